"""A run, from its settings to its end: `command` begins, `loop` trains, the others are what it needs on the way."""
