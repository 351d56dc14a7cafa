"""The optimizer's step as ops of a program: the norm of the gradient, and updates unit by unit.

Parameters have the same bits as after the separate step. What differs is when: an update runs as soon as the program
says, and from the first one on the state as it was is gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn import optim
from yafsdp_fn.algebra import squared_norm
from yafsdp_fn.comm.streams import Event
from yafsdp_fn.reductions import Sum, combine
from yafsdp_fn.runtime.shards import Shards
from yafsdp_fn.runtime.steps import Results
from yafsdp_fn.runtime.store import Store
from yafsdp_fn.schedules import Norm, Program
from yafsdp_fn.sharded import trainable
from yafsdp_fn.state import ShardedState
from yafsdp_fn.tree import Tree

Metrics = Callable[[Results, Tensor, Store | None], tuple[dict[str, Any], Tensor, Tensor | None]]
"""`(results, squares of this rank's gradient shards, store)` -> metrics, the weight, the flag that skips the update."""


class InProgram:
    """The optimizer of one step, as its session calls it."""

    def __init__(
        self, state: ShardedState, tx: Any, grads: Tree, shards: Shards, program: Program, metrics: Metrics
    ) -> None:
        self._state, self._shards, self._metrics = state, shards, metrics
        self._measures = not any(isinstance(op, Norm) for op in program.ops)  # updates destroy the gradient
        self._tx, self._steps = tx, _unit_steps(state, tx, grads)
        self._squares: list[Tensor] = []
        self._results: Results | None = None
        self._measured: dict[str, Any] | None = None
        self._scale: Tensor | None = None
        self._weight: Tensor | None = None  # of all losses, when `_arrives` has
        self._arrives: Event | None = None
        self._found_inf: Tensor | None = None

    def begin(self, results: Results) -> None:
        """The weight of all losses is known after the last forward; updates without a norm need nothing else."""
        self._results = results
        if self._measures:
            weights = [torch.as_tensor(loss.weight, device=loss.total.device).double() for loss in results.losses]
            self._weight = torch.stack(weights).sum()
            self._arrives = self._state.store.comms.start_sum(self._weight)

    def norm(self) -> None:
        """The norm of the whole gradient, and with it everything that the step reports."""
        self._measure(squared_norm(self._shards.present()))

    def update(self, units: tuple[int, ...]) -> None:
        """The optimizer's step on the shards of `units`."""
        store = self._state.store
        if self._scale is None and self._weight is not None:
            if self._arrives is not None:  # waited for no sooner: reductions of earlier microbatches come first
                self._arrives.wait()
            self._scale = self._weight.float()
        if self._measures:
            self._squares += [squared_norm([self._shards.rows[unit]]) for unit in units]
        begin = (lambda: None) if store.writing else store.begin_write
        norm = None if self._measured is None else self._measured["grad_norm"]
        self._steps.run(units, scale=self._scale, found_inf=self._found_inf, grad_norm=norm, on_write=begin)
        store.refresh(units, copied=True)

    def finish(self) -> tuple[ShardedState, dict[str, Any]]:
        """The new state and the step's metrics."""
        store = self._state.store
        if self._measured is None:
            with store.comms.guarded(f"the metrics of step {self._state.step}"):
                self._measure(torch.stack(self._squares).sum())
        assert self._measured is not None
        opt_state = self._steps.finish(self._found_inf)
        store.writing = False
        state = dataclasses.replace(self._state, step=self._state.step + 1, unit_steps=(self._tx, self._steps))
        return state.over(store, opt_state), self._measured

    def _measure(self, squares: Tensor) -> None:
        assert self._results is not None
        self._measured, weight, self._found_inf = self._metrics(self._results, squares, self._state.store)
        self._scale = weight.float()


def _unit_steps(state: ShardedState, tx: Any, grads: Tree) -> optim.UnitSteps:
    """The unit-wise optimizer over the state's memory: it holds many views, so the last step's serves if it can."""
    trees, kept = (trainable(state.params), trainable(grads), state.opt_state), state.unit_steps
    if kept is not None and kept[0] is tx and kept[1].fits(*trees):
        return kept[1]
    return optim.UnitSteps(tx, *trees, trainable(state.store.copies(state.seed, state.step)))


def combined(results: Results, store: Store | None, squares: Tensor | None = None) -> Any:
    """`((total, weight), aux)` over microbatches and ranks; with `squares`, a pair of that and its sum over ranks."""
    parts = [
        ((Sum(loss.total.double()), Sum(torch.as_tensor(loss.weight).double())), aux)
        for loss, aux in zip(results.losses, results.aux, strict=True)
    ]
    if squares is None:
        return combine(parts, None if store is None else store.comms)
    once = [Sum(squares if index == 0 else torch.zeros_like(squares)) for index in range(len(parts))]
    return combine(list(zip(parts, once, strict=True)), None if store is None else store.comms)
