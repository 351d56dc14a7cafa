"""Gradient noise: its law, and that it is one and the same at every number of ranks."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import yafsdp_fn as ya
from tests.harness.oracle import compare, plain
from tests.harness.pool import Pool
from tests.harness.small import param
from yafsdp_fn import optim

ABSTRACT = {
    "layers": ya.Stacked(
        {"w": param(3, 40, 51), "norm": ya.Pinned(param(3, 51)), "more": ya.Unit({"w": param(3, 7, 9)})}
    ),
    "head": {"w": param(11, 50), "bias": param(50)},
    "still": ya.frozen({"w": param(4, 4)}),
}


def noise(steps: int, shape: tuple[int, ...] = (400, 500), eta: float = 1.0, gamma: float = 0.0, key: int = 0) -> Any:
    """Of each step, on a leaf of zeros."""
    tx, leaf = optim.contrib.add_noise(eta, gamma, key), {"w": torch.zeros(shape, dtype=torch.float64)}
    out, state = [], tx.init(leaf)
    for _ in range(steps):
        updates, state = tx.update(leaf, state)
        out.append(updates["w"])
    return torch.stack(out)


def test_the_variance_fades_as_in_the_paper() -> None:
    for count, values in enumerate(noise(6, eta=0.3, gamma=0.55), 1):
        assert float(values.square().mean()) == pytest.approx(0.3 / count**0.55, rel=0.02)


def test_it_is_normal() -> None:
    """Moments up to the sixth, and the shares beyond 1, 2, 3 and 4 deviations."""
    values = noise(20).flatten()
    for power, moment in enumerate([0, 1, 0, 3, 0, 15], 1):
        assert float((values**power).mean()) == pytest.approx(moment, rel=0.02, abs=0.03)
    for bound, share in {1: 0.3173, 2: 0.0455, 3: 0.0027, 4: 6.33e-5}.items():
        assert float((values.abs() > bound).double().mean()) == pytest.approx(share, rel=0.2)


def test_elements_rows_steps_and_keys_are_unrelated() -> None:
    one, two = noise(2)
    other = noise(1, key=1)[0]
    pairs = [(one, two), (one, other), (one[:, 1:], one[:, :-1]), (one[1:], one[:-1]), (one[:, ::2], one[:, 1::2])]
    for a, b in pairs:
        assert abs(float((a * b).mean())) < 0.01  # a deviation of 1 / 400
        assert abs(float((a.square() * b.square()).mean()) - 1) < 0.03


def test_a_key_says_it_all() -> None:
    assert torch.equal(noise(2, key=5), noise(2, key=5))
    assert not torch.equal(noise(1, key=-1), noise(1, key=2**40))


def on_shards(mesh: Any, dtype: torch.dtype) -> None:
    tx = optim.contrib.add_noise(0.5, 0.3, key=7)
    state = ya.init(ABSTRACT, tx, mesh=mesh, precision=ya.Precision(dtype))
    grads = ya.init(ABSTRACT, mesh=mesh, seed=1, precision=ya.Precision(dtype)).params
    whole = optree.tree_map(lambda leaf: leaf.to(dtype), plain(ABSTRACT, seed=1))  # marked: drawn layer by layer
    opt_state, expected_state = tx.init(state.params), tx.init(whole)
    for _ in range(2):
        noisy, opt_state = tx.update(grads, opt_state)
        expected, expected_state = tx.update(whole, expected_state)
        compare(ya.unshard(noisy), expected, 0, "noisy gradients")
        # padding has no noise: else sums over shards would see it
        torch.testing.assert_close(ya.global_norm(noisy), ya.global_norm(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("world", [1, 2])
def test_every_number_of_ranks_has_the_noise_of_the_plain_tree(pools: dict[int, Pool], world: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pools[world].run(on_shards, dtype)


def test_a_negative_variance_is_refused() -> None:
    with pytest.raises(ValueError, match="eta is a variance, expected at least 0, got -1"):
        optim.contrib.add_noise(-1.0, 0.5, key=0)
