"""Gradients inside a loss: those that the step would count twice are refused, the others are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.failing import TX, LossFn, batch, bits, embed, head, layer, loss, plain, same, state
from tests.harness.meshes import on
from tests.harness.pool import Pools
from yafsdp_fn.communication.communicators import communicators

REFUSED = (
    r"head: a backward through a visit outside the step's own, as by torch.autograd.grad or .backward\(\) inside the "
    r"loss, would be added to the step's gradients; use torch.func.grad on a function of params"
)


def inputs_grad(tree: Any, data: Any, **options: Any) -> Tensor:
    """A gradient with respect to what goes into a visit."""
    x = ya.apply(embed, tree["embed"], data["tokens"]).detach().requires_grad_()
    total: Tensor = ya.apply(head, tree["head"], x, data["targets"])
    return total + torch.autograd.grad(total, x, **options)[0].square().sum()


def leaves_grad(tree: Any, data: Any, **options: Any) -> Tensor:
    """A gradient with respect to the leaves of the parameters, which no visit's output depends on in torch's eyes."""
    total = loss(tree, data)
    found = torch.autograd.grad(total, optree.tree_leaves(tree), **options)
    return total + sum(grad.square().sum() for grad in found if grad is not None)


def backward_call(tree: Any, data: Any) -> Tensor:
    total = loss(tree, data)
    total.backward(retain_graph=True)
    return total


GRADIENTS: dict[str, LossFn] = {
    "grad of an input": inputs_grad,
    "grad of an input, create_graph": lambda tree, data: inputs_grad(tree, data, create_graph=True),
    "grad of the leaves": leaves_grad,
    "grad of the leaves, create_graph": lambda tree, data: leaves_grad(tree, data, create_graph=True),
    "grad of the leaves, allow_unused": lambda tree, data: leaves_grad(tree, data, allow_unused=True),
    "grad of the leaves, zeros": lambda tree, data: leaves_grad(tree, data, allow_unused=True, materialize_grads=True),
    "backward()": backward_call,
}


@pytest.mark.parametrize("which", GRADIENTS)
def test_a_backward_inside_a_loss_is_refused(which: str) -> None:
    """In the first step and in a program; the state goes on as if it had not happened."""
    inside = False

    def sometimes(tree: Any, data: Any) -> Tensor:
        return GRADIENTS[which](tree, data) if inside else loss(tree, data)

    now = state()
    step = ya.train_step(GRADIENTS[which], TX)
    expected = state()
    with pytest.raises(RuntimeError, match=REFUSED):
        step(now, batch())
    step = ya.train_step(sometimes, TX)
    for _ in range(2):
        now, _ = step(now, batch())
        expected, _ = ya.train_step(loss, TX)(expected, batch())
    if "input" not in which:  # which visits other units than `loss`
        inside = True
        with pytest.raises(RuntimeError, match=REFUSED):
            step(now, batch())
        inside = False
    now, _ = step(now, batch())
    expected, _ = ya.train_step(loss, TX)(expected, batch())
    assert same(bits(now), bits(expected))


def test_a_second_backward_is_refused() -> None:
    """The graph of a step outlives it where the loss keeps a tensor, but its visits do not."""
    kept: list[Tensor] = []

    def keeping(tree: Any, data: Any) -> Tensor:
        kept.append(loss(tree, data))
        return kept[-1]

    now = state()
    step = ya.train_step(keeping, TX)
    for _ in range(2):
        now, _ = step(now, batch())
        with pytest.raises(RuntimeError, match="head: a second backward through a visit; its graph is gone"):
            kept[-1].backward()


def squares(tree: Any) -> Tensor:
    return sum((leaf.square().sum() for leaf in optree.tree_leaves(tree)), torch.zeros(()))


def by_ranks(ranks: int, replicas: int = 1) -> dict[str, tuple[LossFn, LossFn]]:
    """`(loss of a rank, loss on the plain tree)`. A rank's leaves are its shards, and its loss is one of `ranks` means.

    So a regulariser on the leaves counts once per rank of a replica; one that is the same on all ranks counts once.
    Gradients of torch.func are those of the mean over ranks, and need no factor.
    """

    def mapped(tree: Any, data: Any) -> Tensor:
        return loss(optree.tree_map(lambda leaf: 1.5 * leaf, tree), data)

    def both(tree: Any, data: Any) -> Tensor:
        return mapped(tree, data) + loss(tree, data)

    def penalty(parts: int) -> LossFn:
        def penalised(tree: Any, data: Any) -> Tensor:
            inner = torch.func.grad(lambda at: loss(at, data))(tree)
            shards = squares(inner) * max(1, parts // replicas)
            return loss(tree, data) + shards + 0.1 * ya.global_norm(inner)

        return penalised

    def of_inputs(tree: Any, data: Any) -> Tensor:
        x = ya.apply(embed, tree["embed"], data["tokens"])
        inner = torch.func.grad(lambda at: ya.apply(head, tree["head"], at, data["targets"]))(x.detach())
        return loss(tree, data) + (inner * x).sum()

    def regularised(parts: int) -> LossFn:
        return lambda tree, data: loss(tree, data) + 0.1 * max(1, parts // replicas) * squares(tree)

    def everywhere(tree: Any, data: Any) -> Tensor:
        return loss(tree, data) + 0.1 * ya.vdot(tree, tree) + ya.global_norm(tree)

    return {
        "regulariser": (regularised(ranks), regularised(1)),
        "vdot and global_norm": (everywhere, everywhere),
        "tree_map": (mapped, mapped),
        "tree_map beside visits": (both, both),
        "torch.func.grad of parameters": (penalty(ranks), penalty(1)),
        "torch.func.grad of inputs": (of_inputs, of_inputs),
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"schedule": ya.schedules.zero3(remat=ya.schedules.remat.all)},
    "microbatches": {"microbatches": 2},
}
WHICH = pytest.mark.parametrize(
    ("which", "options"),
    # a product of gradients of parts is no gradient of the whole
    [(one, how) for one in by_ranks(1) for how in OPTIONS if "func" not in one or how != "microbatches"],
)


def exact(mesh: Any, which: str, options: str) -> None:
    """Three steps of plain SGD, whose parameters show every gradient, against the plain tree on the whole batch."""
    ranks = mesh.size()
    rank = mesh.get_rank()
    tx = ya.optim.sgd(1.0)
    parts = [batch(r) for r in range(ranks)]
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    ours, theirs = by_ranks(ranks, communicators(mesh).replicas)[which]
    now = state(mesh, tx)
    expected = plain(tx)
    step = ya.train_step(ours, tx, **OPTIONS[options])
    oracle = ya.train_step(theirs, tx)
    for _ in range(3):
        now, got = step(now, parts[rank])
        expected, want = oracle(expected, whole)
        torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-6, atol=0.0)
        torch.testing.assert_close(got["grad_norm"], want["grad_norm"], rtol=1e-5, atol=0.0)
    for a, b in zip(optree.tree_leaves(ya.unshard(now)), optree.tree_leaves(expected.params), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("world", [1, 2])
@WHICH
def test_functions_of_the_leaves_inside_a_loss_are_exact(pools: Pools, world: int, which: str, options: str) -> None:
    pools[world].run(exact, which, options)


@pytest.mark.sampled
@pytest.mark.parametrize(("world", "mesh"), [(4, "replicate"), (2, "copies")])
@WHICH
def test_and_so_they_are_on_replicas(pools: Pools, world: int, mesh: str, which: str, options: str) -> None:
    pools[world].run(on, mesh, exact, which, options)


CLOSED = (
    r"{name}: {what} reaches the block from outside, where no gradient would come back to it: "
    r"pass it as an argument, in xs, or in consts; or detach it if it needs no gradient"
)


def closing(outside: Callable[[Any, Tensor], Tensor]) -> LossFn:
    """A head that multiplies by a tensor of its surroundings."""

    def total(tree: Any, data: Any) -> Tensor:
        x = ya.apply(embed, tree["embed"], data["tokens"])
        x, _ = ya.scan(layer, x, tree["layers"])
        factor = outside(tree, x)
        return ya.apply(lambda w, x: (head(w, x, data["targets"]) * factor).sum(), tree["head"], x)

    return total


FACTOR = torch.full((3, 1), 2.0, requires_grad=True)
OUTSIDE: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a tensor": (lambda tree, x: FACTOR, r"a tensor of shape \(3, 1\) that requires grad"),
    "what a tensor gives": (lambda tree, x: FACTOR.sum(), r"a tensor of shape \(\) that requires grad"),
    "what a leaf of the parameters gives": (
        lambda tree, x: optree.tree_leaves(tree)[0].sum(),
        r"a tensor of shape \(\) that requires grad",
    ),
    "the carry": (lambda tree, x: x.mean(), r"the output of an earlier visit \(layers\[2\]\)"),
}


@pytest.mark.parametrize("which", OUTSIDE)
def test_a_block_that_closes_over_a_tensor_that_requires_grad(which: str) -> None:
    """In the first step, whenever it is tried again, and in the first step of a program, kept and recomputed."""
    outside, what = OUTSIDE[which]
    text = CLOSED.format(name="head", what=what)
    now = state()
    step = ya.train_step(closing(outside), TX)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=text):
            step(now, batch())
    for remat in (ya.schedules.remat.none, lambda trace: frozenset(visit.id for visit in trace.visits)):
        program = ya.train_step(loss, TX, schedule=ya.schedules.zero3(remat=remat)).lower(now, batch())
        step = ya.train_step(closing(outside), TX, schedule=program)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=text):
                step(now, batch())
    detached = closing(lambda tree, x: outside(tree, x).detach())
    step, (expected, oracle) = ya.train_step(detached, TX), (plain(), ya.train_step(detached, TX))
    if which == "what a leaf of the parameters gives":
        return  # a plain leaf has no padding
    for _ in range(2):
        now, got = step(now, batch())
        expected, want = oracle(expected, batch())
        assert torch.equal(got["loss"], want["loss"])


def test_a_closure_in_a_layer_of_a_scan() -> None:
    def total(tree: Any, data: Any) -> Tensor:
        x = ya.apply(embed, tree["embed"], data["tokens"])
        return ya.scan(lambda x, w: (layer(x, w)[0] * FACTOR.sum(), None), x, tree["layers"])[0].sum()

    with pytest.raises(RuntimeError, match=CLOSED.format(name=r"layers\[0\]", what=r"a tensor of shape \(3, 1\).*")):
        ya.train_step(total, TX)(state(), batch())


@pytest.mark.parametrize("which", ["a tensor", "the carry"])
def test_a_closure_under_torch_func_grad(which: str) -> None:
    """On the pure path, outside a step and inside one."""
    outside, _ = OUTSIDE[which]
    now = state()

    def of_params(tree: Any) -> Tensor:
        return closing(outside)(tree, batch())

    what = r"a tensor of shape \(.*\) that (requires grad|a transform of torch.func has wrapped)"
    text = CLOSED.format(name="head", what=what)
    with pytest.raises(RuntimeError, match=text):
        torch.func.grad(of_params)(now.params)

    def inside(tree: Any, data: Any) -> Tensor:
        return loss(tree, data) + squares(torch.func.grad(of_params)(tree))

    with pytest.raises(RuntimeError, match=text):
        ya.train_step(inside, TX)(now, batch())
    assert same(bits(now), bits(state()))
