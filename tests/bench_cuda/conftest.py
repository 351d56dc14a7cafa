"""Sections make process groups of their own, so that they run in a process aside."""

from tests.emulated.conftest import aside

__all__ = ["aside"]
