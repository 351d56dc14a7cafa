"""Ordered streams and the collectives that run on them, over torch.distributed."""
