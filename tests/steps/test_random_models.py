"""Random trees and random losses over them, on one, two and four ranks, in float64: always the plain result.

What is drawn: stacks with `Unit`, `Pinned` and `frozen` inside, single units, nested containers; scans (reversed,
unrolled, over two stacks, with consts and further xs), units used together and repeatedly, visits without grad, mapped
parameters, chunks; meshes, schedules with their options, remat policies, updates in the program, microbatches, uneven
weights.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.marks import nightly
from tests.harness.meshes import made
from tests.harness.pool import on_ranks
from tests.harness.small import leaves

E, ROWS = 3, 4  # rows of a rank: two microbatches of two
F64 = torch.float64
Loss = Callable[[Any, Any], ya.Mean]
Action = Callable[[Any, Tensor], Tensor]


def param(*shape: int) -> ya.Param:
    return ya.Param(shape, F64, ya.params.initializers.normal(0.4))


def weights(rng: random.Random, *lead: int) -> Any:
    """The leaves of a layer, or of a stack."""
    out: dict[str, Any] = {"w": param(*lead, E, E)}
    if rng.random() < 0.5:
        out["b"] = [param(*lead, E)]
    if rng.random() < 0.3:
        out["f"] = ya.frozen({"g": param(*lead, E, E)})
    if lead and rng.random() < 0.4:
        out["u"] = ya.Unit({"v": param(*lead, E), "m": param(*lead, E, E)})
    if lead and rng.random() < 0.4:
        name = rng.choice(sorted(out))
        out[name] = ya.Pinned(out[name])
    return out


def use(x: Tensor, tree: Any) -> Tensor:
    """A layer of whatever leaves there are."""
    for leaf in optree.tree_leaves(tree):
        x = torch.tanh(x @ leaf) if leaf.ndim == 2 else x + leaf
    return x


def draw_tree(rng: random.Random) -> tuple[Any, list[tuple[str, ...]], list[tuple[str, ...]]]:
    """A tree, the paths of its stacks and of its single units."""
    tree: Any = {"in": weights(rng), "nested": {}}
    stacks = []
    singles = [("in",)]
    depth = rng.randint(1, 4)
    for name in "abc"[: rng.randint(1, 3)]:
        place, path = (tree["nested"], ("nested", name)) if rng.random() < 0.3 else (tree, (name,))
        stack = ya.Stacked(weights(rng, depth))
        place[name] = ya.frozen(stack) if rng.random() < 0.15 and stacks else stack
        stacks.append(path)
    for name in "st"[: rng.randint(0, 2)]:
        tree[name] = weights(rng)
        singles.append((name,))
    if not tree["nested"]:
        del tree["nested"]
    return tree, stacks, singles


def at(params: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        params = params[name]
    return params


KINDS = ("scan", "scan", "scan two", "apply", "together", "no grad", "mapped")


def draw_action(rng: random.Random, stacks: list[Any], singles: list[Any], kind: str, dropout: bool) -> Action:
    reverse, unroll, extra = rng.random() < 0.5, rng.randint(1, 3), rng.random() < 0.3
    stack, other, single, second = rng.choice(stacks), rng.choice(stacks), rng.choice(singles), rng.choice(singles)

    def body(c: Tensor, layer: Any, *consts: Tensor) -> tuple[Tensor, Tensor]:
        c = use(c, layer) + sum(consts)
        if dropout:
            c = torch.nn.functional.dropout(c, 0.2)
        return c, c.sum(1)

    def scanned(params: Any, x: Tensor, *paths: Any, body: Any = body) -> Tensor:
        found = tuple(at(params, path) for path in dict.fromkeys(paths))
        if extra:
            length = (
                found[0].entry.length if isinstance(found[0], ya.Sharded) else optree.tree_leaves(found[0])[0].shape[0]
            )
            found = (*found, torch.linspace(0, 1, length * E, dtype=F64).view(length, E))
        consts: Any = 0.1 * x if extra else ()
        x, ys = ya.scan(body, x, found, reverse=reverse, unroll=unroll, consts=consts)
        return x + 0.1 * ys.mean(0)[:, None]

    match kind:
        case "scan":
            return lambda params, x: scanned(params, x, stack)
        case "chunked":
            axes = (0, None, 0) if extra else (0, None)
            # microbatches leave an even number of rows
            return lambda params, x: scanned(params, x, stack, body=ya.chunk(body, 2, in_axes=axes))
        case "scan two":
            return lambda params, x: scanned(params, x, stack, other)
        case "apply":
            return lambda params, x: ya.apply(lambda w, c: use(c, w), at(params, single), x)
        case "together":
            return lambda params, x: ya.apply(
                lambda w, c: use(c, w), [at(params, p) for p in dict.fromkeys([single, second])], x
            )
        case "mapped":
            return lambda params, x: ya.apply(
                lambda w, c: use(c, w), optree.tree_map(lambda leaf: 0.5 * leaf, at(params, single)), x
            )

    def no_grad(params: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return scanned(params, x, stack)

    return lambda params, x: x + 0.3 * no_grad(params, x)


BUILDERS: dict[str, tuple[str, ...]] = {
    "shard": ("zero1", "zero2", "zero3", "zero3"),
    "copies": ("ddp", "zero3"),
    "replicate": ("hsdp", "hsdp", "zero1", "zero2"),
    "nodes": ("hpz", "hpz", "zero3"),
}


def draw_schedule(rng: random.Random, kind: str) -> Callable[..., ya.schedules.Schedule]:
    """A builder for a mesh of this kind, with drawn options: `schedule(update=True)`."""
    name = rng.choice(BUILDERS[kind])
    options: dict[str, Any] = {
        "remat": rng.choice(
            [ya.schedules.remat.none, ya.schedules.remat.all, ya.schedules.remat.first(1), ya.schedules.remat.every(2)]
        )
    }
    if name != "ddp" and rng.random() < 0.7:
        options["prefetch"] = rng.randint(0, 3)
    if name in ("zero3", "hsdp") and rng.random() < 0.5:
        options["resident"] = rng.randint(0, 3)
    if name in ("zero3", "hsdp", "hpz"):
        options["defer"] = rng.random() < 0.3
    if name == "hpz":
        options["layers"] = rng.randint(0, 5)
    return functools.partial(getattr(ya.schedules, name), **options)


def draw(seed: int, dropout: bool, kind: str) -> tuple[Any, Loss, Any, Any]:
    """A tree, a loss, the options of a step, and the same with the updates in its program."""
    rng = random.Random(seed)
    tree, stacks, singles = draw_tree(rng)
    names = [rng.choice(KINDS if dropout else (*KINDS, "chunked")) for _ in range(rng.randint(1, 5))]
    actions = [draw_action(rng, stacks, singles, name, dropout) for name in names]
    regular = rng.random() < 0.3

    def loss(params: Any, batch: Any) -> ya.Mean:
        x = ya.apply(lambda w, c: use(c, w), params["in"], batch["x"])
        for action in actions:
            x = action(params, x)
        total = (x.square().sum(1) * batch["mask"]).sum()
        if regular:
            total = total + 0.01 * batch["mask"].sum() * ya.global_norm(params["in"])
        return ya.Mean(total, batch["mask"].sum())

    schedule = draw_schedule(rng, kind)
    parts = {"microbatches": rng.choice([1, 1, 2])}
    late = regular or "mapped" in names  # gradients that reach leaves are known too late for updates in the backward
    updates = {"schedule": schedule(update=rng.random() < 0.6), "skip_nonfinite": late or rng.random() < 0.5}
    return tree, loss, {"schedule": schedule(), **parts}, {**updates, **parts}


def batches(seed: int, world: int) -> list[Any]:
    """Three batches of `world` times ROWS rows with uneven masks."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(3):
        x = torch.randn(world * ROWS, E, dtype=F64, generator=generator)
        mask = (torch.rand(world * ROWS, generator=generator) < 0.6).double()
        mask[0] = 1
        out.append({"x": x, "mask": mask})
    return out


