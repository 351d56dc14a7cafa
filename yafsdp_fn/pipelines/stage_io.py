"""Stage I/O: what travels between stages, the buffers for it, and the work of `Send` and `Receive`."""

import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from yafsdp_fn.communication.streams import Work
from yafsdp_fn.params.tree import tensors_in
from yafsdp_fn.pipelines.cut import crossing
from yafsdp_fn.program.ops import Receive, Send
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.split import LINE, Message
from yafsdp_fn.program.text import describe_message
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.runtime.arguments import INDEPENDENT
from yafsdp_fn.runtime.memory import StateMemory
from yafsdp_fn.runtime.protocols import Works
from yafsdp_fn.runtime.reductions import Max, Mean, Sum, is_reduction, of_tensors
from yafsdp_fn.tracing.tracer import TracedResult, Tracer
from yafsdp_fn.util.mesh_axes import round_up
from yafsdp_fn.util.randomness import in_step

# ---- What a stage must know of a step that is cut: what travels, and what stands for the outputs of visits
# elsewhere.
#
# The step is traced whole on fake tensors, and cut as the state is.
#
# A visit that is elsewhere returns tensors of its outputs' shapes without values (fake tensors, made once). Code
# between visits runs on them as on others. What it makes of them is elsewhere, too.


PieceKey = tuple[int, int]
"""A tensor that travels: its flow, and its number there."""


class MessagePiece(NamedTuple):
    """A tensor of a message, and where it lies in it, in bytes. grad: whether it has a gradient that comes back"""

    start: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor, a view of the message's bytes."""
        return buffer[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


class PlaceholderMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """The mode of placeholders. An operation that draws random numbers for a placeholder draws as many and drops them,
    so that the next draws of the loss are the same on all stages, also on the one that has the tensor itself."""

    _drawing = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws = torch.Tag.nondeterministic_seeded in func.tags and not self._drawing and in_step()
        if not draws:
            return super().__torch_dispatch__(func, types, args, kwargs)
        given: Any = (args, kwargs or {})
        ones, named = optree.tree_map(_ones, given)
        func(*ones, **named)
        self._drawing = True  # torch may take it apart
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._drawing = False


def _ones(x: Any) -> Any:
    """Returns a tensor with the layout of `x`, on which depends how much is drawn; values do not matter."""
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).fill_(1)


# ---- what stands for the outputs of a visit elsewhere


class Placeholder:
    """Stands for the outputs of a visit: their structure, and tensors without values; given: see `TracedResult`"""

    def __init__(self, traced: TracedResult, mode: PlaceholderMode) -> None:
        self.structure, outs, self.given = traced
        with mode:  # those of the trace have ended with it
            self._made = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in outs]
        self._tensors = [x.detach() for x in self._made]

    @property
    def tensors(self) -> list[Tensor]:
        """Made once; anew where the loss has written into one, which may have changed its shape."""
        if any(x._version for x in self._tensors):
            self._tensors = [torch.empty_like(x) for x in self._made]
        return self._tensors


# ---- what travels


class Crossing:
    """The values of a step that cross between stages, and stand-ins for those of visits elsewhere.

    trace: the whole step, cut; found: as it was traced
    key_of: `(visit, number of its argument)` -> its key, where it travels

    placeholders: by visit; aux: for each node of what the loss returns beside the total, the segment that makes it,
    None where every stage does, and the node without values; loss: the segment that makes the total
    """

    def __init__(self, trace: Trace, found: Tracer) -> None:
        self.trace = trace
        self.split = trace.cut
        # what stands for visits that are elsewhere
        mode = PlaceholderMode(allow_non_fake_inputs=True)
        self.placeholders = [Placeholder(result, mode) for result in found.results]
        # what travels: the tensors of a flow lie one after the other in its message
        self.key_of: dict[tuple[int, int], PieceKey] = {}
        self._pieces: list[dict[PieceKey, MessagePiece]] = []
        for flow, tensors in enumerate(crossing(trace)):
            start = 0
            pieces = dict[PieceKey, MessagePiece]()
            for number, takers in enumerate(tensors):
                key = flow, number
                self.key_of |= {(visit, argument.place): key for visit, argument in takers}
                a = takers[0][1]
                pieces[key] = MessagePiece(start, a.nbytes, a.shape, getattr(torch, a.dtype), bool(a.grad_bytes))
                start += round_up(a.nbytes, LINE)
            self._pieces.append(pieces)
        # who makes the results
        if not trace.loss_of:
            raise ValueError(INDEPENDENT)
        self.loss = self.split.segment(trace.loss_of[0])
        self.total = found.total
        mean, nodes = _mean_and_nodes(found.out)
        self._home(mean, found, "the loss")
        self.aux = [self._home(node, found, "aux") for node in nodes]

    def pieces(self, message: Message) -> dict[PieceKey, MessagePiece]:
        """The tensors of a message; of one that comes back, those that have a gradient, where the values were."""
        pieces = self._pieces[message.flow]
        return {key: piece for key, piece in pieces.items() if piece.grad or not message.back}

    def has_gradient(self, key: PieceKey) -> bool:
        """Tells whether a gradient of a tensor comes back."""
        return self._pieces[key[0]][key].grad

    def nbytes(self, message: Message) -> int:
        """Bytes of a message, one way or the other."""
        return sum(round_up(piece.nbytes, LINE) for piece in self._pieces[message.flow].values())

    def _home(self, node: Any, found: Tracer, what: str) -> tuple[int | None, Any]:
        visits = {visit for x in tensors_in(node) for visit in found.beside.made(x)}
        segments = sorted({self.split.segment(visit) for visit in visits})
        if len(segments) > 1:
            raise ValueError(
                f"{what}: a leaf, or a mean and its weight, is made of what segments {segments} have made; it can be "
                "of one. Give what it needs through the visits"
            )
        if what == "aux" and segments and not is_reduction(node):
            raise ValueError(
                "aux: a leaf is made by visits that only one stage computes; wrap it in ya.Mean, ya.Sum or ya.Max, "
                f"which all stages get: {node!r}"
            )
        return (segments[0] if segments else None), node


