"""Classes as pytree nodes, for all who look at trees."""

from collections.abc import Callable
from typing import Any

import optree
import torch.utils._pytree as torch_pytree
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE  # plain `optree.tree_map` must see our nodes


def register_node(
    cls: type, flatten: Callable[[Any], tuple[tuple[Any, ...], Any]], unflatten: Callable[[Any, tuple[Any, ...]], Any]
) -> None:
    """Registers `cls` with optree and with torch's pytrees, which torch.func uses: both must see the same nodes."""
    rebuild: Any = unflatten
    optree.register_pytree_node(cls, flatten, rebuild, namespace=GLOBAL_NAMESPACE)
    torch_pytree.register_pytree_node(
        cls,
        lambda node: (list(flatten(node)[0]), flatten(node)[1]),
        lambda children, context: unflatten(context, tuple(children)),
    )
