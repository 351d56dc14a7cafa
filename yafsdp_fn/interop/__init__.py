"""Schedules of other libraries, in and out: torch.distributed.pipelining's rows of actions."""

from yafsdp_fn.interop.actions import from_actions
from yafsdp_fn.interop.to_actions import Actions, to_actions

__all__ = ["Actions", "from_actions", "to_actions"]
