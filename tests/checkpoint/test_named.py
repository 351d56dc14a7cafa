"""FSDP2's checkpoints in and out: the same bits, whatever the numbers of ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import yafsdp_fn as ya
from tests.harness.pool import Pools, on_ranks
from yafsdp_fn import checkpoint
from yafsdp_fn.checkpoint import named
from yafsdp_fn.params.tree import named_leaves

EMBED, LAYERS = 5, 3
Tensors = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(EMBED, 7)
        self.down = nn.Linear(7, EMBED, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Model(nn.Module):
    """Odd sizes: no dimension is divided evenly by two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, EMBED)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(EMBED)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = x + block(x)
        return self.norm(x).square().mean()


def theirs(mesh: Any) -> Model:
    torch.manual_seed(0)
    model = Model()
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(model: Model) -> Tensors:
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in get_model_state_dict(model).items()}


# ---- moments

RATES = (0.02, 0.01, 0.005)
"""Of each step: a schedule that goes on where FSDP2's has ended."""


def weights_and_moments(model: Model, optimizer: Any) -> Tensors:
    out = whole(model)
    for key, kept in get_optimizer_state_dict(model, optimizer)["state"].items():
        for what, value in kept.items():
            out[f"{key}.{what}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return out


def fsdp2s(mesh: Any) -> tuple[Model, Any]:
    model = theirs(mesh)
    return model, torch.optim.AdamW(model.parameters(), weight_decay=0.1)


def stepped(model: Model, optimizer: Any, rate: float) -> None:
    optimizer.param_groups[0]["lr"] = rate
    model(torch.arange(6)).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained_by_fsdp2(mesh: Any, directory: Path) -> list[Tensors]:
    """Two steps, which are saved, with pickled objects beside, and a third."""
    model, optimizer = fsdp2s(mesh)
    for rate in RATES[:2]:
        stepped(model, optimizer, rate)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments, "note": {"lr": [*RATES]}}, checkpoint_id=directory)
    saved = weights_and_moments(model, optimizer)
    stepped(model, optimizer, RATES[2])
    return [saved, weights_and_moments(model, optimizer)]


def our_loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
    def block(x: torch.Tensor, w: Any) -> tuple[torch.Tensor, None]:
        return x + (x @ w["up"]["weight"].T + w["up"]["bias"]).relu() @ w["down"]["weight"].T, None

    x = ya.apply(lambda w, tokens: w["weight"][tokens], params["embed"], tokens)
    x, _ = ya.scan(block, x, params["layers"])
    return ya.apply(
        lambda w, x: torch.nn.functional.layer_norm(x, (EMBED,), w["weight"], w["bias"]).square().mean(),
        params["norm"],
        x,
    )


def moments_of(path: str, layer: int | None) -> str:
    return name(path, layer, "optim.state.")


def on_from_fsdp2(mesh: Any, source: Path, target: Path) -> list[Tensors]:
    """The same third step, and what it saves for FSDP2."""
    rates = [*map(ya.optim.constant_schedule, RATES)]
    tx = ya.optim.adamw(ya.optim.join_schedules(rates, [1, 2]), weight_decay=0.1)
    state = ya.shard(checkpoint.load_named(source, params(), name), tx, mesh=mesh)
    state = checkpoint.load_moments(source, state, moments_of)
    found = [values(state)]
    state, _ = ya.train_step(our_loss, tx)(state, torch.arange(6))
    checkpoint.save_named(f"{target}-weights", state.params, name)
    with pytest.raises(checkpoint.CheckpointError, match=r"it is there already; name a new folder"):
        checkpoint.save_named(f"{target}-weights", state.params, name)
    checkpoint.save_moments(f"{target}-moments", state, moments_of)
    return [*found, values(state)]


def values(state: Any) -> Tensors:
    """By the names of FSDP2."""
    out = {}
    adam = state.opt_state[0]
    for suffix, tree in (("", state.params), (".exp_avg", adam.mu), (".exp_avg_sq", adam.nu)):
        for path, leaf in named_leaves(ya.unshard(tree)):
            for layer in range(LAYERS) if path.startswith("layers") else (None,):
                out[name(path, layer, "") + suffix] = leaf if layer is None else leaf[layer]
                out[name(path, layer, "") + ".step"] = adam.count
    return out


