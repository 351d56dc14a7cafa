"""Sections make process groups of their own, so that they run in a process aside."""

from tests.benchmarks.emulated.conftest import in_child

__all__ = ["in_child"]
