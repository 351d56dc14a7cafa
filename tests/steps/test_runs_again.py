"""A block that is run again for its backward must be the function that it was in the forward; a first step looks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.groups import breakable_stages, outcome
from tests.harness.marks import by_day
from tests.harness.pool import on_ranks
from tests.harness.small import batch, block, embed, head, loss, model, with_block, with_ends

TX = ya.optim.sgd(0.1)
SAID = r"layers\[\d\]: run again for its backward, the block returned other values .* a generator of its own"


def of_one_generator() -> Callable[[Tensor], Any]:
    generator = torch.Generator().manual_seed(1)
    return lambda x: torch.rand(x.shape, generator=generator)


def of_a_generator_in_the_block() -> Callable[[Tensor], Any]:
    return lambda x: torch.rand(x.shape, generator=torch.Generator().manual_seed(torch.initial_seed()))


def of_a_counter() -> Callable[[Tensor], Any]:
    calls: list[int] = []

    def count(x: Tensor) -> float:
        calls.append(len(calls))
        return 1 / len(calls)

    return count


OTHER = {
    "a generator": of_one_generator,
    "python": lambda: lambda _: random.random(),
    "numpy": lambda: lambda _: float(numpy.random.rand()),
    "a counter": of_a_counter,
}
SAME = {
    "torch": lambda: torch.rand_like,
    "a generator in the block": of_a_generator_in_the_block,
    "what is not finite": lambda: lambda x: torch.full_like(x, float("inf")),
}


def noisy(noise: Callable[[Tensor], Any]) -> Callable[[Any, Any], ya.Mean]:
    return with_block(lambda x, w: (block(x, w)[0] * noise(x), None))


def steps(mesh: Any, which: str, remat: str) -> tuple[str, bool]:
    """How two steps end, and whether the state is as before, if they do not."""
    random.seed(0)
    loss = noisy((OTHER | SAME)[which]())
    state = ya.init(model(), TX, mesh=mesh)
    before = ya.unshard(state.params)
    step = ya.train_step(loss, TX, schedule=ya.schedules.zero3(remat=remat))

    def run() -> None:
        step(step(state, batch())[0], batch())

    said = outcome(run)
    return said, said == "returned" or optree.tree_all(optree.tree_map(torch.equal, ya.unshard(state.params), before))


@on_ranks(1, 2)
@pytest.mark.parametrize("which", OTHER)
def test_other_values_are_refused_by_name(mesh: Any, which: str) -> None:
    said, kept = steps(mesh, which, "all")
    assert re.search(SAID, said), said
    assert kept


@on_ranks(2)
@pytest.mark.parametrize("which", OTHER)
def test_where_graphs_are_kept_any_values_serve(mesh: Any, which: str) -> None:
    assert steps(mesh, which, "none")[0] == "returned"


@on_ranks(2)
@pytest.mark.parametrize("which", SAME)
def test_the_same_values_serve(mesh: Any, which: str) -> None:
    assert steps(mesh, which, "all")[0] == "returned"


def in_an_object(params: Any, rows: Any) -> ya.Mean:
    """The carry is an object, as a distribution is, whose tensors no visit sees."""
    inside = lambda carry, w: (SimpleNamespace(x=block(carry.x, w)[0]), None)  # noqa: E731
    middle = lambda params, x: ya.scan(inside, SimpleNamespace(x=x), params.layers)[0].x  # noqa: E731
    return with_ends(middle)(params, rows)


@on_ranks(1, 2)
def test_objects_with_tensors_are_returned_where_graphs_are_kept_alone(mesh: Any) -> None:
    state = ya.init(model(), TX, mesh=mesh)
    found = []
    for function in (loss, in_an_object):
        found.append(ya.unshard(ya.grad(function)(state.params, batch())))
    torch.testing.assert_close(found[0], found[1])
    recomputed = ya.grad(in_an_object, schedule=ya.schedules.zero3(remat="all"))
    with pytest.raises(
        TypeError, match=r"^layers\[0\]: the block returns a SimpleNamespace with tensors inside, and no"
    ):
        recomputed(state.params, batch())


# ---- what begins after some steps, as by a schedule: steps 1, 2, 4, 8 and so on look again

Later = Callable[[Any, Any, bool], ya.Mean]
"""A loss of parameters, batch and whether it has begun to be another one."""


def of_a_generator(params: Any, rows: Any, begun: bool, generator: torch.Generator) -> ya.Mean:
    drawn = lambda x: torch.rand(x.shape, generator=generator) if begun else 1.0  # noqa: E731
    return noisy(drawn)(params, rows)


def of_a_module(params: Any, rows: Any, begun: bool, module: torch.nn.Module) -> ya.Mean:
    middle = lambda params, x: module(x) if begun else x  # noqa: E731
    return with_ends(middle)(params, rows)


def of_a_write(params: Any, rows: Any, begun: bool) -> ya.Mean:
    if begun:
        with torch.no_grad():
            optree.tree_leaves(params)[0].mul_(0.5)
    return loss(params, rows)


def of_an_earlier_step(params: Any, rows: Any, begun: bool, kept: list[Tensor]) -> ya.Mean:
    def middle(params: Any, x: Tensor) -> Tensor:
        x, _ = ya.scan(block, x, params.layers)
        before, kept[:] = list(kept), [x]
        return x + before[0] if begun else x

    return with_ends(middle)(params, rows)


def of_data(params: Any, rows: Any, begun: bool) -> ya.Mean:
    def writing(x: Tensor, w: Any) -> Any:
        if begun:
            w["up"].data.mul_(0.5)
        return block(x, w)

    return with_block(writing)(params, rows)


LATER: dict[str, tuple[Callable[[], Later], str]] = {
    "a generator": (lambda: partial(of_a_generator, generator=torch.Generator().manual_seed(1)), SAID),
    "a module": (lambda: partial(of_a_module, module=torch.nn.Linear(5, 5)), "depends on a torch.nn.Parameter"),
    "a write": (lambda: of_a_write, "writes into the leaves of its parameters in place"),
    "an earlier step": (lambda: partial(of_an_earlier_step, kept=[]), r"an output of layers\[2\] that an earlier call"),
    "a write by .data": (lambda: of_data, r"layers\[0\]: the block writes into its weights in place"),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("what", LATER)
def test_later_steps_look_again(mesh: Any, what: str, first: int) -> None:
    looks_again(ya.init(model(), TX, mesh=mesh), what, first, ya.schedules.zero3(remat="all"))


def of_a_module_behind(params: Any, rows: Any, begun: bool, module: torch.nn.Module) -> Any:
    mean = loss(params, rows)
    return mean._replace(total=module(mean.total[None]).sum()) if begun else mean


def of_leaves(params: Any, rows: Any, begun: bool) -> Any:
    total, weight = loss(params, rows)
    return ya.Mean(total + params.head.leaves[0].square().sum() if begun else total, weight)


def of_no_grad(params: Any, rows: Any, begun: bool) -> Any:
    if begun:
        with torch.no_grad():
            ya.apply(embed, params.embed, rows["tokens"])
    return loss(params, rows)


def of_two_segments(params: Any, rows: Any, begun: bool) -> Any:
    """The first segment's output beside the loss, which the second one makes."""
    x = ya.apply(embed, params.embed, rows["tokens"])
    y, _ = ya.scan(block, x, params.layers)
    total, weight = ya.apply(head, params.head, y, rows["targets"])
    return ya.Mean(total + x.sum() if begun else total, weight)


