"""The published orders: rows of calls, one row for each stage.

    M microbatches; P stages; v segments on each; segment s is on stage s % P, or, v-shaped, s and 2 P - 1 - s on one
    F forward, B backward; I, W its halves: gradients of inputs, of weights

What a row says is the order alone. When a call begins follows from what it takes, and who sends it (messages.py).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

from yafsdp_fn.program.split import Call, Kind, Split

Rows = list[list[Call]]
"""The calls of each stage, in their order."""
Order = Callable[[Split, int], Rows]
"""A function from a split and the number of microbatches to rows."""


def forward_only(split: Split, microbatches: int) -> Rows:
    """The calls of an evaluation: P microbatches go through the first segment, then through the next one."""
    groups = _groups(microbatches, split.stages)
    return [
        [Call("forward", segment, m) for group in groups for segment in split.of(stage) for m in group]
        for stage in range(split.stages)
    ]


def gpipe(split: Split, microbatches: int) -> Rows:
    """All forwards, then all backwards.

    stage 0  | F0 F1 F2          B0 B1 B2 |
    stage 1  |    F0 F1 F2 B0 B1 B2       |
    """
    rows: Rows = []
    for stage in range(split.stages):
        own, ms = split.of(stage), range(microbatches)
        rows.append([Call("forward", segment, m) for segment in own for m in ms])
        rows[-1] += [Call("backward", segment, m) for segment in reversed(own) for m in ms]
    return rows


def one_f_one_b(split: Split, microbatches: int) -> Rows:
    """A backward as soon as there can be one: stage s has at most P - s microbatches under way.

    stage 0  | F0 F1       B0 F2 B1       B2 |
    stage 1  |    F0 B0 F1 B1    F2 B2       |
    """
    _expect("one_f_one_b", split, per_stage=1)
    return [list(_alternating(*_passes(split, s, microbatches), split.stages - 1 - s)) for s in range(split.stages)]


def interleaved(split: Split, microbatches: int) -> Rows:
    """1F1B over v segments per stage (Megatron's), which makes the bubble v times smaller.

        stage 0  | F0,0 F0,1 F2,0 F2,1      B2,0 ...      segment, microbatch

    Microbatches go in groups of about P: all of a group through one segment of a stage, then through its next one.
    Where P does not divide M, groups are as even as can be, and none is smaller than P.
    """
    stages, per_stage = split.stages, len(split.homes) // split.stages
    _expect("interleaved", split, per_stage=per_stage)
    if per_stage == 1:
        return one_f_one_b(split, microbatches)
    ahead = (per_stage - 1) * max(map(len, _groups(microbatches, stages)))
    return [list(_alternating(*_passes(split, s, microbatches), ahead + 2 * (stages - 1 - s))) for s in range(stages)]


def zero_bubble(split: Split, microbatches: int) -> Rows:
    """ZB-H1: 1F1B with halves of backwards. Gradients of weights fill the bubble at the end, and stage s keeps no more
    microbatches than the first stage of 1F1B.

        stage 0  | F0 F1       I0 W0 F2 I1 W1       I2 W2 |
        stage 1  |    F0 I0 F1 I1 W0 F2 I2 W1 W2          |
    """
    _expect("zero_bubble", split, per_stage=1)
    rows: Rows = []
    for s in range(split.stages):
        row: list[Call] = []
        for call in _alternating(*_passes(split, s, microbatches), split.stages - 1 - s):
            if call.kind == "forward":
                row.append(call)
                continue
            row.append(call._replace(kind="inputs"))
            if call.microbatch >= s:
                row.append(Call("weights", s, call.microbatch - s))
        row += [Call("weights", s, m) for m in range(max(0, microbatches - s), microbatches)]
        rows.append(row)
    return _whole_if_idle(rows, split)


def v_shaped(split: Split, microbatches: int) -> Rows:
    """ZB-V: stage s has segments s and 2 P - 1 - s, so that the last segment's gradient is where the first one's
    weights are. With halves of equal length there is no bubble but that of the first and last calls, and all stages
    keep as much.
    """
    _expect("v_shaped", split, per_stage=2, v=True)
    rows: Rows = []
    for s in range(split.stages):
        row = [call for call in _v_row(split.stages, s, microbatches) if call.microbatch < microbatches]
        rows.append(row)
    return _whole_if_idle(rows, split)


def _v_row(stages: int, s: int, microbatches: int) -> Iterator[Call]:
    """The row of stage s, of as many microbatches as fill the pipeline, or more."""
    total = max(microbatches, 2 * stages - 1)
    down, up = s, 2 * stages - 1 - s
    done: dict[tuple[Kind, int], int] = {}

    def call(segment: int, *kinds: Kind) -> Iterator[Call]:
        for kind in kinds:
            done[kind, segment] = done.get((kind, segment), 0) + 1
            yield Call(kind, segment, done[kind, segment] - 1)

    for _ in range(2 * (stages - s) - 1):
        yield from call(down, "forward")
    for _ in range(s):
        yield from call(up, "forward")
        yield from call(down, "forward")
    for _ in range(stages - s):
        yield from call(up, "forward", "inputs", "weights")
    while done["forward", up] < total:
        if done["forward", down] < total:
            yield from call(down, "forward")
        yield from call(down, "inputs", "weights")
        yield from call(up, "forward", "inputs", "weights")
    for _ in range(s):
        yield from call(down, "inputs")
        yield from call(up, "inputs")
    for _ in range(stages - s):
        yield from call(down, "inputs", "weights")
    for segment in (up, down):
        for _ in range(total - done["weights", segment]):
            yield from call(segment, "weights")


def _groups(microbatches: int, stages: int) -> list[range]:
    """Consecutive microbatches, in groups of at least `stages` where there are so many."""
    rounds = max(1, microbatches // stages)
    ends = [microbatches * k // rounds for k in range(rounds + 1)]
    return [range(first, end) for first, end in itertools.pairwise(ends)]


def _passes(split: Split, stage: int, microbatches: int) -> tuple[list[Call], list[Call]]:
    """The forwards of a stage in their order, and its backwards in theirs."""
    own, groups = split.of(stage), _groups(microbatches, split.stages)
    forwards = [Call("forward", segment, m) for group in groups for segment in own for m in group]
    return forwards, [Call("backward", segment, m) for group in groups for segment in reversed(own) for m in group]


def _alternating(forwards: Sequence[Call], backwards: Sequence[Call], ahead: int) -> Iterator[Call]:
    """`ahead` forwards, then one forward and one backward by turns."""
    yield from forwards[:ahead]
    for k, backward in enumerate(backwards):
        yield from forwards[ahead + k : ahead + k + 1]
        yield backward


def _whole_if_idle(rows: Rows, split: Split) -> Rows:
    """Halves of a backward that follow each other are one where no other segment waits for the first of them."""
    waited_for = {flow.target for flow in split.flows if flow.grad_bytes}
    out: Rows = []
    for row in rows:
        out.append([])
        for call in row:
            if (
                call.kind == "weights"
                and call.segment not in waited_for
                and out[-1][-1] == call._replace(kind="inputs")
            ):
                out[-1][-1] = call._replace(kind="backward")
            else:
                out[-1].append(call)
    return out


def _expect(name: str, split: Split, per_stage: int, v: bool = False) -> None:
    """Raises ValueError unless the segments lie on stages as the order wants them."""
    stages = range(split.stages)
    homes = (*stages, *reversed(stages)) if v else tuple(stages) * per_stage
    if split.homes != homes:
        what = "assign(trace, stages, per_stage=2, shape='v')" if v else f"assign(trace, stages, per_stage={per_stage})"
        raise ValueError(
            f"{name}: its segments are on stages {_listed(homes)}, here they are on {_listed(split.homes)}; take an "
            f"assignment of that shape, {what}, or another schedule"
        )


def _listed(homes: Sequence[int]) -> str:
    return " ".join(map(str, homes)) if len(homes) <= 16 else " ".join(map(str, homes[:16])) + " ..."
