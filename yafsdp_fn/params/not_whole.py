"""What a handle says where it is used as the weights that it stands for: indexed, computed with, given to torch."""

from typing import Any, NoReturn

import optree


class NotWhole:
    """Refuses all of that, with TypeError or AttributeError."""

    __slots__ = ()

    def _whole_by(self) -> tuple[str, str]:
        """A name, and the verb in which its weights are whole."""
        raise NotImplementedError

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(self._not_whole(f"[{key!r}]"))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(self._not_whole(f".{name}"))

    def __len__(self) -> NoReturn:
        raise TypeError(self._not_whole(" has no len()"))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        given: Any = [args, kwargs or {}]
        found = optree.tree_leaves(given, is_leaf=lambda node: isinstance(node, NotWhole))
        handle = next(node for node in found if isinstance(node, NotWhole))
        raise TypeError(handle._not_whole(f" in torch.{getattr(func, '__name__', func)}"))

    def _no_arithmetic(self, other: object) -> NoReturn:
        raise TypeError(self._not_whole(" in arithmetic"))

    # a tensor's own operators turn the TypeError of `__torch_function__` into NotImplemented, and then ask the handle
    __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __pow__ = _no_arithmetic
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmatmul__ = __rpow__ = _no_arithmetic

    def _not_whole(self, access: str) -> str:
        name, verb = self._whole_by()
        return f"{name}{access}: {name} is sharded, its weights are whole only inside {verb} or ya.map_layers"
