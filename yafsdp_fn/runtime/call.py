"""One call of a block on sharded weights: what is visited, with which arguments, by which path.

    block(weights..., tensors..., other arguments)  ->  outputs

A `Row` stands among the arguments where the weights of a unit, or of one layer of a stack, belong. Rows and tensors
are taken out, so that autograd sees flat tensors, and put back when the block runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.layout import Group
from yafsdp_fn.runtime.session import Session
from yafsdp_fn.runtime.tracing import Tracer
from yafsdp_fn.sharded import Sharded
from yafsdp_fn.tree import Tree


class Row:
    """The weights of one visit to a handle. `shards`: local shards per group, where the pure path will gather them."""

    __slots__ = ("handle", "layer", "shards")

    def __init__(self, handle: Sharded, layer: int, shards: tuple[Tensor, ...]) -> None:
        self.handle, self.layer, self.shards = handle, layer, shards

    def units(self) -> list[tuple[int, Group]]:
        return [(group.units[self.layer], group) for group in self.handle.entry.groups]


class Argument:
    """Marks the place of a tensor among the arguments."""


ARGUMENT: Any = Argument()


class Call:
    """A block with its arguments taken apart.

    first: whether it is the first visit of its scan or apply; signature: equal for calls that run the same code
    """

    def __init__(
        self, name: str, block: Callable[..., Any], args: Tree, *, first: bool, signature: Hashable = None
    ) -> None:
        leaves, self._spec = optree.tree_flatten(args)
        self.name, self._block, self.first, self.signature = name, block, first, signature
        self.tensors: list[Tensor] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._template = [ARGUMENT if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.rows: list[Row] = [leaf for leaf in leaves if isinstance(leaf, Row)]
        self.of_unit: dict[int, tuple[Group, Row]] = {}
        for row in self.rows:
            for unit, group in row.units():
                self.of_unit.setdefault(unit, (group, row))
        self.units = tuple(self.of_unit)
        self._autocast = _autocast_state()
        self._out_spec: optree.PyTreeSpec | None = None
        self._out_template: list[Any] = []

    def run(self, weights: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs the block on the leaves of each unit (in the order of `units`); returns its tensor outputs."""
        by_unit = dict(zip(self.units, weights, strict=True))
        arguments = iter(tensors)
        args: list[Any] = []
        for leaf in self._template:
            if leaf is ARGUMENT:
                args.append(next(arguments))
            elif isinstance(leaf, Row):
                args.append(leaf.handle.entry.unflatten({group.name: by_unit[unit] for unit, group in leaf.units()}))
            else:
                args.append(leaf)
        out = self._block(*optree.tree_unflatten(self._spec, args))
        leaves, self._out_spec = optree.tree_flatten(out)
        self._out_template = [ARGUMENT if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def outputs(self, tensors: Sequence[Tensor]) -> Tree:
        """The block's output, with `tensors` in place of its tensors."""
        assert self._out_spec is not None
        results = iter(tensors)
        leaves = [next(results) if leaf is ARGUMENT else leaf for leaf in self._out_template]
        return optree.tree_unflatten(self._out_spec, leaves)

    def like(self, other: Call) -> None:
        """Outputs have the structure of `other`'s, which has run."""
        self._out_spec, self._out_template = other._out_spec, other._out_template

    def refuse_views(self, outs: Sequence[Tensor], storages: Container[int]) -> None:
        """Raises where an output is a view of the weights, whose memory will hold other values."""
        for out in outs:
            if out.untyped_storage().data_ptr() in storages:
                raise RuntimeError(
                    f"{self.name}: an output of shape {tuple(out.shape)} is a view of the block's weights, whose "
                    "memory will hold others soon; return a copy (.clone())"
                )

    def session(self) -> Session | Tracer | None:
        """The running session whose own leaves all the rows are; None: the pure path."""
        found = {row.handle.context.session for row in self.rows}
        session = found.pop()
        if found or session is None:
            return None
        if session.closed:
            raise RuntimeError(
                f"{self.name}: these parameters were given to a step that is over; use the state's params"
            )
        if torch._C._are_functorch_transforms_active():
            return None
        for row in self.rows:
            first = row.handle.context.first_group
            if any(leaf is not session.leaves[first + k] for k, leaf in enumerate(row.handle.leaves)):
                return None
        return session

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Autocast as it was when the call was made: a backward runs without it."""
        if self._autocast is None:
            yield
            return
        device, dtype, cache = self._autocast
        with torch.autocast(device, dtype=dtype, cache_enabled=cache):
            yield


def _autocast_state() -> tuple[str, torch.dtype, bool] | None:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    return None
