"""Folders of checkpoints: complete or absent, whatever moment a run is killed at."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from yafsdp_fn.checkpoint import CheckpointError, folder, latest, load, load_params, steps
from yafsdp_fn.util import disk


def write(root: Path, step: int, keep: int | None = None, every: int | None = None, text: str = "") -> Path:
    target = folder.prepare(root, step)
    disk.write(target / "data", text.encode())
    return folder.publish(root, step, keep, every)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_publishing_makes_it_the_latest_and_keeps_the_newest(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    assert latest(root) is None
    assert steps(root) == []
    for step in (5, 10, 100):
        assert write(root, step, keep=2) == latest(root) == root / f"step-{step:08d}"
    assert names(root) == ["latest", "step-00000010", "step-00000100"]
    assert [path.name for path in folder.candidates(root, None)] == ["step-00000100", "step-00000010"]
    assert folder.candidates(root, 10) == [root / "step-00000010"]
    folder.prepare(root, 20)
    assert steps(root) == [10, 100]  # complete ones


def test_loading_without_a_state_says_what_to_give(tmp_path: Path) -> None:
    for load_it in (load, load_params):
        with pytest.raises(TypeError, match=r"like= is missing.*like=ya\.init\(params, tx, mesh=mesh\)"):
            load_it(tmp_path)


def test_what_is_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    assert sorted(folder.complete(tmp_path)) == [1, 2, 3], "all, if nothing is said"
    for step in (4, 5, 6):
        write(tmp_path, step, keep=2, every=2)
    assert sorted(folder.complete(tmp_path)) == [2, 4, 5, 6]


def test_after_a_resume_from_an_earlier_step_its_own_come_first(tmp_path: Path) -> None:
    for step in (2, 4, 6, 3):
        write(tmp_path, step)
    order = [int(path.name[-1]) for path in folder.candidates(tmp_path, None)]
    assert order == [3, 2, 6, 4]


def test_those_of_an_abandoned_run_are_none_of_the_newest(tmp_path: Path) -> None:
    """A run that went back to step 4 keeps its own, and deletes no later ones before it has passed them."""
    for step in (2, 4, 6, 8):
        write(tmp_path, step)
    for step, keep, kept in ((5, 2, [4, 5, 6, 8]), (7, 2, [5, 7, 8]), (9, 2, [7, 9]), (10, 9, [7, 9, 10])):
        write(tmp_path, step, keep)
        assert sorted(folder.complete(tmp_path)) == kept


def test_what_others_put_there_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, 3, text="x")
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000003.bak")
    (tmp_path / "step-mine.partial").mkdir()
    (tmp_path / "notes.partial").write_text("")
    (tmp_path / "step-00000009").symlink_to(tmp_path / "step-00000003")
    write(tmp_path, 4, keep=1)
    assert names(tmp_path) == [
        *("latest", "notes.partial", "step-00000003.bak", "step-00000004", "step-00000009", "step-mine.partial")
    ]


class Killed(BaseException):
    pass


CALLS = ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"))


def killed_at(call: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the calls of the file system that change something fail from number `call` on, each before it acts."""
    seen = 0

    def wrap(real: Any) -> Any:
        def instead(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen > call:
                raise Killed
            return real(*args, **kwargs)

        return instead

    for module, name in CALLS:
        monkeypatch.setattr(module, name, wrap(getattr(module, name)))


@pytest.mark.parametrize("step", [5, 6], ids=["the same step again", "the next step"])
@pytest.mark.parametrize("keep", [1, None])
def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path: Path, step: int, keep: int | None) -> None:
    outcomes = set()
    for call in range(100):
        root = tmp_path / str(call)
        write(root, 5, text="old")
        with pytest.MonkeyPatch.context() as monkeypatch:
            killed_at(call, monkeypatch)
            try:
                write(root, step, keep, text="new")
                done = True
            except Killed:
                done = False
        found = folder.candidates(root, None)
        text = (found[0] / "data").read_text()
        assert text in ("old", "new"), call
        outcomes.add(text)
        if done:
            break
        write(root, 7, keep=1, text="next")  # the run goes on as if nothing had been
        assert names(root) == ["latest", "step-00000007"], call
    assert done
    assert call > 7
    assert outcomes == {"old", "new"}


def test_what_is_not_there_is_answered_with_what_is(tmp_path: Path) -> None:
    write(tmp_path, 5)
    for root, step, said in (
        (tmp_path / "nowhere", None, r"nowhere: expected a complete checkpoint, found no checkpoint"),
        (tmp_path, 9, r"expected step-00000009, found step-00000005"),
    ):
        with pytest.raises(CheckpointError, match=said):
            folder.candidates(root, step)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"step-00000006", "names step 6, which is not there"),
        (b"../step-00000005", "is damaged"),
        (b"", "is damaged"),
        (b"\xff", "is damaged"),
        (b"step-00000001 5d0a4d06", "is damaged"),
    ],
)
def test_a_marker_that_points_nowhere_is_passed_over(tmp_path: Path, text: bytes, what: str) -> None:
    write(tmp_path, 1)
    write(tmp_path, 5)
    (tmp_path / "latest").write_bytes(text)
    with pytest.warns(UserWarning, match=rf"latest {what}; the newest is step-00000005"):
        assert latest(tmp_path) == tmp_path / "step-00000005"


def test_no_flipped_bit_of_the_marker_leads_elsewhere(tmp_path: Path) -> None:
    for step in (*range(1, 10), 3):
        write(tmp_path, step)
    marker = tmp_path / "latest"
    text = marker.read_bytes()
    assert latest(tmp_path) == tmp_path / "step-00000003"
    for bit in range(8 * len(text)):
        marker.write_bytes(bytes(byte ^ (1 << bit % 8) * (bit // 8 == i) for i, byte in enumerate(text)))
        with warnings.catch_warnings(record=True) as caught:
            assert latest(tmp_path) == tmp_path / "step-00000003" or caught, bit


def test_a_name_written_by_hand_is_taken(tmp_path: Path) -> None:
    for step in (1, 5):
        write(tmp_path, step)
    (tmp_path / "latest").write_text("step-00000001\n")
    assert latest(tmp_path) == tmp_path / "step-00000001"
