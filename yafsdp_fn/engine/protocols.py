"""What may be plugged into a step. The engine knows these protocols, and none of those who follow them.

Observer     is told of every op, and when it runs                    (timeline/record.py)
Updates      does the norm and the updates                            (updates.py)
Replays      runs a visit that keeps nothing in a way of its own      (levers/cuda_graphs.py)
CarrySlots   keeps what recomputed visits save; work for its ops      (levers/offload.py)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from yafsdp_fn.comm.streams import Event, Work
from yafsdp_fn.engine.gradients import Place
from yafsdp_fn.schedules.ops import Backward, Forward, Op
from yafsdp_fn.schedules.trace import Lent

Works = Mapping[type[Any], Callable[[Any], Work | None]]
"""Kind of op -> a function from an op to its work, None where it has nothing to do."""

Outs = list[Tensor | None]


class Run(Protocol):
    """One op under way, as an observer sees it."""

    def on(self, stream: str, event: Event | None, waits: Sequence[Event] = ()) -> None:
        """Where it runs, what it completes, and what it waits for."""

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def timed(self, work: Work) -> Work:
        """`work` between `begin` and `end`, wherever it runs."""


class Observer(Protocol):
    """Is told of the ops of a step, in issue order. They are numbered from 0, those before the program below it."""

    def issue(self, op: Op, number: int | None = None) -> Run: ...


class Updates(Protocol):
    """The optimizer of a step. All calls but `begin` are work of the compute stream."""

    def begin(self, losses: Sequence[Any], aux: Sequence[Any], unmeasured: bool) -> None:
        """After the last forward: all losses are known. unmeasured: no norm comes before the updates"""

    def norm(self) -> None:
        """All gradients are complete."""

    def update(self, units: tuple[int, ...], part: int) -> None:
        """The gradients of `units` are complete, and nobody reads their weights any more. part: of the update"""

    def exchange(self, units: tuple[int, ...]) -> Work:
        """What travels between the part that was last and the next: work of the reduce stream."""

    @property
    def lent(self) -> tuple[Lent, ...]:
        """The units whose updates have several parts."""


class Replays(Protocol):
    """Runs visits that recompute, which write nothing that outlives them but slots. visit: as visit.py runs it"""

    def outputs(self, visit: Any, op: Forward, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`visit.outputs(op, tensors)`, in whatever way."""

    def gradients(
        self,
        visit: Any,
        op: Backward,
        places: Sequence[Place],
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
        grads: Sequence[Tensor | None],
    ) -> Outs:
        """`visit.gradients(op, places, tensors, needs, grads)`, likewise."""


class Carries(Protocol):
    def works(self) -> Works:
        """The ops that move what is in carry slots."""


class CarrySlots(Carries, Protocol):
    def save(
        self, visit: int, slot: int, tensors: Sequence[Tensor], carried: int, outs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Copies into `slot` what can be of the first `carried` of a visit's arguments; returns the others."""

    def restore(self, visit: int, slot: int, others: Sequence[Tensor]) -> list[Tensor]:
        """The visit's arguments: those that were saved, among the `others`."""


class Plugs(NamedTuple):
    """What one step runs with. carries: makes the carry slots of a slot set, `carries(memory, number of the set)`"""

    observer: Observer | None = None
    updates: Updates | None = None
    replays: Replays | None = None
    carries: Callable[[Any, object], Carries] | None = None


NOTHING = Plugs()
