"""Measures one run of a body on fake tensors: outputs, FLOPs, and the memory of its forward and backward."""

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from yafsdp_fn.dist.ranks import AxisCollective, Ranks
from yafsdp_fn.nn.linear import DESTINATION, LARGE, Destination, Task
from yafsdp_fn.program.trace import Collectives, Cost, Moved
from yafsdp_fn.runtime.block_call import BlockCall
from yafsdp_fn.runtime.graph_walks import saved_by
from yafsdp_fn.runtime.placement import Placement
from yafsdp_fn.util.torch_private import diagonal_of, memory_key, run_autograd, transforms_active

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
        """A key of the memory of `tensor`, the same for all its views and, while held, for no other; and its bytes."""
        key = memory_key(tensor)
        return self._born.get(key) or key, tensor.untyped_storage().nbytes()

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


# ---- Measures attention on fake tensors by a fixed rule, whatever kernel or decomposition torch would choose for
# them.
#
#     saved      q, k, v, out, and the logsumexp of every row of scores, fp32 [B, H, S]; never the scores [S, T]
#     forward    2 products over the pairs (query, key) that a kernel works on
#     backward   5 products: a flash kernel computes the scores again
#
# A causal kernel leaves out the pairs above the diagonal, which begins at the first query and the first key, or ends at
# the last of both (`causal_lower_right`, no tensor for a kernel); a mask saves no pair. Shapes:
# queries [..., H, S, D], keys [..., K, T, D], values [..., K, T, Dv]. Attention by the math path (the CPU takes it
# for some dtypes, dropout and grouped heads) saves more: the scores, H S T elements a time.


class AttentionRule(TorchFunctionMode):
    """Applies the rule to `scaled_dot_product_attention` while active; `flops` counts what ran."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not transforms_active():
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            if mask is None or not mask.requires_grad:
                return self._attention(*args, **kwargs)
        if func is torch.autograd.grad and not kwargs.get("is_grads_batched") and not kwargs.get("materialize_grads"):
            with self:  # torch takes a mode away while it handles a call, but blocks recompute in this one
                return _grad(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        diagonal = diagonal_of(attn_mask)
        if diagonal is not None:
            attn_mask = None
        elif is_causal:
            diagonal = "first"
        out: Tensor = _Attention.apply(self, query, key, value, attn_mask, diagonal)  # type: ignore[no-untyped-call]
        return out


def attention_flops(query: Tensor, key: Tensor, value: Tensor, diagonal: str | None) -> int:
    """Returns the FLOPs of the two products of a forward. diagonal: which pair is on it, the "first" or the "last" """
    rows, columns = query.shape[-2], key.shape[-2]
    pairs = rows * columns
    if diagonal == "last":
        pairs -= rows * rows // 2
    elif diagonal == "first":
        square = min(rows, columns)
        pairs = square * square - square * square // 2 + max(0, rows - columns) * columns
    return 2 * math.prod(query.shape[:-2]) * pairs * (query.shape[-1] + value.shape[-1])


def kernel_flops(func: Any, args: Any, kwargs: Any) -> int:
    """Returns the FLOPs of one of torch's fused kernels, forward or backward, called with `args` and `kwargs`."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    diagonal = "first" if given.get("is_causal", False) else None
    flops = attention_flops(given["query"], given["key"], given["value"], diagonal)
    return flops * 5 // 2 if "backward" in str(func) else flops


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    **_: bool,
) -> tuple[Tensor | None, ...]:
    """Computes `torch.autograd.grad` on fake tensors, bypassing function modes. Unused inputs get None."""
    outs, wanted, given = ((x,) if isinstance(x, Tensor) else x for x in (outputs, inputs, grad_outputs))
    seeds = [None] * len(outs) if given is None else given
    grads = tuple(torch.ones_like(out) if g is None else g for out, g in zip(outs, seeds, strict=True))
    retain = create_graph if retain_graph is None else retain_graph
    found: tuple[Tensor | None, ...] = run_autograd(
        tuple(outs), grads, retain, create_graph, tuple(wanted), allow_unreachable=True, accumulate_grad=False
    )
    return found


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rule: AttentionRule, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, diagonal: str | None
    ) -> Tensor:
        ctx.rule, ctx.flops = rule, attention_flops(q, k, v, diagonal)
        rule.flops += ctx.flops
        lead, rows, width = q.shape[:-2], q.shape[-2], v.shape[-1]
        if q.ndim > 3:  # heads lie beside each other in memory, so that they are joined without a copy
            out = q.new_empty(*lead[:-1], rows, lead[-1], width).transpose(-2, -3)
        else:
            out = q.new_empty(*lead, rows, width)
        logsumexp = q.new_empty(*lead, rows, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, logsumexp, *([] if mask is None else [mask]))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        ctx.rule.flops += ctx.flops * 5 // 2
        return None, torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None


