"""ya.chunk around blocks: the collectives of one microbatch, the gradients of several.

depth order    for each microbatch: all layers forward, all backward      microbatches=4
layer-major    for each layer: all microbatches                           ya.chunk(block, 4)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.oracle import batch_of, compare, looped, plain
from tests.harness.pool import on_ranks
from tests.harness.problems import (
    SCHEDULES,
    TX,
    Batch,
    Params,
    base_loss,
    base_params,
    block,
    dropout_block,
    embed,
    head,
)
from tests.harness.watching import recorded
from yafsdp_fn.schedules import Gather, Reduce

N = 4
ROWS = 2 * N

Loss = Callable[[Any, Batch], ya.Mean]


def layer_major(layer: Callable[..., Any]) -> Loss:
    """`base_loss` with every block over N chunks of the batch."""

    def loss(params: Params, batch: Batch) -> ya.Mean:
        x = ya.apply(ya.chunk(embed, N, in_axes=(None, 0)), params.embed, batch["tokens"])
        x, _ = ya.scan(ya.chunk(layer, N, in_axes=(0, None)), x, params.layers)
        return ya.apply(ya.chunk(head, N, in_axes=(None, 0, 0)), params.head, x, batch["targets"])

    return loss


CHUNKED = layer_major(block)
DROPPED = layer_major(dropout_block)


# ---- collectives


def one_step(mesh: Any, loss: Loss, schedule: str, rows: int, microbatches: int) -> tuple[tuple[int, int], list[Any]]:
    """(gathers, reductions) of the program, and what one step really calls, in order."""
    state = ya.init(base_params(5), TX, mesh=mesh)
    step = ya.train_step(loss, TX, schedule=SCHEDULES[schedule], microbatches=microbatches)
    batch = batch_of(mesh.get_local_rank(), rows=rows)
    state, _ = step(state, batch)
    with recorded() as calls:
        state, _ = step(state, batch)
    program = step.program(state)
    return (program.count(Gather), program.count(Reduce)), calls


@on_ranks(1, 2)
def test_collectives_are_those_of_one_microbatch(mesh: Any) -> None:
    for schedule in ("zero3", "zero2"):
        planned, calls = one_step(mesh, CHUNKED, schedule, ROWS, 1)
        one_planned, one_calls = one_step(mesh, base_loss, schedule, ROWS // N, 1)
        depth, _ = one_step(mesh, base_loss, schedule, ROWS, N)
        assert planned == one_planned
        for kind in ("gather", "reduce"):
            assert [call for call in calls if call.kind == kind] == [call for call in one_calls if call.kind == kind]
        assert depth[1] == N * planned[1]
        assert depth[0] >= planned[0]
        assert depth[0] > planned[0] or schedule.startswith("zero2")
        assert len(calls) == (sum(planned) if mesh.size() > 1 else 0)


# ---- gradients


@on_ranks(1, 2)
def test_dropout_inside_chunks(mesh: Any) -> None:
    """Numbers are those of the plain loop, in kept and in recomputed visits, and differ between microbatches."""
    state = ya.init(base_params(3), TX, mesh=mesh)
    whole = ya.params.without_markers(plain(base_params(3)))
    batches = [batch_of(rank, rows=ROWS) for rank in range(mesh.size())]
    expected = looped(DROPPED, whole, batches)
    for schedule in ("zero3", "zero3-remat-all"):
        function = ya.value_and_grad(DROPPED, schedule=SCHEDULES[schedule])
        for _ in range(2):
            compare(function(state.params, batches[mesh.get_local_rank()]), expected, 1e-5, f"dropout, {schedule}")
    ones = torch.ones(N, 64)
    seen: list[Tensor] = []

    def look(w: Any, x: Tensor) -> ya.Mean:
        dropped = ya.chunk(lambda w, x: torch.nn.functional.dropout(x, 0.5) * w.scale[0], N, in_axes=(None, 0))(w, x)
        seen.append(dropped.detach().ne(0))
        return ya.Mean(dropped.sum(), N)

    ya.value_and_grad(lambda params, x: ya.apply(look, params.head, x))(state.params, ones)
    assert len({tuple(row.tolist()) for row in seen[0]}) == N


@on_ranks(1, 2)
def test_on_the_pure_path(mesh: Any) -> None:
    params = ya.init(base_params(3), TX, mesh=mesh).params._asdict()
    del params["more"]  # torch's pytrees take None for a leaf
    batch = batch_of(mesh.get_local_rank(), rows=ROWS)
    tangents = ya.normal_like(1, params)

    def of(loss: Loss) -> Callable[[dict[str, Any]], Tensor]:
        return lambda params: loss(Params(**params), batch).total

    for what, transform in {
        "grad": lambda f: torch.func.grad(f)(params),
        "jvp": lambda f: torch.func.jvp(f, (params,), (tangents,)),
        "jvp of grad": lambda f: torch.func.jvp(torch.func.grad(f), (params,), (tangents,)),
    }.items():
        got, expected = (optree.tree_leaves(transform(of(loss))) for loss in (CHUNKED, base_loss))
        compare(got, expected, 1e-5, what)


# ---- on fake tensors


@on_ranks(1)
def test_lowered_before_any_step(mesh: Any) -> None:
    """A program before any step; a kept visit keeps the inputs of its chunks, not their graphs."""
    state = ya.init(base_params(3), TX, mesh=mesh)
    batch = batch_of(0, rows=ROWS)
    steps = [ya.train_step(loss, TX) for loss in (CHUNKED, base_loss)]
    programs = [step.lower(state, batch) for step in steps]
    chunked, usual = (program.trace.visits[2] for program in programs)
    assert programs[0].ops == programs[1].ops
    assert chunked.name == usual.name == "layers[1]"
    assert chunked.cost.kept_bytes == chunked.cost.carry_bytes < usual.cost.kept_bytes
    state, _ = steps[0](state, batch)
    learnt = steps[0].program(state)
    assert learnt.ops == programs[0].ops
