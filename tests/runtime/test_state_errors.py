"""States and handles used in ways they cannot be: donated, over, replaced, indexed; each error names the leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.failing import TX, E, batch, bits, embed, layer, loss, same, state
from tests.harness.pool import on_ranks

STEP = ya.train_step(loss, TX)
DONATED = r"was donated: a later .* uses its memory. Keep the state that the step returned, or pass donate=False"

USES: dict[str, Callable[[ya.ShardedState], Any]] = {
    "step": lambda old: STEP(old, batch()),
    "lower": lambda old: STEP.lower(old, batch()),
    "evaluation": lambda old: ya.eval_step(loss)(old, batch()),
    "evaluation of its params": lambda old: ya.eval_step(loss)(old.params, batch()),
    "gradient": lambda old: ya.value_and_grad(loss)(old.params, batch()),
    "loss outside a step": lambda old: loss(old.params, batch()),
    "unshard": lambda old: ya.unshard(old),
    "unshard of its params": lambda old: ya.unshard(old.params),
    "norm": lambda old: ya.global_norm(old.params),
    "map_whole_layers": lambda old: ya.map_whole_layers(lambda w: w, old.params["layers"]),
    "apply_gradients": lambda old: old.apply_gradients(old.params, TX),
    "copy": lambda old: old.copy(),
}


@pytest.mark.parametrize("use", USES)
def test_a_donated_state_is_refused(use: str) -> None:
    old = state()
    new, _ = STEP(old, batch())
    before = bits(new)
    with pytest.raises(RuntimeError, match=DONATED):
        USES[use](old)
    assert same(bits(new), before)
    STEP(new, batch())


@pytest.mark.parametrize("tree", ["state", "params", "one entry"])
def test_leaves_of_a_donated_state_are_not_handed_out(tree: str) -> None:
    """An average kept beside the training, say: the leaves that it began with are the next state's memory."""
    old = state()
    mean: Any = {"state": old, "params": old.params, "one entry": old.params["layers"]}[tree]
    STEP(old, batch())
    with pytest.raises(RuntimeError, match=DONATED):
        optree.tree_map(lambda leaf: 0.9 * leaf, mean)


@on_ranks(1, 2)
def test_params_of_a_finished_step(mesh: Any) -> None:
    """The params that a step gave to its loss, used when the step is over."""
    kept: list[Any] = []

    def keeping(tree: Any, data: Any) -> Tensor:
        kept.append(tree)
        return loss(tree, data)

    now = state(mesh)
    step = ya.train_step(keeping, TX)
    for _ in range(2):
        now, _ = step(now, batch())
        text = r"embed: these parameters were given to a step that is over; use the state's params"
        for tree in kept:  # that of the call that was recorded, too
            with pytest.raises(RuntimeError, match=text):
                loss(tree, batch())
        with pytest.raises(RuntimeError, match=text), torch.no_grad():
            ya.apply(embed, kept[-1]["embed"], batch()["tokens"])
        with pytest.raises(RuntimeError, match=text):  # inside the next step, too
            ya.train_step(lambda tree, data: loss(kept[-1], data), TX)(now, batch())
    failing = ya.train_step(lambda tree, data: [kept.append(tree), 1 / 0], TX)
    with pytest.raises(ZeroDivisionError):
        failing(now, batch())
    with pytest.raises(RuntimeError, match=text):
        loss(kept[-1], batch())
    step(now, batch())


@on_ranks(1, 2)
def test_leaves_that_do_not_match_the_layout(mesh: Any) -> None:
    """Leaves that do not have the shape of a shard: in a state, in a loss, and outside of both."""
    n = {1: 56, 2: 32}[mesh.size()]
    cuts: dict[str, tuple[Callable[[Tensor], Any], str]] = {
        "shorter": (lambda leaf: leaf[..., :-3], rf"\({n - 3},\)"),
        "an axis more": (lambda leaf: leaf[None], rf"\(1, {n}\)"),
        "a number": (lambda leaf: 1.0, "float"),
    }
    for cut, got in cuts.values():
        now = state(mesh)
        wrong = dataclasses.replace(now, params={**now.params, "embed": optree.tree_map(cut, now.params["embed"])})
        text = rf"embed: a local shard has shape \({n},\), got {got}"
        with pytest.raises(ValueError, match=text):
            STEP(wrong, batch())
        with pytest.raises(ValueError, match=text):
            ya.eval_step(loss)(wrong, batch())
        with pytest.raises(ValueError, match=text):
            ya.value_and_grad(loss)(wrong.params, batch())
        text = rf"embed: a local shard of embed is .*, expected shape \({n},\)"
        with pytest.raises(ValueError, match=text):
            loss(wrong.params, batch())
        with pytest.raises(ValueError, match=text):
            ya.train_step(lambda tree, data, cut=cut: loss(optree.tree_map(cut, tree), data), TX)(now, batch())
        STEP(now, batch())
    now = state(mesh)
    tripled = dataclasses.replace(now, params=optree.tree_map(lambda leaf: 3 * leaf, now.params))
    new, _ = STEP(tripled, batch())  # the right shapes: a state with memory of its own
    assert same(bits(now), bits(state(mesh)))
    assert not same(bits(new), bits(STEP(now, batch())[0]))


