"""Steps across pipeline stages: the whole loss on every stage, of which each computes its own visits."""
