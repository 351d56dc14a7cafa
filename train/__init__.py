"""Recipes on top of `yafsdp_fn`, run from a checkout: `python -m train --help`."""