LATER_IN_STAGES = {
    "a module": LATER["a module"],
    "a module behind": (
        lambda: partial(of_a_module_behind, module=torch.nn.Linear(1, 1)),
        "depends on a torch.nn.Parameter",
    ),
    "a write by .data": LATER["a write by .data"],
    "no_grad": (lambda: of_no_grad, "embed: a visit under no_grad inside of a step across stages"),
    "two segments": (lambda: of_two_segments, "the loss is made of what another segment has made"),
    "leaves": (lambda: of_leaves, "the loss reads sharded leaves beside its visits"),
}


@on_ranks(2)
@pytest.mark.parametrize("what", by_day(LATER_IN_STAGES, "no_grad", "two segments", "leaves"))
def test_later_steps_of_stages_look_again(_: Any, what: str) -> None:
    """Each stage has the whole loss, and says so itself, or is told by the one that does."""
    mesh = breakable_stages(2)
    stages = ya.schedules.assign(ya.planner.trace(loss, model(), batch()), 2)
    state = ya.init(model(), TX, mesh=mesh, stages=stages)
    looks_again(state, what, 3, ya.schedules.one_f_one_b(ya.schedules.zero3(remat="all")))


def looks_again(state: Any, what: str, first: int, schedule: Any) -> None:
    """Steps until something is said, which begins in step `first`."""
    made, said = (LATER | LATER_IN_STAGES)[what]
    later = made()
    begun = False
    step = ya.train_step(lambda params, rows: later(params, rows, begun), TX, schedule=schedule)
    for _ in range(first):
        state, _ = step(state, batch())
    begun = True

    def run() -> None:
        nonlocal state
        while state.step <= 4:
            state, _ = step(state, batch())

    ended = outcome(run)
    assert re.search(said, ended), ended
    every = what in ("a write", "no_grad", "two segments")  # for which each step looks
    found = first if every else {1: 1, 3: 4}[first]
    assert state.step == found
