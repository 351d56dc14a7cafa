"""Adapters on matrices that are split over `tensor`: a pair is split where its matrix is, and trains as in the plain
loop; merged, in checkpoints and in files it is as without axes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from models import hf, llama
from models.parts.axes import NONE, Axes
from tests.axes.test_exact import FLOAT64, close
from tests.axes.test_llama import FAMILIES, SEQUENCE, TENSOR, Case, batch_of, config_of, optimizer, trained, wide
from tests.axes.test_states import equal
from tests.harness.marks import nightly
from tests.harness.pool import on_ranks
from tests.modules.test_lora_on_ranks import begun, every_matrix
from yafsdp_fn.checkpoint import load, save

LLAMA = Case({}, TENSOR)
CONFIG = config_of(LLAMA)
WITHOUT = ya.params.without_markers


def adapted(case: Case, axes: Axes, dtype: Any = None, where: Any = every_matrix) -> Any:
    """The model with adapters that are not zero."""
    whole = wide(FAMILIES[case.family].params(config_of(case), **axes.options))
    tree = ya.lora(
        whole,
        3,
        where,
        alpha=4.0,
        dtype=dtype,
    )
    return begun(tree, torch.float64)


@functools.cache
def plain(family: str, dtype: Any) -> Any:
    case = Case({}, NONE, family=family)
    state = ya.PlainState.create(adapted(case, NONE, dtype), optimizer())
    return trained(case, state, FAMILIES[family].loss(config_of(case)), lambda batch: batch)


def whole(tree: Any) -> Any:
    return optree.tree_map(torch.Tensor.double, WITHOUT(ya.unshard(tree)))


GPT2 = Case({"tensor": 2}, TENSOR, family="gpt2")
"""Queries, keys and values are blocks of one matrix."""
CASES = [
    pytest.param(2, Case({"tensor": 2}, SEQUENCE), None, id="float64"),
    pytest.param(2, Case({"tensor": 2}, TENSOR), torch.int8, id="int8"),
    pytest.param(2, GPT2, None, id="blocks"),
    pytest.param(2, GPT2, torch.int8, id="blocks in int8"),
    nightly(4, Case({"shard": 2, "tensor": 2}, SEQUENCE), None, id="on four ranks"),
]


@on_ranks()
@pytest.mark.parametrize(("world", "case", "dtype"), CASES)
def test_pairs_of_split_matrices(_: Any, case: Case, dtype: Any) -> None:
    mesh = ya.mesh(device="cpu", **case.mesh)
    axes = case.axes
    state = ya.init(adapted(case, axes, dtype), optimizer(), mesh=mesh, precision=FLOAT64)
    loss = FAMILIES[case.family].loss(config_of(case), axes=axes)
    got = trained(case, state, loss, functools.partial(axes.shard_batch, mesh=mesh))
    want = plain(case.family, dtype)
    close(got[0], want[0], "loss")
    close(whole(got[1]), whole(want[1]), "gradient")
    close(got[2], want[2], "metrics")
    close(whole(got[3].params), whole(want[3].params), "parameters")
    names = {group.name for group in got[3].memory.layout.groups if group.trainable}
    assert {"layers", "layers.split(tensor)"} <= names  # pairs are split on one side


@on_ranks(2)
def test_checkpoints_merging_and_files(_: Any, tmp_path: Path) -> None:
    """Trained, saved and loaded on other axes; merged; as files of transformers and peft; from tensors."""
    folder = str(tmp_path)
    mesh = ya.mesh(tensor=2, device="cpu")
    alone = ya.mesh(device="cpu")
    tree = adapted(LLAMA, TENSOR, where=None)
    tx = optimizer()
    state = ya.init(tree, tx, mesh=mesh)
    again = ya.shard(WITHOUT(ya.materialize(tree)), like=tree, mesh=mesh)
    equal(again.params, state.params)
    state, _ = ya.train_step(llama.loss(CONFIG, axes=TENSOR), tx)(state, batch_of(0))
    save(f"{folder}/run", state)
    plain = load(f"{folder}/run", ya.init(tree, tx, mesh=alone))[0]
    equal(plain.params, state.params)
    equal(ya.merge_lora(state), ya.merge_lora(plain))
    for name, each in (("split", state), ("plain", plain)):
        llama.hf.save(f"{folder}/{name}", CONFIG, each.params)
        hf.save_adapters(f"{folder}/{name}-pairs", CONFIG, each.params)
    equal(*(ya.materialize(llama.hf.load(f"{folder}/{name}")[1]) for name in ("split", "plain")))
    pairs, other = (Path(folder, f"{name}-pairs", "adapter_model.safetensors") for name in ("split", "plain"))
    assert pairs.read_bytes() == other.read_bytes()
    # a Hugging Face directory, split and with new adapters
    lazy = ya.lora(llama.hf.load(f"{folder}/plain", axes=TENSOR)[1], 3)
    begun = ya.shard(lazy, mesh=mesh)
    assert any(group.name == "layers.frozen.split(tensor)" for group in begun.memory.layout.groups)
    equal(begun.params, ya.shard(lazy, mesh=alone).params)
