"""Raises for use of a sharded handle as a tensor: indexing, arithmetic, torch functions."""

from typing import Any, NoReturn

import optree

from yafsdp_fn.util.foreign_names import hint


class NotATensor:
    """Base of handles that refuse use as a tensor, by TypeError or AttributeError."""

    __slots__ = ()

    def _visited_by(self) -> tuple[str, str]:
        """Returns a name, and the verb inside which its weights are whole."""
        raise NotImplementedError

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(self._not_a_tensor(f"[{key!r}]"))

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise TypeError(f"{self._visited_by()[0]}[{key!r}] = ...: a state is not written to; ya.shard makes another")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(self._not_a_tensor(f".{name}") + hint(f"leaf.{name}"))

    def __len__(self) -> NoReturn:
        raise TypeError(self._not_a_tensor(" has no len()"))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        given: Any = [args, kwargs or {}]
        found = optree.tree_leaves(given, is_leaf=lambda node: isinstance(node, NotATensor))
        handle = next(node for node in found if isinstance(node, NotATensor))
        raise TypeError(handle._not_a_tensor(f" in torch.{getattr(func, '__name__', func)}"))

    def _no_arithmetic(self, other: object) -> NoReturn:
        raise TypeError(self._not_a_tensor(" in arithmetic"))

    # a tensor's operators turn the TypeError of `__torch_function__` into NotImplemented, then try the handle's
    __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __pow__ = _no_arithmetic
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmatmul__ = __rpow__ = _no_arithmetic

    def _not_a_tensor(self, access: str) -> str:
        name, verb = self._visited_by()
        inside = f"its weights are whole only inside {verb} or ya.map_whole_layers"
        return f"{name}{access}: {name} is sharded, {inside}; ya.unshard makes whole tensors of it"
