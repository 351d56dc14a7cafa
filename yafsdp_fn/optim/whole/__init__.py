"""Transformations of whole leaves: each leaf is lent to the rank that owns it, and returned."""
