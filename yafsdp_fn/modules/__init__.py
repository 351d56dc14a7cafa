"""torch modules as functions of a tree of weights, and back."""
