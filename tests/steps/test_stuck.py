"""Ranks that do not come: the others say where all of them are, by a channel that works while their own hangs."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness.failing import TX, Fault, batch, loss, loss_with, state
from tests.harness.groups import SOON, breakable, outcome
from tests.harness.pool import Pool
from tests.harness.stalls import PATIENCE, printed, watchful
from yafsdp_fn.communication.communicators import communicators

LAST = 2  # the rank that does not come


def in_python(pause: Path) -> None:
    """Until another rank opens this pipe."""
    pause.open().close()


def with_the_lock(pause: Path) -> None:
    os.close(ctypes.PyDLL(None).open(bytes(pause), os.O_RDONLY))


PAUSES: dict[str, Callable[[Path], None]] = {"python": in_python, "lock": with_the_lock}


class Ranks:
    """The same state and steps on each rank, and what it prints."""

    def __init__(self) -> None:
        self.mesh = watchful(breakable())
        self.rank = self.mesh.get_local_rank()
        self.fault = Fault()
        self.step = ya.train_step(loss_with(self.fault), TX)
        self.other = ya.train_step(loss, TX, schedule=ya.schedules.zero2())
        self.now = state(self.mesh)

    def take(self, step: Any, times: int = 1) -> None:
        for _ in range(times):
            self.now, _ = step(self.now, batch(self.rank))


def pauses(mesh: Any, pipes: dict[str, Path]) -> dict[str, str]:
    """The last rank pauses in a block, in two ways, and between two steps. What each rank has printed, by pause."""
    ranks = Ranks()
    ranks.take(ranks.step, 3)
    found = {}
    for name, pipe in pipes.items():
        with printed(pipe if ranks.rank != LAST else None) as said:
            if ranks.rank == LAST and name in PAUSES:
                ranks.fault.event = paused(PAUSES[name], pipe)
            elif ranks.rank == LAST:
                in_python(pipe)
            ranks.take(ranks.step)
            ranks.fault.event = lambda what: None
        found[name] = said.getvalue()
    return {**found, "cost": str(cost(communicators(ranks.mesh).watchdog))}


def cost(lookout: Any) -> float:
    """Seconds that its threads have computed for each second at one look a second; 0 where the system does not tell."""
    told = [Path(f"/proc/self/task/{thread.native_id}/schedstat") for thread in lookout._threads]
    return sum(int(of.read_text().split()[0]) / 1e9 / lookout._looks for of in told if of.exists())


def paused(pause: Callable[[Path], None], pipe: Path) -> Callable[[str], None]:
    left = [pause]

    def event(what: str) -> None:
        if what == "forward layer" and left:
            left.pop()(pipe)

    return event


def other_program(mesh: Any) -> tuple[str, str]:
    """From the third step on the last rank takes the steps of another function, that all have used before."""
    ranks = Ranks()
    ranks.take(ranks.step, 2)
    ranks.take(ranks.other, 2)
    mine = ranks.other if ranks.rank == LAST else ranks.step
    with printed() as said:
        error = outcome(lambda: ranks.take(mine, 30), 2 * PATIENCE)
    return said.getvalue(), error


def failed_alone(mesh: Any) -> str:
    """The last rank raises in a block and lives on."""
    ranks = Ranks()
    ranks.take(ranks.step)
    if ranks.rank != LAST:
        return outcome(lambda: ranks.take(ranks.step))
    ranks.fault.arm(0)
    return outcome(lambda: ranks.take(ranks.step), SOON)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    found = Pool(3)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def shown(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    pipes = {name: tmp_path_factory.mktemp("pipes") / name for name in (*PAUSES, "behind")}
    for pipe in pipes.values():
        os.mkfifo(pipe)
    return pool.run(pauses, pipes)


def table(shown: list[dict[str, str]], name: str) -> list[str]:
    """The lines that one of the ranks has printed."""
    return "".join(text[name] for text in shown).splitlines()


def test_a_rank_that_is_stuck_in_python_says_its_op_and_line(shown: list[dict[str, str]]) -> None:
    header, free, *waiting = table(shown, "python")
    assert re.fullmatch(r"rank [01] has waited for \d+ s. Where ranks are:", header)
    place = r"forward of layers\[0\] \(visit 1, microbatch 0, step 3\), op \d+ of \d+ of program \w{8}"
    assert re.fullmatch(rf"  rank 2: {place}; test_stuck.py:\d+ in in_python", free), free
    assert all(re.match(r"  ranks? [01](-1)?: waiting for gather of ", line) for line in waiting), waiting


def test_it_costs_nothing(shown: list[dict[str, str]]) -> None:
    """Tables, and beats of ranks that wait, included."""
    for of_rank in shown:
        assert float(of_rank["cost"]) < 0.005, of_rank["cost"]


def test_one_rank_prints_it(shown: list[dict[str, str]]) -> None:
    for name in ("python", "lock", "behind"):
        assert "".join(text[name] for text in shown).count("Where ranks are") == 1, shown


def test_a_rank_that_holds_the_lock_is_told_by_its_silence(shown: list[dict[str, str]]) -> None:
    _, silent, *_ = table(shown, "lock")
    assert silent.startswith("  rank 2: no sign of life: ended, or in a call that holds Python's lock; before that ")


def test_a_rank_that_is_behind_says_after_which_step(shown: list[dict[str, str]]) -> None:
    _, behind, waiting = table(shown, "behind")
    assert re.fullmatch(r"  rank 2: after step 4; test_stuck.py:\d+ in in_python", behind)
    assert re.match(r"  ranks 0-1: waiting for gather of embed \(step 5\); forward of embed .*, op ", waiting)


@pytest.mark.nightly
def test_a_rank_that_runs_another_program(pool: Pool) -> None:
    every = pool.run(other_program)
    assert "".join(printed for printed, _ in every).count("Where ranks are") == 1
    for rank, (_, text) in enumerate(every):
        assert f"CommunicationError: rank {rank}: " in text
        assert text.count("Where ranks are:") == 1
        lines = re.findall(r"  ranks? (\S+): .* of program (\w+)", text)
        mine = {program for ranks, program in lines if ranks != str(LAST)}
        other = {program for ranks, program in lines if ranks == str(LAST)}
        assert len(mine) == len(other) == 1 and mine != other, text


def test_an_exception_of_one_rank_ends_the_wait_of_the_others(pool: Pool) -> None:
    """They waited for the timeout, which said nothing of it."""
    *others, last = pool.run(failed_alone)
    assert "Planned: planned: forward embed" in last
    for rank, text in enumerate(others):
        told = (
            rf"CommunicationError: rank {rank}: gather of .* another rank has failed alone \(rank 2 of 3, .*: Planned: "
        )
        assert re.search(told, text), text


def test_there_is_none_where_there_is_one_rank() -> None:
    assert communicators(ya.mesh(device="cpu")).watchdog is None
