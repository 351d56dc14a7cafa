"""A stage that raises, pauses, ends or is given something else: what the others say, by when, and what is left."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.distributed as dist

import yafsdp_fn as ya
from tests.harness.failing import TX, Fault, batch, bits, loss, loss_with, params, same
from tests.harness.groups import SOON, TIMEOUT, breakable_stages, outcome
from tests.harness.pool import Pool
from tests.harness.stalls import printed, until_told, watchful

STAGES, PARTS = 3, 4
LAST = STAGES - 1  # of whom things happen


class Seen(NamedTuple):
    """What the end of a step said, what was printed meanwhile, and how long it took."""

    said: str
    printed: str
    seconds: float


class Ranks:
    """One rank of a pipeline, with steps behind it."""

    def __init__(self, steps: int = 2) -> None:
        self.rank, self.fault, self.batch = dist.get_rank(), Fault(), batch(rows=PARTS)
        self.twice = False
        trace = ya.planner.trace(loss, params(), batch(rows=1))
        assignment = ya.schedules.assign(trace, STAGES)
        self.mesh = watchful(breakable_stages(STAGES))
        self.now = ya.init(params(), TX, mesh=self.mesh, seed=0, stages=assignment)
        whole = loss_with(self.fault)

        def fun(tree: Any, data: Any) -> Any:
            value = whole(tree, data)
            return value + ya.apply(lambda w: w["w"].sum(), tree["head"]) if self.twice else value

        self.step = ya.train_step(fun, TX, schedule=ya.schedules.one_f_one_b(), microbatches=PARTS)
        for _ in range(steps):
            self.take()

    def take(self) -> None:
        self.now, _ = self.step(self.now, self.batch)

    def see(self, pause: Path | None = None, seconds: float | None = SOON) -> Seen:
        """pause: of another rank, which waits until this one has shown where it is; seconds: that this one waits"""
        start = time.monotonic()
        with printed(pause) as text:
            said = outcome(self.take, None if pause else seconds)
            seconds = time.monotonic() - start
        return Seen(said, text.getvalue(), seconds)


def pauses(_: Any, pause: Path) -> str:
    ranks = Ranks()
    left = [pause]

    def event(what: str) -> None:
        if left:
            left.pop().open().close()

    if ranks.rank == LAST:
        ranks.fault.event = event
        ranks.take()
        return ""
    return ranks.see(pause).printed


def raises(_: Any) -> list[Seen]:
    """In the second event of its step, of which others are told; and what a further step says."""
    ranks = Ranks()
    ranks.fault.arm(1 if ranks.rank == LAST else None)
    return [ranks.see(seconds=None), ranks.see()]


def another_loss(_: Any) -> Seen:
    """One that goes on, from the third step on."""
    ranks = Ranks()
    ranks.twice = True
    return ranks.see()


def batches(_: Any) -> list[str]:
    """Of other values, of other shapes, in the first step; then of new shapes, alike, with a step of the plain loop."""
    ranks = Ranks(steps=0)
    before = bits(ranks.now)
    good = ranks.batch
    wrong = {"tokens": good["tokens"].roll(1, 0), "targets": good["targets"]}
    longer = {key: torch.cat([leaf, leaf]) for key, leaf in good.items()}
    found = []
    for bad in (wrong, longer):
        ranks.batch = bad if ranks.rank == LAST else good
        found.append(outcome(ranks.take))
        assert same(bits(ranks.now), before)
    plain = ya.PlainState.create(params(), TX, seed=0)
    whole = ya.train_step(loss, TX, microbatches=PARTS)
    for each in (good, longer, good):
        ranks.batch = each
        ranks.take()
        plain, _ = whole(plain, each)
    pairs = zip(*map(optree.tree_leaves, (ya.unshard(ranks.now.params), plain.params)), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    short, long = (ranks.step.lower(ranks.now, each).trace.split for each in (good, longer))
    assert [2 * flow.nbytes for flow in short.flows] == [flow.nbytes for flow in long.flows], (short, long)
    return found


def killed(_: Any) -> list[Seen]:
    ranks = Ranks()
    until_told(ranks.mesh, "after step 1")
    ranks.fault.before = lambda: os.kill(os.getpid(), signal.SIGKILL)
    ranks.fault.arm(1 if ranks.rank == LAST else None)
    return [ranks.see(), ranks.see()]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    found = Pool(STAGES)
    yield found
    found.stop()


def test_a_stage_that_pauses_is_shown_with_call_flow_and_line(pool: Pool, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pause")
    text = "".join(pool.run(pauses, pipe))
    waits = r"  rank {0}: waiting .*receive of gradient {0} <- {1} \(microbatch 0\) from stage {1} \(step 2\)[,;] "
    assert all(re.search(waits.format(rank, rank + 1), text) for rank in range(LAST)), text
    assert "what arrives for backward of segment 0 (microbatch 0, step 2), op " in text, text
    place = r"forward of head \(visit 4, microbatch 0, step 2\), op \d+ of \d+ of program \w+, stage 2"
    assert re.search(rf"Where ranks are:\n  rank 2: {place}; test_failures.py:\d+ in event", text), text
    assert len(set(re.findall(r" of program (\w+)", text))) == 1, text


def test_a_stage_that_raises_is_named_and_the_state_is_refused(pool: Pool) -> None:
    *others, last = pool.run(raises)
    assert "Planned: planned: backward head" in last[0].said
    assert "rank 2 of 3, backward of head (visit 4, microbatch 0, step 2)" in last[0].said
    for rank, (first, again) in enumerate(others):
        flow = rf"gradient {rank} <- {rank + 1} \(microbatch 0\) from stage {rank + 1}"
        told = "another rank has failed alone (rank 2 of 3, backward of head (visit 4, microbatch 0, step 2): Planned: "
        assert re.search(rf"CommunicationError: rank {rank}: .*receive of {flow} \(step 2\).*: ", first.said), (
            first.said
        )
        assert told in first.said, first.said
        assert "rank 2: after Planned in backward of head (visit 4, microbatch 0, step 2), op " in first.said
        assert f"rank {rank} of 3, what arrives for backward of segment {rank} (microbatch 0, step 2)" in first.said
        assert max(first.seconds, again.seconds) < TIMEOUT
    for rank, seen in enumerate([*others, last]):
        assert f"rank {rank}: the communicators are lost since" in seen[1].said
        assert "restart all" in seen[1].said


def test_a_loss_that_visits_others_is_refused_by_name(pool: Pool) -> None:
    first, *others = pool.run(another_loss)
    assert re.search(r"OrderChanged: .* \(visit 5, microbatch 0, step 2\): the trace has no further visit", first.said)
    for seen in others:
        assert "rank 0: after OrderChanged in " in seen.said, seen.said
        assert seen.seconds < TIMEOUT


def test_stages_must_have_one_batch_and_its_shapes_may_change(pool: Pool) -> None:
    for values, shapes in pool.run(batches):
        assert (
            "RanksDisagree: ranks disagree on the batch, on which all stages compute; tokens of argument 1 has"
            in values
        )
        assert (
            "has other values on rank 0 (stage 0) than on rank 2 (stage 2). Read the same batch on all stages" in values
        )
        assert "ranks disagree on the batch, on which all stages compute; targets of argument 1 differs:" in shapes, (
            shapes
        )
        assert "rank 0, 1: int64 [4, 3]" in shapes
        assert "rank 2: int64 [8, 3]" in shapes


def test_a_stage_that_is_killed_is_told_by_its_silence(pool: Pool) -> None:
    """The last one, since it ends the processes."""
    *others, dead = pool._call(killed, (), 60)
    assert not dead[0]
    assert "EOFError" in dead[1]
    for rank, (ok, seen) in enumerate(others):
        assert ok
        assert f"CommunicationError: rank {rank}: receive of gradient {rank} <- {rank + 1}" in seen[0].said
        assert "  rank 2: no sign of life: " in seen[0].said, seen[0].said
        assert seen[0].seconds < TIMEOUT
        assert "restart all" in seen[1].said
