"""Layers whose weight gradients are written straight into their buffers."""
