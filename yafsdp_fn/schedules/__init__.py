"""The schedule is data: what is visited (trace), what is executed (program), who waits (scoreboard), and the proof.

    schedule = zero3(resident=2)       # a factory returns a function
    program = schedule(trace)          # from a trace to a program
    verify(program); print(program)

Any function from a trace to a program is a schedule.
"""

import sys
from importlib import import_module
from typing import Any

from yafsdp_fn.communication.streams import Scoreboard
from yafsdp_fn.program.cut import cut
from yafsdp_fn.program.ops import (
    AllReduce,
    Backward,
    Exchange,
    Fetch,
    Forward,
    Gather,
    Norm,
    Offload,
    Op,
    Receive,
    Reduce,
    Send,
    Stash,
    Update,
)
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.split import Assignment, Call, Flow, Split
from yafsdp_fn.program.trace import Compute, Lent, Trace, UnitSpec, UpdateWhen, Visit, chained_order
from yafsdp_fn.proof.errors import Refused
from yafsdp_fn.proof.verify import verify
from yafsdp_fn.schedules import remat
from yafsdp_fn.schedules.assign import assign
from yafsdp_fn.schedules.build import alternating_slots, build, own_slots
from yafsdp_fn.schedules.builders import Schedule, ddp, hpz, hsdp, zero1, zero2, zero3
from yafsdp_fn.schedules.fsdp2 import fsdp2
from yafsdp_fn.schedules.pipelines import (
    gpipe,
    interleaved,
    one_f_one_b,
    staged,
    v_half,
    v_min,
    v_shaped,
    zero_bubble,
)

__all__ = ["AllReduce", "Backward", "Exchange", "Fetch", "Forward", "Gather", "Norm", "Offload", "Op", "Reduce"]
__all__ += [
    "Compute",
    "Lent",
    "Program",
    "Refused",
    "Schedule",
    "Scoreboard",
    "Stash",
    "Trace",
    "UnitSpec",
    "Update",
    "UpdateWhen",
    "Visit",
]
__all__ += ["alternating_slots", "build", "chained_order", "own_slots", "verify"]
__all__ += ["ddp", "fsdp2", "hpz", "hsdp", "zero1", "zero2", "zero3"]
__all__ += ["Assignment", "Call", "Flow", "Receive", "Send", "Split"]
__all__ += ["assign", "cut", "from_actions", "gpipe", "interleaved", "one_f_one_b", "staged"]
__all__ += ["v_half", "v_min", "v_shaped", "zero_bubble"]
__all__ += ["Actions", "remat", "to_actions"]

# What is other libraries' stands on these names, and is imported when it is asked for.
_LATE = {
    "Actions": "yafsdp_fn.interop.to_actions",
    "from_actions": "yafsdp_fn.interop.actions",
    "to_actions": "yafsdp_fn.interop.to_actions",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(
            f"module 'yafsdp_fn.schedules' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    return getattr(import_module(_LATE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
