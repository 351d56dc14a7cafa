"""The schedule is data: what is visited (trace), what is executed (program), who waits (scoreboard), and the proof.

    schedule = zero3(resident=2)       # a factory returns a function
    program = schedule(trace)          # from a trace to a program
    verify(program); print(program)

Any function from a trace to a program is a schedule.
"""

from yafsdp_fn.program.hazards import Scoreboard
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
from yafsdp_fn.schedules.actions import from_actions
from yafsdp_fn.schedules.build import alternating_slots, build, own_slots
from yafsdp_fn.schedules.builders import Schedule, ddp, hpz, hsdp, zero1, zero2, zero3
from yafsdp_fn.schedules.cut import assign, cut
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
from yafsdp_fn.schedules.to_actions import Actions, to_actions

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


def __dir__() -> list[str]:
    return sorted(__all__)
