"""Programs across pipeline stages: one list of ops per stage, and what they send each other."""