def _mean_and_nodes(out: Any) -> tuple[Any, list[Any]]:
    """The loss, and the reductions and leaves of aux."""
    mean, aux = out if isinstance(out, tuple) and not isinstance(out, Mean) else (out, None)
    return mean, list(optree.tree_leaves(of_tensors(aux, torch.device("cpu")), is_leaf=is_reduction))


def neutral(node: Any, device: torch.device) -> Any:
    """A node that adds nothing to a reduction, of the shapes and dtypes of `node`, which has no values."""

    def filled(x: Any, value: float) -> Any:
        return torch.full(x.shape, value, dtype=x.dtype, device=device) if isinstance(x, Tensor) else value

    if isinstance(node, Max):
        dtype = torch.as_tensor(node.value).dtype
        if dtype == torch.bool:
            return Max(filled(node.value, False))
        return Max(filled(node.value, -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min))
    assert isinstance(node, Mean | Sum)
    return type(node)(*[filled(x, 0) for x in node])


# ---- Carry slots with what crosses between segments, and the work of `Send` and `Receive`.
#
#     a segment's last compute    put      tensors -> carry slot         compute stream
#     Send                        carry slot -> another stage            send stream
#     Receive                     another stage -> carry slot            receive stream
#     a segment's first compute   get      carry slot -> tensors         compute stream
#
# What arrives is copied out of its slot, which is free at once: what a graph keeps lives as long as the graph.


# ---- Carry slots of messages.


class MessageBuffers:
    """The carry slots of a slot set, for the `crossing` that it is reserved for. number: of the set"""

    crossing: Crossing

    def __init__(self, memory: StateMemory, number: object) -> None:
        self._memory: StateMemory = weakref.proxy(memory)  # as slots have it
        self._number = number
        self._slots: dict[int, Tensor] = {}
        self._reserved: Crossing | None = None  # a crossing has one program

    def reserve(self, crossing: Crossing, program: Program) -> None:
        """Makes every carry slot of `program` as large as what it holds, of `crossing`."""
        if self._reserved is crossing:
            return
        self.crossing = crossing
        sizes: dict[int, int] = {}
        for op in program.ops:
            for message, slot in program.trace.messages_of(op):
                sizes[slot] = max(sizes.get(slot, 0), self.crossing.nbytes(message))
        for slot, size in sizes.items():
            if slot not in self._slots or self._slots[slot].numel() < size:
                self._slots[slot] = torch.empty(size, dtype=torch.uint8, device=self._memory.comms.device)
                self._memory.made([("carry slot", self._number, slot)])
                self._memory.comms.mark_used(self._slots[slot])
        self._reserved = crossing

    def put(self, messages: Iterable[tuple[Message, int]], tensors: Mapping[PieceKey, Tensor | None]) -> None:
        """Into the slot of each message its tensors; None: zeros, a gradient that nothing asked for."""
        for message, slot in messages:
            for key, piece in self.crossing.pieces(message).items():
                view = piece.of(self._slots[slot])
                value = tensors[key]
                view.zero_() if value is None else view.copy_(value)

    def get(self, messages: Iterable[tuple[Message, int]]) -> dict[PieceKey, Tensor]:
        """Copies of the tensors in the slot of each message."""
        found: dict[PieceKey, Tensor] = {}
        for message, slot in messages:
            for key, piece in self.crossing.pieces(message).items():
                found[key] = piece.of(self._slots[slot]).clone()
        return found

    def works(self) -> Works:
        return {Send: self._work, Receive: self._work}

    def named(self, op: Send | Receive) -> str:
        """Names what travels, and to whom or from whom."""
        way = "to" if isinstance(op, Send) else "from"
        return f"{describe_message(op.message, self.crossing.trace)} {way} stage {self._other(op)}"

    def _work(self, op: Send | Receive) -> Work:
        comms = self._memory.comms
        moves = comms.send if isinstance(op, Send) else comms.receive
        return moves(self._slots[op.carry_slot][: self.crossing.nbytes(op.message)], self._other(op))

    def _other(self, op: Send | Receive) -> int:
        return self.crossing.split.ends(op.flow, op.back)[isinstance(op, Send)]
