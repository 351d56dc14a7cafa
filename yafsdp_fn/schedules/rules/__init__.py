"""What verify asks, by the buffers that a rule is about; each file adds its own to the one before."""
