"""Optimizer states in host memory: a unit's states are on the device while it is updated.

    host                        device: two buffers, in turn
    states of unit 0     ->     buffer 0     update of unit 0     ->     host
    states of unit 1     ->     buffer 1        beside it

Copies run on the stream of offloads. The next unit's states are fetched before the update of the one before: the order
of units is that of the last step.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from yafsdp_fn.optim.base import (
    Elementwise,
    GradientTransformation,
    OnHost,
    State,
    as_transformation,
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
    device holds the states of two units at a time. Steps have the bits of those of `tx` itself, whose states and
    checkpoints are the same. On a CPU it means the same, and saves nothing.

    tx: an optimizer whose units take their steps one by one (`why_not_unitwise`): others are refused in the first step

    A step ends when its states are back. It takes as long as the copies, both ways, where these take longer than the
    updates; `ya.planner` counts them by `Cluster.host_bandwidth`. Give the optimizer to `ya.init`, or take a state to
    the host, or back, by `ya.shard(state, tx)`. On a GPU, `tx.update` by hand refuses a state on the host.

    >>> tx = ya.optim.on_host(ya.optim.adamw(1e-3))
    >>> state, metrics = ya.train_step(loss_fn, tx)(ya.init(params, tx, mesh=mesh), batch)
    >>> state.opt_state[0].mu["layers"].leaves[0].device
    device(type='cpu')
    """
    inner = as_transformation(tx)

    def init(params: Tree) -> State:
        device = device_of_leaves(params)
        first = inner.init(_moved(params, device))  # moments are never on the device
        return _moved(first, device)

    rule = inner.rule if isinstance(inner.rule, Elementwise) else OnHost(inner)
    return inner._replace(init=init, rule=rule)


def _moved(tree: Tree, device: torch.device) -> Tree:
    """Returns a tree with its shards on the host, and what is not sharded, such as counts, on the device."""

    def of_group(group: Group, leaf: Tensor) -> tuple[Group, Tensor]:
        if device.type == "meta" or isinstance(leaf, FakeTensor):  # there are no values
            return dataclasses.replace(group, on_host=True), leaf
        here = leaf.cpu()
        if here is leaf and device.type == "cuda":  # a state: only parameters come from the device
            here = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu", pin_memory=True).copy_(leaf)
        return dataclasses.replace(group, on_host=True), here

    def of(node: Any) -> Any:
        if isinstance(node, Sharded):
            return node.map_groups(of_group)
        return node.to(device) if isinstance(node, Tensor) else node

    return optree.tree_map(of, tree, is_leaf=is_sharded)


def leaves_on_host(state: State) -> list[tuple[Group, Tensor]]:
    """Returns the leaves of a state that are fetched from the host. Those without values are not."""
    of_handles = itertools.chain.from_iterable(handle.group_leaves() for handle in handles(state))
    found = [(group, leaf) for _, group, leaf in of_handles if group.on_host and leaf.ndim]
    return [(group, leaf) for group, leaf in found if not isinstance(leaf, FakeTensor)]


# ---- The copies of a step.

BUFFERS = ("states", 0), ("states", 1)
Uses = Sequence[tuple[str, int]]


class HostStates:
    """The states of units that are on the host, and two buffers on the device, each for those of a unit.

    leaves: of the states; memory: of the parameters, whose scoreboard orders copies and updates
    rows: what updates read and write
    """

    def __init__(self, leaves: Sequence[tuple[Group, Tensor]], memory: Any) -> None:
        self._memory = memory
        self._stream = memory.comms.stream("offload")
        sizes: Counter[int] = Counter()
        for group, leaf in leaves:
            sizes.update(dict.fromkeys(group.held, _row_bytes(leaf)))
        # in each buffer the rows of a unit lie one after the other
        buffers = torch.empty(2, max(sizes.values(), default=0), dtype=torch.uint8, device=memory.comms.device)
        self._stream.mark_used(buffers)
        memory.made([BUFFERS[0], BUFFERS[1]])
        units = sorted(sizes)
        self._buffer_of = {unit: number % 2 for number, unit in enumerate(units)}
        self._pairs: dict[int, list[tuple[Tensor, Tensor]]] = {unit: [] for unit in units}  # on host and device
        self.rows: dict[int, list[Tensor]] = {}  # a `Host`
        for group, leaf in leaves:
            here = self.rows[id(leaf)] = []
            for unit, row in zip(group.held, rows(group, leaf), strict=True):
                sizes[unit] -= _row_bytes(leaf)
                memory_of_row = buffers[self._buffer_of[unit]].narrow(0, sizes[unit], row.nbytes)
                here.append(memory_of_row.view(row.dtype))
                self._pairs[unit].append((row, here[-1]))
        # buffer -> the unit whose states it holds; unit -> the one that was updated after it
        self._holds: dict[int, int] = {}
        self._next = dict(itertools.pairwise(units))
        self._order: list[int] = []

    @contextmanager
    def using(self, unit: int, *, last: bool) -> Iterator[None]:
        """Has the states of `unit` on the device inside, and fetches those of the unit that may come next.

        last: they are new afterwards, and go back to the host
        """
        if unit not in self._pairs:
            yield
            return
        self._fetch(unit)
        buffer = self._buffer_of[unit]
        following = self._next.get(unit, unit)
        if self._buffer_of[following] != buffer:
            self._fetch(following)
        self._order.append(unit)
        with self._memory.using((), [BUFFERS[buffer]]):
            yield
        if last:
            self._copy("return states", self._pairs[unit], [BUFFERS[buffer]], [("host states", unit)])

    def _fetch(self, unit: int) -> None:
        buffer = self._buffer_of[unit]
        if self._holds.get(buffer) != unit:
            self._holds[buffer] = unit
            pairs = [(here, there) for there, here in self._pairs[unit]]
            self._copy("fetch states", pairs, [("host states", unit)], [BUFFERS[buffer]])

    def _copy(self, label: str, pairs: Sequence[tuple[Tensor, Tensor]], reads: Uses, writes: Uses) -> None:
        def work() -> None:
            for to, source in pairs:
                to.copy_(source, non_blocking=True)

        event = self._memory.comms.event()
        self._stream.submit(work, self._memory.board.use(event, "offload", reads, writes), event, label)

    def finish(self) -> None:
        """Ends a step: waits until all states are on the host, where anybody may read and write them."""
        with self._memory.using([("host states", unit) for unit in self._pairs]):
            self._stream.drain()
        self._next = dict(itertools.pairwise(self._order))
        self._order = []
        self._holds = {}


def _row_bytes(leaf: Tensor) -> int:
    """Returns the bytes that a row takes in a buffer: the next one may be of a wider dtype."""
    return round_up(leaf.shape[-1] * leaf.itemsize, 16)
