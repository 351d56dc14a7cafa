"""Optimizers whose state is in a format, against the plain loop whose moments pass through the same after each step."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.formats import (
    EXACT,
    F64,
    RATE,
    STEPS,
    TX,
    Halves,
    Loop,
    Plain,
    across_stages,
    adamw,
    alike,
    crossed,
    crossing,
    loss,
    normal,
    planned_program,
    schedules_for,
    split_loss,
    split_tree,
    three_steps,
    tree,
    two_steps_are_plain,
    two_steps_of_micro_shards,
)
from tests.harness.marks import nightly
from tests.harness.oracle import batch_of, compare
from tests.harness.pool import Pools, on_ranks
from yafsdp_fn.communication.formats import Format, Roots, Scaled, Wire, passed
from yafsdp_fn.params.tree import named_leaves

ROOTS = Roots(8)
FORMATS: dict[str, tuple[Format, Wire]] = {
    "roots": (ROOTS, Wire()),
    "wide blocks": (Roots(48), Wire()),
    "travels": (Roots(16), Wire(gather=Scaled(torch.int8, 24))),
    "own": (Halves(), Wire()),
    "stochastic": (Roots(8, stochastic=True), Wire()),
}
TOLERANCE = 1e-10
"""What a format rounds otherwise is off by 1e-3 at least."""


def on_a_rank(mesh: Any, name: str, kind: str, formats: str, parts: int) -> None:
    moments, wire = FORMATS[formats]
    every = schedules_for(mesh) | {"updates inside": ya.schedules.zero3(update=True)}
    some = {schedule: build for schedule, build in every.items() if schedule in (*STEPS, "updates inside")}
    three_steps(mesh, name, Plain(tree(wire, kind)), some, parts, TOLERANCE, moments=moments)


def shards_of(tree: Any) -> list[Tensor]:
    """The leaves of handles: all but counts."""
    return [leaf for leaf in optree.tree_leaves(tree) if leaf.ndim]


@crossing(FORMATS)
def test_three_steps_are_those_of_the_plain_loop(
    pools: Pools, where: str, kind: str, formats: str, parts: int, how: str
) -> None:
    crossed(pools, on_a_rank, where, kind, formats, parts, how)


# ---- with what else there is


class Counted(Halves):
    calls = 0

    def encode(self, blocks: Tensor) -> Tensor:
        Counted.calls += 1
        return super().encode(blocks)


def test_a_large_plan_encodes_one_part_of_each_unit() -> None:
    """Its parts allocate alike, and a stack of matrices has thousands: a plan of 70B took hours."""
    abstract = {"layers": ya.Stacked({"w": normal(2, 2**12, 2**12)})}

    def sum_of(params: Any, x: Tensor) -> Tensor:
        return ya.scan(lambda x, w: (x @ w["w"], None), x, params["layers"])[0].sum()

    ya.planner.trace(sum_of, abstract, torch.ones(1, 2**12), tx=adamw(Counted()))
    assert 0 < Counted.calls < 20


def test_the_definition_on_a_plain_tree() -> None:
    abstract = tree(Wire(), "marked")
    tx = adamw(ROOTS)
    oracle = ya.PlainState.create(optree.tree_map(lambda leaf: dataclasses.replace(leaf, dtype=F64), abstract), tx)
    loop = Loop(Plain(abstract), oracle.params, ROOTS)
    for number in range(3):
        before = optree.tree_leaves(oracle.params)
        _, grads = loop.plain.value_and_grad(before, [batch_of(0, seed=number)], 1, True)
        marked = optree.tree_unflatten(optree.tree_structure(oracle.params), optree.tree_leaves(grads))
        loop.step([batch_of(0, seed=number)], 1, True)
        oracle = oracle.apply_gradients(marked, tx)
        loop.compare(oracle.params, TOLERANCE, "a plain tree")


def reproduced(_: Any, stochastic: bool) -> int:
    return two_steps_of_micro_shards(loss, tree(Wire()), adamw(Roots(32, stochastic)))


@pytest.mark.parametrize("stochastic", [nightly(False), True])
def test_a_deterministic_mesh_has_the_same_bits_at_every_number_of_ranks(pools: Pools, stochastic: bool) -> None:
    alike(pools, (1, 2, 4), reproduced, stochastic)


@on_ranks()
@pytest.mark.parametrize(("world", "kind"), [(2, "marked"), nightly(4, "tied")])
def test_across_stages(_: Any, kind: str) -> None:
    across_stages(Plain(tree(Wire(), kind)), ya.schedules.zero3(), TOLERANCE, moments=ROOTS)


def over_tensor(_: Any, directory: Path, adapters: bool) -> int:
    """Steps are those of one rank, also of adapters; its checkpoint is read over tensor to the bit."""
    world = ya.mesh(device="cpu").size()
    mesh = ya.mesh(device="cpu", tensor=min(2, world))
    tx = adamw(Roots(4))
    abstract: Any = split_tree(8, 16)
    if adapters:
        abstract = ya.lora(abstract, 4, lambda path, _: path.endswith("up"))
    state = ya.init(abstract, tx, mesh=mesh, precision=EXACT)
    step = ya.train_step(split_loss, tx)
    batch = batch_of(0, rows=4)
    for _ in range(2):
        state, _ = step(state, ya.shard_batch(batch, mesh))
    if world == 1:
        torch.save(optree.tree_leaves(ya.unshard(state)), directory / "whole")
        ya.checkpoint.save(directory, state)
    compare(optree.tree_leaves(ya.unshard(state)), torch.load(directory / "whole"), TOLERANCE, "tensor")
    loaded, _ = ya.checkpoint.load(directory, ya.init(abstract, tx, mesh=mesh, precision=EXACT, seed=1))
    if world > 1 and not adapters:
        with pytest.raises(ValueError, match=r"down is split over tensor into runs of 8 elements, and roots/16"):
            ya.init(abstract, adamw(Roots(16)), mesh=mesh)
    return sum_of_bits(ya.unshard(loaded.params), ya.unshard(loaded.opt_state))


def sum_of_bits(*trees: Any) -> int:
    """A number of all bits of whole tensors."""
    leaves = [leaf.reshape(-1).view(torch.uint8) for leaf in optree.tree_leaves(trees)]
    return sum(zlib.crc32(leaf.numpy().tobytes()) for leaf in leaves)


@pytest.mark.parametrize("adapters", [False, True])
def test_over_tensor(pools: Pools, tmp_path: Path, adapters: bool) -> None:
    alike(pools, (1, 2, 4), over_tensor, tmp_path, adapters)


@on_ranks(nightly(1), 2)
def test_beside_other_optimizers(mesh: Any) -> None:
    """Optimizers that share units, none with a kernel, leave each other's elements alone; wrappers take it inside."""
    o = ya.optim
    light = ya.optim.in_format(ya.optim.adamw(RATE), Roots(16))
    for tx in (
        o.muon(0.02, dtype=F64, others=light),
        o.muon(0.02, dtype=F64, others=o.rmsprop(RATE)),
        o.partition({"up": light, "else": o.sgd(0.1, 0.9)}, lambda path, p: "up" if "up" in path else "else"),
        o.contrib.schedule_free(light, RATE),
        o.chain(o.in_format(o.trace(0.9), ROOTS), o.clip_by_global_norm(0.5), o.scale(-0.1)),
        o.in_format(o.lion(1e-3, mu_dtype=torch.bfloat16), ROOTS),
    ):
        two_steps_are_plain(mesh, Plain(tree(Wire())), tx)


