"""publish_weights and pull_weights: another process gets what unshard gives, all of one step, whoever ends."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import yafsdp_fn as ya
from tests.harness import forked
from tests.harness.pool import Pool
from tests.harness.small import batch, loss, model, param
from tests.stages.states import scattered
from tests.test_named_weights import params
from yafsdp_fn.publish_weights import boxes
from yafsdp_fn.util import disk

TX = ya.optim.adamw(1e-2)


def whole(state: Any) -> dict[str, Tensor]:
    """The oracle: whole tensors of `unshard`, a layer each, under the names of `named_weights`."""
    names, tree = [name for name, _ in ya.named_weights(state.params)], ya.params.without_markers(ya.unshard(state))
    out = {}
    for name in names:
        path, layer, leaf = [], None, tree
        for part in name.split("."):
            path.append(part)
            if part.isdigit() and layer is None:
                layer = int(part)
            else:
                leaf = leaf[part] if isinstance(leaf, dict) else getattr(leaf, part)
        out[name] = leaf if layer is None else leaf[layer]
    return out


def empty_like(weights: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {name: torch.full_like(weight, 9.0, dtype=dtype) for name, weight in weights.items()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, weight in want.items():
        assert torch.equal(got[name], weight), name


# ---- boxes


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 1, 3), (3, 2, 4), (2, 0, 3)])
def test_boxes_are_a_range_and_nothing_else(shape: tuple[int, ...]) -> None:
    leaf = torch.arange(int(np.prod(shape))).view(shape)
    for low, high in itertools.combinations_with_replacement(range(leaf.numel() + 1), 2):
        found = list(boxes(shape, low, high))
        parts = [leaf[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].flatten() for box in found]
        assert torch.equal(torch.cat([torch.arange(0), *parts]), torch.arange(low, high))
        assert len(found) <= max(2 * len(shape) - 1, 1)


# ---- on ranks


def steps(mesh: Any, folder: str) -> list[int]:
    """Pulls whole leaves, columns and fused rows after each of three steps; returns bytes of each pull."""
    state, step = ya.init(model(), TX, mesh=mesh, seed=1), ya.train_step(loss, TX)
    publish, narrow = ya.publish_weights(f"{folder}/all"), ya.publish_weights(f"{folder}/bf16", dtype=torch.bfloat16)
    want = whole(state)
    got, halves, fused = empty_like(want), empty_like(want, torch.bfloat16), torch.zeros(9, 7 + 11)
    pull = ya.pull_weights(f"{folder}/all", got)
    into: dict[str, Any] = {
        "layers.1.up": (fused[:, :7].t()[:, 2:6], (slice(None), slice(1, 5))),  # columns, transposed
        "layers.2.down": (fused[4:6, 7:14], slice(2, 4)),
        "head.weight": (fused[:5, 7:].t()[-3:], slice(-3, None)),
    }
    parts, read = ya.pull_weights(f"{folder}/all", into), []
    bf16 = ya.pull_weights(f"{folder}/bf16", halves)
    for _ in range(3):
        state, _ = step(state, batch())
        publish(state.params, state.step)
        narrow(state.params, state.step)
        want = whole(state)
        if mesh.get_rank() == mesh.size() - 1:
            assert pull(state.step) == parts(state.step) == bf16(state.step) == state.step
            assert_same(got, want)
            assert_same(halves, {name: weight.bfloat16() for name, weight in want.items()})
            expected = torch.zeros_like(fused)
            expected[2:6, :7] = want["layers.1.up"][:, 1:5].t()
            expected[4:6, 7:14] = want["layers.2.down"][2:4]
            expected[:5, 15:] = want["head.weight"][-3:].t()
            assert torch.equal(fused, expected)
            read.append((pull.nbytes, bf16.nbytes, parts.nbytes))
            assert pull() == state.step and pull.nbytes == 0  # once
        if mesh.size() > 1:
            dist.barrier()
    elements = sum(weight.numel() for weight in want.values())
    assert all(each == (4 * elements, 2 * elements, 4 * (28 + 14 + 15)) for each in read)
    return read


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_reader_has_the_bits_of_each_step(pools: dict[int, Pool], world: int, tmp_path: Path) -> None:
    assert len(pools[world].run(steps, str(tmp_path))[-1]) == 3
    for kind in ("all", "bf16"):  # two versions of each rank, and nothing else
        assert len(list((tmp_path / kind).iterdir())) == 2 * world


def every_kind(mesh: Any, folder: str, case: str) -> None:
    """Published and pulled, on other meshes and of other trees."""
    tree: Any = params()
    axes: dict[str, int] = {"shard": -1}
    stages = None
    if case == "axes":
        layer = {
            "rows": ya.Param((3, 4, 5), split={"tensor": -2}),
            "qkv": ya.Param((3, 12, 5), split={"tensor": (-2, 3)}),
            "columns": ya.Param((3, 5, 8), split={"tensor": (-1, 2)}),
            "norm": ya.Pinned(ya.Param((3, 6), split={"tensor": -1})),
            "alike": param(3, 3),
        }
        tree, axes = {"layers": ya.Stacked(layer), "table": ya.Param((3, 6), split={"tensor": -1})}, {"tensor": 2}
    elif case == "stages":
        axes = {"stage": 2}
        stages = scattered(len(ya.init(tree, mesh=mesh).memory.units), 2)
    elif case == "replicas":
        axes = {"replicate": 2}
    elif case == "lora":
        tree = ya.lora({"layers": ya.Stacked({"w": param(4, 3, 5)})}, rank=2)
    here = ya.mesh(device="cpu", **axes)
    state = ya.init(tree, mesh=here, seed=1, stages=stages)
    ya.publish_weights(folder)(state.params, 0)
    want = whole(state) if case != "lora" else lora_leaves(state)
    got = empty_like(want)
    ya.pull_weights(folder, got)()
    assert_same(got, want)
    if case == "lora":
        sums, factor = dict(ya.named_weights(state.params)), ya.unshard(state)["layers"]["w"].factor
        for name, merged in sums.items():  # by the reader
            low = got[f"{name}.b"] @ got[f"{name}.a"]
            assert torch.equal(torch.add(got[f"{name}.weight"], low, alpha=factor), merged)


def lora_leaves(state: Any) -> dict[str, Tensor]:
    weights = ya.params.without_markers(ya.unshard(state))["layers"]["w"]
    parts = {"weight": weights.weight, "a": weights.a, "b": weights.b}
    return {f"layers.{layer}.w.{name}": leaf[layer] for name, leaf in parts.items() for layer in range(4)}


@pytest.mark.parametrize(
    "world, case", [(3, "plain"), (2, "axes"), (4, "axes"), (2, "stages"), (4, "replicas"), (2, "lora")]
)
def test_any_layout_is_pulled(pools: dict[int, Pool], world: int, case: str, tmp_path: Path) -> None:
    pools[world].run(every_kind, str(tmp_path / "all"), case)
    assert len({path.name.split("-of-")[1][0] for path in (tmp_path / "all").glob("*-of-*")}) == 1


# ---- a generator, and what ends


def generator(folder: str, result: str, last: int) -> None:
    """A process of its own: pulls whatever is newest, in place, until the last step; saves all that it had."""
    tensors = empty_like(whole(ya.init(model())))
    pull, had, version = ya.pull_weights(folder, tensors), {}, -1
    while version < last:
        version = pull(version + 1, timeout=60)
        had[version] = {name: tensor.clone() for name, tensor in tensors.items()}
    torch.save(had, result)


def trainer(mesh: Any, folder: str, last: int) -> dict[int, dict[str, Tensor]]:
    state, step, had = ya.init(model(), TX, mesh=mesh, seed=1), ya.train_step(loss, TX), {}
    publish = ya.publish_weights(folder)
    while state.step < last:
        state, _ = step(state, batch(state.step))
        publish(state.params, state.step)
        had[state.step] = whole(state)
    return had


def test_a_generator_beside_the_trainer_never_sees_half_a_step(pools: dict[int, Pool], tmp_path: Path) -> None:
    process = forked.context().Process(target=generator, args=(f"{tmp_path}/run", f"{tmp_path}/had", 30), daemon=True)
    process.start()
    want = pools[2].run(trainer, f"{tmp_path}/run", 30)[0]
    process.join(60)
    assert process.exitcode == 0
    had = torch.load(tmp_path / "had")
    assert list(had)[-1] == 30 and sorted(had) == list(had)
    for version, tensors in had.items():
        assert_same(tensors, want[version])


def killed(folder: str) -> None:
    """Publishes two versions, and is killed while it writes the third, over the file of the first."""
    state = ya.init(model(), mesh=ya.mesh(device="cpu"), seed=1)
    publish = ya.publish_weights(folder)
    publish(state.params, 1)
    optree.tree_map_(lambda leaf: leaf.add_(1), state.params)
    publish(state.params, 2)
    optree.tree_map_(lambda leaf: leaf.add_(1), state.params)
    release = disk.release

    def die(stream: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        release(stream)

    disk.release = die
    publish(state.params, 3)


def test_a_killed_trainer_leaves_its_last_whole_version(tmp_path: Path) -> None:
    process = forked.context().Process(target=killed, args=(str(tmp_path),), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert sum(path.suffix == ".partial" for path in tmp_path.iterdir()) == 1
    state = ya.init(model(), mesh=ya.mesh(device="cpu"), seed=1)
    optree.tree_map_(lambda leaf: leaf.add_(1), state.params)
    want = whole(state)
    got = empty_like(want)
    pull = ya.pull_weights(tmp_path, got)
    assert pull() == 2
    assert_same(got, want)
    with pytest.raises(TimeoutError, match=r"version 3 is missing from rank 0 of 1, last 2\. It has ended"):
        pull(3, timeout=0.05)
    assert_same(got, want)
    # a new run begins at an earlier step, and clears the folder
    optree.tree_map_(lambda leaf: leaf.mul_(2), state.params)
    ya.publish_weights(tmp_path)(state.params, 1)
    assert len(list(tmp_path.iterdir())) == 1 and pull() == 1
    assert_same(got, whole(state))


def one_is_late(mesh: Any, folder: str) -> str:
    """Rank 1 ends after the first version."""
    state = ya.init(model(), mesh=mesh, seed=1)
    publish = ya.publish_weights(folder)
    publish(state.params, 1)
    dist.barrier()
    want = whole(state)
    optree.tree_map_(lambda leaf: leaf.add_(1), state.params)
    if mesh.get_rank() == 1:
        return ""
    publish(state.params, 2)
    got = empty_like(want)
    pull = ya.pull_weights(folder, got)
    assert pull() == 1  # the newest that is whole
    assert_same(got, want)
    with pytest.raises(TimeoutError) as error:
        pull(2, timeout=0.05)
    assert_same(got, want)
    return str(error.value)


def test_a_rank_that_does_not_publish_is_named(pools: dict[int, Pool], tmp_path: Path) -> None:
    said, _ = pools[2].run(one_is_late, str(tmp_path))
    assert "after 0.05 s version 2 is missing from rank 1 of 2, last 1. It has ended" in said


def holds(path: str, pipe: Any) -> None:
    stream = disk.opened(Path(path))
    assert disk.try_lock(stream, shared=True)
    pipe.send("locked")
    time.sleep(600)


def test_a_reader_keeps_its_version_and_nobody_waits(tmp_path: Path) -> None:
    state = ya.init(model(), mesh=ya.mesh(device="cpu"), seed=1)
    publish = ya.publish_weights(tmp_path)
    publish(state.params, 1)
    (first,) = tmp_path.iterdir()
    ours, theirs = forked.context().Pipe()
    process = forked.context().Process(target=holds, args=(str(first), theirs), daemon=True)
    process.start()
    assert ours.recv() == "locked"
    kept, content = disk.opened(first), first.read_bytes()
    for version in (2, 3):
        publish(state.params, version)
    assert kept.read() == content and not first.exists()  # a new file in its place
    inodes = {path.stat().st_ino for path in tmp_path.iterdir()}
    process.kill()
    process.join()
    for version in (4, 5):
        publish(state.params, version)
    assert {path.stat().st_ino for path in tmp_path.iterdir()} == inodes  # used again
    second = disk.opened(min(tmp_path.iterdir()))
    assert disk.try_lock(second, shared=True)
    second.close()  # as the end of the process does
    publish(state.params, 6)
    assert {path.stat().st_ino for path in tmp_path.iterdir()} == inodes


def test_a_disk_that_was_full_is_published_to_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = ya.init(model(), mesh=ya.mesh(device="cpu"), seed=1)
    publish, want = ya.publish_weights(tmp_path), whole(state)
    for version in (1, 2):
        publish(state.params, version)
    held = disk.opened(min(tmp_path.iterdir()))
    assert disk.try_lock(held, shared=True)  # so that version 3 needs a file of its own

    def full(stream: Any, size: int) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match=r"No space left on device; [\d,]+ bytes"):
        patched.setattr(disk, "room", full)
        publish(state.params, 3)
    got = empty_like(want)
    assert ya.pull_weights(tmp_path, got)() == 2
    for version in (4, 5):
        publish(state.params, version)
    assert ya.pull_weights(tmp_path, got)() == 5 and len([*tmp_path.iterdir()]) == 2
    assert_same(got, want)


def test_frozen_leaves_are_written_once(tmp_path: Path) -> None:
    described = model()
    state = ya.init(described._replace(embed=ya.frozen(described.embed)), TX, mesh=ya.mesh(device="cpu"), seed=1)
    publish, step, want = ya.publish_weights(tmp_path), ya.train_step(loss, TX), whole(state)
    got, late = empty_like(want), empty_like(want)
    pull, everything, frozen = ya.pull_weights(tmp_path, got), 4 * sum(w.numel() for w in want.values()), 4 * 11 * 5
    for version, changed in enumerate([True, False, False, False, True, False, False], 1):
        state, _ = step(state, batch(version))
        if version == 5:
            (leaf,) = optree.tree_leaves(state.params.embed)
            leaf.add_(1)
        publish(state.params, version)
        assert pull() == version and pull.nbytes == everything - (0 if changed else frozen)
        assert_same(got, whole(state))
        names = sorted(path.name.partition(".")[2] for path in tmp_path.glob("*.frozen"))
        assert names == [f"{n}.0-of-1.frozen" for n in ([1] if version < 5 else [1, 5] if version == 5 else [5])]
    ya.pull_weights(tmp_path, late)()
    assert_same(late, whole(state))


@pytest.mark.parametrize(
    ("published", "fails", "call"),
    [(1, (disk, "room"), 1), (1, (torch, "frombuffer"), 3), (2, (torch, "frombuffer"), 2)],
)
def test_a_version_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: int, fails: tuple[Any, str], call: int
) -> None:
    """Its frozen leaves, which had changed and are written first, go with it: where there is no room for the others,
    and where these have been begun, in a new file and over the oldest one."""
    described = model()
    state = ya.init(described._replace(embed=ya.frozen(described.embed)), mesh=ya.mesh(device="cpu"), seed=1)
    publish, got, calls = ya.publish_weights(tmp_path), empty_like(whole(state)), itertools.count()
    for version in range(published):
        publish(state.params, version)
    there = {path.name for path in tmp_path.iterdir()}
    optree.tree_leaves(state.params.embed)[0].add_(1)
    works = getattr(*fails)

    def failing(*args: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return works(*args, **options)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left on device"):
        patched.setattr(*fails, failing)
        publish(state.params, 3)
    assert next(calls) == call + 1
    assert {path.name for path in tmp_path.iterdir()} <= there
    assert ya.pull_weights(tmp_path, got)() == published - 1
    for version in (4, 5):
        publish(state.params, version)
        assert ya.pull_weights(tmp_path, got)() == version
        assert_same(got, whole(state))
    names = sorted(path.name.partition(".")[2] for path in tmp_path.iterdir())
    assert names == ["4.0-of-1", "4.0-of-1.frozen", "5.0-of-1"]


# ---- what is refused


def test_what_cannot_be_published(tmp_path: Path) -> None:
    state = ya.init(model(), mesh=ya.mesh(device="cpu"))
    publish = ya.publish_weights(tmp_path / "run")
    with pytest.raises(
        TypeError, match=r"publish_weights: expected a sharded tree such as state\.params, got one with"
    ):
        publish({"w": torch.zeros(2)}, 1)
    publish(state.params, 3)
    for version, told in ((3, "above 3, the last one"), (2, "above 3"), (True, "above 3"), (4.0, "above 3")):
        with pytest.raises(ValueError, match=f"expected an integer {told}"):
            publish(state.params, version)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="version -1: expected an integer of at least 0"):
        ya.publish_weights(tmp_path)(state.params, -1)
    wide = optree.tree_map(lambda leaf: torch.stack([leaf, leaf]), state.params)
    with pytest.raises(
        ValueError, match=r"publish_weights: embed has a leaf torch\.float32 \(2, .*\), expected a local shard"
    ):
        publish(wide, 4)
    publish(state.params, 5)
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    with pytest.raises(RuntimeError, match=r"3\.0-of-1 has been removed: another run publishes there"):
        publish(state.params, 6)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        ya.publish_weights(tmp_path / "file")(state.params, 1)


def unlike(mesh: Any, folder: str) -> None:
    state = ya.init(model(), mesh=mesh)
    with pytest.raises(ya.errors.RanksDisagree, match=r"ranks disagree on what is published; version differs"):
        ya.publish_weights(folder)(state.params, mesh.get_rank())


def test_ranks_begin_alike(pools: dict[int, Pool], tmp_path: Path) -> None:
    pools[2].run(unlike, str(tmp_path))
