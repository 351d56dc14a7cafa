"""Steps as a GPU would run them, searched for uses of memory that nothing orders, and for memory freed too early.

`RACES=all` searches every case; by default there are a few of them, in which every builder and every remat occurs, and
most builders by day.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda.days import BY_HAND, Case, day, every_case, numbers_of
from tests.harness.child_process import in_child_process
from tests.harness.fake_cuda.api import fake_cuda
from tests.harness.fake_cuda.log import Finding, Log, findings, without_each_wait
from tests.harness.fake_cuda.ranks import rank_of, saves_alone
from tests.harness.fake_cuda.tensors import CUDA
from tests.harness.marks import by_day, nightly
from yafsdp_fn.nn import linear
from yafsdp_fn.util import squares

CPU = torch.device("cpu")
ALL = list(every_case())
EVERY = os.environ.get("RACES") == "all"
CASES = ALL if EVERY else ALL[::11]
FORMATS = [case._replace(formats=True) for case in ALL[::23]]
DAILY = CASES if EVERY else [CASES[at] for at in (0, 4, 7, 9)]


def seen(case: Case, folder: Path | None = None) -> tuple[list[Any], Log]:
    """What a day gives on the fake device, and its log."""
    with saves_alone(), fake_cuda() as device, rank_of(case.axes) as mesh:
        return numbers_of(day(case, mesh, CUDA, folder)), device.log


def wrong(log: Log) -> list[Finding]:
    """Findings, but for those of weights that are written by hand while slots are filled for the next step: what such a
    gather read is never used, since the next step gathers the new version again."""
    return [found for found in findings(log) if not (BY_HAND in found.second and "reads" in found.first)]


def expect_no_races(case: Case, folder: Path) -> None:
    """Numbers are those of a CPU, whose streams are threads, and which sums up squares and multiplies as a GPU does."""
    wider = linear.multiplies_wider
    with pytest.MonkeyPatch.context() as patch, saves_alone(), rank_of(case.axes, CPU) as mesh:
        patch.setattr(squares, "_on_cpu", squares._on_gpu)
        patch.setattr(linear, "multiplies_wider", lambda factors, product, device: wider(factors, product, "cuda"))
        expected = numbers_of(day(case, mesh, CPU, folder / "cpu"))
    found, log = seen(case, folder / "cuda")
    assert not wrong(log), "\n".join(map(str, wrong(log)))
    assert found == expected


@pytest.mark.parametrize("case", by_day(CASES, *DAILY), ids=lambda case: "-".join(map(str, case)))
@in_child_process
def test_a_day_without_races(case: Case, tmp_path: Path) -> None:
    expect_no_races(case, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("case", FORMATS, ids=lambda case: "-".join(map(str, case)))
@in_child_process
def test_a_day_in_formats(case: Case, tmp_path: Path) -> None:
    expect_no_races(case, tmp_path)


def test_every_builder_and_every_remat_is_searched() -> None:
    for field in ("builder", "remat", "update", "defer", "problem", "precision"):
        assert {getattr(case, field) for case in CASES} == {getattr(case, field) for case in ALL}


# ---- mistakes, made on purpose

PLANTED = [case for case in ALL if case.problem in ("tied", "units")]
PLANTED = PLANTED if EVERY else [case for case in PLANTED if (case.builder, case.update) == ("hsdp", True)][:2]


@pytest.mark.parametrize("case", [PLANTED[0], *map(nightly, PLANTED[1:])], ids=lambda case: "-".join(map(str, case)))
@in_child_process
def test_every_wait_is_missed_or_implied_by_others(case: Case) -> None:
    """What becomes of a day without one of its waits, for each of them. Few are idle: those of gathers that are waited
    for one by one before any of them is used, as by `ya.unshard`."""
    verdicts = Counter(verdict for _, verdict in without_each_wait(seen(case)[1]))
    print(case, verdicts)
    assert verdicts["found"] > 20
    assert verdicts["idle"] < verdicts["found"] / 10
