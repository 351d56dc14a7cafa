"""pull_weights: what is asked for in vain, and files that are damaged or somebody else's."""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.harness.damage import byte_damage, json_damage
from tests.harness.small import model, one_rank
from tests.test_publish_weights import assert_same, empty_like, whole
from yafsdp_fn.publish_weights import STAMP, begin_of
from yafsdp_fn.util import disk


def published(folder: Path, version: int = 1) -> tuple[Path, Any]:
    """The one file of a run, and its state."""
    state = ya.init(model(), mesh=one_rank(), seed=1)
    ya.publish_weights(folder)(state.params, version)
    (path,) = folder.iterdir()
    return path, state


@pytest.mark.parametrize(
    "name, of, error, told",
    [
        ("layers.0.ups", torch.zeros(7, 5), ValueError, r"'layers.0.ups' is not in .*; of 12 leaves: layers\.0\.up, "),
        ("layers.0.up", torch.zeros(5, 7), ValueError, r"up in .* has shape \(7, 5\); the tensor for it has \(5, 7\)"),
        ("layers.0.up", (torch.zeros(5, 7), slice(0, 5)), ValueError, r"\(7, 5\), of which \(5, 5\) is asked for; "),
        ("head.norm", (torch.zeros(5), (slice(5), slice(5))), ValueError, r"has shape \(5,\), of which"),
        ("head.norm", torch.zeros(5, dtype=torch.int64), TypeError, "is torch.float32, and the tensor for it"),
        ("head.norm", (torch.zeros(3), slice(0, 5, 2)), TypeError, r"expected a tensor, or \(tensor, slices\)"),
        ("head.norm", (torch.zeros(5), 0), TypeError, r"expected a tensor, or \(tensor, slices\)"),
        ("head.norm", [1.0], TypeError, r"head\.norm: expected a tensor"),
    ],
)  # fmt: skip
def test_what_does_not_fit(name: str, of: Any, error: type[Exception], told: str, tmp_path: Path) -> None:
    published(tmp_path)
    kept = torch.zeros(11, 5)
    with pytest.raises(error, match=told):
        ya.pull_weights(tmp_path, {"embed.weight": kept, name: of})()
    assert not kept.any()  # nothing is copied before all is known to be there


def test_nobody_or_two_publish(tmp_path: Path) -> None:
    pull = ya.pull_weights(tmp_path / "none", {})
    with pytest.raises(TimeoutError, match=r"none: after 0\.05 s nobody has published there"):
        pull(timeout=0.05)
    (path, _), (other, _) = published(tmp_path / "a"), published(tmp_path / "b")
    other.rename(path.parent / other.name)
    with pytest.raises(TimeoutError, match="several runs publish there: give each a folder of its own"):
        ya.pull_weights(path.parent, {})(timeout=0.05)
    path, _ = published(tmp_path / "d", 4)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TimeoutError, match="version 4 is there, and cannot be"):
        patch.setattr(disk, "try_lock", lambda *_, **__: False)
        ya.pull_weights(path.parent, {})(timeout=0.05)
    path, _ = published(tmp_path / "c", 4)
    with pytest.raises(TimeoutError, match="version 5 is missing from rank 0 of 1, last 4"):
        ya.pull_weights(path.parent, {})(5, timeout=0)


def test_others_are_not_read(tmp_path: Path) -> None:
    path, _ = published(tmp_path / "run")
    magic, run, version, frozen, where, *head = STAMP.unpack(path.read_bytes()[: STAMP.size])
    content = path.read_bytes()[STAMP.size :]
    for stamp, told in (
        ((magic, run, version, frozen, where ^ 1, *head), "is another machine's, or of before this one was started"),
        ((magic, run + 1, version, frozen, where, *head), r"is damaged, or not from ya\.publish_weights"),
    ):
        path.write_bytes(STAMP.pack(*stamp) + content)
        with pytest.raises(ValueError, match=f"{path.name} {told}"):
            ya.pull_weights(tmp_path / "run", {})()
    moved = path.rename(tmp_path / "elsewhere")
    path.symlink_to(moved)
    with pytest.raises(OSError, match=path.name):
        ya.pull_weights(tmp_path / "run", {})()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="is no file of this user"):
        ya.pull_weights(tmp_path / "run", {})()
    path.unlink()
    path.write_bytes(b"\x80\x04".ljust(500, b"x"))
    with pytest.raises(ValueError, match=rf"{path.name} is damaged, or not from ya\.publish_weights"):
        ya.pull_weights(tmp_path / "run", {})()
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="is damaged: it has 0 bytes"):
        ya.pull_weights(tmp_path / "run", {})()


def test_damaged_heads_are_refused_or_harmless(tmp_path: Path) -> None:
    """Bytes are refused by their checksum; a head that a stranger has made gives no more than what lies in the file."""
    path, state = published(tmp_path)
    data = path.read_bytes()
    stamp = STAMP.unpack(data[: STAMP.size])
    head = data[STAMP.size : STAMP.size + stamp[5]]
    shards = data[begin_of(len(head)) :]
    outcomes, want = Counter[str](), whole(state)
    for number in range(300):
        rng = Random(number)
        text = json_damage(json.loads(head), rng)
        by_bytes = byte_damage(data[: begin_of(len(head))], rng) + shards
        by_hand = (STAMP.pack(*stamp[:5], len(text), zlib.crc32(text)) + text).ljust(
            begin_of(len(text)), b"\0"
        ) + shards
        path.write_bytes(by_bytes if number % 3 == 0 else by_hand)
        got = empty_like(want)
        try:
            ya.pull_weights(tmp_path, got)(timeout=0)
            outcomes["loaded"] += 1
            if number % 3 == 0:  # what lies behind the head, up to the shards
                assert_same(got, want)
        except (ValueError, TypeError) as error:
            assert str(tmp_path) in str(error) and len(str(error)) < 2000, error
            outcomes["damaged" if "is damaged" in str(error) else "does not fit"] += 1
        except TimeoutError:  # it is now of another version than its name says
            outcomes["late"] += 1
    assert outcomes.keys() >= {"loaded", "damaged", "does not fit"}
    path.write_bytes(data)
    got = empty_like(want)
    pull = ya.pull_weights(tmp_path, got)
    assert pull() == 1
    assert_same(got, want)
    path.write_bytes(data[:-100])
    with pytest.raises(ValueError, match=rf"{path.name} is damaged: "):
        ya.pull_weights(tmp_path, got)()
    path.write_bytes(b"")
    path.rename(tmp_path / path.name.replace(".1.", ".2."))
    with pytest.raises(ValueError, match=rf"{path.name[:16]}.* is damaged: it had {len(data):,} bytes, and has 0"):
        pull()
