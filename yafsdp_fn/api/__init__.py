"""The verbs that users call: states made, steps made, layers scanned over."""
