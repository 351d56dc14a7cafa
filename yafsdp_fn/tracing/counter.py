"""Counts what operations cost on fake tensors: FLOPs of products, and bytes through memory.

Counter              a run's FLOPs, and its `Moved`: each kernel by itself, and those that feed each other as one
moved_by(work)       what `work` moves
in_pieces(...)       says, inside a run, what eager torch moves beyond one kernel that stands for several
"""

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from yafsdp_fn.params.tree import tensors_in
from yafsdp_fn.program.measured import Moved
from yafsdp_fn.tracing.attention import AttentionRule, kernel_flops
from yafsdp_fn.util.torch_private import memory_key

ALLOCATING = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided"}
"""Operations that launch nothing."""
BY_ROWS = {"aten::embedding", "aten::index_select", "aten::index", "aten::gather"}
"""Operations that read no more of their first tensor than they return."""
ADDING = {"aten::index_add_", "aten::scatter_add_", "aten::index_put_"}
"""Operations that read and write no more of their first tensor than the others have."""


class _Kernel(NamedTuple):
    """A kernel that is no product. reads: of each input its origin, which is the number of the kernel that wrote it, or
    below zero where a product wrote it, or it is older; and its bytes. writes: storages and bytes"""

    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[weakref.ref[Any], int], ...]


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of operations, matrix products and attention separately, and what moves through memory.

    torch's own FlopCounterMode holds gradients for longer than autograd does, which would show in the peaks.
    """

    supports_higher_order_operators = True

    def __init__(self, rule: AttentionRule, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rule = rule
        self._before = rule.flops
        self._ignored = {memory_key(x) for x in ignored}
        # FLOPs: of products, and of attention in kernels that the rule does not see
        self.matmul = self._by_kernel = 0
        # bytes and kernels: of products, and of all others
        self._products = self._product_kernels = 0
        self._kernels: list[_Kernel] = []
        self._escaped = set[int]()  # kernels whose results a product or attention has read
        self._apart = (0, 0)
        # by memory, while it lives
        self._origin: Any = WeakIdKeyDictionary()  # of its content, as `_Kernel` has it
        self._made: Any = WeakIdKeyDictionary()  # FLOPs of products until it was written
        self._outside = itertools.count(-1, -1)  # numbers below zero

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
            for origin, _ in kernel.reads:
                if origin >= 0:
                    root[of(number)] = of(origin)
        # fused: what a group reads from outside, once, and writes for others; eager: what each kernel reads and writes
        outside: dict[tuple[int, int], int] = {}
        fused = 0
        eager = 0
        for number, kernel in enumerate(self._kernels):
            for origin, nbytes in kernel.reads:
                eager += nbytes
                if origin < 0:
                    outside.setdefault((of(number), origin), nbytes)
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
            self._escaped.update(self._origin.get(x.untyped_storage(), -1) for x in given)
            for x in made:
                self._origin[x.untyped_storage()] = next(self._outside)
            return
        if any(memory_key(x) in self._ignored for x in made):
            return
        # any other kernel: what it reads, from whom, and what it writes
        most = sum(map(_bytes_of, given[1:] if schema.name in ADDING else made))
        reads = []
        for at, x in enumerate(given):
            origin = self._origin.setdefault(x.untyped_storage(), next(self._outside))
            nbytes = _bytes_of(x)
            if at == 0 and schema.name in (*BY_ROWS, *ADDING):
                nbytes = min(nbytes, most)
            reads.append((origin, nbytes))
        writes = [(weakref.ref(x.untyped_storage()), min(most, _bytes_of(x))) for x in made]
        for x in made:
            self._origin[x.untyped_storage()] = len(self._kernels)
        self._kernels.append(_Kernel(tuple(reads), tuple(writes)))

    @property
    def attention(self) -> int:
        return self._by_kernel + self._rule.flops - self._before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = flop_registry.get(getattr(func, "_overloadpacket", func))
        attention = "scaled_dot_product" in str(func)  # a kernel that the rule does not see
        if attention:  # in F.multi_head_attention_forward
            self._by_kernel += kernel_flops(func, args, kwargs)
        elif count is not None:
            flops = count(*args, **kwargs, out_val=out)
            if "flex_attention" in str(func):
                self._by_kernel += flops
            else:
                self.matmul += flops
        self._note(func, args, kwargs, out, product=attention or count is not None)
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