# ---- Runs a body once on fake tensors: its outputs, FLOPs, and the memory of its forward and of its backward.


class Measured(NamedTuple):
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

    __slots__ = ("_held", "_lives", "factors", "formed", "scratch_bytes")

    def __init__(self, lives: LiveBytes, leaf: Tensor, reduce: torch.dtype) -> None:
        self.scratch_bytes, self._lives = 0, lives
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
        self.scratch_bytes = dtype.itemsize
        return self._held[-1]

    @staticmethod
    def _in_one(factors: torch.dtype, view: Tensor) -> bool:
        # a trace is the same for all devices: `planner.footprint` knows which of them take scratch
        return factors == view.dtype

    def begin(self, task: Task) -> None:
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


def measure(
    call: BlockCall, trained: tuple[int, ...], track: bool, placement: Placement[Any], rule: AttentionRule
) -> Measured:
    """Runs `call` on weights of its own. track: its backward, too; rule: attention's, which counts itself"""
    device = placement.comms.device
    weights = [
        [
            torch.empty(shape, dtype=placement.gather_dtype(unit), device=device, requires_grad=unit in trained)
            for shape in call.of_unit[unit][0].layout.shapes
        ]
        for unit in call.units
    ]
    leaves = [leaf for unit in weights for leaf in unit]
    inputs = [x.detach().requires_grad_(track and x.requires_grad) for x in call.tensors]
    lives = LiveBytes([*leaves, *inputs])
    large = [leaf for leaf in leaves if leaf.requires_grad and leaf.numel() >= LARGE]
    places = [_TracedDestination(lives, leaf, placement.precision.reduce_dtype) for leaf in large]
    for leaf, place in zip(large, places, strict=True):
        setattr(leaf, DESTINATION, place)
    slots = [held for place in places for held in place._held]
    with lives, _Counter(rule, slots) as forward, noting(placement.comms) as called:
        outs = call.run(inputs, dict(zip(call.units, weights, strict=True)))
    matmul, attention, moved = forward.matmul, forward.attention, forward.moved()
    passed = {memory_key(x): number for number, x in reversed(list(enumerate(inputs)))}
    own = {memory_key(out): out.untyped_storage().nbytes() for out in outs if memory_key(out) not in passed}
    saved = saved_by(outs)
    last_flops = forward.since(saved)
    top, inner = lives.peak, lives.bytes - sum(own.values())  # only the graph keeps the rest alive
    carry = sum(x.numel() * x.element_size() for x in call.tensors)
    roots = [out for out in outs if out.requires_grad]
    wanted = [x for x in (*inputs, *leaves) if x.requires_grad]
    lives.peak = lives.bytes
    grads = [torch.ones_like(root) for root in roots]
    lives.ignore(grads)
    task = Task(roots)
    for place in places:
        place.begin(task)
    with lives, _Counter(rule, slots) as backward, noting(placement.comms) as back:
        found = torch.autograd.grad(roots, wanted, grads, allow_unused=True) if roots and wanted else ()
        inputs_wanted = sum(x.requires_grad for x in inputs)
        fresh = sum(grad.nbytes for grad in found[inputs_wanted:] if grad is not None)
        bwd_moved = backward.moved()
        del found
    factors = {of if isinstance(of, int) else id(of): nbytes for place in places for of, nbytes in place.factors}
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
        between_bytes=sum(factors.values()) + fresh + sum(place.formed for place in places),
        scratch_bytes=placement.largest_leaf * max((place.scratch_bytes for place in places), default=0),
        moved=moved,
        bwd_moved=bwd_moved,
    )
    return Measured(
        call.structure,
        [out.detach().requires_grad_(out.requires_grad) for out in outs],
        [passed.get(memory_key(out)) for out in outs],
        ([memory_key(x) in saved for x in inputs], [memory_key(out) in saved for out in outs]),
        cost,
        tuple(call for call, _ in called),
        tuple(call for call, _ in back),
    )


