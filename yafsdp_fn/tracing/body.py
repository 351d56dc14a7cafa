"""Measures one run of a body on fake tensors: outputs, FLOPs, and the memory of its forward and backward."""

import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.nn import linear
from yafsdp_fn.nn.float8 import NUMBERS
from yafsdp_fn.nn.linear import DESTINATION, AutogradRun, Destination
from yafsdp_fn.params.tree import tensors_in
from yafsdp_fn.program.measured import Cost
from yafsdp_fn.program.trace import Collectives
from yafsdp_fn.runtime import errors
from yafsdp_fn.runtime.block_call import BlockCall
from yafsdp_fn.runtime.graph_walks import OF_VISIT, saved_by
from yafsdp_fn.runtime.placement import Placement
from yafsdp_fn.runtime.recompute import differentiated
from yafsdp_fn.tracing.attention import AttentionRule
from yafsdp_fn.tracing.counter import Counter
from yafsdp_fn.util.mesh_axes import AxisCollective
from yafsdp_fn.util.torch_private import memory_key

# ---- Measures live memory: the bytes that operations allocate, until the last view of their results is freed.


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Allocation:
    storage: weakref.ref[Any]
    nbytes: int
    mark: int


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records, while active, the `bytes` of live results of operations, and their `peak`.

    mark: label of new allocations. Memory that a kernel allocates and frees before it returns is not seen.
    written: keys of the memory that operations have written to in place, through `.data`, too
    """

    supports_higher_order_operators = True

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = self.mark = 0
        self.paused = False
        self.written: set[int] = set()
        self._born: dict[int, _Allocation | None] = {}
        self.ignore(known)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Excludes the memory of `tensors`; the caller keeps them alive."""
        self._born.update((memory_key(tensor), None) for tensor in tensors)

    def adopt(self, tensor: Tensor) -> None:
        """Counts the memory of `tensor` from now on, for as long as it lives."""
        key = memory_key(tensor)
        size = tensor.untyped_storage().nbytes()

        def died(_: Any) -> None:
            self.bytes -= size
            del self._born[key]

        self._born[key] = _Allocation(weakref.ref(tensor.untyped_storage(), died), size, self.mark)
        self.bytes += size

    def saw(self, tensor: Tensor) -> bool:
        """Returns whether an operation has made the memory of `tensor`."""
        return self._born.get(memory_key(tensor)) is not None

    def birth(self, tensor: Tensor) -> tuple[object, int]:
        """Returns a key of the memory of `tensor`, the same for all its views and, while held, for no other; and its
        bytes: the tensor's own where it was made elsewhere, since a batch may be a view of a larger one."""
        key = memory_key(tensor)
        born = self._born.get(key)
        nbytes = tensor.untyped_storage().nbytes()
        return (key, min(nbytes, tensor.nbytes)) if born is None else (born, nbytes)

    def alive(self) -> Iterator[tuple[int, int, int]]:
        """Yields `(key, bytes, mark)` of live memory."""
        born = list(self._born.items())  # the garbage collector may free some meanwhile
        yield from ((memory, birth.nbytes, birth.mark) for memory, birth in born if birth is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.paused:
            # views allocate nothing, even of unknown memory: a batch of real tensors
            schema = getattr(func, "_schema", None)  # operators of higher order have none
            if schema is None or not any(value.alias_info for value in schema.returns):
                for leaf in tensors_in(out):
                    if memory_key(leaf) not in self._born:
                        self.adopt(leaf)
            elif schema.is_mutable:
                self.written.update(map(memory_key, tensors_in(out)))
            self.peak = max(self.peak, self.bytes)
        return out


# ---- Runs a body once on fake tensors: its outputs, FLOPs, and the memory of its forward and of its backward.


class BodyCosts(NamedTuple):
    """The measurements of one run of a body.

    structure: of its outputs; outs: these, detached; shares: for each the number of the input that it shares memory
    with, or None; saved: numbers of those that its graph saves, of inputs and then outputs; collectives, adjoints: as
    of a `Visit`
    """

    structure: Any
    outs: list[Tensor]
    shares: list[int | None]
    saved: list[int]
    cost: Cost
    collectives: Collectives
    adjoints: Collectives


class _TracedDestination(Destination):
    """The destination of a weight's gradient in a trace. Gradient slot and scratch memory exist already, and do not
    count.

    factors: bytes of the memory that a backward in halves would leave for later, the factors of products, by
    `LiveBytes.birth`; formed: bytes of a gradient that it would form in its first half
    numbers: as of `float8.Numbers`, of a weight that is kept as them
    """

    __slots__ = ("_held", "_lives", "factors", "formed", "numbers", "scratch_dtype")

    def __init__(self, lives: LiveBytes, leaf: Tensor, reduce: torch.dtype) -> None:
        self.numbers: Tensor | None = None
        self.scratch_dtype: torch.dtype | None = None
        self._lives = lives
        self.factors: dict[object, int] = {}
        self.formed = 0
        self._held = [torch.empty_like(leaf, dtype=reduce)]
        lives.ignore(self._held)
        super().__init__(self._one)
        self.offer(self._held[0])

    def _one(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        paused, self._lives.paused = self._lives.paused, True
        self._held.append(torch.empty(shape, dtype=dtype, device=self._held[0].device))
        self._lives.ignore(self._held[-1:])
        self._lives.paused = paused
        self.scratch_dtype = dtype
        return self._held[-1]

    @staticmethod
    def _wider(factors: torch.dtype, view: Tensor) -> bool:
        return False  # a trace is the same for all devices: `planner.footprint` knows which of them take scratch

    # ---- the backward, without values

    def begin(self, task: AutogradRun) -> None:
        """Begins the backward."""
        self.view = self._held[0]
        self.task = task
        self.state = "free"

    def write_mm(self, a: Tensor, b: Tensor) -> None:
        super().write_mm(a, b)
        self.factors |= map(self._lives.birth, (a, b))

    def write_rows(self, index: Tensor, rows: Tensor) -> None:
        super().write_rows(index, rows)
        self.factors |= map(self._lives.birth, (index, rows))

    def confirm(self, scale: Tensor) -> bool:
        self.formed = self._held[0].nbytes
        self.state = "written"  # a fake scale has no value to look at
        return True


def measure(
    call: BlockCall, trained: tuple[int, ...], track: bool, placement: Placement[Any], rule: AttentionRule
) -> BodyCosts:
    """Runs `call` on weights of its own. track: its backward, too; rule: attention's, which counts itself"""
    # weights and arguments, which are there already
    weights: dict[int, list[Tensor]] = {}
    for unit in call.units:
        weights[unit] = []
        how: Any = {"dtype": placement.gather_dtype(unit), "device": placement.comms.device}
        for shape in call.of_unit[unit][0].layout.shapes:
            weights[unit].append(torch.empty(shape, **how, requires_grad=unit in trained))
    leaves = [leaf for of_unit in weights.values() for leaf in of_unit]
    for leaf in leaves:
        setattr(leaf, OF_VISIT, call.name)
    memory = list(map(memory_key, leaves))
    inputs = [x.detach().requires_grad_(track and x.requires_grad) for x in call.tensors]
    lives = LiveBytes([*leaves, *inputs])
    destinations: list[tuple[Tensor, _TracedDestination]] = []
    for unit, of_unit in weights.items():
        kept = placement.keeps(unit)
        for leaf in of_unit:
            large = leaf.requires_grad and leaf.numel() >= linear.LARGE
            if large or kept:
                to = _TracedDestination(lives, leaf, placement.wire_dtype(unit))
                setattr(leaf, DESTINATION, to)
                if kept:
                    to.numbers = torch.empty_like(leaf, dtype=NUMBERS)
                if leaf.requires_grad:
                    destinations.append((leaf, to))
    slots = [held for _, to in destinations for held in to._held]
    # forward
    with lives, Counter(rule, slots) as forward, noting(placement.comms) as called:
        outs = call.run(inputs, weights)
    if lives.written.intersection(memory) or memory != list(map(memory_key, leaves)):  # leaf.data = ... in the block
        raise errors.weight_written(call.name)
    matmul = forward.matmul
    attention = forward.attention
    moved = forward.moved()
    there = list(map(memory_key, inputs))
    made = {memory_key(out): out.untyped_storage().nbytes() for out in outs if memory_key(out) not in there}
    own = sum(made.values())
    saved = saved_by(outs)
    last_flops = forward.since(saved)
    top = lives.peak
    inner = lives.bytes - own  # only the graph keeps the rest alive
    carry = sum(x.nbytes for x in call.tensors)
    # backward
    lives.peak = lives.bytes
    grads = [torch.ones_like(out) if out.requires_grad else None for out in outs]
    lives.ignore(grad for grad in grads if grad is not None)
    task = AutogradRun()
    for leaf, to in destinations:
        if not leaf._backward_hooks:  # a hook is to see the gradient
            to.begin(task)
    with lives, Counter(rule, slots) as backward, noting(placement.comms) as back:
        found = differentiated(task, outs, grads, [*inputs, *leaves])
        fresh = sum(grad.nbytes for grad in found[len(inputs) :] if grad is not None)
        bwd_moved = backward.moved()
        del found
    # what the backward of products leaves, or needs
    scratch = {to.scratch_dtype for _, to in destinations if to.scratch_dtype is not None}
    formed = 0
    factors: dict[object, int] = {}
    for _, to in destinations:
        formed += to.formed
        factors |= to.factors
    cost = Cost(
        flops=matmul,
        last_flops=last_flops,
        bwd_flops=backward.matmul,
        kept_bytes=(inner + carry) * track,
        carry_bytes=carry,
        attention_flops=attention,
        bwd_attention_flops=backward.attention,
        inner_bytes=inner,
        peak_bytes=top,
        bwd_peak_bytes=lives.peak - own,
        between_bytes=sum(factors.values()) + fresh + formed,
        scratch_bytes=sum(placement.largest_leaf(dtype) * dtype.itemsize for dtype in scratch),
        moved=moved,
        bwd_moved=bwd_moved,
    )
    return BodyCosts(
        call.structure,
        outs=[out.detach().requires_grad_(out.requires_grad) for out in outs],
        shares=[there.index(memory_key(out)) if memory_key(out) in there else None for out in outs],
        saved=[at for at, x in enumerate((*inputs, *outs)) if memory_key(x) in saved],
        cost=cost,
        collectives=tuple(call for call, _ in called),
        adjoints=tuple(call for call, _ in back),
    )


Noted = list[tuple[AxisCollective, bool]]
"""Collectives over axes inside blocks that were called, and whether each has a backward."""


@contextmanager
def noting(ranks: Ranks) -> Iterator[Noted]:
    """Collects the collectives over axes inside blocks in its context."""
    before, found = ranks.called, Noted()
    ranks.called = lambda call, given, _: found.append((call, given.requires_grad and call.kind != "pmax"))
    try:
        yield found
    finally:
        ranks.called = before
