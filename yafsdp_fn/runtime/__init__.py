"""Runs programs: memory, streams, visits, sessions."""