# ---- memory


def ya_handles(state: Any) -> list[Any]:
    return optree.tree_leaves(state.params, is_leaf=lambda node: isinstance(node, ya.Sharded))


@on_ranks()
@pytest.mark.parametrize(
    ("world", "formats"), [(1, "own"), (2, "travels"), nightly(3, "wide blocks"), nightly(4, "roots")]
)
def test_bytes_are_held_and_planned(mesh: Any, formats: str) -> None:
    """A state has a byte for an element of each moment, and a scale for each block; plans count them."""
    format, wire = FORMATS[formats]
    abstract = tree(wire, "marked")
    tx = adamw(format)
    state = ya.init(abstract, tx, mesh=mesh)
    trained = [leaf for handle in ya_handles(state) for _, group, leaf in handle.group_leaves() if group.trainable]
    held = sum(leaf.nbytes for leaf in optree.tree_leaves(state.opt_state))
    assert held == 2 * format.nbytes(sum(leaf.numel() for leaf in trained)) + 4  # and the count
    program = planned_program(loss, abstract, state, tx)
    assert ya.planner.predict_memory(program, device="cpu").optimizer == held


def test_a_step_needs_memory_for_a_unit() -> None:
    """However many layers there are; and plans know."""

    def of(params: Any, x: Tensor) -> ya.Mean:
        return ya.Mean(ya.scan(lambda x, w: (ya.linear(x, w["w"]), None), x, params["layers"])[0].sum(), 1)

    steps = []
    for layers in (2, 9):
        params = {"layers": ya.Stacked({"w": ya.Param((layers, 64, 64))})}
        found = ya.planner.trace(of, params, torch.zeros(2, 64), tx=adamw(Roots()), device="cpu").optimizer
        steps.append(found.step)
        assert found.block == 64
        assert found.shards == ((4096, 2 * layers * 68, 1),)
    assert steps[0] == steps[1]
    assert steps[0][0] < 12 * 4 * 4096
    assert steps[0][1] == 4096


