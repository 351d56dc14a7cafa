"""Schedules of pipelines: an order of calls, and a schedule for what each stage does in it.

for each stage:
    its part of the step, in the order of its calls         program.py, calls.py
    sharding(part), a program: any schedule there is        gathers, reductions, recomputation, updates
    its sends, receives and carry slots                     messages.py

ya.schedules.one_f_one_b()                                  weights gathered once a step, reduced every microbatch
ya.schedules.one_f_one_b(zero1())                           reduced once a step
ya.schedules.interleaved(zero3(remat="all"))                gathered and recomputed in every microbatch
"""

from collections.abc import Sequence

from yafsdp_fn.program.program import Program, part_of
from yafsdp_fn.program.split import Call, Split
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.proof.stages import check_calls
from yafsdp_fn.schedules import builders, calls
from yafsdp_fn.schedules.builders import Schedule, zero2
from yafsdp_fn.schedules.calls import Order
from yafsdp_fn.schedules.messages import Item, wired, with_messages


def gpipe(sharding: Schedule | None = None) -> Schedule:
    """All forwards, then all backwards: every microbatch is under way at once.

        stage 0  | F0 F1 F2          B0 B1 B2 |
        stage 1  |    F0 F1 F2 B0 B1 B2       |

    With P stages, M microbatches and no time for messages, (P - 1) / (M + P - 1) of the step is idle. One segment per
    stage, or several (a segment for all microbatches, then the next one).
    """
    return staged(calls.gpipe, sharding)


def one_f_one_b(sharding: Schedule | None = None) -> Schedule:
    """A backward as soon as there can be one: stage s keeps at most P - s microbatches.

        stage 0  | F0 F1       B0 F2 B1       B2 |
        stage 1  |    F0 B0 F1 B1    F2 B2       |

    As long as `gpipe`, with the memory of P microbatches at most. One segment per stage.
    """
    return staged(calls.one_f_one_b, sharding)


def interleaved(sharding: Schedule | None = None) -> Schedule:
    """1F1B over v segments per stage, segment s on stage s % P: `assign(trace, P, per_stage=v)`.

    The idle time of `one_f_one_b` divided by v, for v times as many messages and the memory of P + (P - 1) / v
    microbatches where P divides their number, of up to 2 P - 1 where it does not. Any number of microbatches: they go
    in groups of at least P, where there are so many.
    """
    return staged(calls.interleaved, sharding)


def zero_bubble(sharding: Schedule | None = None) -> Schedule:
    """ZB-H1: each backward in two halves. A segment waits only for gradients of inputs, those of weights fill the gaps.

        stage 0  | F0 F1       B0 F2 B1       B2 |
        stage 1  |    F0 I0 F1 I1 W0 F2 I2 W1 W2 |

    Where halves are as long as a forward, P - 1 forwards of idle time in place of 3 (P - 1), with the memory of
    `one_f_one_b`. One segment per stage.
    """
    return staged(calls.zero_bubble, sharding)


def v_shaped(sharding: Schedule | None = None) -> Schedule:
    """ZB-V: segments s and 2 P - 1 - s on stage s, `assign(trace, P, per_stage=2, shape="v")`.

    What the first and the last segment share, a tied embedding say, is on one stage. Where halves are as long as a
    forward, (P - 1) / 2 forwards of a stage are idle, from 2 P - 1 microbatches on, and all stages keep as much.
    """
    return staged(calls.v_shaped, sharding)


FACTORIES = {factory.__name__: factory for factory in (gpipe, one_f_one_b, interleaved, zero_bubble, v_shaped)}
"""The builders by name."""


def staged(order: Order, sharding: Schedule | None = None) -> Schedule:
    """A schedule from an order of calls: `order(split, microbatches)` gives a list of `Call`s for each stage.

    sharding: what builds the program of each stage from its part of the step: any schedule, by default `zero2()`

    An evaluation goes through the segments in turn, whatever the order. Raises Refused where the calls are no step, or
    wait for each other.
    """
    inside = sharding_of(sharding)

    def schedule(trace: Trace) -> Program:
        split = split_of(trace)
        rows = (order if trace.trains else calls.forward_only)(split, trace.microbatches)
        if len(rows) != split.stages:
            raise ValueError(f"expected a row of calls for each of {split.stages} stages, got {len(rows)}")
        check_calls(trace, split, rows)
        return pipeline(trace, with_messages(split, rows), inside)

    return schedule


def pipeline(trace: Trace, lists: Sequence[Sequence[Item]], sharding: Schedule) -> Program:
    """The program of a step that is cut, from its stages' lists of calls and messages."""
    parts = []
    for stage, items in enumerate(lists):
        part = part_of(trace, stage, [item for item in items if isinstance(item, Call)])
        program = sharding(part)
        if not isinstance(program, Program):
            raise TypeError(f"sharding: expected a Program of the stage's trace, got {type(program).__name__}")
        parts.append(program)
    return Program(trace, *wired(parts, split_of(trace), lists))


def sharding_of(given: Schedule | None) -> Schedule:
    """The schedule for each stage. Raises TypeError for what is none."""
    if given is None:
        return zero2()
    factories: list[object] = list(builders.FACTORIES.values())
    if given in factories:
        name = getattr(given, "__name__", "")
        raise TypeError(f"sharding={name}: that is the factory; call it: sharding=ya.schedules.{name}()")
    if not callable(given):
        raise TypeError(f"sharding={given!r}: expected a schedule, ya.schedules.zero3() say")
    return given


def split_of(trace: Trace) -> Split:
    """The stages of a whole step. Raises ValueError where it has none."""
    if trace.split is None or trace.stage is not None:
        raise ValueError(
            "this schedule is for pipeline stages, and the step has none: build the state on ya.mesh(stage=2), with as "
            "many stages as there are to be, or take a schedule without, ya.schedules.zero3()"
        )
    return trace.split
