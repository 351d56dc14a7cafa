"""Optimizer states on the host: the bits of the same optimizer whose states are on the device, and a plain oracle's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness import small
from tests.harness.formats import (
    WHERE,
    alike,
    loss,
    on_two_stages,
    planned_program,
    split_loss,
    split_tree,
    tree,
    two_steps_of_micro_shards,
)
from tests.harness.marks import by_day, nightly
from tests.harness.meshes import made
from tests.harness.oracle import batch_of
from tests.harness.pool import Pools, on_ranks
from tests.optim.test_on_ranks import TXS, trained
from yafsdp_fn.communication.formats import Wire
from yafsdp_fn.planner.costs import Costs

o = ya.optim
s = ya.schedules
ADAMW = o.chain(o.clip_by_global_norm(1.0), o.adamw(1e-2, weight_decay=0.1, mask=lambda path, p: len(p.shape) > 1))
RMSPROP = o.rmsprop(1e-2, momentum=0.5)
MIXED = ya.Precision(compute=torch.bfloat16, reduce=torch.float32)

OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "adamw": (ADAMW, o.on_host(ADAMW)),
    "no kernel": (RMSPROP, o.on_host(RMSPROP)),
    "in 8 bits": (o.in_format(ADAMW, ya.formats.Roots(8)), o.on_host(o.in_format(ADAMW, ya.formats.Roots(8)))),
    "muon": (o.muon(0.02), o.on_host(o.muon(0.02))),
    "soap": (o.contrib.soap(3e-3), o.on_host(o.contrib.soap(3e-3))),
    "beside muon": (
        o.muon(0.02, others=o.rmsprop(1e-2, momentum=0.9)),
        o.muon(0.02, others=o.on_host(o.rmsprop(1e-2, momentum=0.9))),
    ),
    "inside": (o.contrib.schedule_free(RMSPROP, 1e-2), o.contrib.schedule_free(o.on_host(RMSPROP), 1e-2)),
    "in a mask": (
        o.masked(o.lion(1e-3), lambda path, p: "up" not in path),
        o.masked(o.on_host(o.lion(1e-3)), lambda path, p: "up" not in path),
    ),
}
SCHEDULES: dict[str, Any] = {
    "zero1": s.zero1(),
    "zero2": s.zero2(),
    "zero3": s.zero3(remat=s.remat.all),
    "updates inside": s.zero3(update=True),
}


def on_host(state: Any) -> list[Tensor]:
    """The leaves of the optimizer's state that are on the host."""
    found = optree.tree_leaves(state.opt_state, is_leaf=lambda node: isinstance(node, ya.Sharded))
    handles = [node for node in found if isinstance(node, ya.Sharded)]
    return [leaf for handle in handles for _, group, leaf in handle.group_leaves() if group.on_host]


def same(mesh: Any, where: str, kind: str, optimizer: str, schedule: str, parts: int) -> None:
    """Three steps, each to the same bits."""
    mesh, (here, there) = made(where), OPTIMIZERS[optimizer]
    abstract = tree(Wire(), kind)
    states = [ya.init(abstract, tx, mesh=mesh, precision=MIXED) for tx in (here, there)]
    steps = [ya.train_step(loss, tx, schedule=SCHEDULES[schedule], microbatches=parts) for tx in (here, there)]
    assert on_host(states[1])
    assert not on_host(states[0])
    for number in range(3):
        batch = batch_of(mesh.get_rank(), seed=number)
        after = [step(state, batch) for step, state in zip(steps, states, strict=True)]
        states = [state for state, _ in after]
        assert ya.checksum(states[0]) == ya.checksum(states[1]), number
        assert torch.equal(after[0][1]["grad_norm"], after[1][1]["grad_norm"])


@pytest.mark.sampled
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["plain", "marked", "tied"])
@pytest.mark.parametrize("where", WHERE)
def test_steps_have_the_bits_of_states_on_the_device(
    pools: Pools, where: str, kind: str, optimizer: str, schedule: str, parts: int
) -> None:
    world, mesh = where.split()
    pools[int(world)].run(same, mesh, kind, optimizer, schedule, parts)


