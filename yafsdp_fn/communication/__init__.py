"""Process groups, ordered streams and collectives over torch.distributed, and the watchdog over them."""
