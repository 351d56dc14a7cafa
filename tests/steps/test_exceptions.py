"""An exception on all ranks, at every point of a step in turn: the state is as before, and the next step is exact."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.collector import no_collection, sessions
from tests.harness.failing import TX, Fault, LossFn, Planned, batch, bits, embed, head, layer, loss_with, same, state
from tests.harness.marks import nightly
from tests.harness.pool import on_ranks
from yafsdp_fn.api.train_step import TrainStep

FORWARD = ["forward embed", *["forward layer"] * 3, "forward head"]
BACKWARD = ["backward head", *["backward layer"] * 3, "backward embed"]
RECOMPUTED = ["backward head", *["forward layer", "backward layer"] * 3, "backward embed"]


def make(loss: LossFn, **options: Any) -> TrainStep:
    return ya.train_step(loss, TX, **options)


def fail(fault: Fault, at: int, run: Callable[[], Any]) -> bool:
    """Whether `run` raised at event `at`; False where it has fewer events."""
    fault.arm(at)
    try:
        run()
    except fault.error as error:
        assert fault.error is KeyboardInterrupt or f"planned: {fault.events[at]}" in str(error)
        return True
    finally:
        fault.at = None
    return False


def expected_steps(start: ya.ShardedState, loss: LossFn, count: int, **options: Any) -> list[list[torch.Tensor]]:
    """The bits of the state after each of `count` steps that nothing disturbs."""
    data, step, now, out = batch(start.mesh.get_local_rank()), make(loss, **options), start, []
    for _ in range(count):
        now, _ = step(now, data)
        out.append(bits(now))
    return out


def first_step(mesh: Any, error: type[BaseException] = Planned) -> list[str]:
    """Fails in every event of the first call, which is recorded, and of its step; returns the events of a whole one."""
    fault, data = Fault(), batch(mesh.get_local_rank())
    fault.error = error
    expected = expected_steps(state(mesh), loss_with(), 2)
    for at in range(99):
        now, step = state(mesh), make(loss_with(fault))
        before = bits(now)
        if not fail(fault, at, lambda now=now, step=step: step(now, data)):
            return fault.events
        assert same(bits(now), before)
        for after in expected:  # the first knows its program if the call was recorded
            now, _ = step(now, data)
            assert same(bits(now), after), f"event {at}"
    raise AssertionError("a step without an end")


def later_steps(start: ya.ShardedState, error: type[BaseException] = Planned, **options: Any) -> list[str]:
    """Fails in every event of a step that runs a program, each time one step further on the same state."""
    fault, data = Fault(), batch(start.mesh.get_local_rank())
    fault.error = error
    expected = iter(expected_steps(start.copy(), loss_with(), 50, **options))
    step = make(loss_with(fault), **options)
    now, _ = step(start, data)
    assert same(bits(now), next(expected))
    for at in range(49):
        before = bits(now)
        if not fail(fault, at, lambda now=now: step(now, data)):
            return fault.events
        assert same(bits(now), before)
        assert not now.memory.board.open
        now, _ = step(now, data)
        assert same(bits(now), next(expected)), f"event {at}"
    raise AssertionError("a step without an end")


HALF = ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16)
LATER: list[tuple[dict[str, Any], ya.Precision | None, list[str]]] = [
    ({}, None, [*FORWARD, *BACKWARD]),
    ({"schedule": ya.schedules.zero3(remat="all")}, HALF, [*FORWARD, *RECOMPUTED]),
    (
        {"schedule": ya.schedules.zero3(remat="all"), "microbatches": 2},
        None,
        [*FORWARD, *RECOMPUTED] * 2,
    ),
    ({"schedule": ya.schedules.zero3(resident=1, prefetch=2), "microbatches": 2}, HALF, [*FORWARD, *BACKWARD] * 2),
    ({"schedule": ya.schedules.zero2()}, None, [*FORWARD, *BACKWARD]),
]


@on_ranks(nightly(1), 2)
def test_an_exception_in_any_event_leaves_the_state_usable(mesh: Any) -> None:
    assert first_step(mesh) == [*FORWARD, *FORWARD, *BACKWARD]
    for options, precision, events in LATER if mesh.size() == 1 else LATER[1::2]:
        assert later_steps(state(mesh, precision=precision), **options) == events


@on_ranks(nightly(1), 2)
def test_ctrl_c_before_the_commit_leaves_the_state_usable(mesh: Any) -> None:
    """Ctrl-C, as an exception raised in the blocks and as a real signal."""
    assert first_step(mesh, KeyboardInterrupt) == [*FORWARD, *FORWARD, *BACKWARD]
    assert later_steps(state(mesh), KeyboardInterrupt) == [*FORWARD, *BACKWARD]
    if mesh.size() > 1:  # signals do not reach ranks at one point of the step
        return
    fault, step, expected = Fault(), None, expected_steps(state(mesh), loss_with(), 5)
    fault.error = KeyboardInterrupt

    step, now = make(loss_with(fault)), state(mesh)
    for at, after in zip((3, 4, 5, 8, 9), expected, strict=True):  # the first while it is recorded, the rest in a step
        fault.before = functools.partial(signal.raise_signal, signal.SIGINT)
        assert fail(fault, at, lambda now=now: step(now, batch()))
        now, _ = step(now, batch())
        assert same(bits(now), after)


def beside_the_visits(fault: Fault) -> LossFn:
    """A loss that may fail anywhere but in its blocks, and in blocks that are no part of the program."""

    def quiet(w: Any) -> torch.Tensor:
        fault.event("without grad")
        return w["w"].square().sum()

    def mapped(w: Any) -> torch.Tensor:
        fault.event("pure path")
        return w["w"].square().sum()

    def loss(params: Any, data: Any) -> torch.Tensor:
        fault.event("before the first visit")
        x = ya.apply(embed, params["embed"], data["tokens"])
        with torch.no_grad():
            scale = 1 + ya.apply(quiet, params["head"])
        fault.event("between visits")
        doubled = optree.tree_map(lambda leaf: 2 * leaf, params["embed"])
        scale = scale + ya.apply(mapped, doubled)
        x, _ = ya.scan(layer, x, params["layers"])
        inner = torch.func.grad(lambda w: ya.apply(mapped, w))(params["embed"])
        scale = scale + sum(leaf.sum() for leaf in optree.tree_leaves(inner))
        total = scale * ya.apply(head, params["head"], x, data["targets"])
        fault.event("after the last visit")
        return total

    return loss


@on_ranks()
@pytest.mark.parametrize("world", [nightly(1), 2])
def test_an_exception_beside_the_visits_leaves_the_state_usable(mesh: Any) -> None:
    fault, data = Fault(), batch(mesh.get_local_rank())
    expected = expected_steps(state(mesh), beside_the_visits(Fault()), 20)
    for at in range(20):
        now, step = state(mesh), make(beside_the_visits(fault))
        for number, after in enumerate(expected[:3]):
            here = at if number == 0 else at % 6  # a later step has six events and a backward
            if not fail(fault, here, lambda now=now, step=step: step(now, data)):
                assert number == 0
                # the last one is the backward of the mapped visit, which recomputes
                assert set(fault.events) == {
                    *("before the first visit", "without grad", "between visits", "pure path", "after the last visit"),
                }
                return
            now, _ = step(now, data)
            assert same(bits(now), after), f"event {at}"
    raise AssertionError("a step without an end")


@on_ranks(1, 2)
def test_a_failed_evaluation_or_gradient_disturbs_no_step(mesh: Any) -> None:
    """Failing evaluations and gradients by hand between steps that they must not disturb."""
    fault = Fault()
    rank = mesh.get_local_rank()
    data = batch(rank)
    expected = expected_steps(state(mesh), loss_with(), 12)
    evaluate, gradient = ya.eval_step(loss_with(fault)), ya.value_and_grad(loss_with(fault))
    step, now = make(loss_with()), state(mesh)
    for at, after in enumerate(expected):
        if at < 5:
            assert fail(fault, at, lambda now=now: evaluate(now, data))
        assert fail(fault, at % 10, lambda now=now: gradient(now.params, data))
        value, _ = gradient(now.params, data)
        assert torch.equal(value, evaluate(now, data)["loss"])
        now, metrics = step(now, data)
        assert same(bits(now), after)
        assert torch.equal(metrics["loss"], value)


@on_ranks(1, 2)
def test_an_optimizer_that_raises_leaves_the_state_usable(mesh: Any) -> None:
    """The optimizer raises before it writes anything."""
    fault, rank = Fault(), mesh.get_local_rank()

    def update(updates: Any, opt_state: Any, params: Any = None) -> Any:
        fault.event("update")
        return TX.update(updates, opt_state, params)

    tx = ya.optim.assume_elementwise((TX.init, update))
    step, now, data = ya.train_step(loss_with(), tx), state(mesh, tx), batch(rank)
    for _ in range(3):
        before = bits(now)
        assert fail(fault, 0, lambda now=now: step(now, data))
        assert same(bits(now), before)
        now, _ = step(now, data)


@on_ranks(1, 2)
def test_map_layers_that_raises_leaves_the_state_usable(mesh: Any) -> None:
    """`f` raises at each layer in turn, and the exceptions are kept, with all that their frames hold on to."""
    data = batch(mesh.get_local_rank())
    kept = []
    step = make(loss_with())
    now = state(mesh)
    expected = expected_steps(state(mesh), loss_with(), 4)
    fault = Fault()

    def function(weights: Any) -> Any:
        fault.event("layer")
        return optree.tree_map(lambda leaf: 2 * leaf, weights)

    for at, after in enumerate(expected):
        fault.arm(at)
        try:
            doubled = ya.map_whole_layers(function, now.params["layers"])
        except Planned as error:
            kept.append(error)
        now, _ = step(now, data)
        assert same(bits(now), after)
    assert len(kept) == 3
    assert doubled.entry == now.params["layers"].entry


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_failed_step_leaves_no_garbage() -> None:
    """A step's slots may be as large as layers: they must not wait for the cycle collector."""
    fault, now = Fault(), state()
    step = make(loss_with(fault))
    with no_collection():
        before = sessions()
        for at in (0, 3, 7):  # in the recorded call, and in its step
            assert fail(fault, at, lambda now=now: step(now, batch()))
        assert sessions() == before
        now, _ = step(now, batch())
        for at in (0, 3, 7):  # in a later one
            assert fail(fault, at, lambda now=now: step(now, batch()))
        assert sessions() == before


@on_ranks(1, 2)
def test_an_error_without_grad_that_the_loss_swallows_ends_the_step_before_its_updates(mesh: Any) -> None:
    """A visit without grad fails, and the loss goes on as if it had not."""
    fault, data = Fault(), batch(mesh.get_local_rank())
    model = loss_with()

    def quiet(w: Any) -> torch.Tensor:
        fault.event("without grad")
        return w["w"].square().sum()

    def careless(params: Any, batch: Any) -> Any:
        with torch.no_grad(), contextlib.suppress(Planned):
            ya.apply(quiet, params["head"])
        return model(params, batch)

    options = {"schedule": ya.schedules.zero3(update=True), "skip_nonfinite": False}
    tx = ya.optim.adamw(1e-2)
    step = ya.train_step(careless, tx, **options)
    now = state(mesh, tx)
    for _ in range(2):
        now, _ = step(now, data)
    before = bits(now)
    fault.arm(0)
    with pytest.raises(RuntimeError, match="a step cannot continue after a failed visit"):
        step(now, data)
    fault.at = None
    assert same(bits(now), before)
    step(now, data)