@pytest.mark.parametrize("name", by_day(TXS, "warm-up and cosine", "clip, mean, rmsprop"))
def test_steps_are_those_of_the_plain_loop(pools: Pools, name: str) -> None:
    pools[2].run(trained, name, True)


# ---- with what else there is


def reproduced(_: Any) -> int:
    here, there = (two_steps_of_micro_shards(loss, tree(Wire()), tx) for tx in OPTIMIZERS["adamw"])
    assert here == there
    return here


def test_a_deterministic_mesh_has_the_same_bits_at_every_number_of_ranks(pools: Pools) -> None:
    alike(pools, (1, 2, 4), reproduced)


@on_ranks()
@pytest.mark.parametrize(("world", "kind"), [(2, "marked"), nightly(4, "tied")])
def test_across_stages(_: Any, kind: str) -> None:
    for order in (s.one_f_one_b, s.zero_bubble):
        found = []
        for tx in OPTIMIZERS["adamw"]:
            state, _, mine = on_two_stages(loss, tree(Wire(), kind), tx, ya.Precision())
            step = ya.train_step(loss, tx, schedule=order(s.zero3()), microbatches=3)
            for _ in range(2):
                state, _ = step(state, mine)
            found.append(ya.checksum(state))
        assert found[0] == found[1], order.__name__


@on_ranks(2, nightly(4))
def test_over_tensor(_: Any) -> None:
    """Adapters of leaves that are split over an axis inside blocks."""
    mesh = ya.mesh(device="cpu", tensor=2)
    abstract = split_tree(8, 16)
    for params in (abstract, ya.lora(abstract, 4, lambda path, _: path.endswith("up"))):
        found = []
        for tx in OPTIMIZERS["adamw"]:
            state = ya.init(params, tx, mesh=mesh)
            step = ya.train_step(split_loss, tx)
            for number in range(2):
                state, _ = step(state, ya.shard_batch(batch_of(0, rows=4, seed=number), mesh))
            found.append(ya.checksum(state))
        assert found[0] == found[1]


@on_ranks(1, 2)
def test_other_ways_to_take_a_step(mesh: Any) -> None:
    """Gradients by `value_and_grad`, a step that is left out, copies, and a loss that fails: the bits of the device."""
    found = []
    for tx in OPTIMIZERS["adamw"]:
        state = ya.init(tree(Wire()), tx, mesh=mesh)
        batch = batch_of(mesh.get_rank())
        step = ya.train_step(loss, tx, schedule=SCHEDULES["updates inside"])
        sums = []
        _, grads = ya.value_and_grad(loss)(state.params, batch)
        state = state.apply_gradients(grads, tx)
        for _ in range(2):
            state, _ = step(state, batch)
            sums.append(ya.checksum(state))
        broken = state.copy()
        broken.params["head"].leaves[0].fill_(float("inf"))
        left_out, _ = step(broken, batch)
        sums.append(sum(float(leaf.double().sum()) for leaf in optree.tree_leaves(left_out.opt_state)))
        with pytest.raises(ZeroDivisionError):
            ya.train_step(lambda params, batch: 1 / 0, tx)(state, batch)
        for leaf in optree.tree_leaves(state.opt_state):
            leaf.mul_(2)  # by hand, between steps: none of it is on the device
        kept, _ = ya.train_step(loss, tx, donate=False)(state, batch)
        found.append([*sums, ya.checksum(state), ya.checksum(kept)])
    assert found[0] == found[1]


# ---- states: saved, carried over


