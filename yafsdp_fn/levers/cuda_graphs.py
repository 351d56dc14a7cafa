"""Captured visits: the addresses of slots are static, so one CUDA graph per slot parity stands for every layer.

    first call of a key     looked at (what does the block read?), then run on the stream that will be captured
    second                  captured, which runs nothing; then as below
    later                   arguments copied into static buffers, graph replayed, outputs copied out

A key is what is run (block_key.py), the shapes of its arguments, and the addresses of the memory that it uses; of a
backward also which gradients exist and whether each is added to its slot. So two weight and two gradient slots take
two graphs of a forward and two of a backward (recompute included), however many layers there are; where slots are the
shards themselves (one rank), each layer takes its own. Waits and communication stay outside: a graph is replayed where
the block would run. Visits that keep their autograd graph run as they are: what they save must live until their own
backward, so every layer would need a graph and its memory; they are the price of `remat`, not of launches.

A replay runs no Python. Whatever it could not repeat is refused, with a warning, and runs as it is: tensors that reach
the block from outside, values that the host reads or gives, numbers from the CPU's generator, work on the CPU, and what
cannot be captured. Numbers from the device's generator are fine: a replay reads its seed, and the visit's own is set.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from yafsdp_fn.engine.block_call import BlockCall
from yafsdp_fn.engine.protocols import Outs
from yafsdp_fn.engine.randomness import seeded
from yafsdp_fn.levers.block_key import Unfit, code_of
from yafsdp_fn.levers.static_visits import StaticVisits, VisitWork
from yafsdp_fn.tracing.tracer import not_compiled

LIMIT = 256
"""Graphs of one step function. The one used longest ago goes first; its memory goes back to the others' pool."""


RECOVERS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether torch puts its allocator and generators back when a capture fails."""

NO_WAY_BACK = (
    f"the capture of a CUDA graph failed, and torch {torch.__version__} leaves its memory pool and its generators "
    "unusable then; restart without graphs=True, or with torch 2.13, which goes on without this graph"
)

COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class Capture(Protocol):
    """Captures work. `CudaCapture`, or a test's stand-in."""

    device: torch.device

    def warm(self, work: Callable[[], Outs]) -> Outs:
        """Runs `work` in the place where it would be captured."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Captures `work` without running it; returns what replays it. Any exception: it cannot be captured."""


