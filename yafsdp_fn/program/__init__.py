"""A schedule as data: its trace, its ops, its text, and who waits for whom."""
