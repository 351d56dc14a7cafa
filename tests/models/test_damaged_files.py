"""Directories from other people: each is refused by an error that names the file, or loaded as what it says it is."""

from __future__ import annotations

import dataclasses
import json
import random
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from models import llama
from models.files.config_json import FIELDS
from tests.harness.damage import PARTS, byte_damage, json_damage, search
from tests.harness.marks import nightly
from tests.models.test_llama_hf import edit_config, refused

pytest.importorskip("safetensors", reason="reads and writes safetensors")

SMALL = llama.Config(
    vocab=7,
    embed=8,
    ffn=6,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    max_length=64,
    rope_scaling=llama.RopeScaling(factor=8.0),
    generation={"eos_token_id": [1, 2], "generation_config": {"temperature": 0.5, "eos_token_id": 2}},
)
SECRET = 7777.0


def written(root: Path, **options: Any) -> Path:
    """A model in root/model, and one that nothing there may lead to, in root."""
    params = ya.materialize(llama.params(SMALL), seed=3)
    llama.hf.save(root / "model", SMALL, params, **options)
    secret = optree.tree_map(lambda leaf: torch.full_like(leaf, SECRET), params)
    llama.hf.save(root / "outside", SMALL, secret)
    (root / "outside" / "model.safetensors").rename(root / "secret.safetensors")
    return root / "model"


def loaded(directory: Path) -> llama.Config:
    """Reads all of it, and looks at what was read."""
    config, lazy = llama.hf.load(directory)
    for got, leaf in zip(
        optree.tree_leaves(ya.materialize(lazy)), optree.tree_leaves(llama.params(config)), strict=True
    ):
        assert got.shape == leaf.shape
        assert SECRET not in got
    assert config.num_parameters > 0
    assert dataclasses.replace(config) == config
    return config


def damaged(
    file: Path, others: int, change: Callable[[random.Random], bytes], name: str, numbers: range
) -> Counter[str]:
    """Searches inputs for one file of a directory. others: bytes of the files beside it"""
    directory = file.parent

    def make(rng: random.Random) -> int:
        data = change(rng)
        file.write_bytes(data)
        return len(data) + others

    def load() -> None:
        try:
            loaded(directory)
        except (ValueError, FileNotFoundError, TypeError) as error:
            assert str(directory) in str(error), f"names no file: {error}"
            raise

    warnings.simplefilter("ignore")  # in this child: to print one opens the source's file
    loaded(directory)
    return search(name, numbers, make, load, directory, (ValueError, FileNotFoundError, TypeError))


def of_settings(root: Path, numbers: range) -> Counter[str]:
    directory = written(root)
    ours = json.loads((directory / "config.json").read_text())
    theirs = {key: value for key, value in ours.items() if key not in ("rope_scaling", "rope_theta")}
    theirs["rope_parameters"] = {"rope_theta": 1e4, **ours["rope_scaling"]}
    size = (directory / "model.safetensors").stat().st_size
    change = lambda rng: json_damage(rng.choice([ours, theirs]), rng)  # noqa: E731
    return damaged(directory / "config.json", size, change, "config", numbers)


