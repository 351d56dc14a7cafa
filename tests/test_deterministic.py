"""The same bits at every number of ranks: `ya.mesh(deterministic=12)` on 1, 2, 3 and 4 of them.

Whole trajectories are compared: every loss and norm, and at the end every parameter and moment. By default of a few
steps; `DETERMINISTIC=all` takes a thousand.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from models import llama
from tests.harness.marks import by_day
from tests.harness.pool import Pools, on_ranks
from yafsdp_fn import checkpoint

G = 12
"""Micro-shards: a multiple of 1, 2, 3 and 4."""

ALL = os.environ.get("DETERMINISTIC") == "all"
STEPS = 1000 if ALL else 8
"""Of each trajectory."""

# odd sizes: no leaf is divisible by a number of ranks
CONFIG = llama.Config(vocab=61, embed=33, ffn=41, layers=2, heads=3, kv_heads=1, head_dim=10, max_length=64)
CLIP = ya.optim.clip_by_global_norm(0.5)
TXS = {
    "adamw, clipped": ya.optim.chain(CLIP, ya.optim.adamw(1e-2, weight_decay=0.1)),
    "adamw": ya.optim.adamw(1e-2, weight_decay=0.1),
    "lion": ya.optim.lion(1e-3, weight_decay=0.1),
    "sgd, masked decay": ya.optim.chain(
        CLIP, ya.optim.add_decayed_weights(0.1, lambda path, param: len(param.shape) > 2), ya.optim.sgd(0.1, 0.9)
    ),
    "schedule_free_adamw": ya.optim.contrib.schedule_free_adamw(0.05, 2, weight_decay=0.1),
    "muon": ya.optim.muon(1e-2, others=ya.optim.adamw(1e-2)),
    "soap": ya.optim.contrib.soap(1e-2),
}


@functools.cache
def deterministic(local: int | None = None) -> Any:
    """This process's mesh; local: ranks of a node, where it tells nodes apart."""
    return ya.mesh(device="cpu", deterministic=G, local=local)


