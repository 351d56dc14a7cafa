"""States on meshes with stages: each rank holds shards of its stage's units, and all else is as on a plain tree."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist

import yafsdp_fn as ya
from tests.harness.oracle import batch_of
from tests.harness.pool import Pool
from tests.harness.problems import base_loss, base_params, frozen_params, pinned, pinned_params
from yafsdp_fn.comm.communicators import communicators
from yafsdp_fn.params.sharded import trainable
from yafsdp_fn.schedules.split import Assignment

F64 = ya.Precision(param=torch.float64, compute=torch.float64, reduce=torch.float64)
MODELS = {
    "pinned": lambda: pinned_params(5),
    "frozen": lambda: frozen_params(5),
    "lora": lambda: ya.lora(base_params(5), 2, alpha=3.0),
}
MESHES = ((2, {"stage": 2}), (4, {"stage": 2}), (4, {"stage": 4}), (4, {"stage": 2, "replicate": 2}))


@functools.cache
def mesh_of(**axes: int) -> Any:
    return ya.mesh(device="cpu", **axes)


def scattered(units: int, stages: int) -> Assignment:
    """Units here and there, two segments on each stage; one that no visit uses."""
    order = tuple(range(stages))
    return Assignment((*((unit * unit % (2 * stages),) for unit in range(units - 1)), ()), order + order)


def units_of(params: Any) -> int:
    return len(ya.init(params, mesh=mesh_of()).memory.units)


def on_stages(params: Any, tx: Any = None, stages: Any = None, **axes: int) -> ya.ShardedState:
    mesh = mesh_of(**axes)
    count = communicators(mesh).stages
    given = scattered(units_of(params), count) if stages is None and count > 1 else stages
    return ya.init(params, tx, mesh=mesh, precision=F64, seed=3, stages=given)


def plain(params: Any) -> Any:
    return optree.tree_map(lambda leaf: leaf.double(), ya.materialize(params, seed=3))


# ---- the mesh


def who(mesh: Any, axes: dict[str, int]) -> Any:
    made = mesh_of(**axes)
    comms = communicators(made)
    assert comms.world == 4 == comms.stages * comms.batch_ranks
    assert comms.world_rank == comms.stage * comms.batch_ranks + comms.batch_rank == mesh.get_rank()
    assert ("send" in comms.streams) == ("receive" in comms.streams) == (comms.stages > 1)
    every = comms.all_reduce_sum(torch.tensor([2.0 ** mesh.get_rank()]))
    shards = comms.all_gather(torch.tensor([mesh.get_rank()]))
    batch = ya.shard_batch(torch.arange(4), made)
    return made.mesh_dim_names, (comms.stage, comms.replica, comms.rank), every.item(), shards.tolist(), batch.tolist()


def test_stages_are_the_outermost_axis(pools: dict[int, Pool]) -> None:
    names = ("stage", "shard")
    two = pools[4].run(who, {"stage": 2})
    assert two == [
        (names, (r // 2, 0, r % 2), 15.0, [r // 2 * 2, r // 2 * 2 + 1], [r % 2 * 2, r % 2 * 2 + 1]) for r in range(4)
    ]
    copies = pools[4].run(who, {"stage": 2, "replicate": 2})
    assert [at for _, at, *_ in copies] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert [names for names, *_ in pools[4].run(who, {"stage": 1})] == [("shard",)] * 4
    nodes = pools[4].run(who, {"stage": 2, "local": 1})
    assert nodes[3][:2] == (("stage", "node", "local"), (1, 0, 1))


def messages(_: Any) -> None:
    """Each stage sends to all others at once, large and small, and receives the other way round."""
    comms = communicators(mesh_of(stage=4))
    comms._meet()  # as with NCCL: no two wait for each other
    others = [(comms.stage + by) % 4 for by in (1, 2, 3)]
    sizes, received, events = (1, 300_000, 7), {}, []
    before = comms.event()
    before.complete()
    for to in others:
        for number, size in enumerate(sizes):
            content = torch.full((size,), float(100 * comms.stage + 10 * to + number))
            events.append(comms.event())
            comms.streams["send"].submit(comms.send(content, to), [before], events[-1], "send")
    for source in reversed(others):
        for number, size in enumerate(sizes):
            received[source, number] = torch.empty(size)
            events.append(comms.event())
            work = comms.receive(received[source, number], source)
            comms.streams["receive"].submit(work, [before], events[-1], "receive")
    for event in events:
        event.wait()
    for (source, number), content in received.items():
        assert content.eq(100 * source + 10 * comms.stage + number).all()


def test_messages_between_stages_wait_for_none_of_the_other_direction(pools: dict[int, Pool]) -> None:
    pools[4].run(messages)


def test_what_is_no_mesh_of_stages_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mesh\(stage=3, shard=-1\): there are 1 ranks, not a multiple of 3"):
        ya.mesh(device="cpu", stage=3)
    with pytest.raises(ValueError, match=r"mesh\(stage=0, shard=-1\): expected the number of stages"):
        ya.mesh(device="cpu", stage=0)
    with pytest.raises(ValueError, match=r"stage=-2"):
        ya.mesh(device="cpu", stage=-2, shard=1)


# ---- states


def holds_its_own(_: Any, model: str, axes: dict[str, int]) -> None:
    params = MODELS[model]()
    state = on_stages(params, **axes)
    memory, comms = state.memory, state.memory.comms
    assert memory.held == memory.assignment.held(comms.stage) == set(memory.master.rows)
    own = [unit for unit in memory.units if unit.numel]
    assert {unit.id for unit in own} == memory.held and set(memory.trained) <= memory.held
    whole = memory.abstract()
    assert whole.comms.stages == 1 and all(unit.numel for unit in whole.units) and len(whole.units) == len(memory.units)
    assert memory.key != whole.key and memory.key.endswith(f"{comms.stage})")
    got = ya.unshard(state)
    for mine, expected in zip(optree.tree_leaves(got), optree.tree_leaves(ya.strip(plain(params))), strict=True):
        assert torch.equal(mine.double(), expected)
    n = {unit: memory.layout_of(unit).shard_numel(comms.ranks) for unit in memory.held}
    assert sum(leaf.numel() for leaf in optree.tree_leaves(state.params)) == sum(n.values()), "no memory for others"


@pytest.mark.parametrize(("world", "axes"), MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_a_rank_holds_shards_of_its_own_units(
    pools: dict[int, Pool], model: str, world: int, axes: dict[str, int]
) -> None:
    pools[world].run(holds_its_own, model, axes)


# ---- numbers, trees, optimizers


def grads_of(state: ya.ShardedState, seed: int) -> Any:
    """The same logical gradients on every mesh."""
    return ya.normal_like(seed, state.params)


def pair(params: Any, tx: Any, axes: dict[str, int], **options: Any) -> tuple[ya.ShardedState, ya.ShardedState]:
    """A state on stages, and one of the same ranks without."""
    return on_stages(params, tx, **axes, **options), on_stages(params, tx, shard=-1)


def bits(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in optree.tree_leaves(ya.unshard(tree)) if isinstance(leaf, torch.Tensor)]


def same(got: Any, expected: Any, tolerance: float = 0.0, what: str = "") -> None:
    for mine, other in zip(bits(got), bits(expected), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def numbers(_: Any, model: str, axes: dict[str, int]) -> None:
    params = MODELS[model]()
    state, other = pair(params, None, axes)
    leaves = optree.tree_leaves(ya.strip(plain(params)))
    square = sum(leaf.square().sum() for leaf in leaves)
    torch.testing.assert_close(ya.global_norm(state.params), square.sqrt(), rtol=1e-14, atol=0.0)
    noise = grads_of(state, 5)
    same(noise, grads_of(other, 5))
    inner = sum((a * b).sum() for a, b in zip(leaves, bits(noise), strict=True))
    torch.testing.assert_close(ya.vdot(state.params, noise), inner, rtol=1e-12, atol=1e-12)
    mixed = optree.tree_map(lambda p, z: p.sin() * z, state.params, noise)
    same(mixed, optree.tree_map(lambda p, z: p.sin() * z, other.params, grads_of(other, 5)))
    assert ya.checksum(state) == ya.checksum(other)
    assert ya.checksum(state.copy()) == ya.checksum(state)


@pytest.mark.parametrize(("world", "axes"), MESHES)
def test_norms_and_trees_are_those_of_the_plain_tree(pools: dict[int, Pool], world: int, axes: dict[str, int]) -> None:
    for model in MODELS:
        pools[world].run(numbers, model, axes)


def negated_lion() -> Any:
    """A pair of functions that declares nothing: it is given whole trees."""
    lion = ya.optim.lion(1e-2)
    return lion.init, lion.update


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: ya.optim.adamw(1e-2),
    "clipped": lambda: ya.optim.chain(ya.optim.clip_by_global_norm(0.5), ya.optim.adamw(1e-2)),
    "muon": lambda: ya.optim.muon(1e-2),
    "adafactor": lambda: ya.optim.adafactor(1e-2),
    "soap": lambda: ya.optim.soap(1e-2),
    "noise": lambda: ya.optim.chain(ya.optim.add_noise(0.1, 0.5, 3), ya.optim.sgd(1e-2, momentum=0.9)),
    "schedule-free": lambda: ya.optim.schedule_free_adamw(1e-2),
    "whole trees": negated_lion,
}


def optimizers(_: Any, model: str, axes: dict[str, int], names: list[str]) -> None:
    for name in names:
        tx = OPTIMIZERS[name]()
        states = pair(MODELS[model](), tx, axes)
        same(states[0].opt_state, states[1].opt_state)
        for step in range(2):
            states = tuple(state.apply_gradients(grads_of(state, step), tx) for state in states)  # type: ignore[assignment]
        same(states[0].params, states[1].params, 1e-13, name)
        same(states[0].opt_state, states[1].opt_state, 1e-13, name)


def test_optimizers_take_the_steps_of_one_stage(pools: dict[int, Pool]) -> None:
    pools[2].run(optimizers, "pinned", {"stage": 2}, list(OPTIMIZERS))
    pools[2].run(optimizers, "lora", {"stage": 2}, ["muon"])
    for axes in ({"stage": 2}, {"stage": 4}):
        pools[4].run(optimizers, "frozen", axes, ["clipped", "muon"])


def unit_by_unit(_: Any, model: str, axes: dict[str, int], name: str) -> None:
    """As programs take the step: backwards, in parts where leaves travel. The last stage has nothing to train."""
    tx, params = OPTIMIZERS[name](), MODELS[model]()
    trained = set(on_stages(params, shard=-1).memory.trained)
    stages = dict(axes)["stage"]
    last = (stages - 1,)
    homes = [(unit % (stages - 1) if unit in trained else last[0],) for unit in range(units_of(params))]
    state, other = pair(params, tx, axes, stages=Assignment(tuple(homes), tuple(range(stages))))
    assert bool(state.memory.trained) == (state.memory.comms.stage != last[0])
    for number in range(2):
        steps = ya.optim.UnitSteps(tx, trainable(state.params), trainable(grads_of(state, number)), state.opt_state)
        for unit in reversed(state.memory.trained):
            for part in range(steps.parts.get(unit, 1)):
                steps.run([unit], part=part if steps.parts else None)
                for received, sent in steps.messages([unit]) if unit in steps._open else ():
                    state.memory.comms.exchange(received, sent)
        assert steps.finish() is state.opt_state
        other = other.apply_gradients(grads_of(other, number), tx)
    same(state.params, other.params, 1e-13)
    same(state.opt_state, other.opt_state, 1e-13)


def test_units_take_their_steps_one_by_one(pools: dict[int, Pool]) -> None:
    for name in ("adamw", "muon", "soap"):
        pools[2].run(unit_by_unit, "frozen", {"stage": 2}, name)
    pools[4].run(unit_by_unit, "lora", {"stage": 2}, "muon")


# ---- whole weights


def whole_weights(_: Any, axes: dict[str, int], folder: Path) -> None:
    params = MODELS["pinned"]()
    state, other = pair(params, None, axes)
    adapted = [each.params for each in pair(MODELS["lora"](), None, axes)]
    for mine, theirs in zip(*map(ya.named_weights, adapted), strict=True):
        assert mine[0] == theirs[0] and torch.equal(mine[1], theirs[1]), "a matrix and its adapter are one"
    for dtype in (None, torch.bfloat16):
        named = (ya.named_weights(each.params, dtype=dtype) for each in (state, other))
        for (name, weight), (expected, theirs) in zip(*named, strict=True):
            assert name == expected and torch.equal(weight, theirs), name
    grads = grads_of(state, 1)
    called = []

    def like_the_layer(layer: Any, grad: Any) -> Any:
        called.append(len(called))
        return optree.tree_map(lambda w, g: w + g.sum(), layer, grad)

    mapped = ya.map_layers(like_the_layer, state.params.layers, grads.layers)
    assert called == list(range(5)), "every rank is given every layer"
    same(mapped, ya.map_layers(like_the_layer, other.params.layers, grads_of(other, 1).layers))
    one = ya.map_layers(lambda layer: layer["main"].up.norm(), state.params.layers)
    assert torch.equal(one, ya.map_layers(lambda layer: layer["main"].up.norm(), other.params.layers))

    def name(path: str, layer: int | None) -> str:
        return path if layer is None else f"{path}.{layer}"

    ya.checkpoint.save_named(folder, state.params, name)
    lazy = ya.checkpoint.load_named(folder, params, name)
    loads: list[str] = []

    def counted(leaf: Any) -> Any:
        def load(layer: int | None) -> torch.Tensor:
            loads.append("")
            return leaf.load(layer)

        return ya.Lazy(leaf.shape, leaf.dtype, load)

    given = {"mesh": state.mesh, "stages": state.memory.assignment, "precision": F64, "seed": 3}
    again = ya.shard(optree.tree_map(counted, lazy), **given)
    assert ya.checksum(again) == ya.checksum(state)
    own = [again.memory.of_unit[unit] for unit in again.memory.held]
    assert len(loads) <= sum(len(g.layout.names) * (g.layout.shapes[0][0] if g.pinned else 1) for g in own)


def test_whole_layers_come_from_their_stages(pools: dict[int, Pool], tmp_path: Path) -> None:
    for number, (world, axes) in enumerate(MESHES):
        pools[world].run(whole_weights, axes, tmp_path / str(number))


# ---- refusals


def refused(_: Any, axes: dict[str, int]) -> None:
    params, mesh = base_params(3), mesh_of(**axes)
    with pytest.raises(ValueError, match=r"the mesh has 2 stages: say .* stages=ya.assign\(trace, stages=2\)"):
        ya.init(params, mesh=mesh)
    with pytest.raises(ValueError, match="the assignment is of 4 units, these parameters have 5"):
        ya.init(params, mesh=mesh, stages=scattered(4, 2))
    with pytest.raises(ValueError, match="the assignment is of 4 units, these parameters have 5"):
        ya.init(params, mesh=mesh_of(shard=-1), stages=scattered(4, 2))
    with pytest.raises(ValueError, match=r"at home on stages \[0, 1, 2\], the mesh has stages 0 to 1; give ya.assign"):
        ya.init(params, mesh=mesh, stages=scattered(5, 3))
    with pytest.raises(ValueError, match="unit 4 is in segment 7, the assignment has 2 segments"):
        ya.init(params, mesh=mesh, stages=Assignment(((0,), (0,), (1,), (1,), (7,)), (0, 1)))
    with pytest.raises(TypeError, match=r"expected an Assignment, as ya.assign makes"):
        ya.init(params, mesh=mesh, stages=2)  # type: ignore[arg-type]
    with pytest.raises(ya.RanksDisagree, match="stages differs"):
        one, other = scattered(5, 2), Assignment(((0,), (0,), (1,), (1,), (1,)), (0, 1))
        ya.init(params, mesh=mesh, stages=one if dist.get_rank() == 0 else other)
    with pytest.raises(ValueError, match=r"mesh\(stage=2, deterministic=8\): .*leave stage out, or deterministic"):
        ya.mesh(device="cpu", stage=2, deterministic=8)
    state = on_stages(params, **axes)
    with pytest.raises(ValueError, match=r"at home on stages \[0, 1\], the mesh has stages 0 to 3"):
        ya.shard(state, mesh=mesh_of(stage=4))
    regrouped = params._replace(layers=ya.Stacked(pinned(params.layers.tree, "bias")))
    with pytest.raises(ValueError, match="the mesh has 2 stages: say which"):
        ya.shard(state, like=regrouped)
    batch = {"tokens": torch.zeros(1, 3, dtype=torch.int64), "targets": torch.zeros(1, 3, dtype=torch.int64)}
    with pytest.raises(
        RuntimeError, match=r"a derivative outside of a step: the weights of other stages are not here\."
    ):
        base_loss(state.params, batch)
    with pytest.raises(RuntimeError, match="a derivative outside of a step"):
        torch.func.grad(lambda head: base_loss(state.params._replace(head=head), batch).total)(state.params.head)
    with pytest.raises(RuntimeError, match="global_norm: on a mesh with stages it is not differentiable"):
        torch.func.grad(ya.global_norm)(state.params.layers)
    with pytest.raises(RuntimeError, match="vdot: on a mesh with stages it is not differentiable"):
        ya.vdot(optree.tree_map(lambda leaf: leaf.clone().requires_grad_(), state.params), state.params)


def test_what_cannot_be_right_is_refused_by_name(pools: dict[int, Pool]) -> None:
    pools[4].run(refused, {"stage": 2})


# ---- checkpoints, other meshes


def trained(mesh: Any, axes: dict[str, int], tx: Any) -> ya.ShardedState:
    state = on_stages(MODELS["pinned"](), tx, **axes)
    for step in range(2):
        state = state.apply_gradients(grads_of(state, step), tx)
    return state


def begun(mesh: Any, folder: Path, axes: dict[str, int], optimizer: str) -> int:
    state = trained(mesh, axes, OPTIMIZERS[optimizer]())
    ya.checkpoint.save(folder, state, {"at": 3})
    return ya.checksum(state)


def handed_on(mesh: Any, folder: Path, axes: dict[str, int], optimizer: str, background: bool) -> tuple[int, int]:
    tx = OPTIMIZERS[optimizer]()
    state, extra = ya.checkpoint.load(folder, on_stages(MODELS["pinned"](), tx, **axes))
    assert extra == {"at": 3} and state.step == 2
    found = ya.checksum(state)
    if background:
        with ya.checkpoint.Saver(folder) as saver:
            saver.save(state, extra)
            state = state.apply_gradients(grads_of(state, 2), tx)
        state, _ = ya.checkpoint.load(folder, state)
    else:
        ya.checkpoint.save(folder, state, extra)
    return found, ya.checksum(state)


def test_checkpoints_pass_from_any_number_of_stages_to_any_other(pools: dict[int, Pool], tmp_path: Path) -> None:
    optimizer = "muon"  # and AdamW, for the rest
    first = set(pools[4].run(begun, tmp_path, {"stage": 2}, optimizer))
    assert len(first) == 1
    ways: list[tuple[int, dict[str, int]]] = [(1, {}), (4, {"stage": 4}), (3, {}), (2, {"stage": 2})]
    ways += [(4, {"stage": 2, "replicate": 2}), (3, {"stage": 3}), (1, {})]
    for number, (world, axes) in enumerate(ways):
        found = pools[world].run(handed_on, tmp_path, axes, optimizer, number % 2 == 0)
        assert {value for pair in found for value in pair} == first, (world, axes)


def kept_by_peers(mesh: Any, folder: Path) -> None:
    tx, axes = OPTIMIZERS["adamw"](), {"stage": 2}
    state = trained(mesh, axes, tx)
    expected = ya.checksum(state)
    with ya.checkpoint.PeerMemory(folder) as memory:
        memory.save(state, {"at": 3})
        memory.wait()
        found = memory.load(on_stages(MODELS["pinned"](), tx, **axes))
        assert found is not None and ya.checksum(found[0]) == expected and found[1] == {"at": 3}
        assert memory.load(on_stages(MODELS["pinned"](), tx, shard=-1)) is None, "cut in another way"
        other = Assignment(((0,),) * (len(state.memory.units) - 1) + ((1,),), (0, 1))
        assert memory.load(on_stages(MODELS["pinned"](), tx, other, **axes)) is None, "other units"


def test_peers_keep_the_units_of_their_stage(pools: dict[int, Pool], tmp_path: Path) -> None:
    pools[4].run(kept_by_peers, tmp_path)


def resharded(mesh: Any, optimizer: str) -> None:
    tx = OPTIMIZERS[optimizer]()
    state = trained(mesh, {"stage": 2}, tx)
    expected = ya.checksum(state)
    units = len(state.memory.units)
    ways: list[dict[str, Any]] = [
        {"mesh": mesh_of(shard=-1)},
        {"mesh": mesh_of(stage=4), "stages": scattered(units, 4)},
        {"stages": Assignment(tuple((unit % 4,) for unit in range(units)), (3, 2, 1, 0))},
        {"mesh": mesh_of(stage=2), "stages": scattered(units, 2)},
        {},
    ]
    for options in ways:
        state = ya.shard(state, tx, **options)
        assert ya.checksum(state) == expected and state.step == 2, options
    tensors = ya.shard(ya.unshard(state), mesh=mesh_of(stage=1), precision=F64)
    same(tensors.params, state.params)


def test_a_state_goes_from_stages_to_others_and_back(pools: dict[int, Pool]) -> None:
    pools[4].run(resharded, "muon")


def goes_on(mesh: Any, folder: Path) -> None:
    tx, params, batch = ya.optim.adamw(1e-2), base_params(3), batch_of(0, rows=4)
    stages = ya.assign(ya.trace(base_loss, params, batch, microbatches=2), stages=2)
    state = on_stages(params, tx, stages, stage=2)
    step = ya.train_step(base_loss, tx, microbatches=2)
    state, _ = step(step(state, batch)[0], batch)
    ya.checkpoint.save(folder, state)
    again, _ = ya.checkpoint.load(folder, on_stages(params, tx, stages, stage=2))
    assert isinstance(state.program, ya.Pipeline) and again.program == state.program
    expected, _ = step(state, batch)
    got, _ = ya.train_step(base_loss, tx, schedule=again.program, microbatches=2)(again, batch)
    assert ya.checksum(got) == ya.checksum(expected)
    other = Assignment(((0,), *((1,) for _ in stages.units[1:])), (0, 1))
    assert other != stages
    for like in (on_stages(params, tx, other, stage=2), on_stages(params, tx, shard=-1)):
        assert ya.checkpoint.load(folder, like)[0].program is None, "it is of another cut"


def test_a_run_goes_on_with_its_pipeline(pools: dict[int, Pool], tmp_path: Path) -> None:
    pools[2].run(goes_on, tmp_path)


# ---- a unit on several stages


def shared(mesh: Any, folder: Path) -> None:
    """The unit at home on the first stage that holds it is counted, summed up and saved once."""
    tx, axes = OPTIMIZERS["clipped"](), {"stage": 2}
    units = units_of(MODELS["pinned"]())
    both = Assignment(tuple((0, 1) if unit in (0, 1, 4) else (unit % 2,) for unit in range(units)), (0, 1))
    state, other = pair(MODELS["pinned"](), tx, axes, stages=both)
    assert {0, 1, 4} <= state.memory.held
    for step in range(2):
        torch.testing.assert_close(ya.global_norm(state.params), ya.global_norm(other.params), rtol=1e-13, atol=0.0)
        state, other = (each.apply_gradients(grads_of(each, step), tx) for each in (state, other))
    same(state.params, other.params, 1e-13)
    ya.checkpoint.save(folder, state)
    again, _ = ya.checkpoint.load(folder, on_stages(MODELS["pinned"](), tx, both, **axes))
    assert ya.checksum(again) == ya.checksum(state) == ya.checksum(ya.shard(state, tx, mesh=mesh_of(shard=-1)))
    assert all(map(torch.equal, optree.tree_leaves(again.params), optree.tree_leaves(state.params)))
    own = again.memory.master.rows
    if again.memory.comms.stage == 1:
        own[4][0] += 1
    with pytest.raises(ya.Corrupted, match="rank 0 and rank 2 differ"):
        ya.checksum(again)
    if again.memory.comms.stage == 1:
        own[4][0] -= 1
    counted = sum(leaf.square().sum() for leaf in again.memory.master.counted)
    torch.testing.assert_close(
        again.memory.comms.all_reduce_sum(counted).sqrt(), ya.global_norm(state.params), rtol=1e-13, atol=0.0
    )


def test_a_unit_on_two_stages_counts_once(pools: dict[int, Pool], tmp_path: Path) -> None:
    pools[4].run(shared, tmp_path)


# ---- docs/stages.md


def page(mesh: Any, blocks: list[str]) -> None:
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    state = names["state"]
    assert state.memory.comms.stages == mesh.size() == 2 and state.memory.held != names["alone"].memory.held
    torch.testing.assert_close(names["norm"], ya.global_norm(names["alone"].params))
    plan = ya.trace(names["loss"], names["params"], names["batch"], mesh=state.memory.mesh_axes)
    assert plan.stages == 2 and plan.units == state.memory.abstract().units


def test_the_page(pools: dict[int, Pool]) -> None:
    text = (Path(__file__).parent.parent / "docs" / "stages.md").read_text()
    pools[2].run(page, re.findall(r"```python\n(.*?)```", text, re.S))
