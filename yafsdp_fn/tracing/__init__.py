"""Traces losses on fake tensors, and measures what they cost: for predictions, and for steps across stages."""
