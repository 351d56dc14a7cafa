"""The step of a unit whose leaves are lent to their owners, in parts, so that what travels overlaps other units' work:

part 0    what comes before, on shards            ->  lend
part 1    each leaf at its owner                  ->  give back
part 2    what comes after, on shards; the write      (and lend again, where a second transformation wants to)
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import optree

from yafsdp_fn.optim.base import GradientTransformation, OnWrite, Scalar, Stage, State
from yafsdp_fn.optim.step.cutting import Cutter
from yafsdp_fn.optim.step.definition import Definition
from yafsdp_fn.optim.whole.borrowed import Messages
from yafsdp_fn.optim.whole.loans import Leafwise, Loan, plan
from yafsdp_fn.params.leaf_mask import LeafRule
from yafsdp_fn.params.sharded import handles
from yafsdp_fn.params.tree import Tree


def rounds(todo: Sequence[Stage]) -> int:
    """How often the leaves of a unit travel."""
    return sum(isinstance(tx.rule, Leafwise) for tx, _ in todo)


class ByParts(Definition):
    """The definition, which stops between parts."""

    def __init__(
        self, todo: Sequence[Stage], params: Tree, grads: Tree, copies: Tree | None, chosen: LeafRule | None = None
    ) -> None:
        super().__init__(todo, params, grads, copies, chosen)
        self.rounds = rounds(todo)
        found = handles(params)
        self._ranks = found[0].owner.comms
        self._group = {unit: group for handle in found for _, group, _ in handle.group_leaves() for unit in group.held}
        self._plans = [plan(tx.rule, found) if isinstance(tx.rule, Leafwise) else {} for tx, _ in todo]
        self._open: dict[int, Iterator[list[Messages]]] = {}

    def part(
        self, unit: int, part: int, cutter: Cutter, scale: Scalar, found_inf: Scalar, on_write: OnWrite
    ) -> list[Messages]:
        """One part of the step of `unit`; returns what is to be exchanged before the next, nothing after the last."""
        if part == 0:
            self._open[unit] = self.steps([unit], cutter, scale, found_inf, on_write)
        messages = next(self._open[unit], None)
        if messages is None:
            del self._open[unit]
        return messages or []

    def run(
        self, units: Sequence[int] | None, cutter: Cutter | None, scale: Scalar, found_inf: Scalar, on_write: OnWrite
    ) -> None:
        """Unit by unit, one after the other."""
        assert cutter is not None
        for unit in self._group if units is None else units:
            for messages in self.steps([unit], cutter, scale, found_inf, on_write):
                for received, sent in messages:
                    self._ranks.exchange(received, sent)

    def _stage(
        self,
        number: int,
        tx: GradientTransformation,
        updates: Tree,
        state: State,
        params: Tree,
        units: Sequence[int] | None,
    ) -> Generator[list[Messages], None, tuple[Tree, State]]:
        if not isinstance(tx.rule, Leafwise):
            return (yield from super()._stage(number, tx, updates, state, params, units))
        assert units is not None
        (unit,) = units
        (row,), spec = optree.tree_flatten(updates)
        states, of_state = optree.tree_flatten(state)
        (weights,) = optree.tree_leaves(params) if tx.rule.params else (None,)
        of_group = self._plans[number][self._group[unit].name]
        loan: Any = Loan(tx.rule, of_group, unit, self._ranks, row, states[0] if states else None, weights)
        yield loan.lend()
        yield loan.work()
        row, kept = loan.rows()
        return optree.tree_unflatten(spec, [row]), optree.tree_unflatten(of_state, [] if kept is None else [kept])
