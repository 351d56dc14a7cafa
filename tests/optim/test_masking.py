"""Masks as trees of bools: they choose what the rule that says the same would, and must be like the parameters."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.small import assert_equal, batch, loss, model, one_rank
from yafsdp_fn import optim

TX = optim.sgd(0.1)
LIKE: dict[str, Any] = {
    "embed": {"weight": True},
    "layers": {"up": True, "bias": False, "down": True},
    "head": {"norm": False, "weight": True},
}
MAKERS: dict[str, Any] = {
    "sharded": lambda params, tx: ya.init(params, tx, mesh=one_rank()),
    "plain": lambda params, tx: ya.PlainState.create(params, tx),
}
WRAPS: dict[str, Any] = {
    "masked": lambda mask: optim.masked(optim.sgd(0.1), mask),
    "add_decayed_weights": lambda mask: optim.chain(optim.add_decayed_weights(0.5, mask), optim.sgd(0.1)),
    "adamw": lambda mask: optim.adamw(0.1, weight_decay=0.5, mask=mask),
}
MADE, WRAPPED = pytest.mark.parametrize("made", MAKERS), pytest.mark.parametrize("wrap", WRAPS)


@MADE
@WRAPPED
@pytest.mark.parametrize("mask", [LIKE, model()._replace(**LIKE), LIKE | {"layers": ya.Stacked(LIKE["layers"])}])
def test_a_tree_of_bools_is_the_rule_that_says_the_same(made: str, wrap: str, mask: Any) -> None:
    def steps(mask: Any) -> Any:
        tx = WRAPS[wrap](mask)
        state, step = MAKERS[made](model(), tx), ya.train_step(loss, tx)
        for seed in range(2):
            state, _ = step(state, batch(seed))
        return state.params

    assert_equal(steps(mask), steps(lambda path, param: path.split(".")[-1] not in ("bias", "norm")))


@MADE
@pytest.mark.parametrize("whole", [True, False])
def test_a_bool_stands_for_all_that_is_below_it(made: str, whole: bool) -> None:
    params = MAKERS[made](model(), TX).params
    by_rule = ya.params.leaf_mask(lambda path, p: whole if "layers" in path else "norm" not in path, params)
    chosen = ya.params.leaf_mask(LIKE | {"layers": whole}, params)
    assert all(map(torch.equal, optree.tree_leaves(chosen), optree.tree_leaves(by_rule)))


@MADE
@WRAPPED
@pytest.mark.parametrize(
    ("mask", "text"),
    [
        ({"embed": True, "layers": True}, r"mask: the tree says nothing of head\.norm; it has embed, layers"),
        (LIKE | {"head": {"norm": False}}, r"mask: the tree says nothing of head\.weight"),
        (LIKE | {"tail": True}, r"mask: the tree has tail, the parameters have not; they have embed\.weight, layers"),
        (LIKE | {"head": {"norm": False, "weight": True, "bias": True}}, r"mask: the tree has head\.bias, the param"),
        (LIKE | {"embed": {"weight": {"rows": True}}}, r"says nothing of embed\.weight; it has embed\.weight\.rows"),
    ],
)
def test_a_tree_unlike_the_parameters_is_refused_with_the_first_state(
    made: str, wrap: str, mask: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        MAKERS[made](model(), WRAPS[wrap](mask))


@pytest.mark.parametrize("value", [1, "yes", 0.5])
def test_leaves_other_than_bools_are_refused_at_once(value: Any) -> None:
    with pytest.raises(TypeError, match=r"mask: head\.norm is .*; expected True or False, or a rule"):
        optim.masked(TX, LIKE | {"head": {"norm": value, "weight": True}})


@MADE
@pytest.mark.parametrize("said", [{}, {"embed": True}, {"embed": {"weight": False}}])
def test_what_is_frozen_may_be_there_or_not(made: str, said: dict[str, Any]) -> None:
    params = model()
    params = params._replace(embed=ya.frozen(params.embed))
    rest = {key: mask for key, mask in LIKE.items() if key != "embed"}
    MAKERS[made](params, optim.masked(TX, rest | said))
