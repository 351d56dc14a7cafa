"""CUDA graphs of visits: slots have static addresses, so one graph per slot stands for every layer."""

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from yafsdp_fn.communication.streams import Work
from yafsdp_fn.params.tree import tensors_in
from yafsdp_fn.program.ops import Backward, ComputeOp, Forward
from yafsdp_fn.runtime.block_call import BlockCall
from yafsdp_fn.runtime.memory import address_of
from yafsdp_fn.runtime.protocols import Outs
from yafsdp_fn.util.randomness import seeded
from yafsdp_fn.util.torch_private import not_compiled

# ---- Computes keys of functions: functions with equal keys run the same code on the same values they close over.
#
# A loss often defines its block anew in every call; the key is the same as long as the values are. As under
# `jax.jit`, globals and attributes of objects count as constants.

CONSTANT = frozenset({type(None), bool, int, float, str})


class NotCapturable(Exception):
    """The reason why a call has no key or no graph; the text continues `the block ...`."""


def function_key(value: Any, inside: tuple[Any, ...] = ()) -> Hashable:
    """Returns the key of a function, or of another value that a call depends on.

    Raises NotCapturable for a tensor, whose values may change, and for unhashable values, which may change too.
    inside: the functions that `value` was found in, for those that close over themselves
    """
    if type(value) in CONSTANT:  # the usual case, and quick
        return type(value), value
    if isinstance(value, Tensor):
        raise NotCapturable(_no_argument(value))
    if isinstance(value, FunctionType):
        if any(value is outer for outer in inside):
            return "itself"
        compiled = getattr(value, "_torchdynamo_orig_callable", None)
        if compiled is not None:
            return value, function_key(compiled, inside)
        held = (value.__defaults__, tuple((value.__kwdefaults__ or {}).items()), value.__closure__ or ())
        return value.__module__, value.__code__, function_key(held, (*inside, value))
    if isinstance(value, MethodType):
        return function_key((value.__func__, value.__self__), inside)
    if isinstance(value, functools.partial):
        return function_key((functools.partial, value.func, value.args, tuple(value.keywords.items())), inside)
    if isinstance(value, CellType):
        try:
            return function_key(value.cell_contents, inside)
        except ValueError:  # not assigned yet
            return "empty"
    if isinstance(value, tuple):
        return type(value), tuple(function_key(item, inside) for item in value)
    try:
        hash(value)
    except TypeError:
        raise NotCapturable(f"depends on a {type(value).__name__}, which may change; pass it as an argument") from None
    return type(value), value


def _no_argument(tensor: Tensor) -> str:
    return f"uses a tensor of shape {tuple(tensor.shape)} that is not an argument: pass it as one, in xs, or in consts"


# ---- Recomputed visits as work on static memory, which can be captured and replayed.
#
#     work(tensors) -> outs        beside its arguments it reads weight slots and writes gradient slots: these stay
#
# Two works of one block differ in: forward or backward, which gradients are wanted and given, and which gradient
# slots are added to.

VisitWork = Callable[[Sequence[Tensor]], Outs]
"""One run of a block: arguments -> outputs, or gradients; besides, it reads and writes only slots."""


Replay = Callable[[BlockCall, Sequence[Tensor]], Outs]
"""Runs a graph: a call, and its arguments -> outputs, or gradients."""


def _slots(visit: Any, op: ComputeOp) -> list[Tensor]:
    """Returns the weights that a visit reads, flat."""
    slots, units = visit.session.slots, visit.visit.units
    return [slots.weight(slot, unit).flat for slot, unit in zip(op.slots, units, strict=True)]


# ---- Captures visits as CUDA graphs: slot addresses are static, so one graph per slot serves every layer.
#
#     first call of a key     inspected (what does the block read?), then run on the stream that will be captured
#     second                  captured, which runs nothing; then as below
#     later                   arguments copied into static buffers, graph replayed, outputs copied out
#
# A key is the code, the shapes of its arguments, and the addresses of the memory that it uses; for a
# backward also which gradients exist and whether each is added to its slot. So two weight and two gradient slots take
# two graphs of a forward and two of a backward (recompute included), however many layers there are; if slots are the
# shards themselves (one rank), each layer takes its own. Waits and communication stay outside: a graph is replayed
# where the block would run. Visits that keep their autograd graph are not captured: their saved tensors must live
# until their own backward, so every layer would need a graph and its memory.
#
# A replay runs no Python. Anything it could not repeat is refused with a warning, and runs uncaptured: tensors that
# reach the block from outside, values that the host reads or gives, numbers from the CPU's generator, work on the
# CPU, and operations that cannot be captured. Numbers from the device's generator are fine: a replay reads its seed,
# and the visit's own is set.

