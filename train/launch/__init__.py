"""`python -m train launch`: ranks on this machine, or a batch script for several; no library but for its estimate."""
