"""The hooks of a step, and the protocols of those that are not in this folder.

Replays             runs a visit that keeps nothing in a way of its own           (extras/cuda_graphs.py)
ActivationBuffers   keeps what recomputed visits save; work for its ops           (extras/offload.py)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from yafsdp_fn.communication.streams import Work
from yafsdp_fn.nn.linear import Place
from yafsdp_fn.program.ops import Backward, Forward
from yafsdp_fn.runtime.updates import StepUpdates
from yafsdp_fn.timeline.record import Recorder

Works = Mapping[type[Any], Callable[[Any], Work | None]]
"""Kind of op -> a function from an op to its work, None where it has nothing to do."""

Outs = list[Tensor | None]


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


class ActivationBuffers(Protocol):
    """The carry slots of a slot set."""

    def works(self) -> Works:
        """Returns the work of the ops that move the content of activation buffers."""

    def save(
        self, visit: int, slot: int, tensors: Sequence[Tensor], carried: int, outs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Copies what it can of the first `carried` of a visit's arguments into `slot`; returns the others."""

    def restore(self, visit: int, slot: int, others: Sequence[Tensor]) -> list[Tensor]:
        """Returns the visit's arguments: the saved ones, among the `others`."""


class StepHooks(NamedTuple):
    """The hooks of one step.

    observer: is told of every op, and when it ran; updates: the optimizer
    carries: makes the content of the carry slots of a slot set, `carries(memory, number of the set)`:
        `ActivationBuffers`, or the messages between stages
    """

    observer: Recorder | None = None
    updates: StepUpdates | None = None
    replays: Replays | None = None
    carries: Callable[[Any, object], Any] | None = None
