"""Schedules of pipelines: an order of calls, and a schedule for what each stage does in it.

for each stage:
    its part of the step, in the order of its calls         program/program.py
    sharding(part), a program: any schedule there is        gathers, reductions, recomputation, updates
    its sends, receives and carry slots                     messages.py

ya.schedules.one_f_one_b()                                  weights gathered once a step, reduced every microbatch
ya.schedules.one_f_one_b(zero1())                           reduced once a step
ya.schedules.interleaved(zero3(remat="all"))                gathered and recomputed in every microbatch
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from yafsdp_fn.pipelines.messages import UNIT, Item, Pace, wired, with_messages
from yafsdp_fn.program.program import Program, stage_trace
from yafsdp_fn.program.split import Call, CallRows, Kind, Split
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.proof.stages import check_calls
from yafsdp_fn.schedules.builders import Schedule, must_be_made, zero2
from yafsdp_fn.util.words import shown

Order = Callable[[Split, int], CallRows]
"""A function from a split and the number of microbatches to rows."""

# ---- The published orders.
#
#     M microbatches; P stages; v segments on each; segment s is on stage s % P, or, v-shaped, s and 2 P - 1 - s on one
#     F forward, B backward; I, W its halves: gradients of inputs, of weights
#
# What a row of calls says is the order alone. When a call begins follows from what it takes, and who sends it
# (messages.py).


# ---- whole backwards


@shown
def gpipe(sharding: Schedule | None = None) -> Schedule:
    """All forwards, then all backwards: every microbatch is under way at once.

        stage 0  | F0 F1 F2          B0 B1 B2 |
        stage 1  |    F0 F1 F2 B0 B1 B2       |

    With P stages, M microbatches and no time for messages, (P - 1) / (M + P - 1) of the step is idle. One segment per
    stage, or several (a segment for all microbatches, then the next one).

    sharding: as for `staged`

    >>> program = ya.verify(ya.schedules.gpipe()(two_stages))
    >>> [len(ops) for ops in program.stages]
    [14, 14]
    """
    return staged(gpipe_calls, sharding)


def gpipe_calls(split: Split, microbatches: int) -> CallRows:
    """Returns the calls of `gpipe`."""
    return [forwards + backwards for forwards, backwards in _passes(split, [range(microbatches)])]


@shown
def one_f_one_b(sharding: Schedule | None = None) -> Schedule:
    """A backward as soon as there can be one: stage s keeps at most P - s microbatches.

        stage 0  | F0 F1       B0 F2 B1       B2 |
        stage 1  |    F0 B0 F1 B1    F2 B2       |

    As long as `gpipe`, with the memory of P microbatches at most. One segment per stage.

    sharding: as for `staged`

    >>> schedule = ya.schedules.one_f_one_b(ya.schedules.zero3(remat="all"))
    >>> len(ya.verify(schedule(two_stages)).stages)
    2
    """
    return staged(one_f_one_b_calls, sharding)


def one_f_one_b_calls(split: Split, microbatches: int) -> CallRows:
    """Returns the calls of `one_f_one_b`."""
    _expect("one_f_one_b", split, per_stage=1)
    passes = _passes(split, [range(microbatches)])
    return [list(_alternating(*each, split.stages - 1 - stage)) for stage, each in enumerate(passes)]


@shown
def interleaved(sharding: Schedule | None = None) -> Schedule:
    """1F1B over v segments per stage, segment s on stage s % P: `assign(trace, P, per_stage=v)`.

    The idle time of `one_f_one_b` divided by v, for v times as many messages and the memory of P + (P - 1) / v
    microbatches where P divides their number, of up to 2 P - 1 where it does not. Any number of microbatches: they go
    in groups of at least P, where there are so many.

    sharding: as for `staged`

    >>> step = ya.planner.trace(loss_fn, params, batch, microbatches=2)
    >>> step = ya.schedules.cut(step, ya.schedules.assign(step, stages=2, per_stage=2))
    >>> ya.verify(ya.schedules.interleaved()(step)).trace.split.homes   # of four segments
    (0, 1, 0, 1)
    """
    return staged(interleaved_calls, sharding)


def interleaved_calls(split: Split, microbatches: int) -> CallRows:
    """Returns the calls of `interleaved`.

        stage 0  | F0,0 F0,1 F2,0 F2,1      B2,0 ...      segment, microbatch

    Microbatches go in groups of about P: all of a group through one segment of a stage, then through its next one.
    Where P does not divide M, groups are as even as can be, and none is smaller than P.
    """
    per_stage = len(split.homes) // split.stages
    _expect("interleaved", split, per_stage=per_stage)
    if per_stage == 1:
        return one_f_one_b_calls(split, microbatches)
    groups = _groups(microbatches, split.stages)
    ahead = (per_stage - 1) * max(map(len, groups))
    passes = enumerate(_passes(split, groups))
    return [list(_alternating(*each, ahead + 2 * (split.stages - 1 - stage))) for stage, each in passes]


# ---- backwards in halves, which leave no stage idle


@shown
def zero_bubble(sharding: Schedule | None = None) -> Schedule:
    """ZB-H1: each backward in two halves. A segment waits only for gradients of inputs, those of weights fill the gaps.

        stage 0  | F0 F1       B0 F2 B1       B2 |
        stage 1  |    F0 I0 F1 I1 W0 F2 I2 W1 W2 |

    Where halves are as long as a forward, P - 1 forwards of idle time in place of 3 (P - 1), with the memory of
    `one_f_one_b`. One segment per stage.

    sharding: as for `staged`

    >>> program = ya.verify(ya.schedules.zero_bubble()(two_stages))
    >>> [op.half for op in program.stages[1] if isinstance(op, ya.schedules.Backward)]
    ['inputs', 'inputs', 'inputs', 'weights', 'weights', 'weights']
    """
    return staged(zero_bubble_calls, sharding)


def zero_bubble_calls(split: Split, microbatches: int, depth: int = 1) -> CallRows:
    """Returns the calls of `zero_bubble`. Stage s keeps no more microbatches than the first stage of 1F1B; with depth 2
    up to 2 P - 1, for as good as no idle time (ZB-H2)."""
    _expect("zero_bubble", split, per_stage=1)
    rows = []
    for s in range(split.stages):
        ahead = min(depth * (split.stages - 1 - s), microbatches)
        lag = min(depth * s, microbatches)
        letters = "F" * ahead
        for k in range(microbatches):
            letters += "F" * (ahead + k < microbatches) + "I" + "W" * (k >= lag)
        letters += "W" * lag
        rows.append(list(_spelled(letters, s)))
    return whole_if_idle(rows, split)


@shown
def v_shaped(sharding: Schedule | None = None) -> Schedule:
    """ZB-V: segments s and 2 P - 1 - s on stage s, `assign(trace, P, per_stage=2, shape="v")`.

    What the first and the last segment share, a tied embedding say, is on one stage. Where halves are as long as a
    forward, (P - 1) / 2 forwards of a stage are idle, from 2 P - 1 microbatches on, and all stages keep as much.

    sharding: as for `staged`

    >>> step = ya.planner.trace(loss_fn, params, batch, microbatches=2)
    >>> step = ya.schedules.cut(step, ya.schedules.assign(step, stages=2, per_stage=2, shape="v"))
    >>> ya.verify(ya.schedules.v_shaped()(step)).trace.split.homes      # of four segments
    (0, 1, 1, 0)
    """
    return staged(v_shaped_calls, sharding)


def v_shaped_calls(split: Split, microbatches: int) -> CallRows:
    """Returns the calls of `v_shaped`."""
    _expect("v_shaped", split, per_stage=2, v=True)
    rows = (_spelled(_v_row(split.stages, s, microbatches), s, 2 * split.stages - 1 - s) for s in range(split.stages))
    return whole_if_idle([[call for call in row if call.microbatch < microbatches] for row in rows], split)


def _v_row(stages: int, s: int, microbatches: int) -> str:
    """Returns the row of stage s in letters, of as many microbatches as fill the pipeline, or more."""
    total = max(microbatches, 2 * stages - 1)
    fill = "F" * (2 * (stages - s) - 1) + "fF" * s + "fiw" * (stages - s)
    steady = "FIWfiw" * (total - 2 * stages + s + 1)
    drain = "IWfiw" * (stages - s - 1) + "Ii" * s + "IW" * (stages - s)
    return fill + steady + drain + "w" * s + "W" * s


@shown
def v_half(sharding: Schedule | None = None) -> Schedule:
    """V-Half (Qi et al. 2024): the V of `v_shaped` in half the memory, (P + 2) // 2 microbatches of a stage.

    Where halves are as long as a forward, little more than half as much is idle as with `one_f_one_b`.

    sharding: as for `staged`

    >>> step = ya.planner.trace(loss_fn, params, batch, microbatches=2)
    >>> step = ya.schedules.cut(step, ya.schedules.assign(step, stages=2, per_stage=2, shape="v"))
    >>> len(ya.verify(ya.schedules.v_half()(step)).stages)
    2
    """
    return staged(v_half_calls, sharding)


def v_half_calls(split: Split, microbatches: int) -> CallRows:
    """Returns the calls of `v_half`."""
    _expect("v_half", split, per_stage=2, v=True)
    return _repeated(split, microbatches, (1, 2, 1, 2))


@shown
def v_min(sharding: Schedule | None = None) -> Schedule:
    """V-Min (Qi et al. 2024): the V of `v_shaped` in a third of the memory, (P + 4) // 3 microbatches of a stage.

    Where halves are as long as a forward, two thirds as much is idle as with `one_f_one_b`.

    sharding: as for `staged`

    >>> step = ya.planner.trace(loss_fn, params, batch, microbatches=2)
    >>> step = ya.schedules.cut(step, ya.schedules.assign(step, stages=2, per_stage=2, shape="v"))
    >>> len(ya.verify(ya.schedules.v_min()(step)).stages)
    2
    """
    return staged(v_min_calls, sharding)


def v_min_calls(split: Split, microbatches: int) -> CallRows:
    """Returns the calls of `v_min`."""
    _expect("v_min", split, per_stage=2, v=True)
    return _repeated(split, microbatches, (1, 1, 1, 1))


BLOCK = 6
"""Calls of a microbatch on a stage of two segments."""


# ---- orders that repeat a block of calls


def _repeated(split: Split, microbatches: int, steps: tuple[int, int, int, int]) -> CallRows:
    """Returns the calls of a microbatch at fixed times, and those of each next one six calls later.

    steps: time from a stage to the next one: of forwards down the V and up, of backwards down and up
    Turns at the ends of the V take as long as lets no two calls of a stage meet and keeps the fewest microbatches; of
    these, those with the shortest turn from forwards to backwards.
    """
    # turns that let no two calls meet
    found = []
    for turns in itertools.product(range(1, BLOCK + 1), repeat=3):
        blocks = [_block(split.stages, stage, steps, turns) for stage in range(split.stages)]
        if all(len({at % BLOCK for at in block}) == BLOCK for block in blocks):
            kept = max(_kept(block, at) for block in blocks for at in block)
            found.append((kept, turns[1], -turns[0], blocks))
    # the best ones, once for each microbatch
    *_, blocks = min(found)
    rows = []
    for stage, block in enumerate(blocks):
        one = list(_spelled("FfiIwW", stage, 2 * split.stages - 1 - stage))
        timed: list[tuple[int, Call]] = []
        for m in range(microbatches):
            timed += [(at + BLOCK * m, call._replace(microbatch=m)) for at, call in zip(block, one, strict=True)]
        rows.append([call for _, call in sorted(timed)])
    return whole_if_idle(rows, split)


def _kept(block: Sequence[int], at: int) -> int:
    """Returns the microbatches that a stage keeps at a time: of both segments, forwards until then without weights."""
    return sum((at - block[k]) // BLOCK - (at - block[5 - k]) // BLOCK for k in (0, 1))


def _block(stages: int, stage: int, steps: Sequence[int], turns: Sequence[int]) -> list[int]:
    """Returns the times of forwards down and up, backwards of inputs down and up, and of weights: where there is room
    next."""
    at = 0
    block = list[int]()
    for leg, step in enumerate(steps):
        block.append(at + step * (stage if leg % 2 == 0 else stages - 1 - stage))
        at += step * (stages - 1) + (turns[leg] if leg < 3 else 0)
    for first in block[2:4]:
        taken = {each % BLOCK for each in block}
        block.append(next((t for t in range(first + 1, first + BLOCK) if t % BLOCK not in taken), first))
    return block


V_SHAPED = ("v_shaped", "v_half", "v_min")
"""The builders whose segments lie like a V."""

FACTORIES = {made.__name__: made for made in (gpipe, one_f_one_b, interleaved, zero_bubble, v_shaped, v_half, v_min)}
"""The builders by name."""

SEGMENTS = {"interleaved": 2} | dict.fromkeys(V_SHAPED, 2)
"""Segments of a stage, at least, of the builders that take more than one."""

ORDERS: dict[str, Order] = {
    "gpipe": gpipe_calls,
    "one_f_one_b": one_f_one_b_calls,
    "interleaved": interleaved_calls,
    "zero_bubble": zero_bubble_calls,
    "v_shaped": v_shaped_calls,
    "v_half": v_half_calls,
    "v_min": v_min_calls,
}
"""Their calls by name."""


# ---- what orders share


def forward_only(split: Split, microbatches: int) -> CallRows:
    """Returns the calls of an evaluation: P microbatches go through the first segment, then through the next one."""
    return [forwards for forwards, _ in _passes(split, _groups(microbatches, split.stages))]


def _groups(microbatches: int, stages: int) -> list[range]:
    """Consecutive microbatches, in groups of at least `stages` where there are so many."""
    rounds = max(1, microbatches // stages)
    ends = [microbatches * k // rounds for k in range(rounds + 1)]
    return [range(first, end) for first, end in itertools.pairwise(ends)]


def _passes(split: Split, groups: Sequence[range]) -> Iterator[tuple[list[Call], list[Call]]]:
    """Yields the forwards of each stage in their order, and its backwards in theirs: a group of microbatches through
    one segment of the stage, then through its next one."""
    for stage in range(split.stages):
        own = split.of(stage)
        forwards = [Call("forward", segment, m) for group in groups for segment in own for m in group]
        backwards = [Call("backward", segment, m) for group in groups for segment in reversed(own) for m in group]
        yield forwards, backwards


LETTERS: dict[str, Kind] = {"F": "forward", "I": "inputs", "W": "weights"}
"""The kinds of calls, in rows of letters."""


def _spelled(letters: str, segment: int, other: int = -1) -> Iterator[Call]:
    """Yields the calls that letters stand for, each of the next microbatch: capital ones of `segment`, small ones of
    `other`."""
    done: Counter[str] = Counter()
    for letter in letters:
        yield Call(LETTERS[letter.upper()], segment if letter.isupper() else other, done[letter])
        done[letter] += 1


def _alternating(forwards: Sequence[Call], backwards: Sequence[Call], ahead: int) -> Iterator[Call]:
    """Yields `ahead` forwards, then one forward and one backward by turns."""
    yield from forwards[:ahead]
    for k, backward in enumerate(backwards):
        yield from forwards[ahead + k : ahead + k + 1]
        yield backward


def whole_if_idle(rows: CallRows, split: Split) -> CallRows:
    """Halves of a backward that follow each other are one where no other segment waits for the first of them."""
    waited_for = {flow.target for flow in split.flows if flow.grad_bytes}
    out = []
    for row in rows:
        whole: list[Call] = []
        for call in row:
            idle = call.kind == "weights" and call.segment not in waited_for
            if idle and whole[-1] == call._replace(kind="inputs"):
                whole[-1] = call._replace(kind="backward")
            else:
                whole.append(call)
        out.append(whole)
    return out


def _expect(name: str, split: Split, per_stage: int, v: bool = False) -> None:
    """Raises ValueError unless each segment is on the stage that the order expects."""
    stages = range(split.stages)
    homes = (*stages, *reversed(stages)) if v else tuple(stages) * per_stage
    if split.homes != homes:
        what = "assign(trace, stages, per_stage=2, shape='v')" if v else f"assign(trace, stages, per_stage={per_stage})"
        raise ValueError(
            f"{name}: its segments are on stages {_listed(homes)}, here they are on {_listed(split.homes)}; take an "
            f"assignment of that shape, {what}, or another schedule"
        )


def _listed(homes: Sequence[int]) -> str:
    return " ".join(map(str, homes[:16])) + " ..." * (len(homes) > 16)


# ---- A schedule from an order.


@shown
def staged(order: Order, sharding: Schedule | None = None, *, pace: Pace = UNIT) -> Schedule:
    """A schedule from an order of calls: `order(split, microbatches)` gives a list of `Call`s for each stage.

    pace: how long calls and messages take: messages are issued in the order in which they would be made, since each
        waits for those before it. By default a whole backward takes twice as long as other calls, and messages no time
    sharding: what builds the program of each stage from its part of the step: any schedule, by default `zero2()`

    An evaluation goes through the segments in turn, whatever the order. Raises Refused where the calls are no step, or
    wait for each other.

    >>> def all_forwards_first(split, microbatches):
    ...     calls = [(kind, m) for kind in ("forward", "backward") for m in range(microbatches)]
    ...     return [[ya.schedules.Call(kind, stage, m) for kind, m in calls] for stage in range(split.stages)]
    >>> len(ya.verify(ya.schedules.staged(all_forwards_first)(two_stages)).stages)
    2
    """
    inside = sharding_of(sharding)

    def schedule(trace: Trace) -> Program:
        split = split_of(trace)
        rows = (order if trace.trains else forward_only)(split, trace.microbatches)
        if not isinstance(rows, Sequence):
            raise TypeError(
                f"staged: the order returned {rows!r:.80}, expected a list with a row of calls for each stage"
            )
        if len(rows) != split.stages:
            raise ValueError(f"expected a row of calls for each of {split.stages} stages, got {len(rows)}")
        check_calls(trace, rows)
        return pipeline(trace, with_messages(split, rows, pace), inside, pace=pace)

    return schedule


def pipeline(
    trace: Trace,
    lists: Sequence[Sequence[Item]],
    sharding: Schedule,
    *,
    together: bool = False,
    pace: Pace = UNIT,
) -> Program:
    """Returns the program of a step that is cut, from its stages' lists of calls and messages. together: see `wired`"""
    programs = []
    for stage, items in enumerate(lists):
        part = stage_trace(trace, stage, [item for item in items if isinstance(item, Call)])
        program = sharding(part)
        if not isinstance(program, Program):
            raise TypeError(f"sharding: expected a Program of the stage's trace, got {type(program).__name__}")
        programs.append(program)
    return Program(trace, *wired(programs, lists, together=together, pace=pace))


def sharding_of(given: Schedule | None) -> Schedule:
    """Returns the schedule for each stage. Raises TypeError for what is none."""
    if given is None:
        return zero2()
    must_be_made("sharding", given)
    if not callable(given):
        raise TypeError(f"sharding={given!r}: expected a schedule, ya.schedules.zero3() say")
    return given


def split_of(trace: Trace) -> Split:
    """Returns the stages of a whole step. Raises ValueError where it has none."""
    if trace.split is None or trace.stage is not None:
        raise ValueError(
            "this schedule is for pipeline stages, and the step has none: build the state on ya.mesh(stage=2), with as "
            "many stages as there are to be, or take a schedule without, ya.schedules.zero3()"
        )
    return trace.split
