"""`python -m tests.chaos`: training runs that are killed, stopped and starved of disk, and must not care."""
