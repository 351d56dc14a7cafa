"""What scan and apply refuse, on plain and on sharded trees alike."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.api.test_scan import states

TX = ya.optim.sgd(0.1)


def test_errors_of_the_carry_name_the_layer() -> None:
    for params, where in zip(states(), (r"s\[2\]", r"layer\[2\]"), strict=True):
        dtypes = iter([torch.float32, torch.float32, torch.float64])

        def f(c: Tensor, x: Any, dtypes: Any = dtypes) -> tuple[Tensor, None]:
            return c.to(next(dtypes)), None

        with pytest.raises(TypeError, match=f"scan, {where}: the carry came in as"), torch.no_grad():
            ya.scan(f, torch.ones(1), params["s"])


SHARDED_STACK: Any = "the stack of a sharded state"


@pytest.mark.parametrize(
    ("xs", "options", "error", "message"),
    [
        (
            torch.ones(()),
            {},
            TypeError,
            r"a leaf of xs is torch.float32 \(\); expected a tensor with a leading layer axis",
        ),
        ({"a": 3}, {}, TypeError, "a leaf of xs is int"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, {}, ValueError, "scan: lengths differ: xs.a has 2, xs.b has 3"),
        (torch.ones(2), {"length": 3}, ValueError, "length has 3, xs has 2"),
        (None, {}, ValueError, "xs has no leaves; give length="),
        (torch.ones(2), {"unroll": 0}, ValueError, r"scan\(unroll=0\): expected at least 1"),
        (torch.ones(0, 2), {}, ValueError, "length 0"),
        (None, {"length": 0}, ValueError, "length 0"),
        (None, {"length": -1}, ValueError, "length"),
        (torch.ones(2), {"order": []}, ValueError, r"length 2, order=\[\]"),
        (torch.ones(2), {"order": [0, 2]}, ValueError, r"scan\(order=...\): 2 is no layer of 2; .* from 0 to 1"),
        (SHARDED_STACK, {"order": [-1]}, ValueError, "-1 is no layer of 4"),
        (SHARDED_STACK, {"order": [True]}, ValueError, "True is no layer of 4"),
        ((SHARDED_STACK, torch.ones(3)), {}, ValueError, "s has 4, xs.1 has 3"),
        (SHARDED_STACK, {"length": 5}, ValueError, "length has 5, s has 4"),
    ],
)
def test_bad_xs_are_named(xs: Any, options: Any, error: type[Exception], message: str) -> None:
    stack = states()[0]["s"]
    xs = optree.tree_map(lambda leaf: stack if leaf is SHARDED_STACK else leaf, xs)
    with pytest.raises(error, match=message):
        ya.scan(lambda c, x: (c, None), torch.ones(1), xs, **options)


def test_an_error_between_visits_is_of_none() -> None:
    params = states()[0]

    def loss(params: Any) -> Tensor:
        ya.scan(lambda c, w: (c, None), torch.ones(1), params["s"])
        raise KeyError("beside visits")

    with pytest.raises(KeyError) as caught:
        ya.value_and_grad(loss)(params)
    (note,) = caught.value.__notes__
    assert note == "rank 0 of 1, after forward of s[3] (visit 3, microbatch 0, step 0)"


@pytest.mark.parametrize("sharded", [True, False])
def test_arguments_in_another_order_are_refused_by_every_verb(sharded: bool) -> None:
    params = states()[not sharded]
    f, got = (lambda *args: None), r"the function comes first, got "
    calls: dict[str, Any] = {
        r"apply\(f, unit, \*args\)": lambda: ya.apply(params, f, torch.ones(2)),
        r"scan\(f, carry, xs\)": lambda: ya.scan(params, f, torch.ones(2)),
        "train_step, eval_step, grad and planner.trace": lambda: ya.train_step(TX, f),
        "train_step, eval_step, grad and planner": lambda: ya.grad(params),
        "train_step, eval_step, grad": lambda: ya.planner.trace(params, f, torch.ones(2)),
    }
    for verb, call in calls.items():
        with pytest.raises(TypeError, match=f"{verb}.*: {got}"):
            call()
