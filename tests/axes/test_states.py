"""States on axes inside blocks: whole values go in and come out, and checkpoints fit any other axes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.axes.model import Options, batch_of, loss_of, mesh_of, params
from tests.axes.test_exact import FLOAT64, close, optimizer, stages_of
from tests.harness.collector import no_collection, sessions
from tests.harness.marks import by_day
from tests.harness.oracle import compare
from tests.harness.pool import on_ranks
from yafsdp_fn.checkpoint import CheckpointError, Saver, load, save
from yafsdp_fn.program.json import from_json, to_json
from yafsdp_fn.schedules import Gather

OF = Options(frozen=True)
MESHES: dict[str, dict[str, int]] = {
    "shard": {},
    "shard, tensor": {"shard": 2, "tensor": 2},
    "expert, context": {"expert": 2, "context": 2},
    "expert, tensor": {"expert": 2, "tensor": 2},
    "stage, tensor": {"stage": 2, "tensor": 2},
    "stage, expert": {"stage": 2, "expert": 2},
}
WITHOUT = ya.params.without_markers


def made(**axes: int) -> Any:
    return ya.init(params(OF), optimizer(), mesh=mesh_of(**axes), precision=FLOAT64, stages=stages_of(OF, axes))


def equal(got: Any, want: Any) -> None:
    compare(got, want, 0.0, "bits")


@on_ranks(4)
@pytest.mark.parametrize("name", by_day(MESHES, "shard, tensor", "expert, context", "stage, tensor"))
def test_whole_values_go_in_and_come_out(_: Any, name: str) -> None:
    axes = MESHES[name]
    state = made(**axes)
    marked = ya.PlainState.create(params(OF), optimizer()).params
    want = WITHOUT(marked)
    stages = stages_of(OF, axes)
    equal(state, want)
    for name, weight in ya.named_weights(state.params):
        top, *rest = name.split(".")
        leaf = want[top][rest[-1]]
        assert torch.equal(weight, leaf[int(rest[0])] if top == "layers" else leaf), name
    equal(ya.shard(want, like=params(OF), mesh=state.mesh, precision=FLOAT64, stages=stages), want)
    lazy = optree.tree_map(lambda x: ya.Lazy(x.shape, x.dtype, lambda i: x if i is None else x[i]), want)
    equal(ya.shard(lazy, like=params(OF), mesh=state.mesh, precision=FLOAT64, stages=stages), want)
    # maps over whole layers
    seen: list[Any] = []

    def double(layer: Any) -> Any:
        seen.append(optree.tree_map(torch.clone, layer))
        assert ya.axis_size("tensor") == 1
        return optree.tree_map(lambda x: 2 * x, layer)

    doubled = ya.map_whole_layers(double, state.params["layers"])
    equal(optree.tree_map(lambda *xs: torch.stack(xs), *seen), want["layers"])
    equal(doubled, optree.tree_map(lambda x: 2 * x, want["layers"]))
    # numbers over trees
    other = ya.normal_like(3, state.params)
    plain_other = WITHOUT(ya.normal_like(3, marked))
    equal(other, plain_other)
    close(ya.global_norm(state.params), ya.global_norm(want), "norm")
    close(ya.vdot(state.params, other), ya.vdot(want, plain_other), "product")
    wide = ya.params.leaf_mask(lambda path, param: max(param.shape) == 32, state.params)  # FF, whole
    count = ya.vdot(optree.tree_map(lambda mask, x: (mask.expand_as(x) & (x != 0)).double(), wide, state.params), other)
    chosen = optree.tree_map(lambda x: (x != 0).double() * (max(x.shape[1:]) == 32), want["layers"])
    close(count, ya.vdot(chosen, plain_other["layers"]), "mask")
    # a loss outside of a step, and an evaluation
    batch = ya.shard_batch(batch_of(0), state.mesh, split={"context": 1})
    plain_loss, _ = ya.value_and_grad(loss_of(OF))(marked, batch_of(0))
    with torch.no_grad():
        close(ya.functional_loss(loss_of(OF))(state.params, batch), plain_loss, "loss")
    close(ya.eval_step(loss_of(OF))(state, batch)["loss"], plain_loss, "evaluation")


def trained(state: Any) -> Any:
    step = ya.train_step(loss_of(OF), optimizer())
    for number in range(2):
        state, _ = step(state, ya.shard_batch(batch_of(number), state.mesh, split={"context": 1}))
    return state


def whole(state: Any) -> Any:
    return ya.unshard(state), ya.unshard(state.opt_state)


@on_ranks(4)
def test_checkpoints_fit_any_axes(_: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    state = trained(made(shard=2, tensor=2))
    want = whole(state)
    sums = ya.checksum(state)
    for number, axes in enumerate([*MESHES.values(), MESHES["shard, tensor"]]):
        place = Path(folder) / str(number)
        save(place, state)
        saved, (state, _) = state, load(place, made(**axes))
        assert state.step == 2
        assert ya.checksum(state) == sums
        equal(whole(state), want)
        assert (state.program is None) == (axes != {"shard": 2, "tensor": 2} or saved.program is None)
    # written beside the steps
    for axes in ({"stage": 2, "tensor": 2}, {"shard": 2, "tensor": 2}):
        state, _ = load(place, made(**axes))
        with Saver(folder) as saver:
            saver.save(state)
        equal(whole(load(folder, made(**axes))[0]), want)
    # from state to state, the optimizer's included
    state = ya.shard(state, optimizer(), mesh=mesh_of(expert=2, tensor=2))
    equal(whole(state), want)
    equal(whole(ya.shard(state, optimizer(), mesh=mesh_of())), want)
    trained(state)  # goes on


@on_ranks(2)
def test_a_deterministic_run_on_other_axes_is_told(_: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    meshes = [ya.mesh(device="cpu", deterministic=4, **axes) for axes in ({"tensor": 2}, {})]
    for one, other, was in ((0, 1, "tensor=2"), (1, 0, "None")):
        save(f"{folder}/{one}", ya.init(params(), mesh=meshes[one]))
        with pytest.warns(UserWarning, match=f"was saved with .*'axes inside blocks': '?{was}'?.*: bits will not be"):
            load(f"{folder}/{one}", ya.init(params(), mesh=meshes[other]))


@on_ranks(2)
def test_a_damaged_description_is_told(_: Any, tmp_path: Path) -> None:
    mesh = mesh_of(tensor=2)
    tensor = ya.Param((4, 6), split={"tensor": -1})
    state = ya.init({"a": {"w": tensor}}, mesh=mesh)
    path = save(tmp_path, state) / "manifest.json"
    if mesh.get_rank() == 0:
        text = path.read_text()
        assert text.count('"tensor": -1') == 1
        path.write_text(text.replace('"tensor": -1', '"tensor": -3'))
        folder_sums = path.parent / "SHA256SUMS"
        old, new = (hashlib.sha256(each.encode()).hexdigest() for each in (text, path.read_text()))
        folder_sums.write_text(folder_sums.read_text().replace(old, new))
    torch.distributed.barrier()
    text = r"params.a: how it was split cannot be: split=\{'tensor': -3\} of shape \(4, 6\)"
    with pytest.raises(CheckpointError, match=text):
        load(tmp_path, ya.init({"a": {"w": ya.Param((4, 6))}}, mesh=mesh), step=0)


@on_ranks(4)
def test_programs_know_the_ranks_of_units(_: Any) -> None:
    state = made(shard=2, tensor=2)
    batch = ya.shard_batch(batch_of(0), state.mesh)
    step = ya.train_step(loss_of(OF), optimizer())
    lowered = step.lower(state, batch)  # on fake tensors, without any collective
    assert lowered.trace.mesh == (("shard", 2), ("tensor", 2))
    state, _ = step(state, batch)
    program = step.program(state)
    assert program.fingerprint() == lowered.fingerprint()
    trace = program.trace
    layers = {unit.name: unit for unit in trace.units if unit.layer == 0}
    split = layers["layers.split(tensor)[0]"]
    assert split.over == ("tensor",)
    assert trace.ranks_of(split) == 2
    assert layers["layers[0]"].over == ()
    assert trace.ranks_of(layers["layers[0]"]) == 4
    # half of each leaf in a vector over two ranks, all of it in one over four
    assert split.numel == (3 * 16 * 16 - 16 * 16) // 2 + 16 * 16 // 2
    gathers = [trace.units[unit] for op in program.ops if isinstance(op, Gather) for unit in op.units]
    gathered = sum(unit.gather_bytes // trace.ranks_of(unit) * (trace.ranks_of(unit) - 1) for unit in gathers)
    assert program.wire_bytes()["gather"] == gathered
    trace_again, stages = from_json(to_json(trace, program.stages))
    assert type(program)(trace_again, *stages).fingerprint() == program.fingerprint()
    with pytest.raises(ValueError, match="they cannot change: trace again"):
        trace.on((("shard", 4),))
    wider = trace.on((("shard", 4), ("tensor", 2)))
    assert wider.ranks_of(wider.units[split.id]) == 4


@on_ranks(2)
def test_a_step_lets_go_of_its_session(_: Any) -> None:
    """Slots of a first step, by hand: no garbage collector is there to find them."""
    state = made(tensor=2)
    step = ya.train_step(loss_of(OF), optimizer())
    batch = ya.shard_batch(batch_of(0), state.mesh)
    with no_collection():
        before = sessions()  # of other tests in this process
        state, _ = step(state, batch)
        assert sessions() == before
