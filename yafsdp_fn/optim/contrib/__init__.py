"""Transformations that are seldom asked for, each one file that needs public names alone.

Whoever writes an optimizer of their own, of whole leaves or around another one, finds its like here.
"""

from yafsdp_fn.optim.contrib.schedule_free import (
    ScheduleFreeState,
    schedule_free,
    schedule_free_adamw,
    schedule_free_eval_params,
)
from yafsdp_fn.optim.contrib.soap import scale_by_soap, soap

__all__ = [
    "ScheduleFreeState",
    "scale_by_soap",
    "schedule_free",
    "schedule_free_adamw",
    "schedule_free_eval_params",
    "soap",
]
