"""docs/faq.md: its code prints what it shows, and ranks that are spawned run, with `ya.launch` beside them."""

from __future__ import annotations

import doctest
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import yafsdp_fn as ya
from tests.harness.pages import ROOT, blocks, doc
from tests.test_coming_from import examples

PAGE = doc("faq")
SCRIPT, *PIECES = blocks(PAGE)


def test_the_code_prints_what_it_shows(tmp_path: Path) -> None:
    code = "\n".join(re.findall(r"^```pycon\n(.*?)^```", PAGE, re.S | re.M))
    found = doctest.DocTestParser().get_examples(code)
    assert len(found) > 12
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    names = {**examples(), "folder": str(tmp_path)}
    runner.run(doctest.DocTest(found, names, "faq", None, None, None), out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("piece", range(len(PIECES)))
def test_pieces_of_code_run(piece: int) -> None:
    exec(PIECES[piece], examples())


def printed(script: str, folder: Path) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    (folder / "ranks.py").write_text(script.replace("29512", port))
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "ranks.py"], env=env, cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.nightly
def test_ranks_that_are_spawned_run_and_launch_forks_beside_them(tmp_path: Path) -> None:
    more = '    print(ya.launch(lambda: ya.mesh(device="cpu").size(), ranks=2))\n    rank(0, 1)\n'
    assert printed(SCRIPT + more, tmp_path) == ["2 ranks", "2 ranks", "[2, 2]", "1 ranks"]


def test_where_there_is_no_fork_launch_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(RuntimeError, match=r"forks this process.* cannot do: start a script by torchrun"):
        ya.launch(lambda: 0, ranks=2)
