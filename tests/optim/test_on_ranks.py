"""Every optimizer of the library trains shards as it trains plain trees: in float64, on any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.marks import nightly
from tests.harness.oracle import compare, plain
from tests.harness.pool import Pools, on_ranks
from tests.harness.small import batch, batches, loss, model
from tests.optim.trees import F64, trains_as_plain
from yafsdp_fn import optim
from yafsdp_fn.optim import scaling

STEPS = 5


def matrices(path: str, param: ya.Param) -> bool:
    return len(param.shape) > 1


def centred(updates: Any, state: Any, params: Any = None) -> Any:
    return optree.tree_map(lambda u: (u - u.mean()).float(), updates), state


TXS: dict[str, Any] = {
    "undeclared, of another dtype": optim.chain(
        optim.GradientTransformation(lambda params: (), centred), optim.sgd(0.1)
    ),
    "momentum": optim.sgd(0.1, momentum=0.9),
    "nesterov": optim.sgd(0.1, momentum=0.9, nesterov=True),
    "scale by a number": optim.chain(optim.scale(0.3), optim.sgd(0.1)),
    "scale by a rate": optim.chain(optim.scale_by_schedule(lambda count: 0.5 ** (count + 1)), optim.sgd(0.1)),
    "warm-up and cosine": optim.adamw(scaling.warmup_cosine_decay_schedule(0.0, 0.05, 2, STEPS), weight_decay=0.1),
    "momentum, decayed, at a rate": optim.chain(
        optim.clip_by_global_norm(0.5),
        optim.add_decayed_weights(0.1, matrices),
        optim.sgd(lambda count: 0.1 / (count + 1), momentum=0.9),
    ),
    "decay of some leaves": optim.adamw(0.05, weight_decay=0.1, mask=matrices),
    "decay of layers": optim.lion(0.01, weight_decay=0.5, mask=optim.layer_matrices),
    "two partitions": optim.chain(
        optim.masked(optim.sgd(0.1, momentum=0.9), matrices),
        optim.masked(optim.adam(0.05), lambda path, param: not matrices(path, param)),
    ),
    "clip, mean, rmsprop": optim.chain(
        optim.clip(0.05),
        optim.mean_momentum(0.8),
        optim.rmsprop(0.01, eps=1e-3, momentum=0.5, bias_correction=True),
    ),
}


def trained(mesh: Any, name: str, on_host: bool = False) -> None:
    plain_tx = TXS[name]
    inside = name == "decay of layers"  # of which units know, too
    trains_as_plain(mesh, optim.on_host(plain_tx) if on_host else plain_tx, plain_tx, inside=inside, steps=STEPS)


@pytest.mark.parametrize("world", [nightly(1), nightly(2), 3])
@pytest.mark.parametrize("name", TXS)
def test_an_optimizer_trains_shards_as_it_trains_plain_trees(pools: Pools, world: int, name: str) -> None:
    pools[world].run(trained, name)


RATE = scaling.warmup_linear_decay_schedule(0.03, 0.1, 2, 7, 0.001)


def trains_as_momentum(mesh: Any, tx: Any, step_of: Callable[[int, Any], Any], rate: Callable[[int], float]) -> None:
    """Steps are those of SGD with momentum 0.9, by hand, at the rate of each. step_of: of a number and a state"""
    state = ya.init(model(), tx, mesh=mesh, precision=F64)
    expected = optree.tree_map(torch.Tensor.double, plain(model()))
    trace = optree.tree_map(torch.zeros_like, expected)
    for number, (mine, everything) in enumerate(batches(mesh, STEPS)):
        state, _ = step_of(number, state)(state, mine)
        now = rate(number)
        trace = optree.tree_map(lambda t, g: 0.9 * t + g, trace, ya.grad(loss)(expected, everything))
        expected = optree.tree_map(lambda p, t, now=now: p - now * t, expected, trace)
    compare(state, expected, 1e-13, "parameters")


@on_ranks(1, 2, 3)
def test_rates_are_those_of_the_host_in_float64(mesh: Any) -> None:
    """SGD at a rate of the library, against a loop that takes the rate of each count from the host."""
    tx = optim.sgd(RATE, momentum=0.9)
    step = ya.train_step(loss, tx)
    trains_as_momentum(mesh, tx, lambda number, state: step, RATE)


BY_HAND = [0.5, 0.5, 0.01, 0.2, 0.2]


@on_ranks(2)
def test_a_rate_may_be_changed_by_hand(mesh: Any) -> None:
    """Another step with another rate, on the same state and by its program, against SGD at these rates."""

    def step_of(number: int, state: Any) -> Any:
        schedule = state.program or ya.schedules.zero3()
        return ya.train_step(loss, optim.sgd(BY_HAND[number], momentum=0.9), schedule=schedule)

    trains_as_momentum(mesh, optim.sgd(BY_HAND[0], momentum=0.9), step_of, BY_HAND.__getitem__)


# ---- what is refused, on every number of ranks alike


def foreign(update: Any, mark: Any = optim.assume_elementwise) -> Any:
    """An update of each leaf, after a moment that begins with zeros."""

    def every(updates: Any, mu: Any, params: Any = None) -> Any:
        mu = optree.tree_map(lambda m, g: 0.9 * m + g, mu, updates)
        return optree.tree_map(update, updates, mu), mu

    tx = (lambda params: optree.tree_map(torch.zeros_like, params), every)
    return optim.chain(mark(tx), optim.scale(-0.1))


def pair(update: Any) -> Any:
    return optim.chain(optim.assume_elementwise((lambda params: (), update)), optim.scale(-0.1))


NAME = r"[\w.]+(\[0\])?( \(shards\))?"
OFF = rf"every is marked by assume_elementwise, but it does not treat every element of {NAME} on its own"
LEAF = rf"every returned torch.float\d\d \(.*\) for {NAME}, expected a floating-point tensor of shape \("
REFUSED: dict[str, tuple[Any, str]] = {
    "a mean that is broadcast": (foreign(lambda u, mu: u.mean(-1, keepdim=True)), LEAF),
    "a number": (foreign(lambda u, mu: u.sum()), LEAF),
    "of whole trees": (foreign(lambda u, mu: u[:1], lambda tx: tx), LEAF),
    "integers": (foreign(lambda u, mu: u.sign().int()), r"torch.int32 \(.*\) for .*, expected a floating-point tensor"),
    "centred": (foreign(lambda u, mu: u - u.mean()), OFF),
    "of a moment's norm": (foreign(lambda u, mu: u / (1 + (mu - u).norm())), OFF),
    "by the size of a leaf": (foreign(lambda u, mu: u / u.numel()), OFF),
    "rows, masked": (optim.masked(foreign(lambda u, mu: u.softmax(-1)), lambda path, param: True), OFF),
    "nothing": (pair(lambda updates, state, params=None: None), r"lambda.* should return a pair .*, got NoneType$"),
    "updates alone": (pair(lambda updates, state, params=None: updates), r"should return a pair .*, got a Model of 3$"),
    "three": (pair(lambda updates, state, params=None: (updates, state, 1)), r"pair .*, got a tuple of 3$"),
    "another tree": (pair(lambda updates, state, params=None: ([], state)), r"a tree of another structure: "),
    "no updates": (pair(lambda updates, state, params=None: (None, state)), r"a tree of another structure: "),
}


def refused(mesh: Any, name: str, in_program: bool) -> list[str]:
    """What is said, and by whom: of a step, of `apply_gradients` and of a plain tree; states stay as they were."""
    tx = REFUSED[name][0]
    said = []
    state, plain_state = ya.init(model(), tx, mesh=mesh, precision=F64), ya.PlainState.create(model(), tx)
    step = ya.train_step(loss, tx, schedule=ya.schedules.zero3(update=in_program), skip_nonfinite=False)
    before = ya.unshard(state.params)
    calls: list[Any] = [lambda: step(state, batch(mesh.get_rank()))]
    calls.append(lambda: state.apply_gradients(ya.grad(loss)(state.params, batch(mesh.get_rank())), tx))
    calls.append(lambda: plain_state.apply_gradients(plain_state.params, tx))
    for call in calls[:1] if in_program else calls:
        with pytest.raises(TypeError) as error:
            call()
        said.append(str(error.value))
    compare(ya.unshard(state.params), before, 0.0, "parameters")
    return said


@pytest.mark.sampled
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "in_program"),
    [(name, False) for name in REFUSED]
    + [(name, True) for name, (tx, _) in REFUSED.items() if optim.why_not_unitwise(tx) is None],
)
def test_an_update_that_is_not_like_its_parameter_is_refused(
    pools: Pools, name: str, world: int, in_program: bool
) -> None:
    _, message = REFUSED[name]
    first, *others = pools[world].run(refused, name, in_program)
    assert all(re.search(message, one) for one in first), first
    assert all(said == first for said in others)
