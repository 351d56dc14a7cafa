"""A checkpoint loads into a state whose leaves are in other units: split over axes or not, or marked otherwise."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import optree
import pytest

import yafsdp_fn as ya
from models import llama
from models.parts.axes import NONE
from tests.axes.model import Options, batch_of, loss_of, mesh_of, params
from tests.axes.test_exact import FLOAT64, optimizer
from tests.axes.test_llama import SIZE, TENSOR, S
from tests.axes.test_states import equal, whole
from tests.harness.pool import on_ranks
from yafsdp_fn.checkpoint import CheckpointError, load, load_params, save

OF = Options(frozen=True)


def not_split() -> Any:
    return optree.tree_map(lambda leaf: dataclasses.replace(leaf, split=()), params(OF))


def grouped() -> Any:
    """Other units, in another order; what is pinned is not, and what is not is."""
    tree = not_split()
    layer = tree["layers"].tree
    layer = {**layer, "up": ya.Unit(layer["up"]), "pinned": layer["pinned"].tree, "route": ya.Pinned(layer["route"])}
    return {**tree, "layers": ya.Stacked(layer)}


TREES: dict[str, Any] = {"split": lambda: params(OF), "not split": not_split, "grouped": grouped}


@on_ranks(4)
@pytest.mark.nightly
def test_leaves_are_found_by_name(_: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    state = ya.init(params(OF), optimizer(), mesh=mesh_of(shard=2, tensor=2), precision=FLOAT64)
    batch = ya.shard_batch(batch_of(0), state.mesh)
    state, _ = ya.train_step(loss_of(OF), optimizer())(state, batch)
    want = whole(state)
    places = [("not split", {}), ("grouped", {"shard": 2, "tensor": 2}), ("split", {"expert": 2, "context": 2})]
    places += [("not split", {"shard": 4}), ("split", {"shard": 2, "tensor": 2})]
    for number, (tree, axes) in enumerate(places):
        save(f"{folder}/{number}", state)
        like = ya.init(TREES[tree](), optimizer(), mesh=mesh_of(**axes), precision=FLOAT64, seed=1)
        state, _ = load(f"{folder}/{number}", like)
        assert state.step == 1
        equal(whole(state), want)
        only = ya.init(TREES["split"](), ya.optim.identity(), mesh=state.mesh, precision=FLOAT64, seed=1)
        equal(load_params(f"{folder}/{number}", only), want[0])
    state, _ = ya.train_step(loss_of(OF), optimizer())(state, batch)  # goes on


@on_ranks(2)
def test_a_model_for_tensor_and_not(_: Any, tmp_path: Path) -> None:
    """Llama, made for `tensor` and not."""
    folder = str(tmp_path)
    config = llama.Config(max_length=S, **SIZE)
    tx = optimizer()
    mesh = mesh_of(tensor=2)
    for number, (first, then) in enumerate(((NONE, TENSOR), (TENSOR, NONE))):
        state = ya.init(llama.params(config, **first.options), tx, mesh=mesh)
        save(f"{folder}/{number}", state)
        like = ya.init(llama.params(config, **then.options), tx, mesh=mesh, seed=1)
        equal(whole(load(f"{folder}/{number}", like)[0]), whole(state))


@on_ranks(2)
def test_what_is_not_there_is_refused_by_leaf(_: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    mesh = mesh_of(tensor=2)
    w = ya.Param((2, 4, 6), split={"tensor": -1})
    v = ya.Param((2, 4))
    save(folder, ya.init({"layers": ya.Stacked({"w": w, "v": v})}, mesh=mesh))

    def loaded(text: str, **layer: Any) -> None:
        with pytest.raises(CheckpointError, match=text):
            load(folder, ya.init({"layers": ya.Stacked(layer)}, mesh=mesh))

    plain = ya.Param((2, 4, 6))
    loaded(
        r"params.layers, leaf layers.u: the checkpoint has nothing, this state torch.float32 \[2, 4\]",
        w=plain,
        v=v,
        u=v,
    )
    loaded(r"layers.v in params.layers:layers, which this state has not", w=plain)
    wider = ya.Param((2, 4, 8))
    loaded(
        r"leaf layers.w: the checkpoint has torch.float32 \[2, 4, 6\], this state torch.float32 \[2, 4, 8\]",
        w=wider,
        v=v,
    )
    loaded(
        r"leaf layers.v: the checkpoint has torch.float32 \[2, 4\], this state torch.float32 \[2, 5\]",
        w=plain,
        v=ya.Pinned(ya.Param((2, 5))),
    )
