"""What ranks compare before the first step: optimizers in words, environments; and what they are warned of."""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.harness.failing import batch, loss, params, state
from tests.harness.groups import outcome
from tests.harness.pool import on_ranks
from yafsdp_fn.runtime import consistency

o = ya.optim


def scheduled(peak: float = 3e-4, clip: float = 1.0, decay: float = 0.1, steps: int = 100, least: int = 1) -> Any:
    rate = o.warmup_cosine_decay_schedule(0.0, peak, 10, steps)
    mask = lambda path, p: len(p.shape) > least  # noqa: E731
    return o.chain(o.clip_by_global_norm(clip), o.adamw(rate, weight_decay=decay, mask=mask))


def foreign(scale: float = 1.0, device: str = "cuda:0", path: str = "/data/a", seed: int = 0) -> Any:
    """A pair of functions that close over a tensor, names of a device and of a file, and an object."""
    noise, box = torch.randn(3, generator=torch.Generator().manual_seed(seed)), object()
    return lambda p: (), lambda u, s, p=None: (u if noise is box else (device, path) and u, s) if scale else (u, s)


def ours(scale: float = 1.0) -> Any:
    return o.chain(o.partition({"a": o.muon(0.1 * scale), "b": o.sgd(0.1)}, lambda path, p: "ab"[len(p.shape) % 2]))


SAME: list[Callable[..., Any]] = [scheduled, foreign, ours, lambda: o.contrib.schedule_free(o.lion(1e-3), 4)]
OTHERS: list[tuple[Any, Any]] = [
    *((scheduled(), scheduled(**{name: 3})) for name in ("peak", "clip", "decay", "least")),
    (scheduled(), scheduled(steps=200)),
    (o.sgd(0.1), o.adamw(0.1)),
    (o.sgd(0.1), o.sgd(0.1, momentum=0.9)),
    (o.sgd(0.1), o.chain(o.sgd(0.1), o.scale(1.0))),
    (foreign(), foreign(scale=2.0)),
    (ours(), ours(2.0)),
    (o.contrib.schedule_free(o.lion(1e-3), 4), o.contrib.schedule_free(o.lion(1e-3), 5)),
    (o.contrib.schedule_free(o.sgd(0.1), 0.1), o.contrib.schedule_free(o.sgd(0.1), 0.1, b1=0.8)),
]


@pytest.mark.parametrize("make", SAME)
def test_optimizers_made_alike_are_alike(make: Callable[..., Any]) -> None:
    assert consistency.optimizer(make()) == consistency.optimizer(make())


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_others_are_not(number: int) -> None:
    one, other = OTHERS[number]
    assert consistency.optimizer(one) != consistency.optimizer(other)


def test_memory_names_of_files_and_numbers_of_devices_do_not_count() -> None:
    mine = consistency.optimizer(foreign())
    assert mine == consistency.optimizer(foreign(device="cuda:3", path="/scratch/b", seed=1))
    assert not re.search(r"0x|/data|cuda:", str(mine))


def recursive(rate: float) -> Any:
    def schedule(count: int) -> float:
        return schedule(count - 1) if count else rate

    return o.chain(o.scale_by_schedule(schedule))


def test_a_function_that_closes_over_itself_has_an_end() -> None:
    assert "schedule=..." in str(consistency.optimizer(recursive(0.1)))
    assert consistency.optimizer(recursive(0.1)) != consistency.optimizer(recursive(0.2))


def test_words_do_not_depend_on_the_hashes_of_a_process() -> None:
    """Which differ between processes, and with them the order of sets of texts."""
    words = [f"word {number}" for number in range(9)]
    tx = o.add_decayed_weights(0.1, functools.partial(lambda chosen, path, p: path in chosen, frozenset(words)))
    assert re.findall(r"word \d", str(consistency.optimizer(tx))) == words


# ---- on ranks

UNLIKE: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str, str]] = {
    "kind": (lambda: o.sgd(0.1), lambda: o.adamw(0.1), "transformation 0", "Scale(by=-0.1)", "Adam(b1=0.9"),
    "rate": (lambda: o.adamw(0.1), lambda: o.adamw(0.2), "transformation 2", "Scale(by=-0.1)", "Scale(by=-0.2)"),
    "decay": (scheduled, lambda: scheduled(decay=0.2), "transformation 2", "weight_decay=0.1", "weight_decay=0.2"),
    "clipping": (scheduled, lambda: scheduled(clip=2.0), "transformation 0", "max_norm=1.0", "max_norm=2.0"),
    "schedule": (scheduled, lambda: scheduled(peak=4e-4), "transformation 3", "init_value=0.0003", "init_value=0.0004"),
}


@on_ranks(2)
@pytest.mark.parametrize("by_hand", [False, True], ids=["train_step", "apply_gradients"])
def test_another_optimizer_is_refused_and_named(mesh: Any, by_hand: bool) -> None:
    rank = mesh.get_local_rank()
    for *pair, part, first, second in UNLIKE.values():
        tx = pair[rank]()
        now = state(mesh, pair[0]() if by_hand else tx)
        step = ya.train_step(loss, tx)
        if by_hand:
            _, grads = ya.value_and_grad(loss)(now.params, batch(rank))
            text = outcome(functools.partial(now.apply_gradients, grads, tx))
        else:
            text = outcome(functools.partial(step, now, batch(rank)))
        assert f"RanksDisagree: ranks disagree on the optimizer; {part} differs:\n" in text, text
        for at, side in enumerate((first, second)):
            assert re.search(rf"    rank {at}: .*{re.escape(side)}", text), text
    now, _ = ya.train_step(loss, o.sgd(0.1))(state(mesh, o.sgd(0.1)), batch(rank))  # nothing is lost


@on_ranks(2)
def test_another_environment_is_refused_and_named(mesh: Any) -> None:
    rank = mesh.get_local_rank()
    version = consistency._version()
    changes: list[tuple[Any, str, Any, str]] = [
        (os.environ, "NCCL_ALGO", "Ring", "the variable NCCL_ALGO differs:\n    rank 0: not set\n    rank 1: Ring"),
        (torch, "__version__", "2.99", f"of torch differs:\n    rank 0: {torch.__version__}\n    rank 1: 2.99"),
        (consistency, "_version", lambda: "9.9", f"of yafsdp_fn differs:\n    rank 0: {version}\n    rank 1: 9.9"),
    ]
    for where, name, value, said in changes:
        with pytest.MonkeyPatch.context() as patch:
            if rank:
                patch.setitem(where, name, value) if where is os.environ else patch.setattr(where, name, value)
            text = outcome(lambda: ya.init(params(), mesh=mesh))
        assert said in text, text


@on_ranks(2)
def test_other_threads_are_warned_of_once(mesh: Any) -> None:
    """Of another number of threads, in two steps, and not of equal ones."""
    rank = mesh.get_local_rank()
    tx = o.sgd(0.1)
    found = []
    for threads in (1 + rank, 1):
        step = ya.train_step(loss, tx)
        now = state(mesh, tx)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                now, _ = step(now, batch(rank))
        torch.set_num_threads(before)
        found.append([str(each.message) for each in caught if "numbers of threads" in str(each.message)])
    (of_threads,), of_nothing = found
    assert "other numbers of threads, [1, 2]" in of_threads
    assert not of_nothing
