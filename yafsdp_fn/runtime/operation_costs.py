"""Counts what operations cost on fake tensors: FLOPs of products and of attention, and bytes through memory.

AttentionRule        attention by a fixed rule, whatever kernel torch would choose
Counter              a run's FLOPs, and its `Moved`: each kernel by itself, and those that feed each other as one
moved_by(work)       what `work` moves
in_pieces(...)       says, inside a run, what eager torch moves beyond one kernel that stands for several
"""

import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from yafsdp_fn.params.tree import tensors_in
from yafsdp_fn.program.measured import Moved
from yafsdp_fn.util.torch_private import diagonal_of, memory_key, run_autograd, transforms_active

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


# ---- Counts FLOPs, and the bytes that kernels read and write.

ALLOCATING = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided"}
"""Operations that launch nothing."""
BY_ROWS = {"aten::embedding", "aten::index_select", "aten::index", "aten::gather"}
"""Operations that read no more of their first tensor than they return."""
ADDING = {"aten::index_add_", "aten::scatter_add_", "aten::index_put_"}
"""Operations that read and write no more of their first tensor than the others have."""


class _Kernel(NamedTuple):
    """A kernel that is no product. reads: of each input the kernel that wrote it (None: a product, or it is older), the
    version of its memory, and its bytes. writes: storages and bytes"""

    reads: tuple[tuple[int | None, int, int], ...]
    writes: tuple[tuple[weakref.ref[Any], int], ...]


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of operations, matrix products and attention separately, and what moves through memory.

    torch's own FlopCounterMode holds gradients for longer than autograd does, which would show in the peaks.
    """

    supports_higher_order_operators = True

    def __init__(self, rule: AttentionRule, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rule, self._before = rule, rule.flops
        self._ignored = {memory_key(x) for x in ignored}
        # FLOPs: of products, and of attention in kernels that the rule does not see
        self.matmul = self._by_kernel = 0
        # bytes and kernels: of products, and of all others
        self._products = self._product_kernels = 0
        self._kernels: list[_Kernel] = []
        self._escaped = set[int]()  # kernels whose results a product or attention has read
        self._apart = (0, 0)
        # by memory, while it lives
        self._writer: Any = WeakIdKeyDictionary()  # the kernel that wrote it last
        self._version: Any = WeakIdKeyDictionary()  # what tells its content from what was there before
        self._made: Any = WeakIdKeyDictionary()  # FLOPs of products until it was written
        self._versions = itertools.count()

    def __enter__(self) -> "Counter":
        _counting.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, *raised: Any) -> None:
        _counting.remove(self)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    # ---- results

    def moved(self) -> Moved:
        """Returns the bytes moved so far. Kernels that read each other's results are fused: a fused kernel writes only
        results that others read, or that exist still."""
        # groups of kernels that are fused, each known by one of them
        root = [*range(len(self._kernels))]

        def of(number: int) -> int:
            while root[number] != number:
                number = root[number]
            return number

        for number, kernel in enumerate(self._kernels):
            for writer, _, _ in kernel.reads:
                if writer is not None:
                    root[of(number)] = of(writer)
        # fused: what a group reads from outside, once, and writes for others; eager: what each kernel reads and writes
        outside: dict[tuple[int, int], int] = {}
        fused = 0
        eager = 0
        for number, kernel in enumerate(self._kernels):
            for writer, version, nbytes in kernel.reads:
                eager += nbytes
                if writer is None:
                    outside.setdefault((of(number), version), nbytes)
            for storage, nbytes in kernel.writes:
                eager += nbytes
                if storage() is not None or number in self._escaped:
                    fused += nbytes
        fused += sum(outside.values())
        count = len(self._kernels)
        groups = len(set(map(of, range(count))))
        return Moved(self._products, self._product_kernels, eager, count, fused, groups, *self._apart)

    def since(self, saved: Collection[int]) -> int:
        """FLOPs of the products that came after the last that is saved was written."""
        written = [flops for memory, flops in self._made.items() if memory._cdata in saved]
        return self.matmul - max(written, default=self.matmul)

    def in_pieces(self, nbytes: int, kernels: int) -> None:
        """Counts the bytes that several kernels move beyond the one that stands for them here."""
        self._apart = (self._apart[0] + nbytes, self._apart[1] + kernels)

    # ---- counting

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any, product: bool) -> None:
        schema = getattr(func, "_schema", None)
        given = tensors_in((args, kwargs))
        made = tensors_in(out)
        if schema is None or schema.name in ALLOCATING:
            return  # it moves nothing
        if not schema.is_mutable and {memory_key(x) for x in made} <= {memory_key(x) for x in given}:
            return  # a view, or nothing at all
        for x in made:
            self._made[x.untyped_storage()] = self.matmul
        # a product is never fused with others
        if product:
            self._products += sum(map(_bytes_of, [*given, *made]))
            self._product_kernels += 1
            writers = [self._writer.get(x.untyped_storage()) for x in given]
            self._escaped.update(writer for writer in writers if writer is not None)
            for x in made:
                self._writer[x.untyped_storage()] = None
                self._version[x.untyped_storage()] = next(self._versions)
            return
        if any(memory_key(x) in self._ignored for x in made):
            return
        # any other kernel: what it reads, from whom, and what it writes
        most = sum(map(_bytes_of, given[1:] if schema.name in ADDING else made))
        reads = []
        for at, x in enumerate(given):
            memory = x.untyped_storage()
            nbytes = _bytes_of(x)
            if at == 0 and schema.name in (*BY_ROWS, *ADDING):
                nbytes = min(nbytes, most)
            reads.append((self._writer.get(memory), self._version.setdefault(memory, next(self._versions)), nbytes))
        writes = [(weakref.ref(x.untyped_storage()), min(most, _bytes_of(x))) for x in made]
        for x in made:
            self._writer[x.untyped_storage()] = len(self._kernels)
        self._kernels.append(_Kernel(tuple(reads), tuple(writes)))

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


_counting: list[Counter] = []
"""The counters that are active, the innermost last."""


def in_pieces(nbytes: int, kernels: int) -> None:
    """Tells the counter around it how many more bytes several kernels move than the one that stands for them here."""
    for counter in _counting[-1:]:
        counter.in_pieces(nbytes, kernels)


def _bytes_of(x: Tensor) -> int:
    """Returns the bytes that a kernel reads or writes of a tensor: of its memory, if it is expanded."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def moved_by(work: Callable[[], object]) -> Moved:
    """Returns what `work` moves through memory, counted as in a trace."""
    with Counter(AttentionRule()) as counter:
        work()
    return counter.moved()
