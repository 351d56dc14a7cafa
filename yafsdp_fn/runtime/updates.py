"""The optimizer's part of a training step: its norm, its updates, and the metrics of the step.

    norm      the norm of the whole gradient, and with it all metrics
    update    the optimizer's step on the shards of some units, or of all

A session calls both when its program says so, else at the end of the step, to the same bits. The difference is in time:
the first update destroys the old state.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.communication.communicators import Communicators
from yafsdp_fn.communication.ranks import Ranks
from yafsdp_fn.communication.streams import Work
from yafsdp_fn.params.one_state import check, marks, words
from yafsdp_fn.params.sharded import trainable
from yafsdp_fn.params.tree import Tree
from yafsdp_fn.program.trace import Lent
from yafsdp_fn.runtime.memory import Shards
from yafsdp_fn.runtime.reductions import Mean, Sum, combine
from yafsdp_fn.runtime.state import ShardedState
from yafsdp_fn.util.squares import squared_norm, squares_in_bins

Measured = tuple[dict[str, Any], Tensor, Tensor | None]
"""The metrics of a step, the weight to divide gradients by, and the flag that skips the update."""

Measure = Callable[[Sequence[Mean], Sequence[Tree], Tensor, Ranks | None, str], Measured]
"""`(losses, aux, squares of this rank's gradients, ranks, state and step in words)` -> `Measured`."""


class StepUpdates:
    """The optimizer of one step, as its session calls it. state: is donated; grads: handles on `shards`"""

    def __init__(self, state: ShardedState, tx: Any, grads: Tree, shards: Shards, measure: Measure) -> None:
        self._state, self._memory, self._shards, self._measure = state, state.memory, shards, measure
        self._tx, self._steps = tx, state.unit_steps_for(tx, trainable(grads))
        # known after the last forward, and after the norm
        self._losses: Sequence[Mean] = ()
        self._aux: Sequence[Tree] = ()
        self._measured: dict[str, Any] | None = None
        self._scale: Tensor | None = None
        self._found_inf: Tensor | None = None

    # ---- called for its session

    def begin(self, losses: Sequence[Mean], aux: Sequence[Tree]) -> None:
        """Receives all losses, before the norm."""
        self._losses, self._aux = losses, aux

    def norm(self) -> None:
        """Takes the norm of the whole gradient, with the other metrics of the step."""
        comms = self._memory.comms
        counted = self._shards.counted
        squares = squares_in_bins(counted, comms.device) if comms.deterministic else squared_norm(counted)
        own = words(self._memory.number, self._state.step)
        self._measured, self._scale, self._found_inf = self._measure(self._losses, self._aux, squares, comms, own)

    @property
    def lent(self) -> tuple[Lent, ...]:
        return tuple(Lent(unit, parts) for unit, parts in self._steps.parts.items())

    def exchange(self, units: tuple[int, ...]) -> Work:
        pairs, group = self._steps.messages(units), self._memory.comms.reduce_group

        def work() -> None:
            for received, sent in pairs:
                group.exchange(received, sent)

        return work

    def update(self, units: tuple[int, ...], part: int) -> None:
        memory = self._memory
        assert self._measured is not None, "the norm comes first"
        # all units at once, where none is updated in parts: fewer launches
        parts, found_inf = self._steps.parts, self._found_inf
        scalars: Any = {"scale": self._scale, "found_inf": found_inf, "grad_norm": self._measured["grad_norm"]}
        whole = units == memory.trained and not parts
        self._steps.run(None if whole else units, part=part, on_write=memory.begin_write, **scalars)
        # of a unit in several parts the last one writes its weights
        memory.refresh([unit for unit in units if part + 1 == parts.get(unit, 1)], copied=True)

    def finish(self) -> tuple[ShardedState, dict[str, Any]]:
        """Returns the new state and the step's metrics, when the session is over."""
        memory, step = self._memory, self._state.step
        assert self._measured is not None
        opt_state = self._steps.finish(self._found_inf)
        memory.end_write()
        state = dataclasses.replace(self._state, step=step + 1, unit_steps=(self._tx, self._steps))
        return state.over(memory, opt_state), self._measured


# ---- Gradients and metrics of a step.


def divided(grads: Sequence[Tensor | None], weight: Tensor) -> list[Tensor | None]:
    """Returns gradients of a mean from those of its total."""
    return [None if grad is None else (grad / weight).to(grad.dtype) for grad in grads]


def combined(
    losses: Sequence[Mean],
    aux: Sequence[Tree],
    ranks: Ranks | None,
    squares: Tensor | None = None,
    own: str = "",
) -> Any:
    """Returns `((total, weight), aux)` over microbatches and ranks; with `squares`, a pair of that and its sum over
    ranks. Raises RanksDisagree if ranks have used other states than `own`, as far as is known yet."""
    parts = [
        ((Sum(loss.total.double()), Sum(torch.as_tensor(loss.weight).double())), of_loss)
        for loss, of_loss in zip(losses, aux, strict=True)
    ]
    # beside them, in the same collective: squares of gradients, and marks of the state
    once = [] if squares is None else [squares]
    comms = ranks if isinstance(ranks, Communicators) and not ranks.alone else None
    if comms is not None:
        once.append(marks(own, losses[0].total.device))
    of_part = [[Sum(x if index == 0 else torch.zeros_like(x)) for x in once] for index in range(len(parts))]
    found, sums = combine(list(zip(parts, of_part, strict=True)), ranks)
    if comms is not None:
        check(sums[-1], own, comms)
    return found if squares is None else (found, sums[0])