@on_ranks(1, 2, nightly(3))
def test_checkpoints_of_both_kinds_are_one(mesh: Any, tmp_path: Path) -> None:
    """Checkpoints of both kinds are read by both, and `ya.shard` takes a state there and back."""
    batch = batch_of(mesh.get_rank())
    step = {tx: ya.train_step(loss, tx) for tx in OPTIMIZERS["adamw"]}
    for number, (tx, other) in enumerate((OPTIMIZERS["adamw"], OPTIMIZERS["adamw"][::-1])):
        state, _ = step[tx](ya.init(tree(Wire()), tx, mesh=mesh), batch)
        ya.checkpoint.save(tmp_path / str(number), state)
        sums = {ya.checksum(state)}
        loaded, _ = ya.checkpoint.load(tmp_path / str(number), ya.init(tree(Wire()), other, mesh=mesh, seed=1))
        assert bool(on_host(loaded)) != bool(on_host(state))
        moved = ya.shard(state, other)
        assert bool(on_host(moved)) == bool(on_host(loaded))
        back = ya.shard(moved, tx)
        sums |= {ya.checksum(each) for each in (loaded, moved, back)}
        assert len(sums) == 1
        after = [step[tx](state, batch)[0], *(step[other](each, batch)[0] for each in (loaded, moved))]
        assert len({ya.checksum(each) for each in after}) == 1


def test_what_needs_all_units_is_refused() -> None:
    foreign = o.chain(o.adam(1e-3), (lambda params: (), lambda updates, state, params=None: (updates, state)))
    late = o.chain(o.on_host(o.adam(1e-3)), o.clip_by_global_norm(1.0))
    for tx, why in (
        (o.on_host(foreign), "does not declare `elementwise`"),
        (late, "clip_by_global_norm is not the first"),
    ):
        state = ya.init(tree(Wire()), tx, mesh=small.one_rank())
        with pytest.raises(TypeError, match=rf"{why}.*states that are on the host are fetched unit by unit"):
            ya.train_step(loss, tx)(state, batch_of(0))


def test_on_a_plain_tree_nothing_moves() -> None:
    params = {"w": torch.ones(3)}
    tx = o.on_host(ADAMW)
    updates, state = tx.update(params, tx.init(params), params)
    expected, _ = ADAMW.update(params, ADAMW.init(params), params)
    assert torch.equal(updates["w"], expected["w"])
    assert int(state[1][0].count) == 1


def test_a_promise_is_still_tried() -> None:
    def centred(updates: Any, state: Any, params: Any = None) -> Any:
        return optree.tree_map(lambda leaf: leaf - leaf.mean(), updates), state

    tx = o.on_host(o.assume_elementwise((lambda params: params, centred)))
    state = ya.init(tree(Wire()), tx, mesh=small.one_rank())
    with pytest.raises(TypeError, match="marked by assume_elementwise, but it does not treat every element"):
        ya.train_step(loss, tx)(state, batch_of(0))


# ---- plans


@on_ranks()
@pytest.mark.parametrize(("world", "kind"), [(1, "plain"), (2, "marked"), nightly(3, "tied")])
def test_bytes_are_held_and_planned(mesh: Any, kind: str) -> None:
    here, there = OPTIMIZERS["adamw"]
    found = {}
    for tx in (here, there):
        state = ya.init(tree(Wire(), kind), tx, mesh=mesh)
        program = planned_program(loss, tree(Wire(), kind), state, tx)
        found[tx] = program, ya.planner.predict_memory(program, device="cpu"), state
    (program, of_device, _), (hosted, of_host, state) = found[here], found[there]
    leaves = on_host(state)
    largest = max(leaf[0].nbytes if leaf.ndim == 2 else leaf.nbytes for leaf in leaves)
    assert of_host.host == sum(leaf.nbytes for leaf in leaves)
    assert of_device.optimizer - of_host.optimizer == of_host.host - 2 * (2 * largest)  # two moments of two units
    # the link's seconds, in a program that updates and in one that is followed by updates
    for bandwidth, least in ((1e15, 0.0), (1e3, 2 * of_host.host / 1e3)):
        slow = ya.planner.CLUSTERS["a100-80g"].replace(host_bandwidth=bandwidth)
        update = ya.schedules.Update(program.trace.trained)
        times = [Costs(each.trace, slow).seconds(update) for each in (program, hosted)]
        assert max(times[0], least) == pytest.approx(times[1])
