"""The optimizer step unit by unit, in any order, with the bits of `step_`:

    steps = UnitSteps(tx, params, grads, opt_state)
    for unit in any_order:
        steps.run([unit], scale=scale, found_inf=found_inf, grad_norm=norm)   # its gradient shard is complete
    opt_state = steps.finish(found_inf)                                       # now counts advance, once for all units

A unit is a layer of a stack (row i of shards [L, n]) or a shard [n] of its own. Elements do not know of each other, so
nothing but counts is shared by units: until `finish` everyone reads those of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.base import Chain, GradientTransformation, State, check, name, stages
from yafsdp_fn.optim.clipping import ClipByGlobalNorm
from yafsdp_fn.optim.fused import Fusion, Launch, Leaves, Stage, as_read, follow, launch_pieces, recognise
from yafsdp_fn.optim.masking import Masked
from yafsdp_fn.optim.rows import GLOBAL, Cutter, named, rows, shared_leaves
from yafsdp_fn.optim.runs import row_runs, split_runs
from yafsdp_fn.optim.step import check_shapes, clipping_scale, new_values, split_clips, write
from yafsdp_fn.tree import Tree


def why_not_unitwise(tx: Any) -> str | None:
    """Why the step of `tx` cannot be taken unit by unit, or None if it can.

    Clipping by the global norm is fine as the first transformation: its factor is known before the first unit.
    """
    for stage, _ in split_clips(list(stages(tx)))[1]:
        reason = _why_not(stage)
        if reason is not None:
            return reason
    return None


def _why_not(tx: GradientTransformation) -> str | None:
    if isinstance(tx.rule, ClipByGlobalNorm):
        return "clip_by_global_norm is not the first transformation: it needs the updates of all units at once"
    if not tx.elementwise:
        return f"{name(tx)} does not declare `elementwise`: it may need whole leaves"
    if isinstance(tx.rule, Masked):
        parts: Sequence[GradientTransformation] = (tx.rule.inner,)
    else:
        parts = tx.rule.parts if isinstance(tx.rule, Chain) else ()
    return next((reason for part in parts if (reason := _why_not(part)) is not None), None)


class UnitSteps:
    """Steps of `tx` over one memory, unit by unit; serves any number of steps, one after the other.

    params, grads, opt_state, copies: as `step_` takes them, sharded; written in place. The object is for their memory:
        after a step that was donated it serves the next, `fits` says whether.

    Raises TypeError if `tx` or its state cannot be cut into units. All calls of a step go to one stream, from one
    thread at a time. Bits are those of `step_` for every transformation of this package. For a foreign one they are
    too, if it uses operations that round every element alike, wherever in a tensor it lies: of torch's on the CPU,
    `pow`, `sigmoid` and the like do not, in the last place.
    """

    def __init__(self, tx: Any, params: Tree, grads: Tree, opt_state: State, copies: Tree | None = None) -> None:
        reason = why_not_unitwise(tx)
        if reason is not None:
            raise TypeError(
                f"optim: {reason}, but units take their steps one by one; keep the optimizer outside the program"
            )
        tx = check(tx, params)
        check_shapes(params, grads)
        self._memory = _leaves(params, grads, opt_state)
        self._opt_state = opt_state
        self._clips, todo = split_clips(list(stages(tx, opt_state)))
        cutter = Cutter(params)
        self._names = cutter.names
        self._left = set(self._names)
        self._scale: Tensor | None = None
        fusion = recognise(todo)
        columns = None if fusion is None else fusion.columns(params, grads, copies)
        self._steps: _Fused | _Plain
        if fusion is not None and columns is not None:
            self._steps = _Fused(fusion, columns, cutter)
        else:
            self._steps = _Plain(todo, params, grads, copies, cutter)

    def fits(self, params: Tree, grads: Tree, opt_state: State) -> bool:
        """Whether these trees are the memory that was given, and no step over it is under way."""
        leaves = _leaves(params, grads, opt_state)
        same = len(leaves) == len(self._memory) and all(a is b for a, b in zip(leaves, self._memory, strict=True))
        return same and len(self._left) == len(self._names)

    @torch.no_grad()
    def run(
        self,
        units: Sequence[int],
        *,
        scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        grad_norm: Tensor | None = None,
        on_write: Callable[[], None] = lambda: None,
    ) -> None:
        """The step of `units`: rows of parameters and state in place, each unit once per step.

        Gradients are overwritten. scale, found_inf, grad_norm: as in `step_`, the same values in all calls of a step;
            if `needs_norm(tx)`, `grad_norm` must be given: it is of the gradients of all units
        on_write: called before the first write to parameters or state
        """
        if not self._left.issuperset(units) or len(set(units)) != len(units):
            raise self._refusal(units)
        if self._clips and grad_norm is None:
            raise ValueError(
                "optim: clip_by_global_norm needs the norm of the gradients of all units: pass grad_norm, and update "
                "no unit before it is known"
            )
        if len(self._left) == len(self._names):  # the first of a step: all divide alike
            self._scale = clipping_scale(self._clips, scale, grad_norm)
        self._steps.run(units, self._scale, found_inf, on_write)
        self._left.difference_update(units)

    @torch.no_grad()
    def finish(self, found_inf: Tensor | None = None) -> State:
        """Ends the step: counts advance, unless it is skipped. Returns the state, whose leaves stay what they were."""
        if self._left:
            raise RuntimeError(f"optim: the step ends without an update of {named(self._names, sorted(self._left))}")
        self._steps.finish(found_inf)
        self._left = set(self._names)
        return self._opt_state

    def _refusal(self, units: Sequence[int]) -> Exception:
        unknown = [unit for unit in units if unit not in self._names]
        if unknown:
            return ValueError(
                f"optim: no trainable unit has the number {', '.join(map(str, unknown))}; there are "
                f"{named(self._names, sorted(self._names))}"
            )
        twice = sorted({unit for unit in units if unit not in self._left or list(units).count(unit) > 1})
        return RuntimeError(f"optim: a second update in one step of {named(self._names, twice)}; `finish` ends a step")


class _Fused:
    """Through one kernel: the rows of every unit, cut into runs that decay alike."""

    def __init__(self, fusion: Fusion, columns: Sequence[Leaves], cutter: Cutter) -> None:
        self._fusion = fusion
        self._launch: Launch | None = None  # of the step under way
        self._dtype = columns[0][0].dtype
        self._pieces: dict[int, list[tuple[bool, list[Tensor]]]] = {}
        for (_, group, handle), leaves in zip(cutter.leaves, zip(*columns, strict=True), strict=True):
            runs = row_runs(fusion.decay.mask, handle, group, leaves[0].shape[-1])
            for unit, *of_unit in zip(group.units, *(rows(group, leaf) for leaf in leaves), strict=True):
                pieces = zip(*(split_runs(row, runs) for row in of_unit), strict=True)
                self._pieces[unit] = [(decays, list(piece)) for (decays, _), piece in zip(runs, pieces, strict=True)]

    def run(
        self, units: Sequence[int], scale: Tensor | None, found_inf: Tensor | None, on_write: Callable[[], None]
    ) -> None:
        on_write()
        if self._launch is None:
            self._launch = self._fusion.begin()
        pieces = [piece for unit in units for piece in self._pieces[unit]]
        for weight_decay, wanted in ((self._fusion.decay.weight_decay, True), (0.0, False)):
            chosen = [self._read(*columns) for decays, columns in pieces if decays is wanted]
            launch_pieces(self._launch, weight_decay, chosen, scale, found_inf)

    def _read(self, param: Tensor, grad: Tensor, *moments: Tensor) -> tuple[Tensor, ...]:
        return param, as_read(grad, self._dtype), *moments

    def finish(self, found_inf: Tensor | None) -> None:
        self._launch = None
        self._fusion.advance(found_inf)


class _Plain:
    """Through the definition, on trees of rows.

    What all units share (0-dim tensors of states) gets a new value from every call of a step; they must agree.
    """

    def __init__(self, todo: Sequence[Stage], params: Tree, grads: Tree, copies: Tree | None, cutter: Cutter) -> None:
        self._params, self._grads = cutter.cut("params", params), cutter.cut("the gradients", grads)
        self._copies = None if copies is None else cutter.cut("the copies", copies)
        self._states = [(tx, cutter.cut(f"the state of {name(tx)}", state)) for tx, state in todo]
        self._shared = {id(leaf): leaf for _, state in todo for leaf in shared_leaves(state)}
        self._new: dict[int, Tensor] = {}
        self._compared = False

    def run(
        self, units: Sequence[int], scale: Tensor | None, found_inf: Tensor | None, on_write: Callable[[], None]
    ) -> None:
        todo = [(tx, state.of(units)) for tx, state in self._states]
        pairs = new_values(todo, self._params.of(units), self._grads.of(units), scale)
        own = []
        for old, new in pairs:
            if id(old) in self._shared:
                self._agree(old, new, self._new.setdefault(id(old), new))
            else:
                own.append((old, new))
        on_write()
        write(own, found_inf)
        if self._copies is not None:
            follow(_leaves(self._params.of(units)), _leaves(self._copies.of(units)))

    def _agree(self, old: Tensor, new: Tensor, first: Tensor) -> None:
        """Refuses another new value than an earlier unit's. Reads them back: on a device in the first step only."""
        if new is first or (self._compared and new.device.type != "cpu"):
            return
        if not bool((new == first) | ((new != new) & (first != first))):
            raise RuntimeError(
                f"optim: one unit's update takes a 0-dim tensor of the state from {old.item()} to {first.item()}, "
                f"another's to {new.item()}: {GLOBAL}"
            )

    def finish(self, found_inf: Tensor | None) -> None:
        write([(self._shared[key], new) for key, new in self._new.items()], found_inf)
        self._new, self._compared = {}, True


def _leaves(*trees: Tree) -> list[Any]:
    return [leaf for tree in trees for leaf in optree.tree_leaves(tree)]
