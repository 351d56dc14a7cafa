"""Protocols of a step's hooks. The engine knows these protocols, and none of their implementations.

Observer     is told of every op, and when it runs                    (timeline/record.py)
Updates      does the norm and the updates                            (updates.py)
Replays      runs a visit that keeps nothing in a way of its own      (extras/cuda_graphs.py)
ActivationBuffers   keeps what recomputed visits save; work for its ops      (extras/offload.py)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from yafsdp_fn.dist.streams import Event, Work
from yafsdp_fn.nn.linear import Place
from yafsdp_fn.program.ops import Backward, Forward, Op
from yafsdp_fn.program.trace import Lent

Works = Mapping[type[Any], Callable[[Any], Work | None]]
"""Kind of op -> a function from an op to its work, None where it has nothing to do."""

Outs = list[Tensor | None]


class Run(Protocol):
    """One op under way, as an observer sees it."""

    def on(self, stream: str, event: Event | None, waits: Sequence[Event] = ()) -> None:
        """Reports the op's stream, the event it completes, and its waits."""

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def timed(self, work: Work) -> Work:
        """Returns `work` between `begin` and `end`, wherever it runs."""


class Observer(Protocol):
    """Receives the ops of a step, in issue order. They are numbered from 0; those before the program are negative."""

    def issue(self, op: Op, number: int | None = None) -> Run: ...


class Updates(Protocol):
    """The optimizer of a step. All calls but `begin` run as work of the compute stream."""

    def begin(self, losses: Sequence[Any], aux: Sequence[Any], unmeasured: bool) -> None:
        """Receives all losses, after the last forward. unmeasured: no norm comes before the updates"""

    def norm(self) -> None:
        """Computes the norm; all gradients are complete."""

    def update(self, units: tuple[int, ...], part: int) -> None:
        """Updates `units`: their gradients are complete, and their weights are no longer read. part: of the update"""

    def exchange(self, units: tuple[int, ...]) -> Work:
        """Returns the messages between the last part and the next, as work of the reduce stream."""

    @property
    def lent(self) -> tuple[Lent, ...]:
        """The units whose updates have several parts."""


class Replays(Protocol):
    """Runs recomputed visits. Of what they write, only slots outlive them. visit: as in visit.py"""

    def outputs(self, visit: Any, op: Forward, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns `visit.outputs(op, tensors)`."""

    def gradients(
        self,
        visit: Any,
        op: Backward,
        places: Sequence[Place],
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
        grads: Sequence[Tensor | None],
    ) -> Outs:
        """Returns `visit.gradients(op, places, tensors, needs, grads)`."""


class Carries(Protocol):
    def works(self) -> Works:
        """Returns the work of the ops that move the content of activation buffers."""


class ActivationBuffers(Carries, Protocol):
    def save(
        self, visit: int, slot: int, tensors: Sequence[Tensor], carried: int, outs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Copies what it can of the first `carried` of a visit's arguments into `slot`; returns the others."""

    def restore(self, visit: int, slot: int, others: Sequence[Tensor]) -> list[Tensor]:
        """Returns the visit's arguments: the saved ones, among the `others`."""


class StepHooks(NamedTuple):
    """The hooks of one step. carries: makes the activation buffers of a slot set, `carries(memory, number of
    the set)`"""

    observer: Observer | None = None
    updates: Updates | None = None
    replays: Replays | None = None
    carries: Callable[[Any, object], Carries] | None = None


NOTHING = StepHooks()
