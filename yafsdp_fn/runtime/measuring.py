"""Measures one run of a body on fake tensors: outputs, FLOPs, and the memory of its forward and backward."""

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.nn import linear
from yafsdp_fn.nn.linear import DESTINATION, AutogradRun, Destination
from yafsdp_fn.program.measured import Cost
from yafsdp_fn.program.trace import Collectives
from yafsdp_fn.runtime.graph_walks import saved_by
from yafsdp_fn.runtime.operation_costs import AttentionRule, Counter
from yafsdp_fn.runtime.placement import Placement
from yafsdp_fn.runtime.visit import BlockCall, differentiated
from yafsdp_fn.util.mesh_axes import AxisCollective
from yafsdp_fn.util.torch_private import memory_key

# ---- Measures live memory: the bytes that operations allocate, until the last view of their results is freed.


class _Allocation(NamedTuple):
    storage: weakref.ref[Any]
    nbytes: int
    mark: int


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records, while active, the `bytes` of live results of operations, and their `peak`.

    mark: label of new allocations. Memory that a kernel allocates and frees before it returns is not seen.
    """

    supports_higher_order_operators = True

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = self.mark = 0
        self.paused = False
        self._born: dict[int, _Allocation | None] = {}
        self.ignore(known)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Excludes the memory of `tensors`; the caller keeps them alive."""
        self._born.update((memory_key(tensor), None) for tensor in tensors)

    def adopt(self, tensor: Tensor) -> None:
        """Counts the memory of `tensor`, which was made elsewhere, for as long as it lives."""
        self._note(memory_key(tensor), tensor.untyped_storage())

    def saw(self, tensor: Tensor) -> bool:
        """Returns whether an operation has made the memory of `tensor`."""
        return self._born.get(memory_key(tensor)) is not None

    def birth(self, tensor: Tensor) -> tuple[object, int]:
        """A key of the memory of `tensor`, the same for all its views and, while held, for no other; and its bytes: the
        tensor's own where it was made elsewhere, since a batch may be a view of a larger one."""
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

        self._born[number] = _Allocation(weakref.ref(storage, died), size, self.mark)
        self.bytes += size


# ---- Runs a body once on fake tensors: its outputs, FLOPs, and the memory of its forward and of its backward.


class BodyCosts(NamedTuple):
    """The measurements of one run of a body.

    structure: of its outputs; outs: these, detached; shares: for each the number of the input that it shares memory
    with, or None; saved: whether its graph saves each input, and each output; collectives, adjoints: as of a `Visit`
    """

    structure: Any
    outs: list[Tensor]
    shares: list[int | None]
    saved: tuple[list[bool], list[bool]]
    cost: Cost
    collectives: Collectives
    adjoints: Collectives


class _TracedDestination(Destination):
    """The destination of a weight's gradient in a trace. Gradient slot and scratch memory exist already, and do not
    count.

    factors: of products that a backward in halves would leave for later, as `LiveBytes.birth` returns them; formed:
    bytes of a gradient that it would form in its first half
    """

    __slots__ = ("_held", "_lives", "factors", "formed", "scratch_dtype")

    def __init__(self, lives: LiveBytes, leaf: Tensor, reduce: torch.dtype) -> None:
        self.scratch_dtype: torch.dtype | None = None
        self._lives = lives
        self.factors: list[tuple[Any, int]] = []
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
        self.view, self.task, self.state = self._held[0], task, "free"

    def write_mm(self, a: Tensor, b: Tensor) -> None:
        super().write_mm(a, b)
        self.factors += [self._lives.birth(a), self._lives.birth(b)]

    def write_rows(self, index: Tensor, rows: Tensor) -> None:
        super().write_rows(index, rows)
        self.factors += [self._lives.birth(index), self._lives.birth(rows)]

    def confirm(self, scale: Tensor) -> bool:
        self.formed = self._held[0].nbytes
        self.state = "written"  # a fake scale has no value to look at
        return True


Noted = Sequence[tuple[AxisCollective, bool]]
"""Collectives that a block has called, and whether each has a backward."""
Weights = list[list[Tensor]]
"""The leaves of each unit of a call."""


def _own(
    call: BlockCall, trained: tuple[int, ...], track: bool, placement: Placement[Any]
) -> tuple[Weights, list[Tensor]]:
    """Returns weights and arguments of a run beside the step."""
    device = placement.comms.device
    weights = [
        [
            torch.empty(shape, dtype=placement.gather_dtype(unit), device=device, requires_grad=unit in trained)
            for shape in call.of_unit[unit][0].layout.shapes
        ]
        for unit in call.units
    ]
    return weights, [x.detach().requires_grad_(track and x.requires_grad) for x in call.tensors]


# ---- a run


