"""Several ranks have the numbers of one, and name what they wait for when one of them stops: on gloo, and on NCCL where
the ranks share a GPU."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.cuda.ranks import CASES, STEPS, launched, results
from tests.harness.gpu import ON_GPU
from tests.harness.marks import nightly
from tests.harness.oracle import relative

PLACES = [("zero3", 2), ("1F1B", 2), ("bf16 wire", 2), ("hsdp", 4), ("zero3", 4), ("1F1B", 4), ("bf16 wire", 4)]
DAILY = [place if place in (("zero3", 2), ("1F1B", 2)) else nightly(*place) for place in PLACES]
OneRank = Callable[[str, ya.Precision], list[Tensor]]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    """Returns what one rank finds on a device, in a precision."""
    known: dict[tuple[str, ya.Precision], list[Tensor]] = {}

    def found(device: str, precision: ya.Precision) -> list[Tensor]:
        if (device, precision) not in known:
            folder = tmp_path_factory.mktemp("one rank")
            name = next(name for name, case in CASES.items() if case.precision == precision)
            (rank,) = launched(folder, name, 1, device)
            assert rank.status == 0, rank.said
            (known[device, precision],) = results(folder, 1)
        return known[device, precision]

    return found


Environment = dict[str, str]


def check_numbers(folder: Path, name: str, ranks: int, device: str, one_rank: OneRank, env: Environment) -> None:
    case = CASES[name]
    expected = one_rank(device, case.precision)
    ended = launched(folder, name, ranks, device, env)
    for rank, (status, said) in enumerate(ended):
        assert status == 0, f"rank {rank} ended with {status}:\n{said}"
    for rank, got in enumerate(results(folder, ranks)):
        off = [relative(a, b) for a, b in zip(got, expected, strict=True)]
        shown = f"rank {rank}: losses and norms are off by {max(off[: 2 * STEPS]):.1e}, weights by {max(off):.1e}"
        print(shown)
        assert max(off) < case.tolerance, shown


def check_frozen(folder: Path, ranks: int, device: str, env: Environment) -> None:
    *others, _ = launched(folder, "frozen", ranks, device, env, timeout_s=60 if device == "cpu" else 20)
    for rank, (status, said) in enumerate(others):
        assert status is not None and status > 0, f"rank {rank} ended with {status}:\n{said}"
        assert re.search(rf"rank {rank}: (gather|reduce) of \S+ \(step \d\)", said), said
        assert f"rank {ranks - 1}" in said, said  # where ranks are


# ---- on the CPU


@pytest.mark.parametrize(("name", "ranks"), DAILY)
def test_ranks_on_the_cpu_have_the_numbers_of_one(tmp_path: Path, name: str, ranks: int, one_rank: OneRank) -> None:
    check_numbers(tmp_path, name, ranks, "cpu", one_rank, {})


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux's")
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_the_cpu_name_what_they_wait_for(tmp_path: Path, ranks: int) -> None:
    check_frozen(tmp_path, ranks, "cpu", {})


# ---- on one GPU

FROM = 2, 30, 3
"""The first NCCL whose ranks may share a GPU."""
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_DEBUG": "WARN"}
"""NCCL's manual advises few channels for ranks that share a GPU."""
WAYS: list[Environment] = [{}, {"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}]
"""How ranks reach each other: in the GPU's memory, in the host's, by sockets. Some containers allow the last alone."""
LOADED = """
import ctypes, torch
version = ctypes.c_int()
ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
print(version.value)
"""
"""torch.cuda.nccl.version() is the one that torch was built with."""


def preloaded() -> Environment:
    """An NCCL that goes before torch's: `make gpu-check` takes it out of a wheel."""
    library = os.environ.get("GPU_CHECK_NCCL")
    return {"LD_PRELOAD": library} if library else {}


def lacking() -> str | None:
    """Names what this machine lacks for ranks that share a GPU, as far as it can be known beforehand."""
    env = {**os.environ, **preloaded()}
    found = subprocess.run([sys.executable, "-c", LOADED], env=env, capture_output=True, text=True)
    if found.returncode:
        return f"no libnccl.so.2 can be loaded: {found.stderr.strip().splitlines()[-1]}"
    major, rest = divmod(int(found.stdout), 10_000)
    version = major, *divmod(rest, 100)
    if version < FROM:
        shown, needed = (".".join(map(str, each)) for each in (version, FROM))
        cuda = str(torch.version.cuda).partition(".")[0]
        return f"NCCL is {shown}, ranks share a GPU from {needed} on: put a wheel of nvidia-nccl-cu{cuda} into WHEELS"
    mode = ""
    with contextlib.suppress(OSError):  # no nvidia-smi
        query = ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader", "--id=0"]
        mode = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    if mode.startswith(("Exclusive", "Prohibited")):
        return f"the driver lets one process use this GPU: its compute mode is {mode}, Default is needed"
    return None


def test_what_nccl_and_the_driver_lack_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LOADED", "raise OSError('libnccl.so.2: no such file')")
    assert str(lacking()) == "no libnccl.so.2 can be loaded: OSError: libnccl.so.2: no such file"
    monkeypatch.setattr(sys.modules[__name__], "LOADED", "print(22809)")
    assert str(lacking()).startswith("NCCL is 2.28.9, ranks share a GPU from 2.30.3 on: put a wheel of nvidia-nccl-cu")
    monkeypatch.setattr(sys.modules[__name__], "LOADED", "print(23003)")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lacking() is None
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho Exclusive_Process\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert str(lacking()).endswith("its compute mode is Exclusive_Process, Default is needed")


def meeting(folder: Path, device: str) -> Environment:
    """Returns the environment in which two ranks train, by the first way that works here."""
    failed = ""
    for number, way in enumerate(WAYS):
        env = {**SHARING, **way, **preloaded()}
        own = folder / str(number)
        own.mkdir()
        ended = launched(own, "zero3", 2, device, env, timeout_s=30, limit_s=60)
        if all(status == 0 for status, _ in ended):
            print(f"ranks meet with {env}")
            return env
        failed += f"with {env}, rank 0 ended with {ended[0].status}:\n{ended[0].said[-2000:]}\n"
    pytest.fail(f"ranks do not meet:\n{failed}")


def test_ranks_take_the_first_way_that_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here none but the first is a way: gloo does not know them."""
    ways = [{"MASTER_PORT": "no port"}, {"NCCL_P2P_DISABLE": "1"}]
    monkeypatch.setattr(sys.modules[__name__], "WAYS", ways)
    assert meeting(tmp_path, "cpu")["NCCL_P2P_DISABLE"] == "1"
    monkeypatch.setattr(sys.modules[__name__], "WAYS", ways[:1])
    (tmp_path / "none").mkdir()
    with pytest.raises(pytest.fail.Exception, match=r"ranks do not meet:\nwith .*no port(?s:.*)Error"):
        meeting(tmp_path / "none", "cpu")


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    if why := lacking():
        pytest.skip(why)
    return meeting(tmp_path_factory.mktemp("meeting"), "cuda")


GPU = [*ON_GPU, pytest.mark.timeout(500)]


@pytest.mark.parametrize(("name", "ranks"), [pytest.param(*place, marks=GPU) for place in PLACES])
def test_ranks_on_one_gpu_have_the_numbers_of_one(
    tmp_path: Path, name: str, ranks: int, one_rank: OneRank, sharing: Environment
) -> None:
    check_numbers(tmp_path, name, ranks, "cuda", one_rank, sharing)


@pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=GPU) for ranks in (2, 4)])
def test_ranks_on_one_gpu_name_what_they_wait_for(tmp_path: Path, ranks: int, sharing: Environment) -> None:
    check_frozen(tmp_path, ranks, "cuda", sharing)
