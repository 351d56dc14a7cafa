"""Ranks that freeze, for good: real SIGSTOPs of real processes. The others end by themselves, interpreters and all, and
the launcher goes on without the frozen one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.harness.marks import nightly
from tests.harness.pages import ROOT

LONG = 240.0
"""Seconds that no launcher takes, on a machine however busy."""

RANK = """
import os, signal, sys
from datetime import timedelta
import torch
import yafsdp_fn as ya
import yafsdp_fn.api.mesh
from tests.harness.failing import TX, Fault, batch, loss_with, state
from tests.harness.groups import breakable
from yafsdp_fn.communication import groups

meshes = sys.modules["yafsdp_fn.api.mesh"]

who, where = int(sys.argv[1]), sys.argv[2]
rank, first = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def stops(*_):
    if first and rank == who:
        os.kill(os.getpid(), signal.SIGSTOP)

def before(module, name):
    work = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: (stops(), work(*args, **kwargs))[1])

if where == "meeting":
    meet = meshes.rendezvous_store
    meshes.rendezvous_store = lambda timeout: (meet(timeout), stops())[0]
if where == "groups":
    before(groups, "new_group")
fault = Fault()
# of busy machines ranks come late, but not to a step
mesh = ya.mesh(device="cpu", timeout=timedelta(seconds=12 if first and where != "step" else 100))
if where == "step":
    mesh = breakable(5 if first else 100)
now = state(mesh)
step = ya.train_step(loss_with(fault), TX)
for number in range(4):
    if where == "step" and number == 2:
        fault.error, fault.before = KeyboardInterrupt, stops
        fault.arm(3 if first and rank == who else None)
    now, _ = step(now, batch(rank))
os.write(1, f"rank {rank} of attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} is done\\n".encode())
"""


def launched(folder: Path, ranks: int, who: int, where: str) -> tuple[str, str]:
    """What a launcher of `ranks` ranks has said, of which `who` freezes in the first of two attempts."""
    script = folder / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    command = [sys.executable, "-m", "train", "launch", "--ranks", str(ranks), "--max-restarts", "1", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(
        [*command, str(who), where],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    began = time.monotonic()
    try:
        out, err = launcher.communicate(timeout=LONG)
    except subprocess.TimeoutExpired:
        launcher.kill()
        _, err = launcher.communicate()
        pytest.fail(f"the run did not end in {time.monotonic() - began:.0f} s:\n{err}")
    assert launcher.returncode == 0, err
    return out, err


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux's")
@pytest.mark.timeout(2 * LONG)
@pytest.mark.parametrize(
    ("ranks", "who", "where"),
    [
        nightly(2, 0, "step"),
        nightly(2, 1, "step"),
        nightly(4, 0, "step"),
        nightly(4, 2, "step"),
        nightly(2, 0, "meeting"),
        nightly(2, 0, "groups"),
    ],
)
def test_a_run_goes_on_after_a_rank_froze(tmp_path: Path, ranks: int, who: int, where: str) -> None:
    out, err = launched(tmp_path, ranks, who, where)
    assert sorted(out.splitlines()) == [f"rank {rank} of attempt 1 is done" for rank in range(ranks)]
    assert len(re.findall(r"launch: a rank ended .*; restart 1 of 1", err)) == 1, err
    if where == "step":
        survivors = set(range(ranks)) - {who}
        assert {int(rank) for rank in re.findall(r"CommunicationError: rank (\d)", err)} == survivors, err
    if who == 0:
        assert "rank 0" in err and "does not answer" in err, err
