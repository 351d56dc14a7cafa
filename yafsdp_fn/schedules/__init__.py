"""The schedule is data: what is visited (trace), what is executed (program), who waits (scoreboard), and the proof.

    schedule = zero3(resident=2)       # a factory returns a function
    program = schedule(trace)          # from a trace to a program
    verify(program); print(program)

Any function from a trace to a program is a schedule.
"""

from yafsdp_fn.schedules.assign import alternating_slots, own_slots
from yafsdp_fn.schedules.build import build
from yafsdp_fn.schedules.builders import Schedule, ddp, hpz, hsdp, zero1, zero2, zero3
from yafsdp_fn.schedules.further_ops import AllReduce, Exchange, Fetch, Offload, Receive, Send, Stash
from yafsdp_fn.schedules.ops import Backward, Forward, Gather, Norm, Op, Reduce, Update
from yafsdp_fn.schedules.program import Program
from yafsdp_fn.schedules.refused import Refused
from yafsdp_fn.schedules.scoreboard import Scoreboard
from yafsdp_fn.schedules.split import Assignment, Call, Flow, Split
from yafsdp_fn.schedules.stages.actions import from_actions
from yafsdp_fn.schedules.stages.builders import gpipe, interleaved, one_f_one_b, staged, v_shaped, zero_bubble
from yafsdp_fn.schedules.stages.cut import assign, cut
from yafsdp_fn.schedules.stages.pipeline import Pipeline
from yafsdp_fn.schedules.stages.proof import verify
from yafsdp_fn.schedules.trace import Compute, Lent, Trace, UnitSpec, UpdateWhen, Visit, chained_order

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
__all__ += ["ddp", "hpz", "hsdp", "zero1", "zero2", "zero3"]
__all__ += ["Assignment", "Call", "Flow", "Pipeline", "Receive", "Send", "Split"]
__all__ += ["assign", "cut", "from_actions", "gpipe", "interleaved", "one_f_one_b", "staged", "v_shaped", "zero_bubble"]
