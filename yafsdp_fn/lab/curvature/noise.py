"""Estimates the gradient noise scale (McCandlish et al. 2018): about how many examples a batch should have.

noise  = trace of the covariance of an example's gradient signal = |true gradient|^2 scale  = noise / signal:   far
smaller batches are mostly noise, far larger ones gain nothing
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
from torch import Tensor

from yafsdp_fn.lab.curvature.examples import example_gradient_norms, mean_over_examples
from yafsdp_fn.params.algebra import global_norm
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.transform import grad


class NoiseScale(NamedTuple):
    """Unbiased estimates, 0-dim tensors. For a small batch `signal` may be negative: average `noise` and `signal` over
    batches before dividing them."""

    noise: Tensor
    signal: Tensor

    @property
    def scale(self) -> Tensor:
        """`noise / signal`, in examples."""
        return self.noise / self.signal


def gradient_noise_scale(
    loss: Callable[[Tree, Any], Any], params: Tree, batch: Tree, *, at_once: int = 1
) -> NoiseScale:
    """Estimates from the examples of one batch, of all ranks: their number B, their gradients' norms, and that of the
    mean.

        noise  = (mean |g_i|^2 - |g|^2) B / (B - 1)
        signal = (B |g|^2 - mean |g_i|^2) / (B - 1)

    That is appendix A.1 with a small batch of one example and a big one of all. Arguments and cost are those of
    `example_gradient_norms`. "An Empirical Model of Large-Batch Training", arXiv:1812.06162. Raises ValueError for a
    single example.
    """
    rows = len(optree.tree_leaves(batch)[0])
    count = rows * (handles(params)[0].owner.comms.batch_ranks if handles(params) else 1)
    if count < 2:
        raise ValueError("gradient_noise_scale: a batch of one example has no noise to see; expected two or more")
    norms = example_gradient_norms(loss, params, batch, at_once=at_once)
    one = mean_over_examples(params, norms.double().square())
    all_of_them = global_norm(grad(loss)(params, batch)).double().square()
    return NoiseScale((one - all_of_them) * count / (count - 1), (count * all_of_them - one) / (count - 1))