def outline(call: BlockCall, trained: tuple[int, ...], track: bool, placement: Placement[Any]) -> BodyCosts:
    """Runs `call` as `measure` does, without counting: in a fifth of the time. Its backward runs only where the block
    communicates."""
    # forward
    weights, inputs = _own(call, trained, track, placement)
    with noting(placement.comms) as called:
        outs = call.run(inputs, dict(zip(call.units, weights, strict=True)))
    saved = saved_by(outs)
    # backward
    with noting(placement.comms) as back:
        if called:
            grads = [torch.ones_like(out) if out.requires_grad else None for out in outs]
            differentiated(AutogradRun(), outs, grads, [*inputs, *itertools.chain.from_iterable(weights)])
    carry = sum(x.numel() * x.element_size() for x in call.tensors)
    return _found(call, inputs, outs, saved, Cost(carry_bytes=carry), called, back)


def _numbered(inputs: Sequence[Tensor]) -> dict[int, int]:
    """Returns memory -> the first of the inputs that has it."""
    return {memory_key(x): number for number, x in reversed(list(enumerate(inputs)))}


def _found(
    call: BlockCall,
    inputs: Sequence[Tensor],
    outs: Sequence[Tensor],
    saved: Set[int],
    cost: Cost,
    called: Noted,
    back: Noted,
) -> BodyCosts:
    passed = _numbered(inputs)
    return BodyCosts(
        call.structure,
        [out.detach().requires_grad_(out.requires_grad) for out in outs],
        [passed.get(memory_key(out)) for out in outs],
        ([memory_key(x) in saved for x in inputs], [memory_key(out) in saved for out in outs]),
        cost,
        tuple(call for call, _ in called),
        tuple(call for call, _ in back),
    )


def measure(
    call: BlockCall, trained: tuple[int, ...], track: bool, placement: Placement[Any], rule: AttentionRule
) -> BodyCosts:
    """Runs `call` on weights of its own. track: its backward, too; rule: attention's, which counts itself"""
    # weights and arguments, which are there already
    weights, inputs = _own(call, trained, track, placement)
    leaves = [leaf for unit in weights for leaf in unit]
    lives = LiveBytes([*leaves, *inputs])
    destinations: list[_TracedDestination] = []
    for unit, of_unit in zip(call.units, weights, strict=True):
        for leaf in of_unit:
            if leaf.requires_grad and leaf.numel() >= linear.LARGE:
                destinations.append(_TracedDestination(lives, leaf, placement.wire_dtype(unit)))
                setattr(leaf, DESTINATION, destinations[-1])
    # forward
    slots = [held for to in destinations for held in to._held]
    with lives, Counter(rule, slots) as forward, noting(placement.comms) as called:
        outs = call.run(inputs, dict(zip(call.units, weights, strict=True)))
    matmul, attention, moved = forward.matmul, forward.attention, forward.moved()
    passed = _numbered(inputs)
    own = {memory_key(out): out.untyped_storage().nbytes() for out in outs if memory_key(out) not in passed}
    saved = saved_by(outs)
    last_flops = forward.since(saved)
    top = lives.peak
    inner = lives.bytes - sum(own.values())  # only the graph keeps the rest alive
    carry = sum(x.numel() * x.element_size() for x in call.tensors)
    # backward
    lives.peak = lives.bytes
    grads = [torch.ones_like(out) if out.requires_grad else None for out in outs]
    lives.ignore(grad for grad in grads if grad is not None)
    task = AutogradRun()
    for leaf in leaves:
        to = getattr(leaf, DESTINATION, None)
        if to is not None and not leaf._backward_hooks:  # a hook is to see the gradient
            to.begin(task)
    with lives, Counter(rule, slots) as backward, noting(placement.comms) as back:
        found = differentiated(task, outs, grads, [*inputs, *leaves])
        fresh = sum(grad.nbytes for grad in found[len(inputs) :] if grad is not None)
        bwd_moved = backward.moved()
        del found
    # what the backward of products leaves, or needs
    scratch = {to.scratch_dtype for to in destinations if to.scratch_dtype is not None}
    factors = {of if isinstance(of, int) else id(of): nbytes for to in destinations for of, nbytes in to.factors}
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
        bwd_peak_bytes=lives.peak - sum(own.values()),
        between_bytes=sum(factors.values()) + fresh + sum(to.formed for to in destinations),
        scratch_bytes=sum(placement.largest_leaf(dtype) * dtype.itemsize for dtype in scratch),
        moved=moved,
        bwd_moved=bwd_moved,
    )
    return _found(call, inputs, outs, saved, cost, called, back)


@contextmanager
def noting(ranks: Ranks) -> Iterator[list[tuple[AxisCollective, bool]]]:
    """Collects the collectives over axes inside blocks in its context, and whether each has a backward."""
    before, found = ranks.called, list[tuple[AxisCollective, bool]]()
    ranks.called = lambda call, given, _: found.append((call, given.requires_grad and call.kind != "pmax"))
    try:
        yield found
    finally:
        ranks.called = before