def of_an_index(root: Path, numbers: range) -> Counter[str]:
    directory = written(root, max_shard_bytes=800)
    file = directory / "model.safetensors.index.json"
    good = json.loads(file.read_text())
    outside = [str(root / "secret.safetensors"), "../secret.safetensors", "link.safetensors", "..", ".", "config.json"]
    (directory / "link.safetensors").symlink_to(root / "secret.safetensors")

    def change(rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return json_damage(good, rng)
        names = [*good["weight_map"].values(), *outside]
        some = {key: rng.choice(names) if rng.random() < 0.1 else name for key, name in good["weight_map"].items()}
        return json_damage({**good, "weight_map": some}, rng)

    size = sum(path.stat().st_size for path in directory.glob("model-*"))
    return damaged(file, size, change, "index", numbers)


def of_tensors(root: Path, numbers: range) -> Counter[str]:
    directory = written(root)
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    data = whole[8 + length :]

    def change(rng: random.Random) -> bytes:
        if rng.random() < 0.4:
            return byte_damage(whole, rng)
        if rng.random() < 0.3:  # of the header, at its real length
            text = byte_damage(whole[8 : 8 + length], rng)
        else:
            text = json_damage(header, rng)
        return len(text).to_bytes(8, "little") + text + data

    return damaged(file, 1000, change, "tensors", numbers)


@pytest.mark.parametrize("parts", [[range(50)], nightly(PARTS)])
@pytest.mark.parametrize("search_of", [of_settings, of_an_index, of_tensors])
def test_damage(
    in_child: Callable[..., Any], tmp_path: Path, search_of: Callable[[Path], Counter[str]], parts: list[range]
) -> None:
    every = [in_child(search_of, tmp_path / str(part.start), part) for part in parts]
    found = sum(every, Counter())
    print(search_of.__name__, found)
    assert found.total() == sum(map(len, parts))
    assert found["loaded"] > 0
    assert found["ValueError"] > found.total() / 4


# ---- what a search found, or would take long to find


def test_every_key_of_the_config_may_be_anything(tmp_path: Path) -> None:
    directory = written(tmp_path)
    good = (directory / "config.json").read_bytes()
    taken = []
    for key in FIELDS.values():
        for value in ("x", [], {}, -1, 0, 1.5, True, 10**400, 1e308, [[0]]):
            edit_config(directory, **{key: value})
            try:
                loaded(directory)
                taken.append((key, value))
            except ValueError as error:
                assert f"config.json: {key}: " in str(error), f"{key}: {value!r}: {error}"
            (directory / "config.json").write_bytes(good)
    assert taken == [("tie_word_embeddings", True), ("rms_norm_eps", 1.5)]  # the head is then left aside, as theirs is


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a": ' * 5000, "it is nested too deep"),
        (b'{"vocab_size": 7, "vocab_size": 8}', "the key 'vocab_size' is there twice"),
        (b'{"vocab_size": NaN}', "NaN is no number of JSON"),
        (b"\xff\xfe{}", "'utf-8' codec can't decode byte 0xff"),
        (b"", "Expecting value"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_that_means_nothing(tmp_path: Path, name: str, text: bytes, why: str) -> None:
    directory = written(tmp_path, max_shard_bytes=800)
    (directory / name).write_bytes(text)
    refused(directory, rf"{name}: damaged or cut short \({why}")


def test_a_file_too_long_for_its_kind_is_not_read(tmp_path: Path) -> None:
    directory = written(tmp_path)
    with (directory / "config.json").open("r+b") as file:
        file.truncate(10**12)  # a hole: it takes no room
    refused(directory, r"config.json: it has 1000000000000 bytes; expected at most 16777216")


# ---- nothing leads out


OUTSIDE = [
    "../secret.safetensors",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a/b.safetensors",
    "a\\b.safetensors",
    "c:x.safetensors",
]


def indexed(root: Path) -> tuple[Path, Path, dict[str, Any]]:
    """A model of several files, its index, and what that holds."""
    directory = written(root, max_shard_bytes=800)
    file = directory / "model.safetensors.index.json"
    return directory, file, json.loads(file.read_text())


@pytest.mark.parametrize("name", [*OUTSIDE, 7, None, [], {}, "config.json", "x\0.safetensors", "\ud800.safetensors"])
def test_an_index_lists_files_of_its_directory(tmp_path: Path, name: Any) -> None:
    directory, file, values = indexed(tmp_path)
    values["weight_map"]["model.norm.weight"] = name
    file.write_text(json.dumps(values))
    text = r"index.json: weight_map has .* for 'model.norm.weight'; expected the name of a safetensors file in this dir"
    refused(directory, text)


@pytest.mark.parametrize("weight_map", [None, [], {}, "model.safetensors", ...])
def test_an_index_without_a_map(tmp_path: Path, weight_map: Any) -> None:
    directory, file, _ = indexed(tmp_path)
    file.write_text(json.dumps({} if weight_map is ... else {"weight_map": weight_map}))
    refused(directory, r"index.json: weight_map is .*; expected the file of each tensor")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    directory, file, values = indexed(tmp_path)
    first = values["weight_map"]["model.norm.weight"]
    (directory / "again.safetensors").write_bytes((directory / first).read_bytes())
    values["weight_map"]["lm_head.weight"] = "again.safetensors"
    file.write_text(json.dumps(values))
    refused(directory, r"is in again.safetensors as well; delete the file that is not of this model")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_links_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    directory = written(tmp_path)
    (directory / name).rename(tmp_path / name)
    (directory / name).symlink_to(Path("..") / name)
    refused(directory, rf"model/{name}: a link to {tmp_path / name}, outside of the directory; copy")


def test_links_inside_and_those_of_the_hub_s_cache_are_followed(tmp_path: Path) -> None:
    """A snapshot of the hub's cache is a directory of links to `blobs`."""
    directory = written(tmp_path / "a", max_shard_bytes=800)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123abcd"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(directory.iterdir())):
        (blobs / f"{number}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number}")
    assert loaded(snapshot) == SMALL
    (tmp_path / "link").symlink_to(snapshot)
    assert loaded(tmp_path / "link") == SMALL
    (directory / "config.json").rename(directory / "c.json")
    (directory / "config.json").symlink_to("c.json")
    assert loaded(directory) == SMALL
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(directory / "c.json")
    with pytest.raises(ValueError, match="outside of the directory"):
        loaded(snapshot)