# ---- states: saved, carried over, skipped


def saved(mesh: Any, directory: Path, stochastic: bool) -> int:
    tx = adamw(Roots(32, stochastic))
    abstract = tree(Wire(), "marked")
    state = ya.init(abstract, tx, mesh=mesh, precision=EXACT)
    step = ya.train_step(loss, tx)
    if mesh.size() == 2:
        state, _ = step(state, batch_of(mesh.get_rank()))
        ya.checkpoint.save(directory, state)
    loaded, _ = ya.checkpoint.load(directory, ya.init(abstract, tx, mesh=mesh, precision=EXACT, seed=1))
    found = sum_of_bits(ya.unshard(loaded.params), ya.unshard(loaded.opt_state))
    moved = ya.shard(loaded, tx, mesh=ya.mesh(device="cpu", replicate=mesh.size()))
    assert sum_of_bits(ya.unshard(moved.params), ya.unshard(moved.opt_state)) == found
    for other, what in ((TX, r"ya.shard\(state, tx\) then carries over"), (adamw(Scaled(block=32)), "roots/32")):
        like = ya.init(abstract, other, mesh=mesh, precision=EXACT, seed=1)
        with pytest.raises(ya.checkpoint.CheckpointError, match=what):
            ya.checkpoint.load(directory, like)
        only = ya.checkpoint.load_params(directory, like)  # leaves begin elsewhere
        assert sum_of_bits(ya.unshard(only)) == sum_of_bits(ya.unshard(loaded))
    step(loaded, batch_of(mesh.get_rank()))
    return found


@pytest.mark.parametrize("stochastic", [nightly(False), True])
def test_checkpoints_hold_the_bits(pools: Pools, tmp_path: Path, stochastic: bool) -> None:
    alike(pools, (2, 1, 3), saved, tmp_path, stochastic)


@on_ranks(1, 3)
def test_states_are_carried_over(mesh: Any) -> None:
    """A state goes into a format, out of it, and into another; so do other groups of leaves."""
    batch = batch_of(mesh.get_rank())
    light = adamw(ROOTS)
    state, _ = ya.train_step(loss, TX)(ya.init(tree(Wire()), TX, mesh=mesh, precision=EXACT), batch)
    before = dict(named_leaves(ya.unshard(state.opt_state)))
    pinned = tree(Wire())
    pinned["layers"].tree["gain"] = ya.Pinned(pinned["layers"].tree["gain"])
    for format, like in ((ROOTS, tree(Wire())), (Roots(48), pinned)):
        other = ya.shard(ya.shard(state, light), adamw(format), like=like)
        other = ya.shard(ya.shard(state, adamw(format), like=like), adamw(format), mesh=other.mesh)
        for name, leaf in named_leaves(ya.unshard(ya.shard(other, TX, like=tree(Wire())).opt_state)):
            by_layer = "layers" in name and not (like is pinned and "gain" in name)
            rows = before[name] if by_layer or not leaf.ndim else before[name][None]
            expected = torch.stack([passed(format, row) for row in rows]).view(leaf.shape) if leaf.ndim else rows
            compare([leaf], [expected], 1e-6, name)  # a scale may be rounded twice
    for other, what in ((TX, "none of"), (adamw(Roots(4)), "the state is in roots/8, not in this optimizer's")):
        with pytest.raises(TypeError, match=what):
            ya.train_step(loss, other)(ya.shard(state, light), batch)


