from __future__ import annotations

from tests.harness.child_process import in_child

__all__ = ["in_child"]
