"""A run, from its settings to its end: `loop` begins and trains, the others are what it needs on the way."""
