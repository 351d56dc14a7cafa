"""Mean, Sum, Max: combined over microbatches (and ranks) as over one large batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.pool import on_ranks
from tests.harness.small import batch, loss, model
from yafsdp_fn.runtime.reductions import as_mean, combine


def test_dtypes() -> None:
    counts = combine([ya.Sum(torch.tensor([2**53 - 1, 1]))] * 1, None)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [2**53 - 1, 1]
    assert combine([ya.Sum(torch.tensor(True))] * 3, None).tolist() == 3
    assert combine([ya.Max(torch.tensor(3, dtype=torch.int32))] * 2, None).dtype == torch.int32
    assert combine([ya.Sum(torch.tensor(1.0, dtype=torch.bfloat16))] * 2, None).dtype == torch.bfloat16
    assert combine([ya.Mean(torch.tensor(1.0, dtype=torch.bfloat16), 2)] * 2, None) == 0.5


def test_other_leaves_stay() -> None:
    x = torch.ones(2, requires_grad=True)
    y = torch.zeros(2)
    one = combine([{"x": x, "text": "a", "none": None}], None)
    assert torch.equal(one["x"], x) and not one["x"].requires_grad and one["text"] == "a" and one["none"] is None
    two = combine([{"x": x, "text": "a", "none": None}, {"x": y, "text": "b", "none": None}], None)
    assert two["x"].tolist() == [[1, 1], [0, 0]]
    assert not two["x"].requires_grad
    assert two["text"] == "a"


def test_what_is_combined_is_detached() -> None:
    x = torch.ones((), requires_grad=True)
    out = combine([(ya.Sum(x), ya.Max(x), ya.Mean(x, 2.0))] * 2, None)
    assert not any(leaf.requires_grad for leaf in out)
    assert out[2] == 0.5


class Ranks:
    """Stands in for the communicators of three ranks that all have the same values."""

    alone = False
    deterministic = False

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, torch.dtype]] = []

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        self.calls.append(("sum", values.numel(), values.dtype))
        return values.mul_(3)

    def all_reduce_max(self, values: Tensor) -> Tensor:
        self.calls.append(("max", values.numel(), values.dtype))
        return values


def test_one_all_reduce_for_all_sums_and_one_for_all_maxima() -> None:
    ranks: Any = Ranks()
    part = {
        "a": ya.Mean(torch.tensor(6.0), torch.tensor(4)),
        "b": ya.Sum(torch.ones(2, 3)),
        "c": ya.Max(torch.arange(4)),
        "d": ya.Max(torch.tensor(7.0)),
        "e": torch.tensor(5.0),
    }
    out = combine([part, part], ranks)
    assert ranks.calls == [("sum", 8, torch.float64), ("max", 5, torch.float64)]
    assert out["a"] == 1.5
    assert out["b"].tolist() == [[6.0] * 3] * 2
    assert out["c"].tolist() == [0, 1, 2, 3]
    assert out["d"] == 7 and out["e"].tolist() == [5, 5]  # this rank's own


def test_nothing_to_reduce_takes_no_collective() -> None:
    ranks: Any = Ranks()
    assert combine([{"e": 3}], ranks) == {"e": 3}
    assert ranks.calls == []


@on_ranks()
@pytest.mark.parametrize(("world", "stages"), [(1, 1), (2, 1), (2, 2)])
def test_numbers_are_reduced_as_the_tensors_that_they_are(mesh: Any, stages: int) -> None:
    """A step's aux of numbers and of the tensors that they are, on stages, too."""
    params = {"a": ya.Unit({"w": ya.Param((4,))}), "b": ya.Unit({"w": ya.Param((4,))})}

    def loss(params: Any, batch: Tensor) -> Any:
        x = ya.apply(lambda w, x: w["w"] * x, params["a"], batch)
        x = ya.apply(lambda w, x: w["w"] * x, params["b"], x)
        found = [(of(value), of(torch.tensor(value))) for of in (ya.Sum, ya.Max) for value in (4, 2.5, True)]
        return ya.Mean(x.sum(), 3), found

    tx = ya.optim.sgd(0.1)
    assignment = None
    factor = mesh.size() // stages
    batch = torch.ones(8 // factor, 4)
    if stages > 1:
        mesh = ya.mesh(stage=stages, shard=-1, device="cpu")
        assignment = ya.schedules.assign(ya.planner.trace(loss, params, batch, has_aux=True), stages=stages)
    step = ya.train_step(loss, tx, has_aux=True, microbatches=2)
    for state, times in (
        (ya.init(params, tx, mesh=mesh, stages=assignment), factor),
        (ya.PlainState.create(params, tx), 1),
    ):
        found = step(state, batch)[1]["aux"]
        assert all(torch.equal(number, tensor) and number.dtype == tensor.dtype for number, tensor in found)
        sums = [times * n for n in (8, 5.0, 2)]
        assert [number.item() for number, _ in found] == [*sums, 4, 2.5, True]


def test_what_is_no_number_is_refused_in_a_reduction() -> None:
    step = ya.value_and_grad(lambda x: (x, ya.Sum("text")), has_aux=True)
    with pytest.raises(TypeError, match=r"aux: expected a real tensor or number in ya\.Sum, got str"):
        step(torch.ones(()))


def test_parts_of_different_structure_are_refused() -> None:
    with pytest.raises(ValueError, match="microbatches returned trees of different structure"):
        combine([{"a": torch.ones(())}, {"b": torch.ones(())}], None)


@on_ranks(1, 2)
def test_aux_of_other_shapes_in_a_microbatch_is_named(mesh: Any) -> None:
    def fun(params: Any, batch: Any) -> Any:
        mean = loss(params, batch)
        return mean, {"some": ya.Sum(torch.ones(2 + int(batch["number"][0])))}

    rows = batch() | {"number": torch.arange(4)}
    state = ya.init(model(), None, mesh=mesh)
    said = (
        r"aux: microbatches returned the shapes \{'some': Sum\(value=\(2,\)\)\} and \{'some': Sum\(value=\(4,\)\)\}; "
    )
    with pytest.raises(ValueError, match=said):
        ya.eval_step(fun, microbatches=2, has_aux=True)(state, rows)


# ---- what a loss may be


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_weight_is_the_number_that_was_written(dtype: torch.dtype) -> None:
    assert as_mean(ya.Mean(torch.ones((), dtype=dtype), 0.1)).weight.item() == 0.1
    assert combine([ya.Mean(torch.ones((), dtype=dtype), 0.1)], None) == torch.tensor(1 / 0.1, dtype=dtype)


def test_a_weight_that_requires_grad_is_refused() -> None:
    """In a function that is no step's, such as one of `ya.functional_loss`, where nothing asks what it depends on."""
    with pytest.raises(ValueError, match="its gradient would be lost"):
        as_mean(ya.Mean(torch.ones(()), torch.ones((), requires_grad=True)))


@pytest.mark.parametrize("weight", [torch.tensor(True), torch.tensor(200, dtype=torch.uint8), torch.tensor(257.0)])
def test_weights_of_any_dtype_add_up(weight: Tensor) -> None:
    """A weight is summed before it is rounded to anything: True + True is 2, and 200 + 200 does not wrap."""

    def loss(x: Tensor, rows: Tensor) -> ya.Mean:
        return ya.Mean((x * rows).sum() * weight, weight if weight.dtype != torch.float32 else weight.bfloat16())

    value, grad = ya.value_and_grad(loss, microbatches=2)(torch.tensor(3.0), torch.tensor([1.0, 3.0]))
    rounded = 257.0 / 256.0 if weight.dtype == torch.float32 else 1.0
    assert torch.isclose(value, torch.tensor(6.0 * rounded))
    assert torch.isclose(grad, torch.tensor(2.0 * rounded))
