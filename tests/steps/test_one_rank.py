"""An exception on one rank alone: all ranks end with an error that names the op, and the state says that it is lost."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness.failing import TX, Fault, Planned, Steps, loss_with, state
from tests.harness.groups import SOON, TIMEOUT, outcome
from tests.harness.marks import nightly
from tests.harness.pool import Pools, on_ranks

REMAT = {"schedule": ya.schedules.zero3(remat="all")}
LAST = r"rank 1 of 2, backward of embed \(visit 0, microbatch 0, step {step}\)"

# steps before the failure, options, event that fails on rank 1; where rank 1 is then, and what rank 0 waits for
CASES: dict[str, tuple[int, dict[str, Any], int, str, str]] = {
    "first visit of the first step": (
        0,
        {},
        0,
        r"planned: forward embed\nrank 1 of 2, forward of embed \(visit 0, microbatch 0, step 0\)",
        r"forward of layers\[0\] \(visit 1, microbatch 0, step 0\)",
    ),
    "backward of the first step": (
        0,
        {},
        11,  # what is recorded, the forward, the head's
        r"planned: backward layer\nrank 1 of 2, backward of layers\[2\] \(visit 3, microbatch 0, step 0\)",
        r"(gather of layers\[0\]|reduce of layers\[[12]\]) \(step 0\)",  # both are under way then, by the program
    ),
    "forward in a program": (
        2,
        {},
        2,
        r"planned: forward layer\nrank 1 of 2, forward of layers\[1\] \(visit 2, microbatch 0, step 2\)",
        r"gather of (layers\[2\]|head) \(step 2\)",
    ),
    "backward in a program": (
        2,
        REMAT,
        8,  # the head's, layers[2]'s two, then the recomputed forward
        r"planned: forward layer\nrank 1 of 2, backward of layers\[1\] \(visit 2, microbatch 0, step 2\)",
        r"(gather of layers\[0\]|reduce of (layers\[[12]\]|embed)) \(step 2\)",
    ),
    "last visit of a program": (2, {}, 9, r"planned: backward embed\n" + LAST.format(step=2), r"reduce of embed"),
}


def alone(mesh: Any, case: str, delay: float = 0.0) -> dict[str, Any]:
    """Rank 1 fails by itself; what each rank sees then, and when it uses its states again."""
    steps, options, at, _, _ = CASES[case]
    fault = Fault()
    usual = Steps(loss_with(), 1)
    other = state(usual.now.mesh)
    ranks = Steps(loss_with(fault), steps, other.mesh, **options)
    fault.before = lambda: time.sleep(delay)
    fault.arm(at if mesh.get_rank() == 1 else None)
    start = time.monotonic()
    failed = ranks.said(SOON)
    seconds = time.monotonic() - start
    fault.arm(None)
    again = {
        "step": ranks.said(),
        "unshard": outcome(lambda: ya.unshard(ranks.now)),
        "other state": outcome(lambda: ranks.step(other, ranks.batch)),
        "norm": outcome(lambda: ya.global_norm(ranks.now.params)),
        "map_whole_layers": outcome(lambda: ya.map_whole_layers(lambda w: w, ranks.now.params["layers"])),
    }
    return {"failed": failed, "seconds": seconds, "again": again}


DAILY = ("first visit of the first step", "backward in a program")


@pytest.mark.parametrize("case", [case if case in DAILY else nightly(case) for case in CASES])
def test_all_ranks_end_with_an_error_that_names_the_op(pools: Pools, case: str) -> None:
    waiting, failed = pools[2].run(alone, case)
    check(case, waiting, failed)


@pytest.mark.nightly
def test_a_late_failure_is_no_agreement(pools: Pools) -> None:
    """Both are in the last visit when rank 0 gives up waiting, while rank 1 still asks where rank 0 has failed."""
    check("last visit of a program", *pools[2].run(alone, "last visit of a program", SOON / 2))


def check(case: str, waiting: dict[str, Any], failed: dict[str, Any]) -> None:
    _, _, _, mine, theirs = CASES[case]
    assert re.search(f"Planned: {mine}", failed["failed"]), failed["failed"]
    assert re.search(rf"CommunicationError: rank 0: {theirs}", waiting["failed"]), waiting["failed"]
    assert re.search("Another rank has probably stopped: .* restart all", waiting["failed"])
    for rank, seen in enumerate((waiting, failed)):
        assert seen["seconds"] < 3 * TIMEOUT + 5
        for use, text in seen["again"].items():
            assert re.search(rf"rank {rank}: .* lost since .*; restart all ranks", text), f"{use}: {text}"


@on_ranks(2)
def test_an_optimizer_that_raises_on_one_rank(mesh: Any) -> None:
    """Rank 1 fails when its gradients are complete, and tries the step again. Were it to go on, the ranks would be one
    step apart, with collectives that all meet."""
    fault, rank = Fault(), mesh.get_rank()

    def update(updates: Any, opt_state: Any, params: Any = None) -> Any:
        fault.event("update")
        return TX.update(updates, opt_state, params)

    ranks = Steps(loss_with(), 1, tx=ya.optim.assume_elementwise((TX.init, update)))
    fault.arm(0 if rank == 1 else None)
    first = ranks.said(SOON)
    fault.arm(None)
    second = ranks.said(SOON)
    if rank:
        assert "planned: update" in first
        assert re.search(r"rank 1: .* lost since .*; restart all ranks", second), second
    else:
        assert first == "returned" and re.search(r"CommunicationError: rank 0: gather of \S+ \(step 2\)", second), (
            second
        )


@on_ranks(2)
def test_map_layers_that_raises_on_one_rank(mesh: Any) -> None:
    rank, ranks = mesh.get_rank(), Steps(loss_with(), 1)

    def function(weights: Any) -> Any:
        if rank == 1:
            raise Planned("planned: map_whole_layers")
        return weights

    mapped = outcome(lambda: ya.map_whole_layers(function, ranks.now.params["layers"]), SOON)
    if rank:
        assert "planned: map_whole_layers" in mapped
    else:
        assert "CommunicationError: rank 0: all-gather failed" in mapped, mapped
        assert re.search(r"rank 0 of 2, map_whole_layers of layers\[\d\]", mapped), mapped
    text = ranks.said()
    assert re.search(rf"rank {rank}: .*(lost since|has probably stopped).* restart all", text), text
