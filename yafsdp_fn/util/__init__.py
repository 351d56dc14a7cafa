"""Helpers that know nothing of sharding."""
