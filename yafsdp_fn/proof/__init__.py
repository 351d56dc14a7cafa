"""Checks of the rules of `verify`, by the buffers that they look at."""
