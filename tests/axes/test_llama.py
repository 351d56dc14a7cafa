"""Llama and its relatives over axes of the mesh, against the plain loop on whole weights without any of it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from models import gpt2, llama, mistral, mixtral, qwen3
from models.parts.axes import Axes, cross_entropy
from tests.axes.test_exact import FLOAT64, close
from tests.harness.pool import Pool

SIZE: dict[str, Any] = {"vocab": 24, "embed": 16, "ffn": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 4}
S, ROWS, STEPS = 16, 4, 3

TENSOR, SEQUENCE = Axes(tensor=True), Axes(tensor=True, sequence=True)
CONTEXT, ALL = Axes(context=True), Axes(tensor=True, sequence=True, context=True)


FAMILIES: dict[str, Any] = {module.MODEL_TYPE: module for module in (llama, qwen3, mistral, gpt2, mixtral)}


class Case(NamedTuple):
    """mesh: sizes of its axes; axes: of the model; more: of the config; loss: options of that"""

    mesh: dict[str, int]
    axes: Axes
    more: dict[str, Any] = {}
    family: str = "llama"
    documents: bool = False
    recomputed: bool = False
    loss: dict[str, Any] = {}
    microbatches: int = 1


def config_of(case: Case) -> Any:
    return FAMILIES[case.family].Config(max_length=2 * S, **{**SIZE, **case.more})


def batch_of(step: int, documents: bool = False) -> dict[str, Tensor]:
    """The global batch of a step. Some targets do not count, those of one row none."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = (torch.randint(SIZE["vocab"], (ROWS, S), generator=generator) for _ in range(2))
    targets[torch.rand(ROWS, S, generator=generator) < 0.3] = -100
    targets[1, : S // 2 + 3] = -100
    batch = {"tokens": tokens, "targets": targets}
    if documents:
        batch["documents"] = (torch.rand(ROWS, S, generator=generator) < 0.2).cumsum(1)
    return batch


def optimizer() -> Any:
    return ya.optim.chain(ya.optim.clip_by_global_norm(0.5), ya.optim.adamw(1e-2, weight_decay=0.1))


def wide(params: Any) -> Any:
    """The parameters with larger values, in float64: softmaxes and norms are not near their centres."""

    def one(leaf: Any) -> Any:
        return ya.Param(leaf.shape, torch.float64, ya.params.initializers.normal(0.3), leaf.split)

    return optree.tree_map(one, params)


def trained(case: Case, state: Any, loss: Any, cut: Any, **options: Any) -> Any:
    """Value and gradients of the first batch, losses and norms of the steps, and the parameters after them."""
    both = ya.value_and_grad(loss, **options)(state.params, cut(batch_of(0, case.documents)))
    step, found = ya.train_step(loss, optimizer(), **options), []
    for number in range(STEPS):
        state, metrics = step(state, cut(batch_of(number, case.documents)))
        found.append((metrics["loss"], metrics["grad_norm"]))
    return *both, found, state


def exact(_: Any, case: Case) -> None:
    config, family, axes = config_of(case), FAMILIES[case.family], case.axes
    given = {"axes": axes} if axes.tensor else {}
    mesh = ya.mesh(device="cpu", **case.mesh)
    state = ya.init(wide(family.params(config, **given)), optimizer(), mesh=mesh, precision=FLOAT64)
    loss = family.loss(config, axes=axes, **case.loss)
    remat = ya.schedules.remat.all if case.recomputed else ya.schedules.remat.none
    how = {"schedule": ya.schedules.zero3(remat=remat), "microbatches": case.microbatches}
    got = trained(case, state, loss, functools.partial(axes.shard_batch, mesh=mesh), **how)
    plain = ya.PlainState.create(wide(family.params(config)), optimizer())
    want = trained(case, plain, family.loss(config), lambda batch: batch)
    close(got[0], want[0], "loss")
    close(ya.unshard(got[1]), ya.params.without_markers(want[1]), "gradient")
    close(got[2], want[2], "metrics")
    close(ya.unshard(got[3].params), ya.params.without_markers(want[3].params), "parameters")


TWO = {
    "tensor": Case({"tensor": 2}, TENSOR),
    "sequence": Case({"tensor": 2}, SEQUENCE),
    "context": Case({"context": 2}, CONTEXT),
}


@pytest.mark.parametrize("case", TWO.values(), ids=TWO)
def test_two_ranks(pools: dict[int, Pool], case: Case) -> None:
    pools[2].run(exact, case)
