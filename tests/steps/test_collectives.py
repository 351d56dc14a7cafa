"""How often the ranks communicate, in which order and dtype: what the program says, and what is really called."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.oracle import batch_of
from tests.harness.pool import Pools, on_ranks
from tests.harness.problems import (
    PROBLEMS,
    SCHEDULES,
    TX,
    Layer,
    Params,
    base_params,
    block,
    layer,
    with_ends,
)
from tests.harness.watching import recorded
from yafsdp_fn.schedules import Gather, Reduce

# ---- counts

Counts = dict[tuple[str, str], int]
"""`(kind, stack or unit)` -> collectives in one step"""


def counted(mesh: Any, name: str, layers: int, schedule: str, parts: int) -> Counts:
    """Of one step that runs its program: the same by the program and by what is called, in the same order."""
    problem = PROBLEMS[name]
    state = ya.init(problem.params(layers), TX, mesh=mesh)
    step = ya.train_step(problem.loss, TX, schedule=SCHEDULES[schedule], microbatches=parts)
    for _ in range(2):  # recorded; then by the program, which fills the slots that it finds filled from then on
        state, _ = step(state, batch_of(mesh.get_local_rank()))
    program = step.program(state)
    with recorded() as calls:
        state, _ = step(state, batch_of(mesh.get_local_rank()))
    units = program.trace.units
    planned = {
        "gather": [units[u].gather_bytes // 4 for op in program.ops if isinstance(op, Gather) for u in op.units],
        "reduce": [units[u].reduce_bytes // 4 for op in program.ops if isinstance(op, Reduce) for u in op.units],
    }
    for kind, sizes in planned.items():
        assert [call.numel for call in calls if call.kind == kind] == sizes, kind
    assert (program.count(Gather), program.count(Reduce)) == tuple(map(len, planned.values()))
    return dict(
        collections.Counter(
            (type(op).__name__.lower(), units[u].stack or units[u].name)
            for op in program.ops
            if isinstance(op, Gather | Reduce)
            for u in op.units
        )
    )


def two_slots(layers: int, parts: int, width: int = 2) -> int:
    """Gathers of a stack: the last `width` layers of a forward are still there when its backward begins, and the
    first `width` when the next microbatch begins."""
    missing = max(0, layers - width)
    return layers + missing + (parts - 1) * 2 * missing


def test_counts_of_other_visits(pools: Pools) -> None:
    """A tied unit is gathered once and reduced once a microbatch; a stack visited twice, between its neighbours."""
    (tied, *_), (twice, *_), (frozen, *_), (part, *_) = (
        pools[2].run(counted, name, 5, "zero3", parts)
        for name, parts in (("tied", 3), ("twice", 1), ("frozen", 1), ("part", 1))
    )
    assert tied[("gather", "embed")] == 1
    assert tied[("reduce", "embed")] == 3
    # up, down, and both backward: each turn finds the last two layers in their slots
    assert twice[("gather", "layers")] == 5 + 3 * (5 - 2)
    # down's gradient of a layer leaves its slot before up's arrives, except at the turn
    assert twice[("reduce", "layers")] == 2 * 5 - 1
    assert ("reduce", "embed") not in frozen
    assert ("reduce", "layers") not in frozen
    assert ("reduce", "more.main.frozen") not in frozen
    assert frozen[("reduce", "more")] == 5
    # a visit that the loss does not use has a backward all the same: ranks may differ in what they use
    assert part[("reduce", "more")] == 6


# ---- dtypes


def mixed_params() -> Params:
    """A frozen stack that is stored, gathered and never reduced in bf16."""
    return base_params(3)._replace(more=ya.frozen(ya.Stacked(layer(2)), torch.bfloat16))


def cast_block(x: Tensor, w: Layer) -> tuple[Tensor, None]:
    return block(x, Layer(*(leaf.to(x.dtype) for leaf in w)))


@with_ends
def mixed_loss(params: Params, x: Tensor) -> Tensor:
    x, _ = ya.scan(cast_block, x, params.more)
    x, _ = ya.scan(block, x, params.layers)
    return x


@on_ranks(2)
@pytest.mark.sampled
@pytest.mark.parametrize("recorded_too", [True, False])
@pytest.mark.parametrize(
    "precision",
    [
        ya.Precision(),
        ya.Precision(compute=torch.bfloat16),
        ya.Precision(reduce=torch.bfloat16),
        ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16),
    ],
    ids=["fp32", "bf16 gather", "bf16 reduce", "bf16 both"],
)
def test_dtype_of_every_collective(mesh: Any, precision: ya.Precision, recorded_too: bool) -> None:
    state = ya.init(mixed_params(), TX, mesh=mesh, precision=precision)
    step = ya.train_step(mixed_loss, TX, microbatches=3)
    if not recorded_too:
        state, _ = step(state, batch_of(mesh.get_local_rank()))
    with recorded() as calls:
        state, _ = step(state, batch_of(mesh.get_local_rank()))
    assert {leaf.dtype for leaf in (state.params.embed.leaves[0], state.params.head.leaves[0])} == {torch.float32}
    gathers = [call.dtype for call in calls if call.kind == "gather"]
    reduces = [call.dtype for call in calls if call.kind == "reduce"]
    assert set(gathers) == {precision.gather_dtype, torch.bfloat16}
    assert reduces == 3 * (1 + 3 + 1) * [precision.reduce_dtype]
    if precision.gather_dtype == torch.float32:
        # the two frozen layers and the three others share two slots: L = 5. A later step finds the frozen ones in
        # them; a first one gathers them before it begins, and all seven units while it is recorded
        layers = two_slots(5, 3)
        assert len(gathers) == layers + 2 + (7 if recorded_too else -2)
        assert gathers.count(torch.bfloat16) < layers
