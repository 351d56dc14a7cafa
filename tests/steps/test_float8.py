"""Weights in float8 on ranks, against the plain loop whose products are in float8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import yafsdp_fn as ya
from tests.harness.formats import (
    EXACT,
    TX,
    Plain,
    across_stages,
    alike,
    block,
    crossed,
    crossing,
    derivatives,
    embed,
    gradients_and_steps,
    head,
    loss,
    loss_of,
    planned_program,
    sent,
    split_tree,
    tree,
    two_steps_are_plain,
    two_steps_of_micro_shards,
)
from tests.harness.oracle import batch_of, compare
from tests.harness.pool import Pools, on_ranks
from yafsdp_fn.communication.formats import Scaled, Wire

TOLERANCE = 1e-12
WIRES = {"float8": Wire(), "float8, reduced in int8": Wire(reduce=Scaled(torch.int8, 8))}


def light(kind: str = "plain", wires: str = "float8") -> Any:
    """Matrices of layers but the router's, and the head's, in float8. A frozen one, too; a table of two uses is not."""

    def chosen(path: str, param: Any) -> bool:
        return path.endswith((".up", ".down", ".out")) and "router" not in path

    return ya.formats.float8(tree(WIRES[wires], kind), chosen)


def on_a_rank(mesh: Any, name: str, kind: str, formats: str, parts: int) -> None:
    gradients_and_steps(mesh, name, Plain(light(kind, formats)), parts, TOLERANCE)


@crossing(WIRES)
def test_gradients_and_steps_are_those_of_the_plain_loop(
    pools: Pools, where: str, kind: str, formats: str, parts: int, how: str
) -> None:
    crossed(pools, on_a_rank, where, kind, formats, parts, how)


@on_ranks(1, 2)
def test_outside_of_steps(mesh: Any) -> None:
    """The pure path and evaluation. A tangent of x is not rounded, as autograd rounds gradients of y."""
    state = ya.init(light(), TX, mesh=mesh, precision=EXACT)
    value, _ = derivatives(mesh, Plain(light()), state, 2e-2)
    compare(ya.eval_step(loss)(state, batch_of(mesh.get_rank()))["loss"], value, 1e-6, "evaluation")


def reproduced(_: Any) -> int:
    return two_steps_of_micro_shards(loss, light(), TX)


def test_a_deterministic_mesh_has_the_same_bits_at_every_number_of_ranks(pools: Pools) -> None:
    alike(pools, (1, 2, 4), reproduced)


@on_ranks(2)
def test_across_stages(_: Any) -> None:
    across_stages(Plain(light("marked")), ya.schedules.zero3(), TOLERANCE)


@on_ranks(2)
def test_over_tensor_they_are_refused(_: Any) -> None:
    mesh = ya.mesh(device="cpu", tensor=2)
    params = ya.formats.float8(split_tree(8, 8))
    with pytest.raises(ValueError, match=r"layers\S*down is split over tensor, and float8 takes whole rows"):
        ya.init(params, TX, mesh=mesh)


@on_ranks(1, 3)
def test_whole_leaves_go_to_their_owners(mesh: Any) -> None:
    two_steps_are_plain(mesh, Plain(light()), ya.optim.muon(0.02, dtype=torch.float64))


@on_ranks(1, 2)
def test_states_are_those_of_whole_weights(mesh: Any, tmp_path: Path) -> None:
    """Their names, values, checkpoints and what is read from them."""
    trees = {"whole": tree(Wire()), "float8": light()}
    states = {name: ya.init(params, TX, mesh=mesh) for name, params in trees.items()}
    before = {name: dict(ya.named_weights(state.params)) for name, state in states.items()}
    compare(before["float8"], before["whole"], 0, "drawn")
    step = ya.train_step(loss, TX)
    state, _ = step(states["float8"], batch_of(mesh.get_rank()))
    ya.checkpoint.save(tmp_path / "saved", state)
    for name, params in trees.items():
        loaded, _ = ya.checkpoint.load(tmp_path / "saved", ya.init(params, TX, mesh=mesh, seed=1))
        compare(dict(ya.named_weights(loaded.params)), dict(ya.named_weights(state.params)), 0, f"into {name}")
    with torch.no_grad():  # past what a number of 8 bits reaches: the step is skipped
        for leaf in state.params["layers"].leaves:
            leaf.fill_(7.5)
    _, metrics = step(state, batch_of(mesh.get_rank()))
    assert metrics["skipped"] == 1


@on_ranks(1, 2)
def test_what_travels_and_lies_in_slots_is_what_the_program_says(mesh: Any) -> None:
    precision = ya.Precision(compute=torch.bfloat16)
    state = ya.init(light("marked"), TX, mesh=mesh, precision=precision)
    for counted, said in sent(loss, state.copy(), batch_of(mesh.get_rank()))[:2]:
        assert counted == said
        assert (said > 0) == (mesh.size() > 1)
    program = planned_program(loss, light("marked"), state, TX)
    for unit in program.trace.units:
        assert unit.gather_bytes == unit.gather_wire
        assert ("float8" in unit.name) == (unit.gathered_as is not None)
    whole = ya.init(tree(Wire(), "marked"), TX, mesh=mesh, precision=precision)
    slots = [each.slot_bytes() for each in (program, ya.train_step(loss, TX).lower(whole, batch_of(0)))]
    assert sum(slots[0].values()) < 0.8 * sum(slots[1].values())


@on_ranks(2)
def test_blocks_that_take_their_weights_apart(mesh: Any) -> None:
    """As chunks do, and who maps over the tree: they get values, and gradients come back."""

    def mapped(x: Tensor, w: Any) -> Any:
        return block(x, optree.tree_map(torch.clone, w))

    params = light()
    mine = batch_of(mesh.get_rank(), rows=2)
    state = ya.init(params, TX, mesh=mesh, precision=EXACT)
    value, grads = ya.value_and_grad(loss)(state.params, mine)
    for way in (mapped, ya.chunk(block, 2, in_axes=(0, None))):
        found = ya.value_and_grad(loss_of(embed, way, head))(state.params, mine)
        compare(found[0], value, 1e-6, "value")
        compare(ya.unshard(found[1]), ya.unshard(grads), TOLERANCE, "gradients")


@on_ranks(1, 2)
def test_modules(mesh: Any) -> None:
    """The products of unmodified modules; what was trained goes back into the module."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]))
    params, model = ya.functionalize(module, layers="0")

    def squared(params: Any, x: Tensor) -> Tensor:
        return model(params, x).square().mean()

    state = ya.shard(ya.formats.float8(params), TX, mesh=mesh)
    x = torch.randn(4, 8)
    whole = ya.unshard(state.params)
    value, _ = ya.value_and_grad(squared)(state.params, x)
    compare(value, squared(whole, x), 1e-6, "value")
    assert abs(float(value) / float(module(x).square().mean()) - 1) > 1e-6, "products are not in float8"
    state, _ = ya.train_step(squared, TX)(state, x)
    ya.load_into(module, state.params, model=model)
    compare(module[0][1][0].weight.detach(), ya.unshard(state.params)["0"]["0.weight"].weight[1], 0, "loaded")
