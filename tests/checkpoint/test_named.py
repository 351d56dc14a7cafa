"""FSDP2's checkpoints in and out: the same bits, whatever the numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import yafsdp_fn as ya
from tests.checkpoint.test_resharding import Pools
from yafsdp_fn import checkpoint

EMBED, LAYERS = 5, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(EMBED, 7), nn.Linear(7, EMBED, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x).relu())
        return out


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
        out: torch.Tensor = self.norm(x).square().mean()
        return out


def theirs(mesh: Any) -> Model:
    torch.manual_seed(0)
    model = Model()
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(model: Model) -> dict[str, torch.Tensor]:
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in get_model_state_dict(model).items()}


def saved_by_fsdp2(mesh: Any, directory: str) -> dict[str, torch.Tensor]:
    """A step of AdamW, so that there is optimizer state, with pickled objects, beside the weights."""
    model = theirs(mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(6)).backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments, "note": {"lr": [1e-3]}}, checkpoint_id=directory)
    return whole(model)


def params() -> dict[str, Any]:
    block = {
        "up": {"weight": ya.Param((LAYERS, 7, EMBED)), "bias": ya.Param((LAYERS, 7))},
        "down": {"weight": ya.Param((LAYERS, EMBED, 7))},
    }
    norm = {"weight": ya.Param((EMBED,)), "bias": ya.Param((EMBED,))}
    return {"embed": {"weight": ya.Param((11, EMBED))}, "layers": ya.Stacked(block), "norm": norm}


def name(path: str, layer: int | None, prefix: str = "model.") -> str:
    return prefix + (path if layer is None else path.replace("layers.", f"layers.{layer}."))


def through_ours(mesh: Any, source: str, target: str) -> dict[str, Any]:
    lazy = checkpoint.load_named(source, params(), name)
    state = ya.shard(lazy, ya.optim.identity(), mesh=mesh)
    checkpoint.save_named(target, state.params, lambda path, layer: name(path, layer, ""))
    with pytest.raises(checkpoint.CheckpointError, match=r"it is there already; name a new folder"):
        checkpoint.save_named(target, state.params, name)
    return ya.unshard(state.params)


def loaded_by_fsdp2(mesh: Any, directory: str) -> dict[str, torch.Tensor]:
    model = theirs(mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weights = get_model_state_dict(model)
    dcp.load(weights, checkpoint_id=directory)
    return whole(model)


def test_fsdp2_to_ours_and_back(pools: Pools, tmp_path: Path) -> None:
    source, target = str(tmp_path / "theirs"), str(tmp_path / "ours")
    before = pools[2].run(saved_by_fsdp2, source)[0]
    for ours in pools[3].run(through_ours, source, target):
        assert torch.equal(ours["embed"]["weight"], before["embed.weight"])
        assert torch.equal(ours["layers"]["up"]["bias"][2], before["layers.2.up.bias"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]
    for after in pools[2].run(loaded_by_fsdp2, target):
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], before[key]) for key in before)


def test_what_does_not_fit_is_named(pools: Pools, tmp_path: Path) -> None:
    source = str(tmp_path / "theirs")
    pools[1].run(saved_by_fsdp2, source)
    with pytest.raises(checkpoint.CheckpointError, match=r"embed\.weight should be embed\.weight, which is not there"):
        checkpoint.load_named(source, params(), lambda path, layer: path)
    other = params() | {"norm": {"weight": ya.Param((6,)), "bias": ya.Param((EMBED,))}}
    with pytest.raises(
        checkpoint.CheckpointError, match=r"model\.norm\.weight has shape \(5,\), norm\.weight here has"
    ):
        checkpoint.load_named(source, other, name)
    with pytest.raises(checkpoint.CheckpointError, match=r"\.metadata cannot be read"):
        checkpoint.load_named(tmp_path, params(), name)
