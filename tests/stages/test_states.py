"""States on meshes with stages: each rank holds shards of its stage's units, whole weights come from all stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist

import yafsdp_fn as ya
from tests.harness.oracle import compare
from tests.harness.pages import blocks, doc
from tests.harness.pool import on_ranks
from tests.harness.problems import base_loss, base_params, pinned
from tests.stages.states import F64, MESHES, MODELS, grads_of, mesh_of, on_stages, pair, plain, same, scattered
from tests.steps.staged.models import TWO_STAGES
from yafsdp_fn.program.split import Assignment


@on_ranks()
@pytest.mark.sampled
@pytest.mark.parametrize(("world", "axes"), MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_a_rank_holds_shards_of_its_own_units(_: Any, model: str, axes: dict[str, int]) -> None:
    params = MODELS[model]()
    state = on_stages(params, **axes)
    memory = state.memory
    comms = state.memory.comms
    assert memory.held == memory.assignment.held(comms.stage) == set(memory.master.rows)
    own = [unit for unit in memory.units if unit.numel]
    assert {unit.id for unit in own} == memory.held
    assert set(memory.trained) <= memory.held
    whole = memory.abstract()
    assert whole.comms.stages == 1
    assert all(unit.numel for unit in whole.units)
    assert len(whole.units) == len(memory.units)
    assert memory.key != whole.key
    assert memory.key.endswith(f"{comms.stage})")
    compare(optree.tree_map(torch.Tensor.double, ya.unshard(state)), plain(params), 0.0, "values")
    n = {unit: memory.layout_of(unit).shard_numel(comms.ranks) for unit in memory.held}
    assert sum(leaf.numel() for leaf in optree.tree_leaves(state.params)) == sum(n.values()), "no memory for others"


# ---- whole weights


@on_ranks()
@pytest.mark.parametrize(("world", "axes"), [MESHES[0], MESHES[3]], ids=str)
def test_whole_layers_come_from_their_stages(_: Any, axes: dict[str, int], tmp_path: Path) -> None:
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

    mapped = ya.map_whole_layers(like_the_layer, state.params.layers, grads.layers)
    assert called == list(range(5)), "every rank is given every layer"
    same(mapped, ya.map_whole_layers(like_the_layer, other.params.layers, grads_of(other, 1).layers))
    one = ya.map_whole_layers(lambda layer: layer["main"].up.norm(), state.params.layers)
    assert torch.equal(one, ya.map_whole_layers(lambda layer: layer["main"].up.norm(), other.params.layers))

    def name(path: str, layer: int | None) -> str:
        return path if layer is None else f"{path}.{layer}"

    ya.checkpoint.save_named(tmp_path / "named", state.params, name)
    lazy = ya.checkpoint.load_named(tmp_path / "named", params, name)
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


# ---- refusals


@on_ranks(4)
def test_what_cannot_be_right_is_refused_by_name(_: Any) -> None:
    params = base_params(3)
    mesh = mesh_of(stage=2)
    beyond = Assignment(((0,), (0,), (1,), (1,), (7,)), (0, 1))
    assignments: list[tuple[type[Exception], str, Any]] = [
        (ValueError, r"the mesh has 2 stages: say .* stages=ya.schedules.assign\(trace, stages=2\)", None),
        (ValueError, "the assignment is of 4 units, these parameters have 5", scattered(4, 2)),
        (ValueError, r"at home on stages \[0, 1, 2\], the mesh has stages 0 to 1; give ya.sche", scattered(5, 3)),
        (ValueError, "unit 4 is in segment 7, the assignment has 2 segments", beyond),
        (TypeError, "expected an Assignment, as ya.schedules.assign makes", 2),
    ]
    for error, text, stages in assignments:
        with pytest.raises(error, match=text):
            ya.init(params, mesh=mesh, stages=stages)
    with pytest.raises(ValueError, match="the assignment is of 4 units, these parameters have 5"):
        ya.init(params, mesh=mesh_of(shard=-1), stages=scattered(4, 2))
    with pytest.raises(ya.errors.RanksDisagree, match="stages differs"):
        one = scattered(5, 2)
        other = TWO_STAGES
        ya.init(params, mesh=mesh, stages=one if dist.get_rank() == 0 else other)
    with pytest.raises(ValueError, match=r"mesh\(stage=2, deterministic=8\): .*leave stage out, or deterministic"):
        ya.mesh(device="cpu", stage=2, deterministic=8)
    state = on_stages(params, stage=2)
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


# ---- docs/stages.md


@on_ranks(2)
def test_the_page(mesh: Any) -> None:
    text = doc("stages")
    names: dict[str, Any] = {}
    for block in blocks(text):
        exec(block, names)
    state = names["state"]
    assert state.memory.comms.stages == mesh.size() == 2
    assert state.memory.held != names["alone"].memory.held
    torch.testing.assert_close(names["norm"], ya.global_norm(names["alone"].params))
    plan = ya.planner.trace(names["loss"], names["params"], names["batch"], mesh=state.memory.mesh_axes)
    assert plan.stages == 2
    assert plan.units == state.memory.abstract().units
