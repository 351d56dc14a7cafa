"""The schedule is data: what is visited (trace), what is executed (program), who waits (scoreboard), and the proof.

    schedule = zero3(resident=2)       # a factory returns a function
    program = schedule(trace)          # from a trace to a program
    verify(program); print(program)

Any function from a trace to a program is a schedule.
"""

from yafsdp_fn.schedules.builders import Schedule, alternating_slots, build, zero2, zero3
from yafsdp_fn.schedules.program import Backward, Forward, Gather, Op, Program, Reduce, Update
from yafsdp_fn.schedules.scoreboard import Scoreboard, uses
from yafsdp_fn.schedules.trace import Compute, Trace, Unit, Visit, chained_order
from yafsdp_fn.schedules.verify import Refused, verify

__all__ = [
    "Backward",
    "Compute",
    "Forward",
    "Gather",
    "Op",
    "Program",
    "Reduce",
    "Refused",
    "Schedule",
    "Scoreboard",
    "Trace",
    "Unit",
    "Update",
    "Visit",
    "alternating_slots",
    "build",
    "chained_order",
    "uses",
    "verify",
    "zero2",
    "zero3",
]
