"""Gradients without their means."""

from typing import Any

from torch import Tensor

from yafsdp_fn.optim import EmptyState, GradientTransformation, assume_leafwise


def centralize() -> GradientTransformation:
    """Subtracts the mean over all axes but the first from the updates of leaves with two axes or more (gradient
    centralization, Yong et al., 2020).

    >>> tx = ya.optim.contrib.centralize()
    >>> tx.update(torch.tensor([[1.0, 3.0], [2.0, 6.0]]), tx.init(torch.ones(2, 2)))[0]
    tensor([[-1.,  1.],
            [-2.,  2.]])
    """

    def update(updates: Tensor, state: Any, params: Tensor | None = None) -> tuple[Tensor, Any]:
        if updates.ndim < 2:
            return updates, state
        return updates - updates.mean(tuple(range(1, updates.ndim)), keepdim=True), state

    return assume_leafwise(GradientTransformation(lambda leaf: EmptyState(), update))
