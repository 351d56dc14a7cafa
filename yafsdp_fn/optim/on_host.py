"""Optimizer states in host memory: a unit's states are on the device while it is updated.

    host                        device: two buffers, in turn
    states of unit 0     ->     buffer 0     update of unit 0     ->     host
    states of unit 1     ->     buffer 1        beside it

Copies run on the stream of offloads. The next unit's states are fetched before the update of the one before: the order
of units is that of the last step.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from yafsdp_fn.communication.streams import Scoreboard
from yafsdp_fn.optim.base import (
    Chain,
    GradientTransformation,
    OnHost,
    State,
    WholeTrees,
    as_transformation,
    chain,
    checked_update,
    name,
)
from yafsdp_fn.optim.cutting import rows
from yafsdp_fn.params.layout import Group
from yafsdp_fn.params.sharded import Sharded, handles, is_sharded
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.util.mesh_axes import round_up
from yafsdp_fn.util.randomness import device_of_leaves

# ---- The transformation.


def on_host(tx: Any) -> GradientTransformation:
    """Keeps what `tx` remembers of sharded parameters in the host's memory, pinned where the device is a GPU: the
    device holds the states of two units at a time. The bits of all steps are those of `tx` itself, and so are its
    states and checkpoints. On a CPU it means the same, and saves nothing.

    tx: any optimizer whose units take their steps one by one (`why_not_unitwise`), or a part of a `partition`

    A step takes as long as the copies, both ways, where these take longer than the updates; `ya.planner` counts them by
    `Cluster.host_bandwidth`. Give the optimizer to `ya.init`; `ya.shard(state, tx)` takes a state to the host, or back.
    Raises TypeError for a `tx` that is given whole trees.

    >>> tx = ya.optim.on_host(ya.optim.adamw(1e-3))
    >>> state, metrics = ya.train_step(loss_fn, tx)(ya.init(params, tx, mesh=mesh), batch)
    >>> state.opt_state[0].mu["layers"].leaves[0].device
    device(type='cpu')
    """
    inner = as_transformation(tx)
    if isinstance(inner.rule, Chain):
        return chain(*map(on_host, inner.rule.parts))
    if isinstance(inner.rule, WholeTrees):
        raise TypeError(
            f"on_host: {name(inner)} is given whole trees, but states come from the host unit by unit; declare what it "
            "does by ya.optim.assume_elementwise or assume_leafwise"
        )

    def init(params: Tree) -> State:
        device = device_of_leaves(params)
        first = inner.init(optree.tree_map(_to_host, params))  # moments are never on the device
        return optree.tree_map(partial(_put, device), first, is_leaf=is_sharded)

    def update(updates: Tree, state: State, params: Tree | None = None) -> tuple[Tree, State]:
        device = device_of_leaves(updates)
        new, after = checked_update(inner, updates, on_device(state, device), params)
        if any(group.on_host for handle in handles(state) for _, group, _ in handle.group_leaves()):
            after = optree.tree_map(partial(_put, device), after, is_leaf=is_sharded)
        return new, after  # in the steps of units their states are on the device for a while

    return GradientTransformation(init, update, inner.elementwise, OnHost(inner))


def _put(device: torch.device, node: Any) -> Any:
    """Puts shards on the host, and what is not sharded, such as counts, on the device."""

    def of_group(group: Group, leaf: Tensor) -> tuple[Group, Tensor]:
        if not leaf.ndim:
            return group, leaf.to(device)
        return dataclasses.replace(group, on_host=True), _to_host(leaf, pin=device.type == "cuda")

    if isinstance(node, Sharded):
        return node.map_groups(of_group)
    return node.to(device) if isinstance(node, Tensor) else node


def _to_host(leaf: Tensor, pin: bool = False) -> Tensor:
    """Returns `leaf` in the host's memory. What has no values stays where it is."""
    if leaf.device.type == "meta" or isinstance(leaf, FakeTensor):
        return leaf
    return torch.empty_like(leaf, device="cpu", pin_memory=True).copy_(leaf) if pin else leaf.cpu()


def on_device(state: State, device: torch.device) -> State:
    """Returns a state with all that is on the host on `device`."""

    def of_group(group: Group, leaf: Tensor) -> tuple[Group, Tensor]:
        return dataclasses.replace(group, on_host=False), leaf.to(device) if group.on_host else leaf

    def of(node: Any) -> Any:
        return node.map_groups(of_group) if isinstance(node, Sharded) else node

    return optree.tree_map(of, state, is_leaf=is_sharded)


