from __future__ import annotations

from tests.harness.aside import aside

__all__ = ["aside"]
