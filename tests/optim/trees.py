"""Small trees, and the step as it is defined: the oracle of `step_`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness import small
from tests.harness.oracle import compare, plain, whole
from yafsdp_fn import optim
from yafsdp_fn.params.tree import named_leaves

F64 = ya.Precision(*[torch.float64] * 3)


class Layer(NamedTuple):
    weight: Tensor
    norm: Tensor


class Model(NamedTuple):
    """A stack of layers [L, ...], a vector, and a leaf that is absent."""

    layers: Layer
    bias: Tensor
    frozen: None = None


def model(seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Model:
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    return Model(Layer(leaf(3, 5, 7), leaf(3, 7)), leaf(13))


def plain_state(abstract: Any, tx: Any) -> ya.PlainState:
    """The plain state in float64 with the values of `ya.init(abstract)`."""
    return ya.PlainState.create(optree.tree_map(Tensor.double, plain(abstract)), tx)


def factored(params: Any, batch: Any) -> ya.Mean:
    """The loss of a small model times a factor, which may be infinite."""
    total, weight = small.loss(params, batch)
    return ya.Mean(total * batch["factor"], weight)


def trains_as_plain(
    mesh: Any,
    tx: Any,
    plain_tx: Any = None,
    *,
    create: Callable[[], Any] = small.model,
    inside: bool = False,
    by_hand: bool = False,
    skips: bool = False,
    steps: int = 5,
    tolerance: float = 1e-12,
    of_state: float = 1e-12,
) -> None:
    """Steps with updates after the program, `inside` of it, too, and `by_hand` from gradients, against the plain tree.
    Those of programs have the same bits. skips: the third one is not finite"""
    expected = plain_state(create(), plain_tx or tx)
    oracle = ya.train_step(factored, plain_tx or tx)
    states = [ya.init(create(), tx, mesh=mesh, precision=F64) for _ in range(1 + inside + by_hand)]
    schedules = [ya.schedules.zero3(update=update) for update in (False, True)[: 1 + inside]]
    verbs = [ya.train_step(factored, tx, schedule=schedule) for schedule in schedules]
    for number, (mine, everything) in enumerate(small.batches(mesh, steps)):
        bad = skips and number == 2
        factor = {"factor": torch.tensor(float("inf") if bad else 1.0)}
        expected, wanted = oracle(expected, everything | factor)
        for at, step in enumerate(verbs):
            states[at], got = step(states[at], mine | factor)
            assert float(got["skipped"]) == bad
            compare({} if bad else got, {} if bad else wanted, tolerance, f"step {number}: metrics")
        if by_hand:
            states[-1] = states[-1].apply_gradients(ya.grad(factored)(states[-1].params, mine | factor), tx)
        compare(states[0], expected.params, tolerance, f"step {number}: parameters")
    for state in states:
        compare(state, expected.params, tolerance, "parameters")
        compare(ya.global_norm(state.params), ya.global_norm(expected.params), tolerance, "padding stays zero")
        leaves, plain_leaves = (dict(named_leaves(whole(tree))) for tree in (state.opt_state, expected.opt_state))
        compare({path: leaves[path] for path in plain_leaves}, plain_leaves, of_state, "the optimizer's state")
        assert not any(leaf.any() for path, leaf in leaves.items() if path not in plain_leaves), "what is not chosen"
    if inside:
        assert [step.program(state).has_updates for step, state in zip(verbs, states, strict=False)] == [False, True]
        compare(states[1], states[0], 0.0, "parameters, inside of the program")


def matrices(path: str, param: Any) -> bool:
    return path == "layers.weight"


def clone(tree: Any) -> Any:
    return optree.tree_map(torch.clone, tree)


def bits(tree: Any) -> list[bytes]:
    return [leaf.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for leaf in flat(tree)]


def flat(tree: Any) -> list[Tensor]:
    return [leaf.reshape(-1) for leaf in optree.tree_leaves(tree)]


def defined_step(tx: Any, params: Any, grads: Any, state: Any, scale: float = 1.0) -> tuple[Any, Any]:
    """New parameters and state, by `update` alone."""
    updates, state = tx.update(optree.tree_map(lambda g: g / scale, grads), state, params)
    return optim.apply_updates(params, updates), state


def assert_close(actual: Any, expected: Any, rtol: float) -> None:
    assert optree.tree_structure(actual) == optree.tree_structure(expected)
    for a, e in zip(optree.tree_leaves(actual), optree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, e, rtol=rtol, atol=rtol)