# ---- The copies of a step.


class HostStates:
    """The states of units that are on the host, and the buffers on the device that hold two of these.

    rows: id of a leaf -> its rows on the device, by unit: what updates read and write
    """

    def __init__(self, state: State, comms: Any) -> None:
        self._comms, self._stream = comms, comms.stream("offload")
        leaves = [
            (group, leaf) for handle in handles(state) for _, group, leaf in handle.group_leaves() if group.on_host
        ]
        self._host: dict[int, list[Tensor]] = {}
        for group, leaf in leaves:
            for unit, row in zip(group.held, rows(group, leaf), strict=True):
                self._host.setdefault(unit, []).append(row)
        units = sorted(self._host)
        self._buffer_of = {unit: number % 2 for number, unit in enumerate(units)}
        # in each buffer the rows of a unit lie one after the other
        starts = {unit: [0, *itertools.accumulate(map(_bytes, self._host[unit]))] for unit in units}
        size = max((ends[-1] for ends in starts.values()), default=0)
        buffers = torch.empty(2, size, dtype=torch.uint8, device=comms.device)
        self._stream.mark_used(buffers)
        self._there: dict[int, list[Tensor]] = {}
        for unit, own in self._host.items():
            bytes_of = buffers[self._buffer_of[unit]]
            self._there[unit] = [
                bytes_of[start : start + row.nbytes].view(row.dtype).view(row.shape)
                for row, start in zip(own, starts[unit], strict=False)
            ]
        views = {unit: iter(found) for unit, found in self._there.items()}
        self.rows = {id(leaf): [next(views[unit]) for unit in group.held] for group, leaf in leaves}
        # buffer -> the unit whose states it holds; unit -> the one that was updated after it
        self._holds: dict[int, int] = {}
        self._next = dict(itertools.pairwise(units))
        self._order: list[int] = []
        self._board: Scoreboard[Any] = Scoreboard()
        with self._use((), [("buffer", 0), ("buffer", 1)]):
            pass  # kernels of the memory's last owner may still run on the compute stream

    @contextmanager
    def using(self, unit: int, *, last: bool) -> Iterator[None]:
        """Has the states of `unit` on the device inside, and fetches those of the unit that may come next.

        last: they are new afterwards, and go back to the host
        """
        if unit not in self._host:
            yield
            return
        self._fetch(unit)
        buffer, following = self._buffer_of[unit], self._next.get(unit, unit)
        if self._buffer_of[following] != buffer:
            self._fetch(following)
        self._order.append(unit)
        with self._use((), [("buffer", buffer)]):
            yield
        if last:
            self._copy(unit, "return states", self._there[unit], self._host[unit])

    def finish(self) -> None:
        """Ends a step: waits until all states are on the host, where anybody may read and write them."""
        with self._use([("host", unit) for unit in self._host], ()):
            self._stream.drain()
        self._next = dict(itertools.pairwise(self._order))
        self._order = []
        self._holds = {}

    def _fetch(self, unit: int) -> None:
        buffer = self._buffer_of[unit]
        if self._holds.get(buffer) != unit:
            self._holds[buffer] = unit
            self._copy(unit, "fetch states", self._host[unit], self._there[unit])

    def _copy(self, unit: int, label: str, sources: Sequence[Tensor], to: Sequence[Tensor]) -> None:
        host, buffer = ("host", unit), ("buffer", self._buffer_of[unit])
        reads, writes = ([host], [buffer]) if to is self._there[unit] else ([buffer], [host])

        def work() -> None:
            for source, target in zip(sources, to, strict=True):
                target.copy_(source, non_blocking=True)

        event = self._comms.event()
        self._stream.submit(work, self._board.use(event, "offload", reads, writes), event, label)

    @contextmanager
    def _use(self, reads: Sequence[Hashable], writes: Sequence[Hashable]) -> Iterator[None]:
        """Orders a use on the compute stream."""
        event = self._comms.event()
        try:
            self._board.begin(event, reads, writes)
            yield
        finally:
            self._board.end(event)


def _bytes(row: Tensor) -> int:
    return round_up(row.nbytes, 16)