def resumed_by_fsdp2(mesh: Any, target: Path) -> Tensors:
    model, optimizer = fsdp2s(mesh)
    weights = get_model_state_dict(model)
    found = get_optimizer_state_dict(model, optimizer)
    dcp.load({"model": weights}, checkpoint_id=f"{target}-weights")
    dcp.load({"optim": {"state": found["state"]}}, checkpoint_id=f"{target}-moments")
    set_optimizer_state_dict(model, optimizer, found)
    return weights_and_moments(model, optimizer)


def test_from_fsdp2_to_ours_on_other_ranks_and_back(pools: Pools, tmp_path: Path) -> None:
    source = tmp_path / "theirs"
    target = tmp_path / "ours"
    before, after = pools[2].run(trained_by_fsdp2, source)[0]
    for loaded, stepped in pools[3].run(on_from_fsdp2, source, target):
        assert loaded.keys() == before.keys() == stepped.keys()
        for key in before:
            assert torch.equal(loaded[key].float(), before[key]), key  # counts are integers here
            torch.testing.assert_close(stepped[key].float(), after[key], rtol=1e-5, atol=1e-7, msg=key)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours-moments", "ours-weights", "theirs"]
    for again in pools[2].run(resumed_by_fsdp2, target):
        assert all(torch.equal(again[key], stepped[key].float()) for key in before)


@on_ranks(1)
def test_a_folder_appears_when_it_is_complete(mesh: Any, tmp_path: Path) -> None:
    state = ya.init(params(), None, mesh=mesh)
    target = tmp_path / "ours"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(checkpoint.CheckpointError, match="the disk is gone"):
        patch.setattr(named, "sync_folder", mock.Mock(side_effect=OSError("the disk is gone")))
        checkpoint.save_named(target, state.params, name)
    assert not target.exists()
    checkpoint.save_named(target, state.params, name)


