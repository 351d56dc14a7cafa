"""Ranks that use two states of one layout in another order, or steps of one: told by name wherever they meet."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.fake_cuda.api import fake_cuda
from tests.harness.fake_cuda.tensors import CUDA
from tests.harness.groups import SOON, breakable, breakable_stages, outcome
from tests.harness.pool import Pools, on_ranks
from yafsdp_fn.communication.communicators import communicators
from yafsdp_fn.communication.cuda_streams import CudaEvent
from yafsdp_fn.params.one_state import check, marks

TX = ya.optim.adamw(0.1)
STAGES = ya.schedules.Assignment(units=((0,), (1,)), homes=(0, 1))


def loss(params: Any, x: Tensor) -> Tensor:
    for name in ("one", "two"):
        x = ya.apply(lambda w, x: (x * w["w"]).tanh(), params[name], x)
    return x.sum()


def state_of(mesh: Any, seed: int) -> Any:
    tree = {name: {"w": ya.Param((4,), init=ya.params.initializers.normal(1.0))} for name in ("one", "two")}
    return ya.init(tree, TX, mesh=mesh, seed=seed, stages=STAGES if mesh.ndim > 1 else None)


def read(params: Any) -> None:
    for _ in ya.named_weights(params):
        pass


STEP = ya.train_step(loss, TX)
EVALUATE = ya.eval_step(loss)
GRADIENT = ya.value_and_grad(loss)
VERBS: dict[str, Callable[[Any, Tensor, Path], Any]] = {
    "step": lambda state, x, _: ya.train_step(loss, TX)(state, x),
    "known step": lambda state, x, _: STEP(state, x),
    "eval_step": lambda state, x, _: ya.eval_step(loss)(state, x),
    "known eval_step": lambda state, x, _: EVALUATE(state.params, x),
    "value_and_grad": lambda state, x, _: GRADIENT(state.params, x),
    "unshard": lambda state, *_: ya.unshard(state),
    "named_weights": lambda state, *_: read(state.params),
    "global_norm": lambda state, *_: ya.global_norm(state.params),
    "shard": lambda state, *_: ya.shard(state, TX),
    "relative_errors": lambda state, *_: ya.formats.relative_errors(ya.formats.Scaled(), state.params),
    "checksum": lambda state, *_: ya.checksum(state),
    "checkpoint.save": lambda state, _, folder: ya.checkpoint.save(folder, state),
    "save_named": lambda state, _, folder: ya.checkpoint.save_named(
        folder / "named", state.params, lambda path, layer: path
    ),
}


def alone(_: Any) -> str:
    """Rank 0 calls a verb of all ranks, as one does who saves on rank 0 alone."""
    mesh = breakable()
    state = state_of(mesh, 0)
    return "" if torch.distributed.get_rank() else outcome(lambda: ya.unshard(state), SOON)


def test_a_rank_that_calls_a_verb_of_all_ranks_alone_says_so(pools: Pools) -> None:
    text, _ = pools[2].run(alone)
    assert "rank 0: unshard, which all ranks call: " in text, text
    assert "Where ranks are:\n  rank 1: no sign of life" in text, text


def swapped(_: Any, folder: Path, ranks: int, how: str, stages: bool) -> dict[str, tuple[str, str]]:
    """What each verb says, of the teacher on the last rank and of the student on all others; and then of one state."""
    mesh, last = breakable_stages(2) if stages else breakable(), torch.distributed.get_rank() == ranks - 1
    x = torch.ones(4)
    found = {}
    for verb in VERBS:
        student = state_of(mesh, 0)
        teacher = student.copy() if how == "copy" else state_of(mesh, 1)
        if verb.startswith("known"):
            STEP(student.copy(), x), STEP(teacher.copy(), x)
            EVALUATE(student, x), EVALUATE(teacher, x)
        kept = student.copy()
        said = outcome(lambda: VERBS[verb](teacher if last else student, x, folder))  # noqa: B023
        found[verb] = said, outcome(lambda: VERBS[verb](kept, x, folder / "kept"))  # noqa: B023
    return found


@pytest.mark.parametrize(("ranks", "how", "stages"), [(2, "order", False), (3, "copy", False), (2, "order", True)])
def test_ranks_with_another_state_are_told(pools: Pools, ranks: int, how: str, stages: bool, tmp_path: Path) -> None:
    every = pools[ranks].run(swapped, tmp_path, ranks, how, stages)
    for found in every:
        for verb, (said, then) in found.items():
            assert said.startswith("yafsdp_fn.communication.agreement.RanksDisagree: ranks disagree on which state"), (
                verb,
                said,
            )
            first, second = re.findall(r"\n    rank (\S+(?:, \d+)?): state (\d+), step 0", said)
            assert first[0] == ", ".join(map(str, range(ranks - 1)))
            assert second[0] == str(ranks - 1)
            assert first[1] != second[1]
            assert then == "returned", (verb, then)
    assert not [name for name in os.listdir(tmp_path) if name not in ("kept", "kept.partial")]


@on_ranks(2)
def test_a_step_compares_nothing_more(mesh: Any) -> None:
    """A known step has no collectives on the host, and one sum of its metrics."""
    state = state_of(mesh, 0)
    x = torch.ones(4)
    comms = communicators(mesh)
    for _ in range(2):
        state, _ = STEP(state, x)
    control = []
    sums = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comms, "same_on_all", lambda *args, **_: control.append(args) or True)
        patch.setattr(comms, "numbers_of_all", lambda *args, **_: control.append(args))
        summed = comms.all_reduce_sum
        patch.setattr(comms, "all_reduce_sum", lambda values: sums.append(values.numel()) or summed(values))
        STEP(state, x)
    assert not control and sums[-1] == 3 + 2  # total, weight and squares, and the two marks


@on_ranks(2)
def test_a_copy_of_one_rank_is_no_difference(mesh: Any) -> None:
    """A copy that one rank makes alone gives no number away."""
    state = state_of(mesh, 0)
    if mesh.get_rank() == 1:
        state.copy()
    other = state_of(mesh, 1)
    x = torch.ones(4)
    ya.eval_step(loss)(other, x)
    ya.train_step(loss, TX)(state, x)  # the ranks agree


def test_on_cuda_a_later_step_tells_what_has_arrived() -> None:
    """Nobody waits: a sum that has not arrived is left, and the next one is read in its place."""
    comms: Any = SimpleNamespace(device=CUDA, world=2, world_rank=0, unread=None, event=CudaEvent)
    with fake_cuda():
        same, other = (2 * marks(own, CUDA) for own in ("state 1, step 0", "state 1, step 1"))
        mixed = (same + other) / 2
        for sums in (same, same, mixed):  # of the third nothing is known yet
            check(sums, "state 1, step 0", comms)
            torch.cuda.synchronize()
        with pytest.raises(ya.errors.RanksDisagree, match=r"rank 0 has used state 1, step 0, others have not"):
            check(same, "state 1, step 2", comms)