def global_batch(step: int, rows: int = G) -> dict[str, Tensor]:
    """Tokens and targets [B, S]; from a tenth to a half of the targets is masked, unevenly over micro-shards."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, CONFIG.vocab, (rows, 6), generator=generator)
    targets = torch.randint(0, CONFIG.vocab, (rows, 6), generator=generator)
    masked = torch.rand(rows, 6, generator=generator) < torch.linspace(0.1, 0.5, rows)[:, None]
    return {"tokens": tokens, "targets": targets.masked_fill(masked, -100)}


def noisy(config: llama.Config) -> Any:
    """The layer with dropout, so that random numbers count."""
    block = llama.block(config)

    def layer(x: Tensor, w: Any, rope: Any) -> tuple[Tensor, None]:
        return torch.nn.functional.dropout(block(x, w, rope)[0], 0.1), None

    return layer


Trajectory = tuple[Tensor, list[Tensor]]
"""Losses and norms of each step, and at the end every parameter and moment."""


class Run(NamedTuple):
    """tied: the embedding is visited first and last; remat: name of a policy; schedule, options: of the builder"""

    tied: bool = False
    remat: str = "none"
    schedule: str = "zero3"
    options: tuple[tuple[str, Any], ...] = ()
    tx: str = "adamw, clipped"
    precision: ya.Precision = ya.Precision()
    skips: bool = True
    pin_norms: bool = False
    local: int | None = None

    @property
    def config(self) -> llama.Config:
        return dataclasses.replace(CONFIG, tied=self.tied)

    def start(self) -> ya.ShardedState:
        params = llama.params(self.config, pin_norms=self.pin_norms)
        return ya.init(params, TXS[self.tx], mesh=deterministic(self.local), seed=3, precision=self.precision)

    def step(self) -> Any:
        schedule = getattr(ya.schedules, self.schedule)(remat=self.remat, **dict(self.options))
        loss = llama.loss(self.config, layer=noisy(self.config))
        return ya.train_step(loss, TXS[self.tx], schedule=schedule, skip_nonfinite=self.skips)


def go(state: ya.ShardedState, step: Any, until: int) -> tuple[ya.ShardedState, Tensor]:
    """Steps up to number `until`; `[steps, 2]` losses and norms."""
    seen = []
    while state.step < until:
        batch = ya.shard_batch(global_batch(state.step), deterministic())
        state, metrics = step(state, batch)
        seen.append(torch.stack([metrics["loss"], metrics["grad_norm"]]))
    return state, torch.stack(seen)


def trajectory(mesh: Any, run: Run, steps: int) -> Trajectory:
    """Losses and norms, then whole parameters and moments."""
    state, seen = go(run.start(), run.step(), steps)
    return seen, values(state)


def values(state: ya.ShardedState) -> list[Tensor]:
    return [x.clone() for x in optree.tree_leaves(ya.unshard((state.params, state.opt_state)))]


def unlike(a: list[Tensor], b: list[Tensor]) -> list[int]:
    """The numbers of the tensors that have other bits."""
    return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not torch.equal(x, y)]


def same(a: Trajectory, b: Trajectory, what: str) -> None:
    """Equal bits, and of numbers that have moved."""
    assert torch.isfinite(a[0]).all() and len(a[0].unique()) > 1, what
    differ = (a[0] != b[0]).any(1).nonzero().flatten().tolist()
    assert a[0].shape == b[0].shape and not differ, f"{what}: losses or norms differ from step {differ[:1]} on"
    assert not unlike(a[1], b[1]), f"{what}: leaves {unlike(a[1], b[1])} differ"


def on(pools: Pools, world: int, run: Run, steps: int) -> Trajectory:
    """The trajectory on `world` ranks, which is the same on all of them."""
    first, *others = pools[world].run(trajectory, run, steps, timeout=3600)
    for rank, other in enumerate(others, 1):
        same(first, other, f"rank {rank} of {world} against rank 0")
    return first


@pytest.mark.nightly  # by day through changes of the number of ranks, and by schedules that recompute
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_equal_bits_on_any_number_of_ranks(pools: Pools, tied: bool) -> None:
    one = on(pools, 1, Run(tied), STEPS)
    print(f"\n{STEPS} steps, tied={tied}: loss {float(one[0][0, 0]):.6f} -> {float(one[0][-1, 0]):.6f}")
    for world in (1, 2, 3, 4):
        remat = "all" if (world + tied) % 2 else "none"
        same(one, on(pools, world, Run(tied, remat), STEPS), f"{world} ranks, remat {remat}, against one without")
        print(
            f"{world} ranks, remat {remat}: {STEPS} losses and norms, {len(one[1])} leaves have equal bits", flush=True
        )


def part(mesh: Any, run: Run, folder: Path, until: int) -> Trajectory:
    """From the newest checkpoint in `folder`, if there is one, up to step `until`, saved there."""
    state = run.start()
    if any(folder.iterdir()):
        state, _ = checkpoint.load(folder, state)
    state, seen = go(state, run.step(), until)
    checkpoint.save(folder, state)
    return seen, values(state)


def test_equal_bits_through_changes_of_the_number_of_ranks(pools: Pools, tmp_path: Path) -> None:
    run = Run(tied=True)
    seen = []
    for turn, world in enumerate((2, 3, 1, 4), 1):
        of_part, after = pools[world].run(part, run, tmp_path, STEPS * turn // 4, timeout=3600)[0]
        seen.append(of_part)
    same(on(pools, 1, run, STEPS), (torch.cat(seen), after), f"{STEPS} steps on 2, 3, 1 and 4 ranks against one")
    print(f"\n{STEPS} steps on 2, 3, 1 and 4 ranks, a quarter each: equal bits")


def drawn(number: int) -> Run:
    """A schedule by chance; the updates come after the program, or inside of it."""
    draw = random.Random(number)
    schedule = draw.choice(["zero3", "zero2"])
    remat = draw.choice(["none", "all", "every:2", "first:1", "offload"])
    options = {"prefetch": draw.randrange(4), "update": draw.random() < 0.6}
    if schedule == "zero3":
        options["resident"] = draw.randrange(3)
    return Run(True, remat, schedule, tuple(options.items()), tx="adamw", skips=False)


def test_equal_bits_by_any_schedule(pools: Pools) -> None:
    first = on(pools, 1, Run(tied=True, tx="adamw", skips=False), 3)
    for number in range(60 if ALL else 5):
        run = drawn(number)
        world = 1 + number % 3
        same(first, on(pools, world, run, 3), f"{run} on {world} ranks")


BF16 = torch.bfloat16
OTHERS = {
    "updates inside, after the norm": Run(options=(("update", True),), pin_norms=True),
    "bfloat16": Run(precision=ya.Precision(compute=BF16, reduce=BF16)),
    "bfloat16, wide sums": Run(tied=True, precision=ya.Precision(compute=BF16, reduce=BF16, accumulate=torch.float32)),
    "bfloat16, reduced in float32": Run(precision=ya.Precision(compute=BF16)),
    "float64": Run(tied=True, precision=ya.Precision(torch.float64)),
    **{name: Run(tied=True, tx=name) for name in TXS if not name.startswith("adamw")},
}


DAILY = ("updates inside, after the norm", "bfloat16, wide sums", "soap")


@pytest.mark.nightly
@pytest.mark.parametrize("name", by_day(OTHERS, *DAILY))
def test_equal_bits_by_other_dtypes_and_optimizers(pools: Pools, name: str) -> None:
    run = OTHERS[name]
    world = 2 + len(name) % 2
    same(on(pools, 1, run, 2), on(pools, world, run, 2), f"{run} on {world} ranks against one")


def test_equal_bits_on_nodes(pools: Pools) -> None:
    """Sums go to all ranks at once, not over nodes first, and gathers inside of nodes are copies."""
    hpz = Run(schedule="hpz", options=(("layers", 2),), local=2)
    same(on(pools, 1, Run(), 3), on(pools, 4, hpz, 3), "four ranks on two nodes against one")


# ---- other verbs


def block(x: Tensor, w: Any) -> tuple[Tensor, None]:
    return torch.nn.functional.dropout(x + torch.tanh(x @ w["w"] + w["b"]), 0.1), None


def twice(params: Any, batch: Any) -> Any:
    """All layers are visited twice, and the first unit twice. The weights of means are uneven."""
    x = ya.apply(lambda w, tokens: w["w"][tokens], params["embed"], batch["tokens"])
    for _ in range(2):
        x, _ = ya.scan(block, x, params["layers"])
    x = ya.apply(lambda w, x: x * w["w"].mean(), params["embed"], x)
    losses = ya.apply(lambda w, x: (x @ w["w"].T).square().mean((1, 2)), params["embed"], x)
    weight = 0.1 + batch["tokens"].float().mean()
    thirds = ya.Sum(x.double().sum((0, 1)) / 3)  # of which float64 rounds the sums
    return ya.Mean(losses.sum(), weight), {"rows": ya.Mean(losses.mean(), 0.3), "thirds": thirds}


def other_verbs(mesh: Any) -> list[Tensor]:
    """`value_and_grad` and `apply_gradients`, an evaluation, and numbers over trees."""
    tree = {
        "embed": {"w": ya.Param((61, 5))},
        "layers": ya.Stacked({"w": ya.Param((3, 5, 5)), "b": ya.Param((3, 5))}),
    }
    tx = TXS["adamw, clipped"]
    state = ya.init(tree, tx, mesh=deterministic(), seed=1)
    both = ya.value_and_grad(twice, has_aux=True)
    evaluate = ya.eval_step(twice, has_aux=True)
    out = []
    for number in range(3):
        batch = ya.shard_batch(global_batch(number), deterministic())
        (value, aux), grads = both(state.params, batch)
        out += [value, *optree.tree_leaves(aux), *optree.tree_leaves(ya.unshard(grads))]
        out += [ya.global_norm(grads), ya.vdot(grads, state.params)]
        state = state.apply_gradients(grads, tx)
        out += optree.tree_leaves(evaluate(state, batch))
    return [x.clone() for x in out + values(state)]


@pytest.mark.nightly
def test_equal_bits_by_other_verbs(pools: Pools) -> None:
    """The first step and later ones add up the visits of a unit alike: each of three steps is compared."""
    one = pools[1].run(other_verbs)[0]
    assert all(x.isfinite().all() for x in one)
    assert len(one) > 40
    for world in (2, 3, 4):
        for rank, got in enumerate(pools[world].run(other_verbs)):
            assert not unlike(one, got), f"rank {rank} of {world}: values {unlike(one, got)} of {len(one)}"


def test_the_plain_loop_draws_the_same_numbers(pools: Pools) -> None:
    """Losses of one step on whole tensors, micro-shard by micro-shard."""
    run = Run(remat="all")
    plain = ya.PlainState.create(llama.params(CONFIG), TXS["adamw"], seed=3)
    step = ya.train_step(llama.loss(CONFIG, layer=noisy(CONFIG)), TXS["adamw"], microbatches=G)
    _, metrics = step(plain, global_batch(0))
    seen, _ = on(pools, 3, run, 1)
    torch.testing.assert_close(seen[0, 0], metrics["loss"], rtol=1e-6, atol=0)


# ---- what a mesh hands out, and what it refuses


@on_ranks(3)
def test_ranks_take_turns_in_micro_shards(mesh: Any) -> None:
    batch = {"x": torch.arange(2 * G), "n": 5, "scale": torch.tensor(3.0)}
    mine = ya.shard_batch(batch, deterministic())
    wanted = [2 * g + i for g in range(mesh.get_rank(), G, 3) for i in range(2)]
    assert mine["x"].tolist() == wanted
    assert mine["n"] == 5
    assert mine["scale"] == 3


def outcome(mesh: Any, name: str) -> Any:
    return REFUSED[name](mesh)


def state_on(mesh: Any, **how: Any) -> ya.ShardedState:
    return ya.init({"w": ya.Param((4, 4))}, ya.optim.sgd(0.1), mesh=mesh, **how)


def loss(params: Any, x: Tensor) -> Tensor:
    return ya.apply(lambda w, x: (x @ w).square().sum(), params["w"], x)


def regularised(params: Any, x: Tensor) -> Tensor:
    return loss(params, x) + params["w"].leaves[0].square().sum()


def inner(params: Any, x: Tensor) -> Tensor:
    grads = torch.func.grad(loss)(params, x)
    return loss(optree.tree_map(lambda p, g: p - 0.1 * g, params, grads), x)


def trained(fun: Any, **how: Any) -> Any:
    return lambda mesh: ya.train_step(fun, ya.optim.sgd(0.1), **how)(state_on(deterministic()), torch.ones(G, 4))


def of_params(function: Any) -> Any:
    return lambda mesh: function(state_on(deterministic()).params, torch.ones(1, 4))


def threads(mesh: Any) -> Any:
    torch.set_num_threads(1 + mesh.get_rank() % 2)
    try:
        return ya.mesh(device="cpu", deterministic=G)
    finally:
        torch.set_num_threads(1)


@of_params
def by_hand(params: Any, x: Tensor) -> Any:
    return loss(optree.tree_map(Tensor.requires_grad_, params), x)


WIDE = ya.Precision(torch.bfloat16, accumulate=torch.float32)
REFUSED = {
    "a bool": lambda mesh: ya.mesh(device="cpu", deterministic=True),
    "a number of ranks": lambda mesh: ya.mesh(device="cpu", deterministic=5),
    "replicas": lambda mesh: ya.mesh(device="cpu", deterministic=G, replicate=2),
    "threads": threads,
    "rows": lambda mesh: ya.shard_batch({"x": torch.ones(7, 2)}, deterministic()),
    "microbatches": trained(loss, microbatches=5),
    "deferred": trained(loss, schedule=ya.schedules.zero1()),
    "beside": trained(regularised),
    "inside": trained(inner),
    "objective": of_params(ya.functional_loss(loss)),
    "transform": of_params(torch.func.grad(loss)),
    "by hand": by_hand,
    "norm": of_params(lambda params, x: torch.func.grad(ya.global_norm)(params)),
    "plain": of_params(ya.grad(lambda p, x: loss(p, x) * x.sum(), argnums=(0, 1))),
    "accumulate": lambda mesh: state_on(deterministic(), precision=WIDE),
}
SAID = {
    "a bool": "ValueError: mesh(deterministic=True): expected the number of micro-shards",
    "a number of ranks": "5 micro-shards do not divide by 2; take 1, 5 of them, or give a multiple of 2",
    "replicas": "ValueError: mesh(replicate=2, deterministic=12): gradients would be added up in each copy first",
    "threads": "ranks disagree on what bits depend on; threads differs:",
    "rows": "ValueError: shard_batch: x has 7 rows, not a multiple of 12 micro-shards",
    "microbatches": "microbatches=5: on this mesh, ya.mesh(deterministic=12) over ",
    "deferred": "take a schedule that does not defer reductions",
    "beside": "RuntimeError: the loss reads sharded leaves beside its visits",
    "inside": "a derivative with respect to sharded parameters by torch.func",
    "objective": "RuntimeError: ya.functional_loss on a deterministic mesh",
    "transform": "a derivative with respect to sharded parameters by torch.func",
    "by hand": "or by torch.autograd outside of a step",
    "norm": "RuntimeError: global_norm: on a deterministic mesh it is an exact sum, and not differentiable",
    "plain": "ValueError: a gradient of plain tensors with a state on a deterministic mesh",
    "accumulate": "ValueError: Precision.accumulate is torch.float32, but on a deterministic mesh",
}


EVERYWHERE = ("microbatches", "deferred", "beside", "inside", "objective", "transform", "by hand", "norm", "plain")
"""What is refused at one rank as at several."""


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(pools: Pools, name: str) -> None:
    for world in (1, 2) if name in EVERYWHERE else (2,):
        for error in pools[world].errors(outcome, name):
            assert SAID[name] in error