class CudaCapture:
    """CUDA graphs on one stream and in one memory pool: replays never overlap, so graphs may share what they use."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"graphs=True captures CUDA graphs, but the state is on the device {device}; leave it out")
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm(self, work: Callable[[], Outs]) -> Outs:
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            outs = work()
        current.wait_stream(self._stream)  # and it for the current one before each use: freed memory is safe
        return outs

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # the outer one, since that of a capture that fails does not put the stream back
        with torch.cuda.stream(self._stream):
            # other threads (NCCL's watchdog) may query events meanwhile
            capture = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
            with capture:
                work()
        replay: Callable[[], None] = graph.replay
        return replay


class Graphs(StaticVisits):
    """The graphs of one step function, by key."""

    def __init__(self, capture: Capture, limit: int = LIMIT) -> None:
        self.capture, self._limit = capture, limit
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._refused: OrderedDict[Hashable, str] = OrderedDict()  # by what is run
        self._buffers: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()
        self._told: set[str] = set()

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
        """From a graph where there is one; what is pure is run once more, to see what it reads."""
        try:
            code = code_of(call.code), call.form
            if code in self._refused:
                raise Unfit(self._refused[code])
        except Unfit as reason:
            self._tell(call, reason)
            return work(tensors)
        key = (code, what, tuple(map(_outline, tensors)), tuple((flat.data_ptr(), _outline(flat)) for flat in memory))
        with seeded(call.seed, self.capture.device):
            try:
                if key not in self._entries:
                    return self._warm(call, key, self._look(work, tensors, memory) if pure else work, tensors)
                self._entries.move_to_end(key)
                entry = self._entries[key]
                if entry.replay is None:
                    self._record(call, entry, work, tensors)
            except Unfit as reason:  # nothing that counts has run
                self._refuse(call, code, key, reason)
                return work(tensors)
            return entry.run(call, tensors)

    def __len__(self) -> int:
        """How many graphs there are."""
        return sum(entry.replay is not None for entry in self._entries.values())

    def _look(self, work: VisitWork, tensors: Sequence[Tensor], memory: Sequence[Tensor]) -> VisitWork:
        """`work`, if a run of it has shown nothing that a replay could not repeat."""
        look = _Look(self.capture.device, (*tensors, *memory))
        try:
            with not_compiled(), look:
                look.see((*tensors, *work(tensors)))
        except Exception as error:
            raise Unfit(f"cannot be looked at ({type(error).__name__}: {error})") from error
        if look.found is not None:
            raise Unfit(look.found)
        return work

    def _warm(self, call: BlockCall, key: Hashable, work: VisitWork, tensors: Sequence[Tensor]) -> Outs:
        outs = self.capture.warm(lambda: work(tensors))
        self._entries[key] = _Entry([None if out is None else torch.empty_like(out, device="meta") for out in outs])
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)
            self._tell(call, Unfit(f"is one of more than {self._limit} kinds of visit: some are captured in vain"))
        return outs

    def _record(self, call: BlockCall, entry: "_Entry", work: VisitWork, tensors: Sequence[Tensor]) -> None:
        inputs = [self._buffer(("in", number), tensor) for number, tensor in enumerate(tensors)]
        outputs = [None if out is None else self._buffer(("out", n), out) for n, out in enumerate(entry.outs)]

        def again() -> None:
            for buffer, out in zip(outputs, work(inputs), strict=True):
                if (buffer is None) != (out is None):
                    raise Unfit("gives a gradient in one call, and none in the next")
                if buffer is not None and out is not None:
                    buffer.copy_(out)

        try:
            replay = self.capture.record(again)
        except Unfit:
            raise
        except Exception as error:
            if not RECOVERS:
                raise RuntimeError(f"{call.name}: {NO_WAY_BACK}") from error
            raise Unfit(f"cannot be captured ({type(error).__name__}: {error})") from error
        entry.inputs, entry.outputs, entry.replay = inputs, outputs, replay

    def _buffer(self, place: tuple[str, int], like: Tensor) -> Tensor:
        """Static memory, shared by graphs: each is replayed between the copies in and out."""
        key = (place, _outline(like))
        found = self._buffers.get(key)
        if found is None:
            found = self._buffers[key] = torch.empty_like(like, device=self.capture.device, requires_grad=False)
        return found

    def _refuse(self, call: BlockCall, code: Hashable, key: Hashable, reason: Unfit) -> None:
        self._entries.pop(key, None)
        self._refused[code] = str(reason)
        if len(self._refused) > self._limit:
            self._refused.popitem(last=False)
        self._tell(call, reason)

    def _tell(self, call: BlockCall, reason: Unfit) -> None:
        text = f"{call.name.partition('[')[0]}: not captured: the block {reason}"
        if text not in self._told and len(self._told) < self._limit:
            self._told.add(text)
            warnings.warn(text, RuntimeWarning, stacklevel=2)


class _Entry:
    """A work that was warmed up, and its graph when it has one. outs: on "meta", like its outputs"""

    def __init__(self, outs: Outs) -> None:
        self.outs = outs
        self.inputs: list[Tensor] = []
        self.outputs: Outs = []
        self.structure: Any = None
        self.replay: Callable[[], None] | None = None

    def run(self, call: BlockCall, tensors: Sequence[Tensor]) -> Outs:
        assert self.replay is not None
        if self.structure is None:
            self.structure = call.structure  # `call` was captured just now
        call.structure = self.structure
        for buffer, tensor in zip(self.inputs, tensors, strict=True):
            buffer.copy_(tensor)
        self.replay()
        return [None if buffer is None else buffer.clone() for buffer in self.outputs]


class _Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation; `found` is what a replay could not repeat.

    Memory is known by its address: what comes from outside is alive all the time, so nothing made here shares its own.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._known = device, set(map(_address, known))
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given, outs = _tensors((args, kwargs)), _tensors(out)
        made = func is torch.ops.aten.lift_fresh.default  # a constant, which begins its life here
        for tensor in () if made else given:
            if tensor.numel() and _address(tensor) not in self._known:
                self._find(
                    f"uses a tensor of shape {tuple(tensor.shape)} that is not an argument: pass it as one, in xs, or "
                    "in consts"
                )
        if func is torch.ops.aten._local_scalar_dense.default and given[0].device.type == self._device.type:
            self._find("reads a value on the host (.item(), float(), if), which a graph would keep for good")
        if func in COPIES and {x.device.type for x in (*given, *outs)} > {self._device.type}:
            self._find(
                "copies between host and device, which cannot be captured: make constants with torch.full, or pass them"
            )
        # kernels of attention give their seed, which outside of a capture is on the CPU, beside what is on the device
        random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if random and all(x.device.type == "cpu" for x in (*given, *outs)):
            self._find("draws from the CPU's generator, whose numbers a graph would repeat")
        self._known.update(map(_address, (*given, *outs)))
        return out

    def _find(self, what: str) -> None:
        self.found = self.found or what

    def see(self, ends: Iterable[Tensor | None]) -> None:
        """Looks at the arguments and outputs of the whole."""
        others = {str(end.device) for end in ends if end is not None and end.device != self._device}
        if others:
            self._find(f"takes or returns a tensor on {', '.join(sorted(others))}")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _outline(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
