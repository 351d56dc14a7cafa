"""One run of a body on fake tensors: its outputs, FLOPs, and the memory of its forward and of its backward."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from yafsdp_fn.engine.block_call import BlockCall
from yafsdp_fn.engine.gradients import DESTINATION, LARGE, Destination, Task
from yafsdp_fn.engine.placement import Placement
from yafsdp_fn.schedules.measured import Cost
from yafsdp_fn.torch_private import memory_key
from yafsdp_fn.tracing.allocations import Lives
from yafsdp_fn.tracing.attention import AttentionRule, kernel_flops


class Measured(NamedTuple):
    """What one run of a body has shown.

    outs: its outputs, detached; shares: for each the number of the input that it shares memory with, or None
    """

    call: BlockCall
    outs: list[Tensor]
    shares: list[int | None]
    cost: Cost


class _Place(Destination):
    """Of a weight in a trace: its gradient slot and the scratch memory are there already, and do not count.

    factors: of products that a backward in halves would leave for later, as `Lives.birth` has them; formed: bytes of a
    gradient that it would form in its first half
    """

    __slots__ = ("_held", "_lives", "factors", "formed", "scratch_bytes")

    def __init__(self, lives: Lives, leaf: Tensor, reduce: torch.dtype) -> None:
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

    def begin(self, task: Task) -> None:
        """The backward begins."""
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
    """`call`, run on weights of its own. track: its backward, too; rule: attention's, which counts itself"""
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
    lives = Lives([*leaves, *inputs])
    large = [leaf for leaf in leaves if leaf.requires_grad and leaf.numel() >= LARGE]
    places = [_Place(lives, leaf, placement.precision.reduce_dtype) for leaf in large]
    for leaf, place in zip(large, places, strict=True):
        setattr(leaf, DESTINATION, place)
    with lives, _Counter(rule) as forward:
        outs = call.run(weights, inputs)
    matmul, attention = forward.matmul, forward.attention
    passed = {memory_key(x): number for number, x in reversed(list(enumerate(inputs)))}
    own = {memory_key(out): out.untyped_storage().nbytes() for out in outs if memory_key(out) not in passed}
    top, inner = lives.peak, lives.bytes - sum(own.values())  # the graph alone keeps the rest alive
    carry = sum(x.numel() * x.element_size() for x in call.tensors)
    roots = [out for out in outs if out.requires_grad]
    wanted = [x for x in (*inputs, *leaves) if x.requires_grad]
    lives.peak = lives.bytes
    grads = [torch.ones_like(root) for root in roots]
    lives.ignore(grads)
    task = Task(roots)
    task.watch()
    for place in places:
        place.begin(task)
    with lives, _Counter(rule) as backward:
        found = torch.autograd.grad(roots, wanted, grads, allow_unused=True) if roots and wanted else ()
        inputs_wanted = sum(x.requires_grad for x in inputs)
        fresh = sum(grad.nbytes for grad in found[inputs_wanted:] if grad is not None)
        del found
    factors = {of if isinstance(of, int) else id(of): nbytes for place in places for of, nbytes in place.factors}
    cost = Cost(
        flops=matmul,
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
    )
    return Measured(
        call,
        [out.detach().requires_grad_(out.requires_grad) for out in outs],
        [passed.get(memory_key(out)) for out in outs],
        cost,
    )


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """FLOPs of what runs under it, matrix products and attention apart.

    torch's own FlopCounterMode holds gradients for longer than autograd does, which would show in the peaks.
    """

    supports_higher_order_operators = True

    def __init__(self, rule: AttentionRule) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rule, self._before = rule, rule.flops
        self.matmul = self._by_kernel = 0

    @property
    def attention(self) -> int:
        return self._by_kernel + self._rule.flops - self._before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if "scaled_dot_product" in str(func):  # a kernel, out of the rule's sight: in F.multi_head_attention_forward
            self._by_kernel += kernel_flops(func, args, kwargs)
        elif count := flop_registry.get(getattr(func, "_overloadpacket", func)):
            flops = count(*args, **kwargs, out_val=out)
            if "flex_attention" in str(func):
                self._by_kernel += flops
            else:
                self.matmul += flops
        return out
