"""A save in place of another model, killed or failing at any of its file-system calls: one of the two is there, or,
where settings change, no config.json."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import errno
import io
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import pytest
import torch

import yafsdp_fn as ya
from models import llama
from models.files import settings, tree
from models.files.tensor_writer import Writer
from tests.harness.marks import nightly
from tests.harness.pool import Pools
from yafsdp_fn.util import model_folder

pytest.importorskip("safetensors", reason="reads and writes safetensors")

OLD = llama.Config(vocab=7, embed=8, ffn=6, layers=1, heads=2, kv_heads=1, head_dim=4, max_length=64)
ONE = 10**9
SEVERAL = 600
PAIRS = [(ONE, ONE), (ONE, SEVERAL), (SEVERAL, ONE), (SEVERAL, SEVERAL)]
SETTINGS = {
    "same": OLD,
    "other": dataclasses.replace(OLD, embed=6, rope_theta=5e5, generation={"generation_config": {"top_k": 5}}),
}
CALLS = ("replace", "rename", "unlink", "fsync", "open", "mkdir", "scandir")

Found = tuple[llama.Config, Any, list[torch.Tensor]]


class Killed(BaseException):
    """Nothing of a killed process runs on: every later call raises it again."""


@contextlib.contextmanager
def interrupted(at: int | None, error: Callable[[], BaseException], again: bool) -> Iterator[list[str]]:
    """Counts the calls to the file system, and raises in place of number `at`. again: and of all that follow"""
    log: list[str] = []

    def hooked(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            log.append(f"{name} {_named(args[0])}")
            if at is not None and (len(log) == at + 1 or (again and len(log) > at)):
                raise error()
            return call(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, hooked(name, getattr(os, name)))
        patch.setattr(io, "open", hooked("io.open", io.open))
        patch.setattr(builtins, "open", hooked("io.open", builtins.open))
        yield log


def _named(what: Any) -> str:
    if isinstance(what, int):
        return Path(os.readlink(f"/proc/self/fd/{what}")).name if os.path.exists("/proc/self/fd") else "?"
    return Path(os.fsdecode(what)).name


def saved(directory: Path, config: llama.Config, seed: int, max_shard_bytes: int) -> None:
    llama.hf.save(directory, config, ya.materialize(llama.params(config), seed=seed), max_shard_bytes=max_shard_bytes)


def found(directory: Path) -> Found:
    config, lazy = llama.hf.load(directory)
    return config, dict(config.generation), optree.tree_leaves(ya.materialize(lazy))


def found_or_none(directory: Path) -> Found | None:
    """None where there is no config.json."""
    try:
        return found(directory)
    except FileNotFoundError as error:
        assert "config.json: no such file" in str(error)
        return None


def equal(a: Found, b: Found) -> bool:
    return a[:2] == b[:2] and all(torch.equal(x, y) for x, y in zip(a[2], b[2], strict=True))


@pytest.mark.parametrize(
    ("kill", "settings", "old", "new"),
    [
        (True, "other", ONE, SEVERAL),
        (False, "other", SEVERAL, ONE),
        nightly(True, "other", ONE, ONE),
        nightly(True, "other", SEVERAL, ONE),
        nightly(True, "other", SEVERAL, SEVERAL),
        nightly(True, "same", ONE, SEVERAL),
        (True, "same", SEVERAL, ONE),
        nightly(False, "other", ONE, SEVERAL),
    ],
)
def test_the_old_model_or_the_new_one(tmp_path: Path, kill: bool, old: int, new: int, settings: str) -> None:
    config = SETTINGS[settings]
    before = tmp_path / "before"
    after = tmp_path / "after"
    saved(before, OLD, 1, old)
    (before / "tokenizer.json").write_text("{}")
    shutil.copytree(before, after)
    saved(after, config, 2, new)
    whole = [found(before), found(after)]
    assert not equal(*whole)
    error = Killed if kill else lambda: OSError(errno.ENOSPC, "No space left on device")
    states = []
    for at in itertools.count():
        directory = tmp_path / str(at)
        shutil.copytree(before, directory)
        with interrupted(at, error, kill) as log, contextlib.suppress(Killed, OSError):
            saved(directory, config, 2, new)
            if len(log) <= at:
                break
        got = found_or_none(directory)
        states.append([got is not None and equal(got, model) for model in whole])
        assert states[-1].count(True) == (got is not None), f"a mixture after {log[at]}, call {at}"
        left = {file.name for file in directory.glob("partial-*.safetensors")}
        assert kill or not states[-1][0] or not left, "a failure leaves what takes room"
        saved(directory, OLD, 1, ONE)  # and the next save puts it right
        assert {file.name for file in directory.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
        assert found(directory)[0] == OLD
    order = [[True, False], [False, False], [False, True]]  # the old one, none, the new one
    assert {tuple(state) for state in states} == set(map(tuple, order if settings == "other" else order[::2]))
    if kill:  # mkdir, say, may fail where the directory is there
        assert states == sorted(states, key=order.index)
        assert states.count(order[1]) <= 12, "a few renames"


@pytest.mark.parametrize("settings", ["other", nightly("same")])
@pytest.mark.parametrize(("old", "new"), [PAIRS[1], *(nightly(*pair) for pair in PAIRS if pair != PAIRS[1])])
def test_a_kill_between_saves_that_were_killed(tmp_path: Path, old: int, new: int, settings: str) -> None:
    """What the first save left is whole, and a second one may be killed over it anywhere, too."""
    saved(tmp_path / "before", OLD, 1, old)
    with interrupted(None, Killed, True) as log:
        saved(shutil.copytree(tmp_path / "before", tmp_path / "counted"), SETTINGS[settings], 2, new)
    for first in range(len(log) - 8, len(log), 2):
        begun = shutil.copytree(tmp_path / "before", tmp_path / f"begun {first}")
        with interrupted(first, Killed, True), contextlib.suppress(Killed):
            saved(begun, SETTINGS[settings], 2, new)
        middle = found_or_none(begun)
        saved(shutil.copytree(begun, tmp_path / f"whole {first}"), OLD, 3, old)
        last = found(tmp_path / f"whole {first}")
        for second in range(3, 50, 13):
            directory = shutil.copytree(begun, tmp_path / f"{first} {second}")
            with interrupted(second, Killed, True), contextlib.suppress(Killed):
                saved(directory, OLD, 3, old)
            got = found_or_none(directory)
            assert got is None or [equal(got, model) for model in (middle, last) if model].count(True) == 1


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_what_is_renamed_is_on_the_disk(tmp_path: Path, old: int, new: int) -> None:
    """The order of calls: each file before its name, and names of the new model before those of the old one go."""
    saved(tmp_path, OLD, 1, old)
    with interrupted(None, Killed, True) as log:
        saved(tmp_path, SETTINGS["other"], 2, new)
    calls = [tuple(line.split(" ", 1)) for line in log]
    moved = [at for at, (call, _) in enumerate(calls) if call in ("replace", "rename")]
    for at in moved:
        assert ("fsync", calls[at][1]) in calls[:at]
    folder = [at for at, call in enumerate(calls) if call == ("fsync", tmp_path.name)]
    change = "partial-0.safetensors" if new == ONE else "partial-model.safetensors.index.json"
    at = calls.index(("replace", change))
    gone = calls.index(("unlink", "config.json"))
    for name in ("config.json", "generation_config.json"):
        assert calls.index(("fsync", f"partial-{name}")) < gone, "what takes room is there before the change"
    assert any(gone < k < at for k in folder), "no settings, and then other weights"
    assert max([k for k in moved if k < at], default=0) < max(k for k in folder if k < at)
    after = [k for k, call in enumerate(calls) if k > at and call[0] in ("replace", "unlink")]
    if (old, new) == (ONE, SEVERAL):
        assert calls[after[0]] == ("unlink", "model.safetensors")  # the change is here
        assert any(at < k < after[0] for k in folder)
        at = after[0]
        after = after[1:]
    assert any(at < k < after[0] for k in folder), "before the settings change, and the old files go"
    assert {file.name for file in tmp_path.iterdir()} >= {"config.json", "generation_config.json"}


def test_the_same_model_makes_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        saved(tmp_path / name, OLD, 1, SEVERAL)
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in "ab"]
    assert files[0] == files[1]
    assert len(files[0]) > 4


def test_links_are_replaced_not_followed(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    names = ["model.safetensors", "config.json", "partial-0.safetensors", "partial-config.json"]
    for name in names:
        (tmp_path / name).write_text(name)
        (directory / name).symlink_to(tmp_path / name)
    saved(directory, OLD, 1, ONE)
    assert all((tmp_path / name).read_text() == name for name in names)
    assert not any(file.is_symlink() for file in directory.iterdir())
    assert found(directory)[0] == OLD


def test_lazy_leaves_of_a_model_that_was_saved_over_say_so(tmp_path: Path) -> None:
    saved(tmp_path, OLD, 1, ONE)
    _, lazy = llama.hf.load(tmp_path)
    saved(tmp_path, OLD, 2, ONE)
    with pytest.raises(ValueError, match=r"model.safetensors: another file than when the model was opened; save to a"):
        ya.materialize(lazy)


def test_a_save_while_a_model_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of one model and weights of the other are never put together."""
    saved(tmp_path, OLD, 1, ONE)
    other = dataclasses.replace(OLD, rope_theta=5e5)  # of the same shapes
    scan = tree.scan_directory
    for config, text in ((other, "another model has been saved there while this one was opened"), (other, None)):
        monkeypatch.setattr(tree, "scan_directory", lambda root, of=config: (saved(root, of, 2, ONE), scan(root))[1])
        if text is None:
            assert llama.hf.load(tmp_path)[0] == other
        else:
            with pytest.raises(ValueError, match=text):
                llama.hf.load(tmp_path)


