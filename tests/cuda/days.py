"""What may happen to a state in a day of training, on one rank of four: the runs that are searched for races."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.oracle import batch_of
from tests.harness.problems import PROBLEMS
from yafsdp_fn.checkpoint import save

s = ya.schedules
remat = ya.schedules.remat

MESHES: dict[str, dict[str, int]] = {
    "shard": {"shard": 4},
    "copies": {"replicate": 4, "shard": 1},
    "replicate": {"replicate": 2, "shard": 2},
    "nodes": {"node": 2, "local": 2},
    "replicate-nodes": {"replicate": 2, "node": 2, "local": 2},
}
BUILDERS: dict[str, tuple[Callable[..., Any], str]] = {
    "ddp": (s.ddp, "copies"),
    "zero1": (s.zero1, "shard"),
    "zero2": (s.zero2, "nodes"),
    "zero3": (s.zero3, "shard"),
    "resident": (functools.partial(s.zero3, resident=1, prefetch=2), "replicate"),
    "hsdp": (s.hsdp, "replicate-nodes"),
    "hpz": (functools.partial(s.hpz, 2), "nodes"),
}
DEFERS = ("zero3", "resident", "hsdp", "hpz")
REMATS: dict[str, Any] = {
    "none": remat.none,
    "all": remat.all,
    "every": remat.every(2),
    "offload": remat.offload(ahead=0),
    "offload-ahead": remat.offload(remat.every(2), recompute=remat.all, ahead=1),
}
PRECISIONS = (
    ya.Precision(),
    ya.Precision(compute=torch.bfloat16, reduce=torch.float32),
    ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16),
    ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16, accumulate=torch.float32),
)


BY_HAND = "written by hand"


class Case(NamedTuple):
    builder: str
    remat: str
    update: bool
    defer: bool
    problem: str
    precision: int
    clips: bool
    formats: bool = False

    @property
    def axes(self) -> dict[str, int]:
        return MESHES[BUILDERS[self.builder][1]]

    def schedule(self) -> Any:
        more = {"defer": True} if self.defer else {}
        return BUILDERS[self.builder][0](remat=REMATS[self.remat], update=self.update, **more)


def every_case() -> Iterator[Case]:
    """Every builder, remat, update and defer; models, precisions and clipping take turns."""
    turns = zip(
        itertools.cycle(("frozen", "units", "tied", "pinned", "twice")),
        itertools.cycle(range(len(PRECISIONS))),
        itertools.cycle((False, False, True)),
        strict=False,
    )
    for builder, name, update, defer in itertools.product(BUILDERS, REMATS, (False, True), (False, True)):
        if not defer or builder in DEFERS:
            yield Case(builder, name, update, defer, *next(turns))


def sums(layer: Any, *more: Any) -> Tensor:
    return torch.stack([leaf.float().sum() for leaf in optree.tree_leaves((layer, more))])


def day(case: Case, mesh: Any, device: torch.device, folder: Path | None = None, **options: Any) -> list[Any]:
    """Steps, and what happens between them; gives all that a user might look at."""
    problem = PROBLEMS[case.problem]
    clip = [ya.optim.clip_by_global_norm(0.1)] if case.clips else []
    tx = ya.optim.chain(*clip, ya.optim.adamw(1e-2, weight_decay=0.1))
    params = problem.params(4)
    if case.formats:
        int8 = ya.formats.Scaled(torch.int8, 8)
        params = ya.params.with_wire(params, ya.Wire(int8, int8))
    state = ya.init(params, tx, mesh=mesh, precision=PRECISIONS[case.precision])
    train = functools.partial(ya.train_step, problem.loss, tx, skip_nonfinite=case.clips)
    step = train(schedule=case.schedule(), microbatches=2, **options)
    other = train(schedule=s.zero2(prefetch=1))
    evaluate = ya.eval_step(problem.loss)
    gradients = ya.value_and_grad(problem.loss)
    numbers = itertools.count()
    out: list[Any] = []

    def batch() -> dict[str, Tensor]:
        return {key: value.to(device) for key, value in batch_of(0, seed=next(numbers), rows=4).items()}

    def steps(which: Any, count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, metrics = which(state, batch())
            out.append(metrics)

    steps(step, 3)
    out.append(evaluate(state, batch()))
    steps(step, 1)
    out.append(ya.map_whole_layers(sums, state.params.layers))
    steps(other, 1)
    value, grads = gradients(state.params, batch())
    out += [value, ya.map_whole_layers(sums, state.params.layers, grads.layers)]
    state = state.apply_gradients(grads, tx)
    if folder is not None:
        save(folder, state)
    steps(step, 1)
    with torch.no_grad(), torch.profiler.record_function(BY_HAND):
        for leaf in optree.tree_leaves(state.params):
            leaf.mul_(0.99)
    steps(step, 1)
    out.append(ya.unshard(state.params))
    return out


def numbers_of(out: list[Any]) -> list[Any]:
    """All that was returned, as numbers: the host looks."""
    return [x.tolist() if isinstance(x, Tensor) else x for x in optree.tree_leaves(out)]