def one_case(kind: str, seed: int, dropout: bool = False) -> None:
    """Three gradients and three steps of one drawn model, against the plain tree on the whole batch."""
    mesh = made(kind)
    tree, loss, options, updates = draw(seed, dropout, kind)
    tx = ya.optim.sgd(0.1, momentum=0.9)
    state = ya.init(tree, tx, mesh=mesh, precision=ya.Precision(param=F64))
    plain = ya.PlainState.create(tree, tx)
    step = ya.train_step(loss, tx, **updates)
    plain_step = ya.train_step(loss, tx, microbatches=options["microbatches"])
    evaluate = ya.eval_step(loss)
    differentiate = ya.value_and_grad(loss, **options)
    plain_differentiate = ya.value_and_grad(loss, microbatches=options["microbatches"])
    for batch in batches(seed, mesh.size()):
        mine = ya.shard_batch(batch, mesh)
        if state.step == 0 or not dropout:  # a plain tree does not know the step that the random numbers depend on
            got = differentiate(state.params, mine)
            want = plain_differentiate(plain.params, batch)
            close(got, (want[0], ya.params.without_markers(want[1])))
        if not dropout:
            close(evaluate(state, mine)["loss"], want[0])
        state, metrics = step(state, mine)
        plain, plain_metrics = plain_step(plain, batch)
        close(metrics, plain_metrics, 1e-6)  # the norm is reported in fp32
        close(state, ya.params.without_markers(plain.params))


def close(got: Any, want: Any, rtol: float = 1e-9) -> None:
    for a, b in zip(leaves(got), leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-11)


def cases(_: Any, kinds: tuple[str, ...], seeds: range) -> None:
    for seed in seeds:
        try:
            one_case(kinds[seed % len(kinds)], seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def seeds(first: int, count: int, daily: int) -> Any:
    """Parametrizes with `count` seeds, of which all but the first `daily` run nightly."""
    rest = [nightly(seed) for seed in range(first + daily, first + count)]
    return pytest.mark.parametrize("seed", [*range(first, first + daily), *rest])


@seeds(0, 28, daily=9)
def test_one_rank(seed: int) -> None:
    one_case(("shard", "shard", "copies")[seed % 3], seed)


@seeds(100, 15, daily=5)
def test_one_rank_with_dropout(seed: int) -> None:
    one_case("shard", seed, dropout=True)


@on_ranks(2)
@pytest.mark.parametrize("seeds", [range(4), nightly(range(4, 8))])
def test_two_ranks(mesh: Any, seeds: range) -> None:
    cases(mesh, ("shard", "copies", "nodes"), seeds)


@on_ranks(4)
@pytest.mark.nightly
@pytest.mark.parametrize("seeds", [range(2), range(2, 4)])
def test_four_ranks(mesh: Any, seeds: range) -> None:
    cases(mesh, ("replicate", "nodes"), seeds)