# ---- ranks


def save_where_rank_0_cannot(mesh: Any, directory: Path, after: int | None) -> str:
    """What the save raises, and then one that works, on the same mesh."""
    state = ya.init(llama.params(OLD), mesh=mesh, seed=1)
    add, count = Writer.add, itertools.count()

    def full(self: Writer, name: str, tensor: torch.Tensor) -> None:
        if next(count) == after:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, name, tensor)

    with mock.patch.object(Writer, "add", full), pytest.raises(OSError) as caught:
        llama.hf.save(directory, OLD, state.params)
    with pytest.raises(ValueError, match="max_shard_bytes: expected a positive number, got 0"):
        llama.hf.save(directory, OLD, state.params, max_shard_bytes=0)
    with pytest.raises(TypeError, match=r"embed_tokens.weight: cannot write torch.int8; expected one of"):
        llama.hf.save(directory.parent / "never", OLD, state.params, dtype=torch.int8)
    llama.hf.save(directory.parent / "works", OLD, state.params)
    return f"{type(caught.value).__name__} {caught.value}"


@pytest.mark.parametrize("world", [1, 2])
def test_a_failure_of_rank_0_is_every_rank_s(pools: Pools, world: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for text in pools[world].run(save_where_rank_0_cannot, tmp_path / "file", None):
        assert text.startswith("FileExistsError")
        assert str(tmp_path / "file") in text
    for text in pools[world].run(save_where_rank_0_cannot, tmp_path / "full", 5):
        assert text == "OSError [Errno 28] No space left on device"
    assert not list((tmp_path / "full").iterdir())
    assert llama.hf.load(tmp_path / "works")[0] == OLD


def test_the_names_that_are_looked_for_are_those_of_transformers() -> None:
    utils = pytest.importorskip("transformers.utils", reason="compares with transformers")
    assert model_folder.SINGLE == utils.SAFE_WEIGHTS_NAME
    assert model_folder.INDEX == utils.SAFE_WEIGHTS_INDEX_NAME
    assert settings.CONFIG == utils.CONFIG_NAME
    assert settings.GENERATION == utils.GENERATION_CONFIG_NAME
