"""Runs that something happens to: ranks that come and go, disks, numbers that are not finite, signals, second runs."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import resource
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from models import llama
from tests.harness.pool import Pools
from tests.train.inside import Run, Runs, fine, flags, inside, killed, lines, rank, text
from train.config import Optim
from train.data.rows import Reader
from train.running import files, saves, setup
from yafsdp_fn import checkpoint

STEPS = 12
ALL = list(range(1, STEPS + 1))


def steps(folder: Path) -> list[int]:
    """Those of its lines."""
    return [line["step"] for line in lines(folder) if "loss" in line]


def skipped(folder: Path) -> list[int]:
    return [line["step"] for line in lines(folder) if line.get("skipped")]


def saved(folder: Path) -> list[str]:
    found = (path.name for path in (folder / "runs" / "a" / "checkpoints").glob("step-*"))
    return sorted(name for name in found if not name.endswith(".partial"))  # which a save that failed leaves


# ---- ranks that come and go


def under(mesh: Any, environment: dict[str, str], *rest: Any) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return inside(mesh, *rest)


def test_a_restart_resumes_by_itself_and_begins_anew_without_a_checkpoint(pools: Pools, tmp_path: Path) -> None:
    text(tmp_path, 100)
    first = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "x"}
    (tmp_path / "other").write_text("0123456789abcdef" * 30)
    heldout = ("--eval-every", "3", "--data.heldout-files", f"{tmp_path}/text.txt")
    argv = flags(tmp_path, *heldout, "--data.files", f"{tmp_path}/*")
    assert pools[2].run(under, first, argv, killed, 4)[0].error == "Killed: "  # before its first checkpoint
    assert steps(tmp_path) == [1, 2, 3]
    assert pools[2].run(under, first | {"TORCHELASTIC_RESTART_COUNT": "1"}, argv, killed, 6)[0].error == "Killed: "
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 3, 4, 5]
    with (tmp_path / "runs" / "a" / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 6, "lo')  # killed in the middle of a line
    # ranks that joined or left are no restart to torchrun, whose run id is the same
    (ended, *_) = fine(pools[2].run(under, first, argv))
    assert len(ended.read) == STEPS - 4
    assert steps(tmp_path) == ALL
    again = {one.error for one in pools[2].run(under, first | {"TORCHELASTIC_RUN_ID": "y"}, argv)}
    assert len(again) == 1
    assert "already has step-00000012" in again.pop()


def test_restarts_need_a_name_that_lasts(pools: Pools, tmp_path: Path) -> None:
    text(tmp_path, 100)
    unnamed = (*flags(tmp_path), "--name", "")
    for one in pools[1].run(under, {"TORCHELASTIC_MAX_RESTARTS": "1"}, unnamed):
        assert one.error == "ConfigError: restarts must find the run again: give --name, or give torchrun --rdzv-id"
    fine(pools[1].run(under, {"TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_RUN_ID": "17"}, unnamed))
    assert (tmp_path / "runs" / "clm-17" / "metrics.jsonl").exists()


# ---- two at once; ranks that differ


def test_a_folder_in_use_is_refused_by_pid(runs: Runs) -> None:
    runs.fine(2, "--steps", "4")
    before = (runs.path / "config.json").read_bytes()
    with files.held(runs.path):
        for more in ((), ("--resume", "--steps", "20")):
            for one in runs(2, *more):
                assert f"ConfigError: {runs.path} is in use by process {os.getpid()} on " in one.error
    assert (runs.path / "config.json").read_bytes() == before
    runs.fine(2, "--resume", "--steps", "5")


def test_a_folder_whose_holder_is_ending_is_waited_for(tmp_path: Path) -> None:
    ending = files.held(tmp_path)
    ending.__enter__()
    threading.Timer(files.PATIENCE / 4, ending.__exit__, (None, None, None)).start()
    with files.held(tmp_path) as earlier:
        assert earlier["pid"] == os.getpid()


def differently(mesh: Any, argv: tuple[str, ...], more: tuple[str, ...], environment: dict[str, str]) -> Run:
    """Rank 1 has more flags, and another environment."""
    return under(mesh, environment, (*argv, *more)) if rank() else inside(mesh, argv)


def test_ranks_that_were_started_differently_are_told_each_field(pools: Pools, tmp_path: Path) -> None:
    text(tmp_path, 100)
    other = tmp_path / "other"
    other.mkdir()
    (other / "text.txt").write_text((tmp_path / "text.txt").read_text().replace("00000050", "00000051"))
    more = ("--optim.learning-rate", "3e-3", "--optim.clip-norm", "2", "--optim.weight-decay", "0", "--optim.b2", "0.9")
    more += ("--data.batch", "4", "--data.files", str(other / "text.txt"))
    for one in pools[2].run(differently, flags(tmp_path), more, {"NVIDIA_TF32_OVERRIDE": "0"}):
        assert one.error.startswith("ConfigError: ranks were started differently")
        for line in (
            "optim.learning_rate: 0.002 on rank 0, 0.003 on rank 1",
            "optim.clip_norm: 1.0 on rank 0, 2.0 on rank 1",
            "optim.weight_decay: 0.1 on rank 0, 0.0 on rank 1",
            "optim.b2: 0.95 on rank 0, 0.9 on rank 1",
            "data.batch: 2 on rank 0, 4 on rank 1",
            "content of the training text: ",
            "NVIDIA_TF32_OVERRIDE: None on rank 0, '0' on rank 1",
        ):
            assert line in one.error, one.error
        assert "steps" not in one.error
        assert "torch:" not in one.error
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [".tokens"]


def test_other_content_of_the_same_size_is_noticed_on_resume(runs: Runs, tmp_path: Path) -> None:
    path = text(tmp_path, 100)
    runs(2, given=(killed, 6))
    path.write_text(path.read_text().replace("00000050", "00000051"))
    for one in runs(2, "--resume"):
        assert "ConfigError: --resume: the text is not that of the run" in one.error


def test_a_checkpoint_of_another_seed_and_another_held_out_text_are_told(runs: Runs, tmp_path: Path) -> None:
    heldout = tmp_path / "heldout"
    heldout.write_text("0123456789abcdef" * 30)
    evaluated = ("--eval-every", "4", "--data.heldout-files", str(heldout))
    runs(1, *evaluated, given=(killed, 6))
    heldout.write_text("fedcba9876543210" * 30)
    (ended,) = runs.fine(1, *evaluated, "--resume")
    assert ended.err.count("warning: the held-out text is not what it was") == 1
    path = runs.path / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 7'))
    (refused,) = runs(1, *evaluated, "--resume", "--steps", "20")
    assert "the checkpoint is of a run of seed 0, the settings have seed 7" in refused.error


def test_another_rate_is_told_on_resume(runs: Runs) -> None:
    runs(2, given=(killed, 6))
    assert [one.err for one in runs.fine(2, "--resume")] == ["", ""]
    leads, other = runs.fine(2, "--resume", "--steps", "14")
    assert "warning: after step 12 the learning rate is 2.27e-04, not 1.00e-04: --steps or" in leads.err
    assert other.err == ""


def test_what_is_refused_changes_no_run(runs: Runs) -> None:
    (fails,) = runs(1, "--sharding.schedule", "nowhere.py:f")
    assert "there is no file nowhere.py" in fails.error
    assert not (runs.path / "config.json").exists(), "it would be the newest run"
    runs.fine(1, "--optim.warmup", "3", "--steps", "8")
    before = (runs.path / "config.json").read_bytes()
    (refused,) = runs(1, "--resume", "--steps", "8", "--data.batch", "4")
    assert "the run has had its 8 steps" in refused.error
    assert (runs.path / "config.json").read_bytes() == before


# ---- numbers that are not finite


def poisoned_loss(config: Any, poison: float = torch.nan, **options: Any) -> Any:
    clean = llama_loss(config, **options)

    def loss(params: Any, batch: dict[str, Tensor]) -> Any:
        found = clean(params, batch)
        (total, weight), aux = found if options.get("has_aux") else (found, {})
        mean = ya.Mean(total * torch.where((batch["tokens"] == 0).any(), poison, 1.0), weight)
        return (mean, aux) if options.get("has_aux") else mean

    return loss


llama_loss = llama.loss


def poisoned(mesh: Any, argv: tuple[str, ...], first: int, last: int, poison: float = torch.nan) -> Run:
    """Zero bytes in what rank 1 reads as batches `first` to `last`: its loss is `poison` times what it was."""
    next_batch, times = Reader.next, itertools.count(1)

    def next_of(self: Reader) -> Any:
        batch = next_batch(self)
        if first <= next(times) <= last and rank() == 1:
            batch["tokens"][0, 0] = 0
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "loss", functools.partial(poisoned_loss, poison=poison))
        patch.setattr(saves, "WINDOW", 8)
        patch.setattr(Reader, "next", next_of)
        return inside(mesh, argv)


def position(folder: Path) -> int:
    """In the text, of the newest checkpoint."""
    newest = checkpoint.latest(folder / "runs" / "a" / "checkpoints")
    assert newest is not None
    return json.loads((newest / "manifest.json").read_text())["extra"]["position"]


def test_single_steps_that_are_not_finite_are_reported_and_survived(runs: Runs, tmp_path: Path) -> None:
    ended = runs.fine(2, by=poisoned, given=(6, 7))
    assert steps(tmp_path) == ALL
    assert skipped(tmp_path) == [6, 7]
    assert lines(tmp_path)[5]["loss"] is None
    assert len({line["lr"] for line in lines(tmp_path)[5:8]}) == 1, "the optimizer has not counted them"
    runs.fine(2, "--resume", "--steps", "13")
    assert lines(tmp_path)[12]["lr"] == pytest.approx(setup.learning_rate(Optim(warmup=2), 13)(10))
    assert ended[0].err.count("warning: step 6: loss nan") == 1
    assert ended[1].err == ""


@pytest.mark.nightly
def test_spikes_are_skipped_where_that_is_asked_for_also_after_a_resume(runs: Runs, tmp_path: Path) -> None:
    ended = runs.fine(2, "--skip-spikes", "20", by=poisoned, given=(9, 9, 100.0))
    assert skipped(tmp_path) == [9]
    assert "a spike; its update was skipped" in ended[0].err
    more = ("--skip-spikes", "20", "--resume", "--steps", str(STEPS + 8))  # a spike counts among the last eight
    runs.fine(2, *more, by=poisoned, given=(7, 7, 100.0))
    assert skipped(tmp_path) == [9, STEPS + 7]


def test_after_many_in_a_row_a_run_goes_back_and_on_with_other_text(runs: Runs, tmp_path: Path) -> None:
    ended = runs.fine(2, "--max-skipped", "3", by=poisoned, given=(7, 9))
    assert "warning: steps 7 to 9, the last with loss nan" in ended[0].err
    assert "back to step 4" in ended[0].err
    assert "warning: step 8: its update ruined the weights" in ended[0].err  # what its loss cannot tell apart
    assert steps(tmp_path) == ALL
    assert not any("skipped" in line for line in lines(tmp_path))
    assert position(tmp_path) == (STEPS + 5) * 4
    rows = [row for one in ended for batch in one.read for row in batch]
    assert len(rows) == len(set(rows)) == (STEPS + 5) * 4


def test_a_run_gives_up_after_going_back_in_vain_and_keeps_what_was_good(runs: Runs, tmp_path: Path) -> None:
    for one in runs(2, "--max-skipped", "2", "--max-rollbacks", "2", by=poisoned, given=(7, 10**6)):
        assert one.error.startswith("Diverged: steps 5 to 6, the last with loss nan")
        assert "as often as it may" in one.error
        assert len(one.read) == 6 + 2 + 2 * 2
    assert saved(tmp_path) == ["step-00000004"]
    assert all(line["loss"] is not None for line in lines(tmp_path)[:4])


@pytest.mark.nightly
def test_ruined_weights_do_not_take_the_place_of_good_ones(runs: Runs, tmp_path: Path) -> None:
    runs.fine(2, "--keep", "1", "--steps", "3")
    ruin = ("--resume", "--optim.learning-rate", "1e38", "--checkpoint-every", "1", "--steps", "30", "--keep", "1")
    for one in runs(2, *ruin):
        assert one.error.startswith("Diverged: ")
    assert saved(tmp_path) == ["step-00000003"]


# ---- disks


def full_disk(times: int, reader: Reader, folder: str) -> None:
    """From the sixth batch to the tenth no file grows beyond a few bytes."""
    if times in (6, 10):
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 if times == 6 else hard, hard))
    if times == 10:
        assert saved(Path(folder)) == ["step-00000004"]


def test_a_full_disk_delays_checkpoints_and_lines(runs: Runs, tmp_path: Path) -> None:
    ended = runs.fine(2, given=(full_disk, str(tmp_path)))
    err = ended[0].err
    assert "metrics.jsonl: [Errno 27] File too large" in err
    assert "metrics.jsonl: written again, nothing is missing" in err
    assert "warning: no checkpoint of step 8: " in err and "File too large" in err, err
    assert steps(tmp_path) == ALL
    assert "step-00000012" in saved(tmp_path)
    assert len(saved(tmp_path)) == 2
    assert saved(tmp_path)[0] != "step-00000004"
    assert ended[1].err == ""


def test_a_resume_on_a_full_disk_leaves_config_and_lines_whole(runs: Runs, tmp_path: Path) -> None:
    runs(2, given=(killed, 7))
    files = [runs.path / name for name in ("config.json", "metrics.jsonl")]
    before = [file.read_bytes() for file in files]
    for one in runs(2, "--resume", by=limited, given=(64,)):
        assert one.error == "Killed: "
    assert [file.read_bytes() for file in files] == before
    runs.fine(2, "--resume")
    assert steps(tmp_path) == ALL


def limited(mesh: Any, argv: tuple[str, ...], nbytes: int) -> Run:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        return inside(mesh, argv, killed, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def gone(times: int, reader: Reader, folder: str) -> None:
    """The run's folder is deleted; later something else takes the place of its checkpoints for a while."""
    if times in (6, 8, 11) and rank() == 0:
        shutil.rmtree(Path(folder, "a"), ignore_errors=True)
        if times == 8:
            Path(folder, "a").mkdir()
            Path(folder, "a", "checkpoints").write_text("not a folder")


