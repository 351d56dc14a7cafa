"""Folders of checkpoints: complete or absent, and errors that name the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from yafsdp_fn.checkpoint import CheckpointError, folder, latest


def write(root: Path, step: int, keep: int | None = None) -> Path:
    folder.prepare(root, step)
    (folder.partial(root, step) / "data").write_bytes(bytes(step))
    return folder.commit(root, step, {"step": step}, keep)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_commit_makes_it_the_latest_and_keeps_the_newest(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    assert latest(root) is None
    for step in (5, 10, 100):
        assert write(root, step, keep=2) == latest(root) == root / f"step-{step:08d}"
    assert names(root) == ["latest", "step-00000010", "step-00000100"]
    assert folder.read_manifest(root / "step-00000100")["files"] == {"data": 100}
    assert folder.find(root, None).name == "step-00000100"
    assert folder.find(root, 10).name == "step-00000010"


def test_without_keep_all_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000002", "step-00000003"]


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 3)
    (tmp_path / "step-00000003" / "data").write_bytes(b"other length")
    write(tmp_path, 3)
    assert folder.read_manifest(tmp_path / "step-00000003")["files"] == {"data": 3}


def test_an_interrupted_save_leaves_the_last_complete_one_and_is_swept_later(tmp_path: Path) -> None:
    write(tmp_path, 5)
    folder.prepare(tmp_path, 6)  # killed before commit
    (folder.partial(tmp_path, 6) / "data").write_bytes(b"half")
    assert folder.find(tmp_path, None).name == "step-00000005"
    assert [path.name for path in folder.complete(tmp_path)] == ["step-00000005"]
    write(tmp_path, 7)
    assert names(tmp_path) == ["latest", "step-00000005", "step-00000007"]


def test_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: expected a complete checkpoint, found no checkpoint"):
        folder.find(tmp_path / "nowhere", None)


def test_a_step_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    write(tmp_path, 5)
    with pytest.raises(CheckpointError, match=r"expected step-00000009, found step-00000005"):
        folder.find(tmp_path, 9)


def test_a_marker_that_points_nowhere(tmp_path: Path) -> None:
    write(tmp_path, 5)
    (tmp_path / "latest").write_text("step-00000006")
    with pytest.raises(CheckpointError, match=r"latest names step-00000006, which is not there; .*: step-00000005"):
        folder.find(tmp_path, None)


def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path) -> None:
    where = write(tmp_path, 500)
    (where / "data").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"data is truncated or changed: 5 bytes, written with 500"):
        folder.read_manifest(where)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    where = write(tmp_path, 500)
    (where / "data").unlink()
    with pytest.raises(CheckpointError, match=r"data is missing; it was written with 500 bytes"):
        folder.read_manifest(where)


@pytest.mark.parametrize("text", ['{"format": 1, "files"', "{}", ""])
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    where = write(tmp_path, 5)
    (where / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged .*; use an earlier checkpoint"):
        folder.read_manifest(where)


def test_a_missing_manifest_is_named(tmp_path: Path) -> None:
    where = write(tmp_path, 5)
    (where / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing: .* is not a complete checkpoint"):
        folder.read_manifest(where)


def test_another_format_is_refused(tmp_path: Path) -> None:
    where = write(tmp_path, 5)
    path = where / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="format 2, this version of yafsdp_fn reads format 1"):
        folder.read_manifest(where)
