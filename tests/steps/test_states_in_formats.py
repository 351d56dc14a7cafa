"""Optimizers whose state is in a format, against the plain loop whose moments pass through the same after each step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import zlib
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.meshes import made
from tests.harness.oracle import batch_of, by_autograd, compare, joined
from tests.harness.pool import Pool
from tests.harness.problems import Batch, E, V
from tests.steps.test_wire_formats import (
    EXACT,
    F64,
    STEPS,
    TOLERANCE,
    WHERE,
    Halves,
    Plain,
    loss,
    schedules_for,
    split_loss,
    tree,
)
from yafsdp_fn.communication.formats import Format, Roots, Scaled, Wire, passed
from yafsdp_fn.params.tree import named_leaves

ROOTS = Roots(8)
FORMATS: dict[str, tuple[Format, Wire]] = {
    "roots": (ROOTS, Wire()),
    "wide blocks": (Roots(48), Wire()),
    "travels": (Roots(16), Wire(gather=Scaled(torch.int8, 24))),
    "own": (Halves(), Wire()),
}
B1, B2, RATE, EPS, DECAY = 0.9, 0.95, 1e-2, 1e-8, 0.1


def adamw(format: Format) -> ya.optim.GradientTransformation:
    inside = ya.optim.in_format(ya.optim.adamw(RATE, B1, B2, EPS, DECAY), format)
    return ya.optim.chain(ya.optim.clip_by_global_norm(1.0), inside)


class Loop:
    """Clipped AdamW on whole leaves, by hand. Moments pass through `format`, a layer of a stacked leaf at a time."""

    def __init__(self, leaves: dict[str, Tensor], format: Format, by_layer: set[str]) -> None:
        self.leaves, self.format, self.by_layer, self.count = leaves, format, by_layer, 0
        self.mu, self.nu = ({name: torch.zeros_like(leaf) for name, leaf in leaves.items()} for _ in range(2))

    def passed(self, name: str, moment: Tensor) -> Tensor:
        if name not in self.by_layer:
            return passed(self.format, moment)
        return torch.stack([passed(self.format, row) for row in moment])

    def step(self, grads: dict[str, Tensor]) -> None:
        self.count += 1
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        for name, grad in grads.items():
            grad = grad / max(norm, 1.0)
            mu, nu = B1 * self.mu[name] + (1 - B1) * grad, B2 * self.nu[name] + (1 - B2) * grad.square()
            update = mu / (1 - B1**self.count) / ((nu / (1 - B2**self.count)).sqrt() + EPS)
            self.leaves[name] = self.leaves[name] - RATE * (update + DECAY * self.leaves[name])
            self.mu[name], self.nu[name] = self.passed(name, mu), self.passed(name, nu)


def looped(plain: Plain, params: Any, format: Format) -> Loop:
    by_layer = {name for name, stacked in zip(plain.names, plain.stacked, strict=True) if stacked}
    return Loop(dict(plain.trained(params)), format, by_layer if plain.frozen else by_layer | {"layers.gain"})


def exact(mesh: Any, name: str, kind: str, formats: str, parts: int, how: str) -> None:
    """One rank's part. how: the gradients of weights are written into slots, or autograd's"""
    with by_autograd() if how == "autograd" else contextlib.nullcontext():
        three_steps(made(name), f"{name}, {kind}, {formats}, {parts} microbatches", kind, formats, parts)


def three_steps(mesh: Any, what: str, kind: str, formats: str, parts: int) -> None:
    format, wire = FORMATS[formats]
    abstract, tx = tree(wire, kind), adamw(format)
    plain = Plain(abstract)
    if kind != "marked":
        plain.stacked = [name.startswith("layers") for name in plain.names]
    schedules = dict(schedules_for(mesh)) | {"updates inside": ya.schedules.zero3(update=True)}
    for schedule in [name for name in (*STEPS, "updates inside") if name in schedules]:
        state = ya.init(abstract, tx, mesh=mesh, precision=EXACT)
        step = ya.train_step(loss, tx, schedule=schedules[schedule], microbatches=parts)
        params = ya.unshard(state)
        whole = optree.tree_leaves(params)
        loop = looped(plain, params, format)
        for number in range(3):
            now = [batch_of(rank, seed=number) for rank in range(mesh.size())]
            latest = [loop.leaves.get(name, leaf) for name, leaf in zip(plain.names, whole, strict=True)]
            _, grads = plain.value_and_grad(latest, now, parts, schedule == "zero1")
            loop.step(plain.trained(grads))
            state, _ = step(state, now[mesh.get_rank()])
            got = plain.trained(ya.unshard(state))
            compare(got, loop.leaves, 100 * TOLERANCE, f"{what}, {schedule}: step {number}")
        for handle in ya_handles(state.opt_state):
            assert all(leaf.dtype == torch.uint8 for leaf in handle.leaves)


def ya_handles(tree: Any) -> list[Any]:
    found = optree.tree_leaves(tree, is_leaf=lambda node: isinstance(node, ya.Sharded))
    return [node for node in found if isinstance(node, ya.Sharded)]


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["slots", "autograd"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("kind", ["plain", "marked", "tied"])
@pytest.mark.parametrize("where", WHERE)
def test_three_steps_are_those_of_the_plain_loop(
    pools: dict[int, Pool], where: str, kind: str, formats: str, parts: int, how: str
) -> None:
    world, mesh = where.split()
    pools[int(world)].run(exact, mesh, kind, formats, parts, how)


# ---- with what else there is


def test_the_definition_on_a_plain_tree_is_the_plain_loop() -> None:
    abstract, tx = tree(Wire(), "marked"), adamw(ROOTS)
    plain = Plain(abstract)
    oracle = ya.PlainState.create(optree.tree_map(lambda leaf: ya.Param(leaf.shape, F64, leaf.init), abstract), tx)
    loop = looped(plain, oracle.params, ROOTS)
    for number in range(3):
        whole = optree.tree_leaves(oracle.params)
        _, grads = plain.value_and_grad(oracle.params, [batch_of(0, seed=number)], 1, True)
        loop.step(plain.trained(grads))
        marked = optree.tree_unflatten(optree.tree_structure(oracle.params), optree.tree_leaves(grads))
        oracle = oracle.apply_gradients(marked, tx)
        assert len(whole) == len(plain.names)
    compare(plain.trained(oracle.params), loop.leaves, TOLERANCE, "a plain tree")


def reproduced(_: Any, micro_shards: int) -> int:
    mesh = ya.mesh(device="cpu", deterministic=micro_shards)
    tx = adamw(Roots(32))
    state = ya.init(tree(Wire()), tx, mesh=mesh)
    step = ya.train_step(loss, tx)
    for number in range(3):
        state, _ = step(state, ya.shard_batch(batch_of(0, seed=number, rows=micro_shards), mesh))
    return ya.checksum(ya.shard(state, tx))


def test_a_deterministic_mesh_has_the_same_bits_at_every_number_of_ranks(pools: dict[int, Pool]) -> None:
    assert len({found for world in (1, 2, 4) for found in pools[world].run(reproduced, 4)}) == 1


def over_stages(_: Any, kind: str) -> None:
    mesh, tx = ya.mesh(device="cpu", stage=2), adamw(ROOTS)
    abstract = tree(Wire(), kind)
    plain = Plain(abstract)
    if kind != "marked":
        plain.stacked = [name.startswith("layers") for name in plain.names]
    batches = [batch_of(rank, rows=6) for rank in range(mesh.size() // 2)]
    part = {key: value[:2] for key, value in batches[0].items()}
    mine = ya.shard_batch(joined(batches), mesh)
    assignment = ya.schedules.assign(ya.planner.trace(loss, abstract, part, precision=EXACT, tx=tx), 2)
    for order in (ya.schedules.one_f_one_b, ya.schedules.zero_bubble):
        state = ya.init(abstract, tx, mesh=mesh, precision=EXACT, stages=assignment)
        step = ya.train_step(loss, tx, schedule=order(ya.schedules.zero3()), microbatches=3)
        loop = looped(plain, ya.unshard(state), ROOTS)
        whole = optree.tree_leaves(ya.unshard(state))
        for _ in range(3):
            latest = [loop.leaves.get(name, leaf) for name, leaf in zip(plain.names, whole, strict=True)]
            _, grads = plain.value_and_grad(latest, batches, 3, False)
            loop.step(plain.trained(grads))
            state, _ = step(state, mine)
        compare(plain.trained(ya.unshard(state)), loop.leaves, 100 * TOLERANCE, f"stages, {kind}, {order.__name__}")


@pytest.mark.parametrize(("world", "kind"), [(2, "marked"), (4, "tied")])
def test_across_stages(pools: dict[int, Pool], world: int, kind: str) -> None:
    pools[world].run(over_stages, kind)


def split_tree() -> dict[str, Any]:
    def own(*shape: int, **more: Any) -> ya.Param:
        return ya.Param((2, *shape), init=ya.params.initializers.normal(0.5), **more)

    layer = {
        "up": own(16, 8, split={"tensor": -2}),
        "down": own(8, 16, split={"tensor": -1}),
        "gain": own(8),
    }
    return {"embed": ya.Param((V, 8), init=ya.params.initializers.normal(0.5)), "layers": ya.Stacked(layer)}


def over_tensor(_: Any, directory: Path, saves: bool) -> int:
    """Split leaves have the blocks of whole ones, or are refused; checkpoints are read on other meshes, to the bit."""
    mesh, tx = ya.mesh(device="cpu", tensor=min(2, ya_world())), adamw(Roots(4))
    state = ya.init(split_tree(), tx, mesh=mesh, precision=EXACT)
    params = ya.unshard(state)
    batch = batch_of(0, rows=4)
    rows = [{key: leaf[:2] for key, leaf in batch.items()}, {key: leaf[2:] for key, leaf in batch.items()}]
    own = rows if mesh.size() == 4 else [batch]
    leaves = dict(zip(NAMES, optree.tree_leaves(params), strict=True))
    loop = Loop(leaves, Roots(4), set(NAMES) - {"embed"})
    step = ya.train_step(split_loss, tx)
    for _ in range(2):
        now = {name: leaf.clone().requires_grad_() for name, leaf in loop.leaves.items()}
        tree = optree.tree_unflatten(optree.tree_structure(params), [now[name] for name in NAMES])
        means = [split_loss(tree, part) for part in own]
        total = sum(mean.total for mean in means) / sum(int(mean.weight) for mean in means)
        loop.step(dict(zip(now, torch.autograd.grad(total, list(now.values())), strict=True)))
        state, _ = step(state, ya.shard_batch(batch, mesh))
    got = dict(zip(NAMES, optree.tree_leaves(ya.unshard(state)), strict=True))
    compare(got, loop.leaves, 100 * TOLERANCE, "tensor")
    if saves:
        ya.checkpoint.save(directory, state)
    loaded, _ = ya.checkpoint.load(directory, ya.init(split_tree(), tx, mesh=mesh, precision=EXACT, seed=1))
    if mesh.size() > 1:
        with pytest.raises(ValueError, match=r"layers.*down is split over tensor into runs of 4 elements, and int8/8"):
            ya.init(split_tree(), adamw(ROOTS), mesh=mesh)
    return sum_of(ya.unshard(loaded.opt_state))


NAMES = ("embed", "layers.down", "layers.gain", "layers.up")


def ya_world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_of(tree: Any) -> int:
    """A number of all bits of whole tensors."""
    return sum(zlib.crc32(leaf.cpu().contiguous().view(torch.uint8).numpy().tobytes()) for leaf in tensors_of(tree))


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf.reshape(-1) for leaf in optree.tree_leaves(tree)]


def test_over_tensor(pools: dict[int, Pool], tmp_path: Path) -> None:
    found = set()
    for number, world in enumerate((2, 4, 1)):
        found |= set(pools[world].run(over_tensor, tmp_path, number == 0))
    assert len(found) == 1


def adapted_loss(params: Any, batch: Batch) -> ya.Mean:
    def block(x: Tensor, w: dict[str, Any]) -> tuple[Tensor, None]:
        return x + ya.linear(torch.tanh(ya.linear(x, w["up"])), w["down"]), None

    x = ya.apply(lambda table, tokens: F.embedding(tokens, table), params["embed"], batch["tokens"])
    x, _ = ya.scan(block, x, params["layers"])
    return ya.Mean(x.square().sum(), x.numel())


def adapted(mesh: Any) -> None:
    """Adapters alone are trained, and their moments alone are there."""
    tx = adamw(ROOTS)
    base = split_tree()
    layer = {name: dataclasses.replace(leaf, split=()) for name, leaf in base["layers"].tree.items()}
    abstract = ya.lora({**base, "layers": ya.Stacked(layer)}, 2, lambda path, _: path.endswith("up"))
    abstract = optree.tree_map(lambda leaf: dataclasses.replace(leaf, dtype=F64), abstract)
    state = ya.init(abstract, tx, mesh=mesh, precision=EXACT)
    oracle = ya.PlainState.create(abstract, tx)
    batches = [batch_of(rank) for rank in range(mesh.size())]
    step = ya.train_step(adapted_loss, tx)
    for _ in range(3):
        state, metrics = step(state, batches[mesh.get_rank()])
        oracle, _ = step(oracle, joined(batches))
        assert metrics["skipped"] == 0
    got, expected = (optree.tree_leaves(tree) for tree in (ya.unshard(state), oracle.params))
    compare(got, expected, 100 * TOLERANCE, "adapters")


@pytest.mark.parametrize("world", [1, 2])
def test_adapters(pools: dict[int, Pool], world: int) -> None:
    pools[world].run(adapted)


# ---- memory


def bytes_of(mesh: Any, per_node: int) -> None:
    """A state has a byte for an element of each moment, and a scale for each block; plans count them, and a step's
    memory is that of a unit."""
    block = 64
    tx = adamw(Roots(block))
    abstract = tree(Wire(), "marked")
    state = ya.init(abstract, tx, mesh=mesh)
    held = sum(leaf.nbytes for leaf in tensors_of(state.opt_state))
    elements = sum(leaf.numel() for handle in ya_handles(state.params) for leaf in handle.of(range(99)).leaves)
    frozen = sum(
        leaf.numel() for handle in ya_handles(state.params) for _, g, leaf in handle.group_leaves() if not g.trainable
    )
    assert held == 2 * (elements - frozen) // block * (block + 4) + 4  # and the count
    program = ya.train_step(loss, tx).lower(state, batch_of(0))
    assert ya.planner.predict_memory(program, device="cpu").optimizer == held
    shape = {"mesh": program.trace.mesh, "tx": tx, "device": "cpu"}
    alone = ya.planner.trace(loss, abstract, batch_of(0), **shape)
    assert alone == program.trace
    assert type(program).from_json(program.to_json()).trace == program.trace


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_bytes(pools: dict[int, Pool], world: int) -> None:
    pools[world].run(bytes_of, 1)


# ---- states: saved, carried over, skipped


def saved(mesh: Any, directory: Path) -> int:
    tx = adamw(Roots(32))
    abstract = tree(Wire(), "marked")
    state = ya.init(abstract, tx, mesh=mesh, precision=EXACT)
    step = ya.train_step(loss, tx)
    if mesh.size() == 2:
        state, _ = step(state, batch_of(mesh.get_rank()))
        ya.checkpoint.save(directory, state)
    loaded, _ = ya.checkpoint.load(directory, ya.init(abstract, tx, mesh=mesh, precision=EXACT, seed=1))
    found = sum_of((ya.unshard(loaded.params), ya.unshard(loaded.opt_state)))
    assert loaded.step == 1
    moved = ya.shard(loaded, tx, mesh=ya.mesh(device="cpu", replicate=mesh.size()))
    assert sum_of((ya.unshard(moved.params), ya.unshard(moved.opt_state))) == found
    whole_tx = ya.optim.adamw(1e-2)
    others = (whole_tx, "ya.shard(state, tx) then carries over"), (adamw(Scaled(block=32)), "roots/32")
    for other, name in others:
        with pytest.raises(ya.checkpoint.CheckpointError, match=re.escape(name)):
            ya.checkpoint.load(directory, ya.init(abstract, other, mesh=mesh, precision=EXACT))
    only = ya.checkpoint.load_params(directory, ya.init(abstract, whole_tx, mesh=mesh, precision=EXACT, seed=1))
    assert sum_of(ya.unshard(only.params)) == sum_of(ya.unshard(loaded.params))  # leaves begin elsewhere
    loaded, _ = step(loaded, batch_of(mesh.get_rank()))
    return found


def test_checkpoints_hold_the_bits(pools: dict[int, Pool], tmp_path: Path) -> None:
    assert len({found for world in (2, 1, 3) for found in pools[world].run(saved, tmp_path)}) == 1


def carried_over(mesh: Any) -> None:
    """A state goes into a format, out of it, and into another; so do other groups of leaves, and more rows."""
    light, whole = adamw(ROOTS), ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(1e-2))
    batch = batch_of(mesh.get_rank())
    state = ya.init(tree(Wire()), whole, mesh=mesh, precision=EXACT)
    state, _ = ya.train_step(loss, whole)(state, batch)
    before = ya.unshard(state.opt_state)[1][0]
    pinned = tree(Wire())
    pinned["layers"].tree["gain"] = ya.Pinned(pinned["layers"].tree["gain"])
    for format, like in ((ROOTS, None), (Roots(48), pinned)):
        tx = adamw(format)
        other = ya.shard(state, tx, like=like)
        back = ya.unshard(ya.shard(other, whole, like=tree(Wire())).opt_state)[1][0]
        assert back.count == 1
        for what in ("mu", "nu"):
            for name, leaf in named_leaves(getattr(before, what)):
                rows = leaf if name.startswith("layers") and (like is None or "gain" not in name) else leaf[None]
                expected = torch.stack([passed(format, row) for row in rows]).view(leaf.shape)
                compare([dict(named_leaves(getattr(back, what)))[name]], [expected], 1e-12, name)
        other, metrics = ya.train_step(loss, tx)(other, batch)
        assert metrics["skipped"] == 0
    larger = tree(Wire())
    larger["embed"] = ya.Param((V + 3, E), init=ya.params.initializers.normal(0.5))
    grown = ya.shard(ya.shard(state, light), light, like=larger, grow=["embed"])
    back = ya.unshard(ya.shard(grown, whole).opt_state)[1][0]
    assert not back.mu["embed"][V:].any() and back.mu["embed"][:V].any()
    with pytest.raises(TypeError, match="none of"):
        ya.train_step(loss, whole)(ya.shard(state, light), batch)
    with pytest.raises(TypeError, match="not in this optimizer"):
        ya.train_step(loss, adamw(Scaled(torch.int8, 8)))(ya.shard(state, light), batch)


@pytest.mark.parametrize("world", [1, 3])
def test_states_are_carried_over(pools: dict[int, Pool], world: int) -> None:
    pools[world].run(carried_over)


def skipped(mesh: Any) -> None:
    """Steps that are not finite leave all bits as they are; copies and what is not donated have their own."""
    tx = adamw(ROOTS)
    batch = batch_of(mesh.get_rank())
    state = ya.init(tree(Wire()), tx, mesh=mesh, precision=EXACT)
    state, _ = ya.train_step(loss, tx)(state, batch)
    kept = state.copy()
    before = ya.checksum(kept)
    with torch.no_grad():
        kept.params["head"].leaves[0].fill_(float("inf"))
    own = sum_of(ya.unshard(kept.opt_state))
    kept, metrics = ya.train_step(loss, tx)(kept, batch)
    assert metrics["skipped"] == 1 and sum_of(ya.unshard(kept.opt_state)) == own
    other, _ = ya.train_step(loss, tx, donate=False)(state, batch)
    assert ya.checksum(state) == before != ya.checksum(other)
    finite = ya.optim.contrib.apply_if_finite(adamw(ROOTS), 3)
    state = ya.init(tree(Wire()), finite, mesh=mesh, precision=EXACT)
    state, _ = ya.train_step(loss, finite, skip_nonfinite=False)(state, batch)
    assert all(leaf.dtype == torch.uint8 for handle in ya_handles(state.opt_state) for leaf in handle.leaves)


@pytest.mark.parametrize("world", [1, 2])
def test_steps_that_are_skipped(pools: dict[int, Pool], world: int) -> None:
    pools[world].run(skipped)


# ---- what is refused


def test_what_cannot_be_in_a_format_is_refused(tmp_path: Path) -> None:
    o, mesh = ya.optim, ya.mesh(device="cpu")
    with pytest.raises(TypeError, match=r"in_format: expected a ya.formats.Format"):
        o.in_format(o.adamw(1e-3), torch.int8)  # type: ignore[arg-type]
    for tx in (o.muon(0.02), o.contrib.lookahead(o.sgd(0.1), 5, 0.5), o.masked(o.adam(1e-3), lambda path, p: True)):
        with pytest.raises(TypeError, match=r"works on whole leaves; it takes elementwise optimizers.*put it inside"):
            o.in_format(tx, ROOTS)
    state = ya.init(tree(Wire()), o.in_format(o.lion(1e-3, mu_dtype=torch.float32), ROOTS), mesh=mesh)
    with pytest.raises(TypeError, match=r"moments in torch.bfloat16, parameters are torch.float32; leave out"):
        ya.shard(state, o.in_format(o.lion(1e-3, mu_dtype=torch.bfloat16), ROOTS))
    with pytest.raises(
        ValueError, match=r"embed: shards are cut at multiples of 8 elements, which are no blocks of int8/3"
    ):
        adamw(Roots(3)).init(state.params)
    state = ya.init(tree(Wire()), adamw(ROOTS), mesh=mesh)
    for verb in (ya.checkpoint.save_moments, ya.checkpoint.load_moments):
        with pytest.raises(TypeError, match=r"Adam's moments whole, got them in a format.*ya.shard\(state"):
            verb(tmp_path / "moments", state, lambda path, layer: f"{path}.{layer}")


def disagree(mesh: Any) -> None:
    with pytest.raises(ya.errors.RanksDisagree, match=r"(?s)cut at multiples of 8.*cut at multiples of 16"):
        ya.init(tree(Wire()), adamw(Scaled(block=8 * (1 + mesh.get_rank()))), mesh=mesh)


def test_ranks_have_the_same_formats(pools: dict[int, Pool]) -> None:
    pools[2].run(disagree)


# ---- formats for moments


def test_roots_keep_small_elements() -> None:
    """Elements over twelve powers of ten are off by a part of themselves, and none becomes zero."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(64, 256, generator=draw).square() * 10.0 ** -(8 * torch.rand(64, 256, generator=draw))
    values[:, 0] = 1e-12
    for source in (values, -values, values.double()):
        found = passed(Roots(256), source, F64)
        off = ((found - source) / source).abs()
        largest = source.abs().amax(-1, keepdim=True)
        assert float(off[source.abs() > largest * 1e-4].max()) < 4 * 0.5 / 127 / 0.1 * 1.3
        assert bool((found.sign() == source.sign()).all())
        assert float(passed(Scaled(torch.int8, 256), source, F64).eq(0).double().mean()) > 0.5  # without roots
    again = passed(ROOTS, values)
    assert torch.equal(passed(ROOTS, torch.zeros(16)), torch.zeros(16))
    assert not passed(ROOTS, torch.tensor([1.0, float("nan"), *[0.0] * 6])).isfinite().all()
    assert float((passed(ROOTS, again) - again).abs().max()) <= 1e-6


def test_a_step_needs_memory_for_a_unit() -> None:
    """However many layers there are; and plans know."""
    steps = []
    for layers in (2, 9):
        params = {"layers": ya.Stacked({"w": ya.Param((layers, 64, 64))})}

        def of(params: Any, x: Tensor) -> ya.Mean:
            return ya.Mean(ya.scan(lambda x, w: (ya.linear(x, w["w"]), None), x, params["layers"])[0].sum(), 1)

        trace = ya.planner.trace(of, params, torch.zeros(2, 64), tx=adamw(Roots(64)), device="cpu")
        steps.append(trace.optimizer.step)
        assert trace.optimizer.one_by_one and trace.optimizer.shards == ((4096, 2 * layers * 68, 1),)
    assert steps[0] == steps[1] and steps[0][1] == 4096
    assert steps[0][0] < 12 * 4 * 4096