@contextmanager
def noting(ranks: Ranks) -> Iterator[list[tuple[AxisCollective, bool]]]:
    """Collects the collectives over axes inside blocks in its context, and whether each has a backward."""
    before, found = ranks.called, list[tuple[AxisCollective, bool]]()
    ranks.called = lambda call, given: found.append((call, given.requires_grad and call.kind != "pmax"))
    try:
        yield found
    finally:
        ranks.called = before


ALLOCATING = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided"}
"""Operations that launch nothing."""
BY_ROWS = {"aten::embedding", "aten::index_select", "aten::index", "aten::gather"}
"""Operations that read no more of their first tensor than they return."""
ADDING = {"aten::index_add_", "aten::scatter_add_", "aten::index_put_"}
"""Operations that read and write no more of their first tensor than the others have."""


class _Kernel(NamedTuple):
    """A kernel that is no product. reads: the kernel that wrote, None for a product or what was there; a number of what
    it reads; bytes. writes: storages and bytes"""

    reads: tuple[tuple[int | None, int, int], ...]
    writes: tuple[tuple[weakref.ref[Any], int], ...]


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of operations, matrix products and attention separately, and what moves through memory.

    torch's own FlopCounterMode holds gradients for longer than autograd does, which would show in the peaks.
    """

    supports_higher_order_operators = True

    def __init__(self, rule: AttentionRule, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rule, self._before = rule, rule.flops
        self._ignored = {memory_key(x) for x in ignored}
        self.matmul = self._by_kernel = 0
        self._products = self._product_kernels = 0
        self._kernels: list[_Kernel] = []
        self._writer: dict[int, int] = {}  # memory -> the kernel that wrote it last
        self._version: dict[int, int] = {}  # memory -> what tells its content from what was there before
        self._deaths: dict[int, weakref.ref[Any]] = {}
        self._serial = 0
        self._escaped: set[int] = set()  # kernels whose results a product or attention has read
        self._apart: tuple[int, int] = (0, 0)
        self._made: dict[int, int] = {}  # memory -> FLOPs of products until it was written

    def __enter__(self) -> "_Counter":
        _counting.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, *raised: Any) -> None:
        _counting.remove(self)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def moved(self) -> Moved:
        """Returns what moved so far. A kernel belongs to those whose results it reads; of what these write, others than
        themselves read, or hold now, is written."""
        root = [*range(len(self._kernels))]

        def of(number: int) -> int:
            while root[number] != number:
                number = root[number]
            return number

        for number, kernel in enumerate(self._kernels):
            for writer, _, _ in kernel.reads:
                if writer is not None:
                    root[of(number)] = of(writer)
        fused = 0
        outside: set[tuple[int, int]] = set()
        for number, kernel in enumerate(self._kernels):
            for writer, key, nbytes in kernel.reads:
                if writer is None and (of(number), key) not in outside:
                    outside.add((of(number), key))
                    fused += nbytes
            fused += sum(nbytes for storage, nbytes in kernel.writes if storage() is not None)
        fused += sum(
            nbytes
            for number, kernel in enumerate(self._kernels)
            for storage, nbytes in kernel.writes
            if storage() is None and number in self._escaped
        )
        eager = sum(
            sum(nbytes for _, _, nbytes in kernel.reads) + sum(nbytes for _, nbytes in kernel.writes)
            for kernel in self._kernels
        )
        groups = len({of(number) for number in range(len(self._kernels))})
        count = len(self._kernels)
        return Moved(self._products, self._product_kernels, eager, count, fused, groups, *self._apart)

    def since(self, saved: Collection[int]) -> int:
        """FLOPs of the products that came after the last that is saved was written."""
        return self.matmul - max((flops for key, flops in self._made.items() if key in saved), default=self.matmul)

    def in_pieces(self, nbytes: int, kernels: int) -> None:
        """Counts what several kernels move beyond the one that stands for them here."""
        self._apart = (self._apart[0] + nbytes, self._apart[1] + kernels)

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    def _watch(self, x: Tensor) -> None:
        """Forgets the memory of `x` when it is freed: another tensor may get its address."""
        key = memory_key(x)

        def died(_: Any) -> None:
            for of in (self._writer, self._version, self._deaths, self._made):
                of.pop(key, None)

        if key not in self._deaths:
            self._deaths[key] = weakref.ref(x.untyped_storage(), died)

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any, product: bool) -> None:
        schema = getattr(func, "_schema", None)
        for leaf in optree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._watch(leaf)
        if schema is None or schema.name in ALLOCATING:
            return
        leaves: list[Any] = optree.tree_leaves((args, kwargs))  # type: ignore[arg-type]
        given = [x for x in leaves if isinstance(x, Tensor)]
        made = [x for x in optree.tree_leaves(out) if isinstance(x, Tensor)]
        if not schema.is_mutable and {memory_key(x) for x in made} <= {memory_key(x) for x in given}:
            return  # a view, or nothing at all
        self._made.update((memory_key(x), self.matmul) for x in made)
        if product:
            self._products += sum(map(_bytes_of, [*given, *made]))
            self._product_kernels += 1
            self._escaped.update(self._writer[key] for x in given if (key := memory_key(x)) in self._writer)
            for x in made:
                self._writer.pop(memory_key(x), None)
                self._version[memory_key(x)] = self._next()
            return
        if any(memory_key(x) in self._ignored for x in made):
            return
        most = sum(map(_bytes_of, given[1:] if schema.name in ADDING else made))
        reads = []
        for at, x in enumerate(given):
            nbytes = min(_bytes_of(x), most) if schema.name in (*BY_ROWS, *ADDING) and at == 0 else _bytes_of(x)
            key = memory_key(x)
            reads.append((self._writer.get(key), self._version.setdefault(key, self._next()), nbytes))
        writes = [(weakref.ref(x.untyped_storage()), min(most, _bytes_of(x))) for x in made]
        self._kernels.append(_Kernel(tuple(reads), tuple(writes)))
        self._writer.update((memory_key(x), len(self._kernels) - 1) for x in made)

    @property
    def attention(self) -> int:
        return self._by_kernel + self._rule.flops - self._before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = flop_registry.get(getattr(func, "_overloadpacket", func))
        if "scaled_dot_product" in str(func):  # a kernel that the rule does not see: in F.multi_head_attention_forward
            self._by_kernel += kernel_flops(func, args, kwargs)
        elif count:
            flops = count(*args, **kwargs, out_val=out)
            if "flex_attention" in str(func):
                self._by_kernel += flops
            else:
                self.matmul += flops
        self._note(func, args, kwargs, out, product="scaled_dot_product" in str(func) or count is not None)
        return out


_counting: list[_Counter] = []
"""The counters that are active, the innermost last."""


def in_pieces(nbytes: int, kernels: int) -> None:
    """Tells what counts around it how much more several kernels move than the one that stands for them here."""
    for counter in _counting[-1:]:
        counter.in_pieces(nbytes, kernels)


def _bytes_of(x: Tensor) -> int:
    """Bytes that a kernel reads of it, or writes: those of its memory, where it is expanded."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def moved_by(work: Callable[[], object]) -> Moved:
    """Returns what `work` moves through memory, counted as in a trace."""
    with _Counter(AttentionRule()) as counter:
        work()
    return counter.moved()