@on_ranks(nightly(1), 2)
def test_steps_that_are_skipped(mesh: Any) -> None:
    """Steps that are not finite leave all bits as they are; copies, and what is not donated, have their own."""
    tx = adamw(ROOTS)
    batch = batch_of(mesh.get_rank())
    state, _ = ya.train_step(loss, tx)(ya.init(tree(Wire()), tx, mesh=mesh, precision=EXACT), batch)
    before = ya.checksum(state)
    broken = state.copy()
    with torch.no_grad():
        broken.params["head"].leaves[0].fill_(float("inf"))
    kept, _ = ya.train_step(loss, tx)(broken, batch)
    assert all(torch.equal(*pair) for pair in zip(shards_of(kept.opt_state), shards_of(state.opt_state), strict=True))
    other, _ = ya.train_step(loss, tx, donate=False)(state, batch)
    assert ya.checksum(state) == before != ya.checksum(other)


# ---- what is refused


def test_what_cannot_be_in_a_format_is_refused(tmp_path: Path) -> None:
    o = ya.optim
    mesh = ya.mesh(device="cpu")
    with pytest.raises(TypeError, match=r"in_format: expected a ya.formats.Format"):
        o.in_format(o.adamw(1e-3), torch.int8)  # type: ignore[arg-type]
    for tx in (o.muon(0.02), o.contrib.schedule_free(o.sgd(0.1), 0.1), o.masked(o.adam(1e-3), lambda path, p: True)):
        with pytest.raises(TypeError, match=r"works on whole leaves; it takes elementwise optimizers.*put it inside"):
            o.in_format(tx, ROOTS)
    state = ya.init(tree(Wire()), adamw(ROOTS), mesh=mesh)
    with pytest.raises(
        ValueError, match=r"embed: shards are cut at multiples of 8 elements, which are no blocks of ro"
    ):
        adamw(Roots(3)).init(state.params)
    for verb in (ya.checkpoint.save_moments, ya.checkpoint.load_moments):
        with pytest.raises(TypeError, match=r"Adam's moments whole, got them in a format.*ya.shard\(state"):
            verb(tmp_path / "moments", state, lambda path, layer: f"{path}.{layer}")


@on_ranks(2)
def test_ranks_have_the_same_blocks(mesh: Any) -> None:
    with pytest.raises(ya.errors.RanksDisagree, match=r"(?s)cut at multiples of 8.*cut at multiples of 16"):
        ya.init(tree(Wire()), adamw(Roots(8 * (1 + mesh.get_rank()))), mesh=mesh)


# ---- the format for moments


def test_roots_keep_small_elements() -> None:
    """Those that integers round to zero are off by a part of themselves, and none becomes zero."""
    draw = torch.Generator().manual_seed(0)
    values = 10.0 ** -(8 * torch.rand(64, 64, generator=draw))
    values[:, 0] = 1
    signs = torch.randn(64, 64, generator=draw).sign()
    for source, levels in ((values, 255), (values * signs, 127), (values.double(), 255)):
        found = passed(Roots(), source, F64)
        off = ((found - source) / source).abs()
        half_a_step = 2 / levels / source.abs().double() ** 0.25
        assert bool((off <= (1 + half_a_step / 4) ** 4 - 1 + 1e-5).logical_or(source.abs() < 1e-6).all())
        assert torch.equal(found.sign(), source.sign().double())
        assert float((passed(Roots(), found) - found).abs().max()) <= 1e-6
    assert float(passed(Scaled(torch.int8), values).eq(0).double().mean()) > 0.5
    assert not Roots().encode(torch.zeros(1, 64)).any()
    for wrong in (float("inf"), float("-inf"), float("nan")):
        found = passed(Roots(8), torch.cat([torch.ones(7), torch.tensor([wrong]), torch.ones(8)]))
        assert not found[:8].isfinite().all()
        assert torch.equal(found[8:], torch.ones(8))
