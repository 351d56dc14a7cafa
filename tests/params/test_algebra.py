"""vdot, global_norm, normal_like: numbers over whole trees, sharded or plain."""

from __future__ import annotations

import math
from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.small import assert_equal, leaves, model, one_rank, param, states
from yafsdp_fn.params.sharded import trainable

TX = ya.optim.adamw(1e-2)
TREE: Any = {
    "m": model(),
    "s": ya.Stacked({"w": param(2, 3), "v": param(2), "f": ya.frozen(param(2, 4)), "u": ya.Unit(param(2, 1))}),
}


def test_precision() -> None:
    small = torch.full((4096,), 1e-2, dtype=torch.bfloat16)
    assert ya.global_norm({"a": small}).dtype == torch.float32
    assert torch.isclose(ya.global_norm({"a": small}), small.float().norm())
    assert torch.isclose(ya.vdot({"a": small}, {"a": small}), small.float().square().sum(), rtol=1e-5)
    double = {"a": torch.tensor([1.0, 1e-9], dtype=torch.float64)}
    assert ya.vdot(double, double).dtype == torch.float64
    assert ya.global_norm({}) == 0


@pytest.mark.parametrize("n", [1, 63, 64, 65, 4097])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 3e-7), (torch.bfloat16, 3e-7)])
def test_a_norm_is_the_exact_sum_of_squares(n: int, dtype: torch.dtype, bound: float) -> None:
    """Leaves of very different size, one of them an outlier; the result is rounded to float32 where it is one."""
    generator = torch.Generator().manual_seed(n)
    tree = {name: (torch.randn(n, generator=generator) * size).to(dtype) for name, size in SIZES.items()}
    exact = math.sqrt(math.fsum(x * x for leaf in tree.values() for x in leaf.double().tolist()))
    assert ya.global_norm(tree).item() == pytest.approx(exact, rel=bound)
    assert ya.vdot(tree, tree).item() == pytest.approx(exact**2, rel=2 * bound)


SIZES = {"tiny": 1e-6, "usual": 1.0, "large": 1e3}


def test_trees_of_different_structure_are_refused() -> None:
    with pytest.raises(ValueError, match="vdot: trees differ in structure"):
        ya.vdot({"a": torch.ones(1)}, {"b": torch.ones(1)})


def test_normal_like_has_the_structure_and_zero_gaps() -> None:
    sharded, _ = states(TREE)
    drawn = ya.normal_like(0, sharded)
    assert optree.tree_structure(drawn) == optree.tree_structure(sharded)
    whole = torch.cat([x.flatten() for x in leaves(drawn)])
    assert 0.85 < whole.std() < 1.15
    assert abs(whole.mean()) < 0.15
    assert torch.isclose(ya.global_norm(drawn), whole.norm())  # nothing in gaps or padding
    assert_equal(drawn, ya.normal_like(0, sharded))
    assert not torch.equal(leaves(drawn)[0], leaves(ya.normal_like(1, sharded))[0])


def test_normal_like_draws_another_value_for_every_layer_and_leaf() -> None:
    sharded, _ = states(TREE)
    whole = torch.cat([x.flatten() for x in leaves(ya.normal_like(0, sharded))])
    assert whole.unique().numel() == whole.numel()


def test_normal_like_of_moments_and_in_another_dtype() -> None:
    state = ya.init(TREE, TX, mesh=one_rank())
    drawn = ya.normal_like(0, trainable(state.params))
    assert len(optree.tree_leaves(drawn)) == len(optree.tree_leaves(state.params)) - 1
    halves = optree.tree_map(lambda x: x.bfloat16(), state.params)
    assert {leaf.dtype for leaf in optree.tree_leaves(ya.normal_like(0, halves))} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e19, 1e25, 1e-25])
@pytest.mark.parametrize("differentiated", [False, True])
def test_a_norm_that_float32_holds_though_not_its_squares(
    dtype: torch.dtype, size: float, differentiated: bool
) -> None:
    leaf = torch.full((100,), size).to(dtype).requires_grad_(differentiated)
    exact = leaf[0].item() * 10
    assert ya.global_norm({"a": leaf}).item() == pytest.approx(exact, rel=1e-6)
    if differentiated:
        (grad,) = torch.autograd.grad(ya.global_norm([leaf]), leaf)
        assert torch.allclose(grad.float(), torch.tensor(0.1), rtol=1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_norm_of_what_is_not_finite_is_not(bad: float) -> None:
    for at in (0, 64, 99):
        leaf = torch.full((100,), 1e19)
        leaf[at] = bad
        found = ya.global_norm({"a": leaf}).item()
        assert math.isnan(found) if math.isnan(bad) else found == math.inf
        assert not ya.vdot([leaf], [leaf]).isfinite()
