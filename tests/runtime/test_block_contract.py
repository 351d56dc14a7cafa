"""Blocks that break their contract: views of weights, carries that change, visits inside visits, caught errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.failing import TX, LossFn, batch, bits, embed, head, layer, loss, plain, same, state
from tests.harness.groups import outcome
from tests.harness.pool import on_ranks

VIEW = (
    r"{name}: an output of shape \({shape}\) is a view of the block's weights, whose memory will hold others "
    r"soon; return a copy \(.clone\(\)\)"
)


def head_only(block: Callable[[Any], Any]) -> LossFn:
    return lambda tree, data: ya.apply(block, tree["head"]).sum()


def returning(output: Callable[[Any], Tensor]) -> LossFn:
    """A scan whose layers return a part of their weights as `y`."""
    return lambda tree, data: ya.scan(lambda x, w: (x, output(w)), torch.zeros(()), tree["layers"])[1].sum()


VIEWS: dict[str, tuple[LossFn, str, str]] = {
    "transposed": (head_only(lambda w: w["w"].t()), "head", "11, 5"),
    "itself": (head_only(lambda w: w["w"]), "head", "5, 11"),
    "a slice": (head_only(lambda w: w["w"][0]), "head", "11,"),
    "detached": (
        lambda tree, data: loss(tree, data) * ya.apply(lambda w: w["w"].detach(), tree["head"])[0, 0],
        "head",
        "5, 11",
    ),
    "an output of a scan": (returning(lambda w: w["b"]), r"layers\[0\]", "5,"),
}


@on_ranks(1, 2)
def test_a_block_that_returns_a_view_of_its_weights(mesh: Any) -> None:
    for name, (total, unit, shape) in VIEWS.items():
        text = VIEW.format(name=unit, shape=shape)
        now, step = state(mesh), ya.train_step(total, TX)
        for _ in range(2):  # the failed step leaves nothing behind
            with pytest.raises(RuntimeError, match=text):
                step(now, batch())
        with pytest.raises(RuntimeError, match=text):
            ya.eval_step(total)(now, batch())
        assert same(bits(now), bits(state(mesh))), name
        assert outcome(lambda now=now, total=total: total(now.params, batch())) == "returned" or mesh.size() == 1
    copying = ya.train_step(returning(lambda w: w["b"].clone()), TX)
    now, _ = copying(state(mesh), batch())
    now, _ = copying(now, batch())
    # nothing that a block returns outside a step may change with the state
    kept = ya.apply(lambda w: w["w"].clone(), now.params["head"])
    before = kept.detach().clone()
    ya.train_step(loss, TX)(now, batch())
    assert torch.equal(kept, before)


def test_an_argument_that_passes_through() -> None:
    """A block may return what it was given, untouched: in a step, outside one, and under torch.func."""

    def total(tree: Any, data: Any) -> Tensor:
        x = ya.apply(embed, tree["embed"], data["tokens"])
        x, ys = ya.scan(lambda x, w: (x, (w["b"] * 2).sum()), x, tree["layers"])
        return ya.apply(head, tree["head"], x, data["targets"]) + ys.square().sum()

    now = state()
    expected = plain()
    step = ya.train_step(total, TX)
    oracle = ya.train_step(total, TX)
    for _ in range(2):
        assert torch.equal(total(now.params, batch()), total(expected.params, batch()))
        theirs = torch.func.grad(total)(expected.params, batch())
        ours = torch.func.grad(total)(now.params, batch())
        torch.testing.assert_close(ya.global_norm(ours), ya.global_norm(theirs))
        now, got = step(now, batch())
        expected, want = oracle(expected, batch())
        assert torch.equal(got["loss"], want["loss"])


Carry = Callable[[Any, Any], Any]
CARRIES: dict[str, tuple[Carry, str]] = {
    "shape": (
        lambda x, w: (torch.cat([x, x], -1), None),
        r"the carry came in as torch.float32 \(4, 3, 5\) and left as torch.float32 \(4, 3, 10\); f must keep its shape",
    ),
    "dtype": (
        lambda x, w: (x.double(), None),
        r"the carry came in as torch.float32 \(4, 3, 5\) and left as torch.float64 \(4, 3, 5\); f must keep its shape "
        r"and dtype \(cast before returning\)",
    ),
    "structure": (
        lambda x, w: ((x, x), None),
        r"the carry changed its structure from PyTreeSpec\(\*\) to PyTreeSpec\(\(\*, \*\)\)",
    ),
    "a number": (lambda x, w: (1.0, None), r"the carry came in as torch.float32 \(4, 3, 5\) and left as float"),
    "no pair": (
        lambda x, w: x,
        r"f must return \(carry, y\), got Tensor; without outputs return \(carry, None\)",
    ),
}


def scanning(f: Carry, **options: Any) -> LossFn:
    def total(tree: Any, data: Any) -> Tensor:
        x = ya.apply(embed, tree["embed"], data["tokens"])
        return ya.scan(f, x, tree["layers"], **options)[0].sum()

    return total


@pytest.mark.parametrize("change", CARRIES)
def test_a_carry_that_changes(change: str) -> None:
    f, text = CARRIES[change]
    now = state()
    for _ in range(2):
        with pytest.raises(TypeError, match=r"scan(, layers\[0\])?: " + text):
            ya.train_step(scanning(f), TX)(now, batch())
    with pytest.raises(TypeError, match=r"scan(, layers\[0:1\])?: " + text):
        ya.train_step(scanning(f, unroll=2), TX)(now, batch())
    with pytest.raises(TypeError, match=r"scan(, layers\[2\])?: " + text):
        ya.eval_step(scanning(f, reverse=True))(now, batch())
    with pytest.raises(TypeError, match=r"scan(, layers\[0\])?: " + text):
        scanning(f)(now.params, batch())
    with pytest.raises(TypeError, match=r"scan(, layer\[0\])?: " + text):
        ya.train_step(scanning(f), TX)(plain(), batch())
    assert same(bits(now), bits(state()))


@pytest.mark.parametrize("make", [plain, state], ids=["plain", "sharded"])
def test_a_carry_names_the_leaf_that_changes(make: Callable[[], Any]) -> None:
    def total(tree: Any, data: Any) -> Tensor:
        x = ya.apply(embed, tree["embed"], data["tokens"])
        carry, _ = ya.scan(lambda c, w: ({**c, "b": c["b"][:, :1]}, None), {"a": x, "b": x}, tree["layers"])
        return carry["a"].sum()

    with pytest.raises(TypeError, match=r"the carry.b came in as torch.float32 \(4, 3, 5\) and left as .* \(4, 1, 5\)"):
        ya.train_step(total, TX)(make(), batch())


def nested(tree: Any, data: Any) -> Tensor:
    """Visits the head from inside the layers."""
    x = ya.apply(embed, tree["embed"], data["tokens"])

    def block(x: Tensor, w: Any) -> tuple[Tensor, None]:
        return x * ya.apply(lambda other: other["w"].sum(), tree["head"]), None

    return ya.scan(block, x, tree["layers"])[0].sum()


def scan_inside(tree: Any, data: Any) -> Tensor:
    """A scan inside a block."""
    x = ya.apply(embed, tree["embed"], data["tokens"])
    return ya.apply(lambda w, x: head(w, ya.scan(layer, x, tree["layers"])[0], data["targets"]), tree["head"], x)


@on_ranks(1, 2)
def test_a_visit_inside_a_visit(mesh: Any) -> None:
    text = (
        r"(forward|backward) of (head|layers\[\d\]) \(visit \d, microbatch 0, step 0\) begins inside "
        r"(forward|backward) of (head|layers\[\d\]) .*: a block cannot visit sharded parameters; visit them beside it, "
        r"or give them to the block \(a pytree of units to ya.apply, two stacks to ya.scan\)"
    )
    for total in (nested, scan_inside):
        now = state(mesh)
        with pytest.raises(RuntimeError, match=text):
            ya.train_step(total, TX)(now, batch())
        with pytest.raises(RuntimeError, match=text):
            ya.eval_step(total)(now, batch())
        ya.train_step(loss, TX)(now, batch())
    # and as the error says: several units in one visit
    together = ya.train_step(
        lambda tree, data: ya.apply(
            lambda units, data: head(units[0], embed(units[1], data["tokens"]), data["targets"]),
            (tree["head"], tree["embed"]),
            data,
        ),
        TX,
    )
    now = state(mesh)
    for _ in range(2):
        now, _ = together(now, batch())


@on_ranks(1, 2)
def test_a_loss_cannot_go_on_after_a_failed_visit(mesh: Any) -> None:
    """A loss that goes on after a visit has failed."""

    def total(tree: Any, data: Any) -> Tensor:
        x = ya.apply(embed, tree["embed"], data["tokens"])
        with contextlib.suppress(ZeroDivisionError):
            ya.apply(lambda w: 1 / 0, tree["head"])
        return x.sum() if stops else ya.apply(head, tree["head"], x, data["targets"])

    for stops in (False, True):  # noqa: B007 (read by `total`)
        now = state(mesh)
        with pytest.raises(RuntimeError, match=r"forward of head \(visit 1.*ZeroDivisionError") as caught:
            ya.train_step(total, TX)(now, batch())
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        now, _ = ya.train_step(loss, TX)(now, batch())
        assert same(bits(now), bits(ya.train_step(loss, TX)(state(mesh), batch())[0]))


@on_ranks(2)
def test_a_loss_cannot_go_on_after_a_visit_that_cannot_begin(mesh: Any) -> None:
    """A loss that goes on after a visit that cannot begin: its program expects another one there."""

    def total(tree: Any, data: Any) -> Tensor:
        with contextlib.suppress(RuntimeError):
            ya.apply(lambda w: w["w"].sum(), tree["head"])
        return loss(tree, data)

    now = state(mesh)
    step = ya.train_step(total, TX, schedule=ya.train_step(loss, TX).lower(now, batch()))
    with pytest.raises(RuntimeError, match=r"forward of head \(visit 0.* raised OrderChanged, and the loss went on"):
        step(now, batch())
