"""The protocols of a session's hooks: of those that are not in this folder.

StepObserver        is told of each op, and when it runs                          (timeline/record.py)
ActivationBuffers   keeps what recomputed visits save; work for its ops           (extras/offload.py)
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor

from yafsdp_fn.communication.streams import Event, Work
from yafsdp_fn.program.ops import Op
from yafsdp_fn.program.trace import Trace

Works = Mapping[type[Any], Callable[[Any], Work | None]]
"""Kind of op -> a function from an op to its work, None where it has nothing to do."""


# ---- Who watches a step.


class OpObserver(Protocol):
    """Observes an op that has been issued."""

    def on(self, stream: str, event: Event | None, waits: Sequence[Event] = ()) -> None:
        """Notes where the op runs, what it completes and what it waits for."""

    def begin(self) -> None:
        """Notes that its waits are over."""

    def end(self) -> None:
        """Notes that it has run."""

    def collective(self, name: str) -> Callable[[], None]:
        """Begins a collective of the op's block; the result ends it."""

    def timed(self, work: Work) -> Work:
        """Returns `work` between `begin` and `end`."""


class StepObserver(Protocol):
    """Observes a step. Gradients that the step gives carry it, for their update."""

    def issue(self, op: Op, number: int | None = None) -> OpObserver:
        """Observes the next op. number: below zero, of a gather of what a slot should have held already"""

    def issue_late(self, op: Op) -> OpObserver | None:
        """Observes an update outside the step's program; None if nobody observes any more."""

    def finish(self, trace: Trace, rank: str) -> None:
        """Notes that the step ended well. rank: in words"""


OBSERVE: ContextVar[Callable[[bool], StepObserver] | None] = ContextVar("observe", default=None)
"""Makes the observer of a step, from whether streams are CUDA's. One of the two context variables of the library (the
other: util/randomness.py). Read in the thread that calls steps alone: backwards may run in another, and get the
observer by hand."""


# ---- What a visit may be given.


class ActivationBuffers(Protocol):
    """The carry slots of a slot set."""

    def works(self) -> Works:
        """Returns the work of the ops that move the content of activation buffers."""

    def save(
        self, visit: int, slot: int, tensors: Sequence[Tensor], carry_length: int, outs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Copies what it can of the first `carry_length` of a visit's arguments into `slot`; returns the others."""

    def restore(self, visit: int, slot: int, others: Sequence[Tensor]) -> list[Tensor]:
        """Returns the visit's arguments: the saved ones, among the `others`."""


def movable(tensors: Sequence[Tensor], passed: Collection[int | None]) -> list[int]:
    """Returns the indices of a visit's carries that an offload copies: those that are the whole of their storage, which
    a copy can free.

    passed: indices of carries that leave the visit in the same memory; every visit would copy them again
    """
    return [
        number
        for number, tensor in enumerate(tensors)
        if number not in passed and 0 < tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    ]