def test_a_folder_that_vanishes_is_made_again(runs: Runs, tmp_path: Path) -> None:
    ended = runs.fine(2, given=(gone, str(tmp_path / "runs")))
    assert "metrics.jsonl was deleted: what it held is lost" in ended[0].err
    assert "warning: no checkpoint of step 8: " in ended[0].err
    assert saved(tmp_path)[-1] == "step-00000012"
    assert steps(tmp_path)[-1] == STEPS


def test_runs_that_cannot_be_written_are_refused(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    for one in runs(2):
        assert re.search(rf"^ConfigError: .* cannot be kept in {tmp_path}/runs/\.tokens/.*: \[Errno ", one.error)


# ---- signals


def asked(times: int, reader: Reader, at: int) -> None:
    if times == at:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_where_an_evaluation_is_due_keeps_it(runs: Runs, tmp_path: Path) -> None:
    heldout = tmp_path / "heldout"
    heldout.write_text("0123456789abcdef" * 30)
    evaluated = ("--eval-every", "5", "--data.heldout-files", str(heldout))
    runs.fine(1, *evaluated, given=(asked, 5))
    assert saved(tmp_path) == ["step-00000004", "step-00000005"]
    runs.fine(1, *evaluated, "--resume")
    assert [line["step"] for line in lines(tmp_path) if "eval_loss" in line] == [0, 5, 10, 12]
