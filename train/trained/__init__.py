"""Models that have been trained: opened, loaded, sampled from, and asked how likely a text is."""