WHOLE = r"{what}: {name} is sharded, its weights are whole only inside ya.{verb} or ya.map_whole_layers"
HEAD = WHOLE.format(what="head{}", name="head", verb=r"apply\(f, params..., x\)")
LAYERS = WHOLE.format(what="layers{}", name="layers", verb=r"scan\(f, x, params...\)")
X = torch.ones(2, E)

ACCESSES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "as a dict": (lambda p: p["head"]["w"], TypeError, HEAD.format(r"\['w'\]")),
    "as a tuple": (lambda p: p["head"].w, AttributeError, HEAD.format(r"\.w")),
    "as a tensor": (lambda p: p["head"].shape, AttributeError, HEAD.format(r"\.shape")),
    "in a product": (lambda p: X @ p["head"], TypeError, HEAD.format(".*")),
    "in a linear layer": (lambda p: F.linear(X, p["head"]), TypeError, HEAD.format(r" in torch\.linear")),
    "in torch": (lambda p: torch.cat([p["head"]]), TypeError, HEAD.format(r" in torch\.cat")),
    "in arithmetic": (lambda p: X * p["head"], TypeError, HEAD.format(".*")),
    "a layer of a stack": (lambda p: p["layers"][0], TypeError, LAYERS.format(r"\[0\]")),
    "a loop over a stack": (lambda p: list(p["layers"]), TypeError, LAYERS.format(r".*")),
    "the length of a stack": (lambda p: len(p["layers"]), TypeError, LAYERS.format(r" has no len\(\)")),
    "apply on a stack": (
        lambda p: ya.apply(lambda w, x: x, p["layers"], X),
        TypeError,
        r"apply on the stack 'layers': use ya.scan, which visits it layer by layer",
    ),
    "apply on a tree with a stack": (
        lambda p: ya.apply(lambda w, x: x, p, X),
        TypeError,
        r"apply on the stack 'layers': use ya.scan",
    ),
    "scan over a unit": (
        lambda p: ya.scan(layer, X, p["head"]),
        TypeError,
        r"scan over 'head', which is not Stacked: use ya.apply",
    ),
    "scan over everything": (
        lambda p: ya.scan(layer, X, p),
        TypeError,
        r"scan over 'embed', which is not Stacked: use ya.apply",
    ),
    "a part of a stack": (
        lambda p: ya.scan(layer, X, optree.tree_map(lambda leaf: leaf[:2], p["layers"])),
        ValueError,
        r"layers are torch.float32 \(2, \d+\), expected 3 layers .*: a part of a stack .* order=range\(k\)",
    ),
    "map_whole_layers over a unit": (
        lambda p: ya.map_whole_layers(lambda w: w, p["head"]),
        TypeError,
        r"map_whole_layers over 'head', which is not Stacked: use ya.apply",
    ),
}


def test_unshard_wants_shards() -> None:
    numbers = optree.tree_map(lambda leaf: leaf.sum(), state().params)
    with pytest.raises(ValueError, match=r"unshard: \w+ has a leaf torch.float32 \(\), expected a local shard \["):
        ya.unshard(numbers)


@pytest.mark.parametrize("access", ACCESSES)
def test_a_handle_is_no_tensor(access: str) -> None:
    """Outside a step, and inside a loss."""
    use, kind, text = ACCESSES[access]
    now = state()
    with pytest.raises(kind, match=text):
        use(now.params)
    with pytest.raises(kind, match=text):
        ya.train_step(lambda tree, data: use(tree), TX)(now, batch())
