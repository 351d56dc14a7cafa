"""functionalize(files=...): values of modules without memory come from files, a layer at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import yafsdp_fn as ya
from tests.harness.oracle import compare
from tests.harness.pool import Pools
from tests.harness.small import one_rank
from tests.modules.test_functionalize import CODE, FROM_FILES, made, squares, tokens_of
from yafsdp_fn.util.tensor_files import StoredTensor

safetensors_torch = pytest.importorskip("safetensors.torch", reason="reads and writes safetensors")


class Reads:
    """What is read while it is in place: by name, and how many bytes of it lived at once."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.most = 0
        self._live: list[tuple[StorageWeakRef, int]] = []

    def __enter__(self) -> Reads:
        self._before = StoredTensor.read
        StoredTensor.read = lambda stored: self._read(stored)
        return self

    def __exit__(self, *_: object) -> None:
        StoredTensor.read = self._before

    def _read(self, stored: StoredTensor) -> Tensor:
        tensor = self._before(stored)
        self.names.append(stored.name)
        self._live = [kept for kept in self._live if not kept[0].expired()]
        self._live.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
        self.most = max(self.most, sum(nbytes for _, nbytes in self._live))
        return tensor


def rows(world: int) -> dict[str, Tensor]:
    """Of all ranks; padded in one row of each, so that there is a mask."""
    tokens = torch.randint(3, 61, (2 * world, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[::2, -2:] = 0
    return {"tokens": tokens, "mask": mask, "targets": tokens.roll(-1, 1).masked_fill(mask == 0, -100)}


def page(mesh: Any, folder: Path) -> None:
    """The page's first code, which trains and saves, then its second, from the files: nothing but a layer is whole."""
    names: dict[str, Any] = {
        "mesh": mesh,
        "directory": folder,
        "batch": {key: value.chunk(mesh.size())[mesh.get_rank()] for key, value in rows(mesh.size()).items()},
    }
    exec(CODE, names)
    trained = names["state"]
    module = names["module"]
    if mesh.size() > 1:  # until rank 0 has saved
        torch.distributed.barrier(mesh.get_group())
    with Reads() as reads:
        exec(FROM_FILES, names)
    assert names["module"] is not module
    assert all(param.is_meta for param in names["module"].parameters())
    compare(names["state"], trained, 0.0, "trained")
    sizes = {name: param.nbytes for name, param in module.named_parameters()}
    layer = sum(nbytes for name, nbytes in sizes.items() if name.startswith("model.layers.0."))
    assert 3 * layer < sum(sizes.values()), "the model is too small for the bound to say something"
    assert reads.most <= max(layer, sizes["model.embed_tokens.weight"])
    assert len(set(reads.names)) == len(reads.names), "each tensor is read once"
    # of each layer a rank of several reads what it has a part of
    assert (len(reads.names) < len(sizes)) == (mesh.size() > 1)
    batch = names["batch"]
    loss = [ya.eval_step(names["loss_fn"])(state, batch)["loss"] for state in (names["state"], trained)]
    assert torch.equal(*loss)


@pytest.mark.parametrize("world", [1, 2])
def test_a_rank_reads_its_part_a_layer_at_a_time(pools: Pools, tmp_path: Path, world: int) -> None:
    pytest.importorskip("transformers", reason="the page trains a model of transformers")
    pools[world].run(page, tmp_path)


# ---- a module that has what transformers' have not


def on_meta(module: nn.Module) -> nn.Module:
    """The module with its parameters, tied ones too, on the meta device; buffers keep their values."""
    seen: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None:
                empty = nn.Parameter(param.to("meta"), param.requires_grad)
                part._parameters[name] = seen.setdefault(id(param), empty)
    return module


def saved(folder: Path, **changes: Tensor | None) -> nn.Module:
    """Saves a module and returns its like on the meta device. changes: other tensors, None for none; "." as "__" """
    module = made(ties=True)
    for layer in module.layers:
        layer.shift.fill_(2.5)  # a buffer that is saved
    tensors = {name: param.detach().clone() for name, param in module.named_parameters()}
    tensors |= {name: buffer.clone() for name, buffer in module.named_buffers()}
    changed = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    left = {name: tensor for name, tensor in (tensors | changed).items() if tensor is not None}
    safetensors_torch.save_file(left, folder / "model.safetensors")
    return on_meta(made(ties=True))


def test_ties_frozen_leaves_buffers_and_dtypes_are_as_in_the_module(tmp_path: Path) -> None:
    module = saved(tmp_path)
    right = made(ties=True)
    right.load_state_dict(safetensors_torch.load_file(tmp_path / "model.safetensors"), strict=False)
    for dtype in (torch.float32, torch.bfloat16):
        (ours, model), (theirs, function) = (
            ya.functionalize(of.to(dtype), "layers", **how) for of, how in ((module, {"files": tmp_path}), (right, {}))
        )
        assert optree.tree_structure(ours) == optree.tree_structure(theirs)
        a = ya.materialize(ours)
        b = ya.materialize(theirs)
        compare(a, b, 0.0, "files")
        assert {leaf.dtype for leaf in optree.tree_leaves(a)} == {dtype}
        assert torch.equal(model(a, tokens_of(0)), function(b, tokens_of(0)))
    tx = ya.optim.sgd(0.1)
    state, _ = ya.train_step(squares(model), tx)(ya.shard(ours, tx, mesh=one_rank()), tokens_of(0))
    again, _ = ya.train_step(squares(function), tx)(ya.shard(theirs, tx, mesh=one_rank()), tokens_of(0))
    assert ya.checksum(state) == ya.checksum(again)


def with_a_buffer_on_meta(module: nn.Module) -> nn.Module:
    part = module.get_submodule("layers.1")
    part.register_buffer("angle", torch.ones(2, device="meta"), persistent=False)
    return module


EMPTY = torch.zeros(8, 8, dtype=torch.float8_e4m3fn)
REFUSED: list[tuple[dict[str, Tensor | None], Callable[[nn.Module], nn.Module], str]] = [
    (
        {"layers__1__norm__bias": None},
        nn.Module.eval,
        r"has no layers.1.norm.bias; expected the names of module.state_d",
    ),
    ({"layers__2__shift": None}, nn.Module.eval, "has no layers.2.shift"),
    ({"embed__weight": None}, nn.Module.eval, "has no embed.weight or tail.1.weight.*is the module tied"),
    ({"position": torch.ones(4, 8)}, nn.Module.eval, r"position has shape \(4, 8\), the module's is \(5, 8\)"),
    (
        {"tail__1__weight": torch.ones(11, 8)},
        nn.Module.eval,
        "tail.1.weight is not embed.weight, and the module has one",
    ),
    ({"layers__0__up__weight": EMPTY}, nn.Module.eval, "layers.0.up.weight is F8_E4M3, expected one of"),
    ({}, with_a_buffer_on_meta, "layers.1.angle is a buffer on the meta device, and in no file"),
]


@pytest.mark.parametrize(("changes", "change", "text"), REFUSED)
def test_files_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Tensor | None], change: Callable[[nn.Module], nn.Module], text: str
) -> None:
    module = change(saved(tmp_path, **changes))
    with pytest.raises((TypeError, ValueError), match=text):
        ya.functionalize(module, "layers", files=tmp_path)


def test_a_second_copy_of_a_tied_weight_is_read_and_others_are_warned_of(tmp_path: Path) -> None:
    weight = made(ties=True).embed.weight.detach()
    module = saved(tmp_path, tail__1__weight=weight.clone(), more=torch.ones(1), other=torch.ones(1))
    with pytest.warns(UserWarning, match=r"has more and 1 more, which the module has not"):
        params, _ = ya.functionalize(module, "layers", files=tmp_path)
    assert torch.equal(ya.materialize(params)["embed"]["weight"], weight)


def test_without_files_or_without_the_library_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = saved(tmp_path)
    with pytest.raises(TypeError, match=r"is on the meta device and has no values; load the module first, or name its"):
        ya.functionalize(module, "layers")
    with pytest.raises(FileNotFoundError, match=r"nowhere: neither model.safetensors nor model.safetensors.index.json"):
        ya.functionalize(module, "layers", files=tmp_path / "nowhere")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"needs the library: pip install 'yafsdp_fn\[hf\]'"):
        ya.functionalize(module, "layers", files=tmp_path)