@on_ranks(2)
def test_ranks_write_into_the_folder_that_rank_0_names(mesh: Any, tmp_path: Path) -> None:
    """Two clocks, say. It is complete, and found from another working directory than the one that it was opened in."""
    state = ya.init(params(), None, mesh=mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        checkpoint.save_named(f"of-{mesh.get_rank()}", state.params, name)
        lazy = checkpoint.load_named("of-0", params(), name)
    assert [path.name for path in tmp_path.iterdir()] == ["of-0"]
    assert ya.checksum(ya.shard(lazy, None, mesh=mesh)) == ya.checksum(state)
    with pytest.raises(TypeError, match=r"`name` returned None for"):
        checkpoint.save_named(tmp_path / "other", state.params, lambda path, layer: None)  # type: ignore


@on_ranks(1)
def test_moments_that_do_not_fit(mesh: Any, tmp_path: Path) -> None:
    """A parameter that began later has taken fewer steps; the state stays as it was."""
    source = tmp_path / "ours"
    target = tmp_path / "changed"
    state = ya.init(params(), ya.optim.adam(0.1), mesh=mesh)
    state = state.apply_gradients(ya.normal_like(1, state.params), ya.optim.adam(0.1))
    checkpoint.save_moments(source, state, moments_of)
    about = FileSystemReader(source).read_metadata().state_dict_metadata
    stored = {key: torch.empty(of.size, dtype=of.properties.dtype) for key, of in about.items()}
    dcp.load(stored, checkpoint_id=source, no_dist=True)
    stored["optim.state.norm.bias.step"] += 1
    dcp.save(stored, checkpoint_id=target)
    with pytest.raises(checkpoint.CheckpointError, match=r"one number of steps .* got embed.weight 1, norm.bias 2"):
        checkpoint.load_moments(target, state, moments_of)
    before = values(state)
    with pytest.raises(checkpoint.CheckpointError, match=r"weight should be embed\.weight\.exp_avg, which is not"):
        checkpoint.load_moments(target, state, lambda path, layer: path)
    assert all(torch.equal(kept, before[key]) for key, kept in values(state).items())
    muon = ya.init(params(), ya.optim.muon(0.1), mesh=mesh)
    with pytest.raises(TypeError, match=r"one Adam for all parameters, .*, got 1 of them in a partition or mask"):
        checkpoint.save_moments(f"{target}-2", muon, moments_of)


@on_ranks(2)
def test_moments_of_an_adam_whose_decay_is_masked(mesh: Any, tmp_path: Path) -> None:
    """The mask is of the decay: the moments are those of all parameters, in one Adam."""
    tx = ya.optim.adamw(0.1, mask=lambda path, param: path.endswith("weight"))
    state = ya.init(params(), tx, mesh=mesh)
    state = state.apply_gradients(ya.normal_like(1, state.params), tx)
    checkpoint.save_moments(tmp_path / "moments", state, moments_of)
    again = checkpoint.load_moments(tmp_path / "moments", ya.init(params(), tx, mesh=mesh), moments_of)
    kept, found = (ya.unshard(of.opt_state[0].nu) for of in (state, again))
    assert torch.equal(found["norm"]["bias"], kept["norm"]["bias"])
    assert kept["norm"]["bias"].any()
    assert torch.equal(found["layers"]["up"]["weight"], kept["layers"]["up"]["weight"])


def params() -> dict[str, Any]:
    block = {
        "up": {"weight": ya.Param((LAYERS, 7, EMBED)), "bias": ya.Param((LAYERS, 7))},
        "down": {"weight": ya.Param((LAYERS, EMBED, 7))},
    }
    norm = {"weight": ya.Param((EMBED,)), "bias": ya.Param((EMBED,))}
    return {"embed": {"weight": ya.Param((11, EMBED))}, "layers": ya.Stacked(block), "norm": norm}


def name(path: str, layer: int | None, prefix: str = "model.") -> str:
    return prefix + (path if layer is None else path.replace("layers.", f"layers.{layer}."))


def test_what_does_not_fit_is_named(pools: Pools, tmp_path: Path) -> None:
    source = tmp_path / "theirs"
    pools[1].run(trained_by_fsdp2, source)
    with pytest.raises(checkpoint.CheckpointError, match=r"embed\.weight should be embed\.weight, which is not there"):
        checkpoint.load_named(source, params(), lambda path, layer: path)
    other = params() | {"norm": {"weight": ya.Param((6,)), "bias": ya.Param((EMBED,))}}
    with pytest.raises(
        checkpoint.CheckpointError, match=r"model\.norm\.weight has shape \(5,\), norm\.weight here has"
    ):
        checkpoint.load_named(source, other, name)
    with pytest.raises(checkpoint.CheckpointError, match=r"layers\.down\.weight is .* in layer 0 and in layer 1"):
        checkpoint.load_named(source, params(), lambda path, layer: name(path, layer and 0))
    block = {"up": {"weight": ya.Param((2, 7, EMBED)), "bias": ya.Param((2, 7))}}
    with pytest.warns(
        UserWarning, match=r"has model\.layers\.0\.down\.weight, .*model\.layers\.2\.up\.bias, .* not read"
    ):
        checkpoint.load_named(source, params() | {"layers": ya.Stacked(block)}, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load_named(source, params(), name)  # moments of what is read are beside it
    with pytest.raises(checkpoint.CheckpointError, match=r"cannot be read as torch's checkpoint: FileNotFoundError"):
        checkpoint.load_named(tmp_path, params(), name)


def test_leaves_keep_what_their_params_say(pools: Pools, tmp_path: Path) -> None:
    source = tmp_path / "theirs"
    pools[1].run(trained_by_fsdp2, source)
    own = ya.Param((11, EMBED), split={"tensor": -1}, compute=torch.bfloat16, reduce=torch.float64)
    leaf = checkpoint.load_named(source, params() | {"embed": {"weight": own}}, name)["embed"]["weight"]
    assert (leaf.split, leaf.compute, leaf.reduce) == (own.split, own.compute, own.reduce)