LIMIT = 256
"""Graphs of one step function. The least recently used is evicted; its memory returns to the others' pool."""


RECOVERS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""True if torch restores its allocator and generators when a capture fails."""

NO_WAY_BACK = (
    f"the capture of a CUDA graph failed, and torch {torch.__version__} leaves its memory pool and its generators "
    "unusable then; restart without graphs=True, or with torch 2.13, which goes on without this graph"
)

COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class CudaCapture:
    """Captures work as CUDA graphs on one stream and in one memory pool. Replays never overlap, so graphs may share
    memory."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"graphs=True captures CUDA graphs, but the state is on the device {device}; leave it out")
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm(self, work: Callable[[], Outs]) -> Outs:
        """Runs `work` on the stream where it would be captured."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outs = work()
        current.wait_stream(self._stream)  # the stream waits for this one before each use: freed memory is safe
        return outs

    def record(self, work: Work) -> Work:
        """Captures `work` without running it; returns what replays it. Any exception means that it cannot be
        captured."""
        graph = torch.cuda.CUDAGraph()
        # not by `torch.cuda.graph`, which waits for the whole device first, a message of another stage included, and
        # gives cached memory back
        with torch.cuda.stream(self._stream):
            # other threads (NCCL's watchdog) may query events meanwhile
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()  # after an error it raises as well, and that error is its context
        replay: Work = graph.replay
        return replay


class Graphs:
    """The graphs of one step function, by key: implements `Replays` (runtime/protocols.py).
    capture: a `CudaCapture`, or its double"""

    def __init__(self, capture: Any, limit: int = LIMIT) -> None:
        self.capture, self._limit = capture, limit
        self._entries: OrderedDict[Hashable, Replay | Outs] = OrderedDict()  # first what its outputs are like
        self._refused: OrderedDict[Hashable, str] = OrderedDict()  # by code
        self._buffers: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()
        self._told: set[str] = set()

    def outputs(self, visit: Any, op: Forward, tensors: Sequence[Tensor]) -> list[Tensor]:
        work = functools.partial(visit.outputs, op)
        outs: Any = self.run(visit.call, "forward", _slots(visit, op), work, tensors, pure=True)
        return list(outs)

    def gradients(
        self,
        visit: Any,
        op: Backward,
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
        grads: Sequence[Tensor | None],
    ) -> Outs:
        given, grad_slots = [grad is not None for grad in grads], visit.target.grad_slots

        def work(both: Sequence[Tensor]) -> Outs:
            left = iter(both[len(needs) :])
            back = [next(left) if g else None for g in given]
            return list(visit.gradients(op, both[: len(needs)], needs, back))

        trained = tuple(unit in visit.visit.trained for unit in visit.visit.units)
        what = (tuple(needs), tuple(given), trained, tuple(grad_slot.add for grad_slot in grad_slots))
        both = [*tensors, *(grad for grad in grads if grad is not None)]
        # products of another dtype go through scratch: made in the first step, without graphs, if there are any
        written = [*(grad_slot.views.flat for grad_slot in grad_slots), *visit.session.memory.scratches]
        return self.run(visit.call, what, [*_slots(visit, op), *written], work, both, pure=False)

    def run(
        self,
        call: BlockCall,
        what: Hashable,
        memory: Sequence[Tensor],
        work: VisitWork,
        tensors: Sequence[Tensor],
        *,
        pure: bool,
    ) -> Outs:
        """Computes `work(tensors)`, from a graph if there is one.

        what: tells different works of one call apart; memory: the slots that it reads and the memory that it writes, as
        flat views; pure: it writes none, so that it is run once more, to see what it reads
        """
        try:
            code = function_key(call.code), call.form
            if code in self._refused:
                raise NotCapturable(self._refused[code])
        except NotCapturable as reason:
            self._tell(call, reason)
            return work(tensors)
        key = (code, what, tuple(map(_outline, tensors)), tuple((flat.data_ptr(), _outline(flat)) for flat in memory))
        with seeded(call.seed, self.capture.device):
            try:
                if key not in self._entries:
                    if pure:
                        self._look(work, tensors, memory)
                    return self._warm(call, key, work, tensors)
                self._entries.move_to_end(key)
                entry = self._entries[key]
                if isinstance(entry, list):
                    entry = self._entries[key] = self._record(call, entry, work, tensors)
            except NotCapturable as reason:  # nothing with effects has run
                self._refuse(call, code, key, reason)
                return work(tensors)
            return entry(call, tensors)

    def __len__(self) -> int:
        """Returns the number of graphs."""
        return sum(map(callable, self._entries.values()))

    def _look(self, work: VisitWork, tensors: Sequence[Tensor], memory: Sequence[Tensor]) -> None:
        """Raises NotCapturable if a run of `work` shows something that a replay could not repeat."""
        look = _Inspector(self.capture.device, (*tensors, *memory))
        try:
            with not_compiled(), look:
                look.see((*tensors, *work(tensors)))
        except Exception as error:
            raise NotCapturable(f"cannot be looked at ({type(error).__name__}: {error})") from error
        if look.found is not None:
            raise NotCapturable(look.found)

    def _warm(self, call: BlockCall, key: Hashable, work: VisitWork, tensors: Sequence[Tensor]) -> Outs:
        outs: Outs = self.capture.warm(lambda: work(tensors))
        self._entries[key] = [None if out is None else torch.empty_like(out, device="meta") for out in outs]
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)
            self._tell(call, f"is one of more than {self._limit} kinds of visit: some are captured in vain")
        return outs

    def _record(self, call: BlockCall, outs: Outs, work: VisitWork, tensors: Sequence[Tensor]) -> Replay:
        """Captures work; returns what runs its graph. outs: tensors on "meta", like its outputs"""
        inputs = [self._buffer(("in", number), tensor) for number, tensor in enumerate(tensors)]
        outputs = [None if out is None else self._buffer(("out", n), out) for n, out in enumerate(outs)]

        def again() -> None:
            for buffer, out in zip(outputs, work(inputs), strict=True):
                if (buffer is None) != (out is None):
                    raise NotCapturable("gives a gradient in one call, and none in the next")
                if buffer is not None and out is not None:
                    buffer.copy_(out)

        try:
            replay = self.capture.record(again)
        except NotCapturable:
            raise
        except Exception as error:
            if not RECOVERS:
                raise RuntimeError(f"{call.name}: {NO_WAY_BACK}") from error
            raise NotCapturable(f"cannot be captured ({type(error).__name__}: {error})") from error
        structure = call.structure  # of the outputs, which the capture has made

        def run(call: BlockCall, tensors: Sequence[Tensor]) -> Outs:
            call.structure = structure
            for buffer, tensor in zip(inputs, tensors, strict=True):
                buffer.copy_(tensor)
            replay()
            return [None if buffer is None else buffer.clone() for buffer in outputs]

        return run

    def _buffer(self, name: tuple[str, int], like: Tensor) -> Tensor:
        """Returns static memory, shared by graphs: each is replayed between the copies in and out."""
        key = (name, _outline(like))
        found = self._buffers.get(key)
        if found is None:
            found = self._buffers[key] = torch.empty_like(like, device=self.capture.device, requires_grad=False)
        return found

    def _refuse(self, call: BlockCall, code: Hashable, key: Hashable, reason: NotCapturable) -> None:
        self._entries.pop(key, None)
        self._refused[code] = str(reason)
        if len(self._refused) > self._limit:
            self._refused.popitem(last=False)
        self._tell(call, reason)

    def _tell(self, call: BlockCall, reason: object) -> None:
        text = f"{call.name.partition('[')[0]}: not captured: the block {reason}"
        if text not in self._told and len(self._told) < self._limit:
            self._told.add(text)
            warnings.warn(text, RuntimeWarning, stacklevel=2)


class _Inspector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inspects every operation; `found` describes what a replay could not repeat.

    Memory is known by its address: memory from outside stays alive, so new memory never shares its address.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._known = device, set(map(address_of, known))
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given, outs = tensors_in((args, kwargs)), tensors_in(out)
        made = func is torch.ops.aten.lift_fresh.default  # a new constant
        for tensor in () if made else given:
            if tensor.numel() and address_of(tensor) not in self._known:
                self._find(_no_argument(tensor))
        if func is torch.ops.aten._local_scalar_dense.default and given[0].device.type == self._device.type:
            self._find("reads a value on the host (.item(), float(), if), which a graph would keep for good")
        if func in COPIES and {x.device.type for x in (*given, *outs)} > {self._device.type}:
            self._find(
                "copies between host and device, which cannot be captured: make constants with torch.full, or pass them"
            )
        # attention kernels also return their seed, which is on the CPU outside a capture
        random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if random and all(x.device.type == "cpu" for x in (*given, *outs)):
            self._find("draws from the CPU's generator, whose numbers a graph would repeat")
        self._known.update(map(address_of, (*given, *outs)))
        return out

    def _find(self, what: str) -> None:
        self.found = self.found or what

    def see(self, ends: Iterable[Tensor | None]) -> None:
        """Inspects the arguments and outputs of the whole work."""
        others = {str(end.device) for end in ends if end is not None and end.device != self._device}
        if others:
            self._find(f"takes or returns a tensor on {', '.join(sorted(others))}")


def _outline(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
