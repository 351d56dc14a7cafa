"""When memory lives: the bytes that operations allocate, from their results' birth to the death of the last view."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from yafsdp_fn.torch_private import memory_key


class _Birth(NamedTuple):
    storage: weakref.ref[Any]
    nbytes: int
    mark: int


class Lives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, results of operations are seen: `bytes` of those that live, and the `peak` of that.

    mark: what is born is marked with. What a kernel allocates for itself and frees before it returns is not seen.
    """

    supports_higher_order_operators = True

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = self.mark = 0
        self.paused = False
        self._born: dict[int, _Birth | None] = {}
        self.ignore(known)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Their memory does not count; the caller keeps it alive."""
        self._born.update((memory_key(tensor), None) for tensor in tensors)

    def saw(self, tensor: Tensor) -> bool:
        """Whether an operation has made the memory of `tensor`."""
        return self._born.get(memory_key(tensor)) is not None

    def birth(self, tensor: Tensor) -> tuple[object, int]:
        """What stands for the memory of `tensor`, the same for all its views and, held, for no other; and its bytes."""
        key = memory_key(tensor)
        return self._born.get(key) or key, tensor.untyped_storage().nbytes()

    def alive(self) -> Iterator[tuple[int, int, int]]:
        """`(key, bytes, mark)` of what lives."""
        born = list(self._born.items())  # the collector may end lives while the caller looks
        yield from ((memory, birth.nbytes, birth.mark) for memory, birth in born if birth is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.paused:
            # views of what exists are not born here, even where it is unknown: a batch of real tensors
            schema = getattr(func, "_schema", None)  # operators of higher order have none
            if schema is None or not any(value.alias_info for value in schema.returns):
                for leaf in optree.tree_leaves(out):
                    if isinstance(leaf, Tensor) and memory_key(leaf) not in self._born:
                        self._note(memory_key(leaf), leaf.untyped_storage())
            self.peak = max(self.peak, self.bytes)
        return out

    def _note(self, number: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()

        def died(_: Any) -> None:
            self.bytes -= size
            del self._born[number]

        self._born[number] = _Birth(weakref.ref(storage, died), size, self.mark)
        self.bytes += size
