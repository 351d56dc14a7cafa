"""The rule of what goes around another transformation: averages of it, several gradients to one step of it."""

import dataclasses

from yafsdp_fn.optim.base import GradientTransformation


@dataclasses.dataclass(frozen=True)
class Around:
    """Rule: `inner`, and something elementwise before and after it. Whatever `inner` needs of a tree, this needs."""

    inner: GradientTransformation
