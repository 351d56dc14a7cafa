"""An optimizer's step in place, of all units at once or unit by unit, in any order, to the same bits:

    steps = UnitSteps(tx, params, grads, opt_state)
    for unit in any_order:
        steps.run([unit], scale=scale, found_inf=found_inf, grad_norm=norm)   # its gradient shard is complete
    opt_state = steps.finish(found_inf)                                       # now counts advance, once for all units

A unit is a layer of a stack (row i of shards [L, n]) or a shard [n] of its own. Elements do not know of each other, so
nothing but counts is shared by units: until `finish` everyone reads those of the step before.

Sequences of rules that torch has a fused kernel for take one pass and no memory (fused.py); everything else follows the
definition (definition.py), on whole trees, or on trees of the units' rows.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.algebra import global_norm
from yafsdp_fn.optim.base import GradientTransformation, OnWrite, Scalar, Stage, State, check, name, stages
from yafsdp_fn.optim.clipping import ClipByGlobalNorm
from yafsdp_fn.optim.cutting import Cutter, named, rows
from yafsdp_fn.optim.decay_runs import Runs, leaf_runs, row_runs, split_runs
from yafsdp_fn.optim.definition import Definition, check_shapes
from yafsdp_fn.optim.fused import LARGE, Fusion, Launch, Leaves, recognise
from yafsdp_fn.optim.masking import Masked
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.tree import Tree


def needs_norm(tx: Any) -> bool:
    """Whether a step wants `grad_norm`: the first thing `tx` does is clip by it."""
    return bool(_split_clips(list(stages(tx)))[0])


def why_not_unitwise(tx: Any) -> str | None:
    """Why the step of `tx` cannot be taken unit by unit, or None if it can.

    Clipping by the global norm is fine as the first transformation: its factor is known before the first unit.
    """
    return _why_not(stage for stage, _ in _split_clips(list(stages(tx)))[1])


def _why_not(parts: Iterable[GradientTransformation]) -> str | None:
    for tx in parts:
        if isinstance(tx.rule, ClipByGlobalNorm):
            return "clip_by_global_norm is not the first transformation: it needs the updates of all units at once"
        if not tx.elementwise:
            return f"{name(tx)} does not declare `elementwise`: it may need whole leaves"
        if isinstance(tx.rule, Masked) and (reason := _why_not(one for one, _ in stages(tx.rule.inner))) is not None:
            return reason
    return None


def _split_clips(todo: Sequence[Stage]) -> tuple[list[ClipByGlobalNorm], list[Stage]]:
    """The clipping at the head of a chain, and the stages after it.

    It costs nothing: the caller has the norm already, and its factor joins `scale`.
    """
    clips = []
    for tx, _ in todo:
        if not isinstance(tx.rule, ClipByGlobalNorm):
            break
        clips.append(tx.rule)
    return clips, list(todo[len(clips) :])


def _clipping_scale(clips: Sequence[ClipByGlobalNorm], scale: Scalar, grad_norm: Scalar) -> Scalar:
    """What gradients of norm `grad_norm` (after division by `scale`) are to be divided by; `scale` itself at most."""
    for clip in clips:
        assert grad_norm is not None
        excess = (grad_norm / clip.max_norm).clamp(min=1.0)
        scale = excess if scale is None else scale * excess
        grad_norm = grad_norm.clamp(max=clip.max_norm)
    return scale


@torch.no_grad()
def step_(
    tx: Any,
    params: Tree,
    grads: Tree,
    opt_state: State,
    *,
    scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    grad_norm: Tensor | None = None,
    on_write: OnWrite = lambda: None,
    copies: Tree | None = None,
) -> State:
    """One whole step of `UnitSteps`: updates `params` and `opt_state` in place, and returns the latter."""
    steps = UnitSteps(tx, params, grads, opt_state, copies)
    steps.run(scale=scale, found_inf=found_inf, grad_norm=grad_norm, on_write=on_write)
    return steps.finish(found_inf)


class UnitSteps:
    """Steps of `tx` over one memory; serves any number of steps, one after the other.

    params, grads, opt_state: trees, sharded or plain, that are written in place; grads are overwritten
    copies: of `params` in another dtype, which take their new values; on CUDA in the same pass where a kernel can

    The object is for their memory: after a step that was donated it serves the next, `fits` says whether. All calls of
    a step go to one stream, from one thread at a time. Raises TypeError where `tx` needs whole leaves, and has shards.

    Bits do not depend on how units are grouped, for every transformation of this package. For a foreign one neither, if
    it uses operations that round every element alike, wherever in a tensor it lies: of torch's on the CPU, `pow`,
    `sigmoid` and the like do not, in the last place.
    """

    def __init__(self, tx: Any, params: Tree, grads: Tree, opt_state: State, copies: Tree | None = None) -> None:
        self._tx = check(tx, params)
        check_shapes(params, grads)
        self._trees, self._opt_state = (params, grads, copies), opt_state
        self._memory = _leaves(params, grads, opt_state)
        self._clips, todo = _split_clips(list(stages(self._tx, opt_state)))
        self._left: set[int] | None = None  # units of the step under way, None between steps
        self._scale: Scalar = None
        fusion = recognise(todo)
        columns = None if fusion is None else fusion.columns(params, grads, copies)
        self._steps: _Fused | Definition
        if fusion is not None and columns is not None:
            self._steps = _Fused(fusion, columns, params)
        else:
            self._steps = Definition(todo, *self._trees)

    @cached_property
    def _cutter(self) -> Cutter:
        if (reason := why_not_unitwise(self._tx)) is not None:
            raise TypeError(
                f"optim: {reason}, but units take their steps one by one; keep the optimizer outside the program"
            )
        return Cutter(self._trees[0])

    def fits(self, params: Tree, grads: Tree, opt_state: State) -> bool:
        """Whether these trees are the memory that was given, and no step over it is under way."""
        leaves = _leaves(params, grads, opt_state)
        return self._left is None and list(map(id, leaves)) == list(map(id, self._memory))

    def renew(self, params: Tree) -> None:
        """`params` are a later state's handles on the memory that was given: those of a donated state refuse."""
        self._trees = params, *self._trees[1:]
        self._steps.params = params

    @torch.no_grad()
    def run(
        self,
        units: Sequence[int] | None = None,
        *,
        scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        grad_norm: Tensor | None = None,
        on_write: OnWrite = lambda: None,
    ) -> None:
        """The step of `units`, each once per step, or of all that there is: parameters and state in place.

        The others are the same values in all calls of a step:
        scale: 0-dim, what every gradient is to be divided by; None for 1
        found_inf: 0-dim; where it is 1, parameters and state (its counts too) keep their bits. Never read by the host
        grad_norm: 0-dim, the global norm of `grads / scale`; must be given if `needs_norm(tx)`, unless all are updated
        on_write: called before the first write to parameters or state; an exception before it leaves both as they were
        """
        first = self._left is None
        self._take(units)
        if first:  # all divide alike
            if self._clips and grad_norm is None:
                if units is not None:
                    self._left = None
                    raise ValueError(
                        "optim: clip_by_global_norm needs the norm of the gradients of all units: pass grad_norm, and "
                        "update no unit before it is known"
                    )
                grad_norm = global_norm(self._trees[1])
                grad_norm = grad_norm if scale is None else grad_norm / scale
            self._scale = _clipping_scale(self._clips, scale, grad_norm)
        cutter = None if units is None else self._cutter
        self._steps.run(units, cutter, self._scale, found_inf, on_write)

    def _take(self, units: Sequence[int] | None) -> None:
        """Takes note that `units` take their step."""
        if units is None:
            if self._left is not None:
                raise RuntimeError("optim: a step of all units inside of one unit by unit; `finish` ends a step")
            self._left = set()
            return
        names = self._cutter.names
        left = set(names) if self._left is None else self._left
        if unknown := ", ".join(str(unit) for unit in units if unit not in names):
            there = named(names, sorted(names))
            raise ValueError(f"optim: no trainable unit has the number {unknown}; there are {there}")
        if twice := sorted(unit for unit, times in Counter(units).items() if times > 1 or unit not in left):
            raise RuntimeError(f"optim: a second update in one step of {named(names, twice)}; `finish` ends a step")
        self._left = left.difference(units)

    @torch.no_grad()
    def finish(self, found_inf: Tensor | None = None) -> State:
        """Ends the step: counts advance, unless it is skipped. Returns the state, whose leaves stay what they were."""
        if self._left is None or self._left:
            names = self._cutter.names
            missing = sorted(names if self._left is None else self._left)
            raise RuntimeError(f"optim: the step ends without an update of {named(names, missing)}")
        self._steps.finish(found_inf)
        self._left = None
        return self._opt_state


class Piece(NamedTuple):
    """A stretch of elements of one leaf.

    large: whether it is of a large unit; tensors: its parameters, gradients and moments, and maybe copies
    """

    decays: bool
    large: bool
    tensors: list[Tensor]


class _Fused:
    """Through one kernel: leaves, or the rows of units, cut into runs that decay alike."""

    def __init__(self, fusion: Fusion, columns: Sequence[Leaves], params: Tree) -> None:
        self._fusion, self._columns, self.params = fusion, list(columns), params
        self._launch: Launch | None = None  # of the step under way
        self._whole: list[Piece] = []
        self._of_unit: dict[int, list[Piece]] = {}
        # the kernels read memory as it lies: autograd may give a transposed view, and a caller another dtype
        self._grads: Leaves = columns[1]
        self._as_read = all(g.dtype == p.dtype and g.is_contiguous() for p, g in zip(*columns[:2], strict=True))
        self._large = [numel >= LARGE for numel in _unit_numels(params)]

    def run(
        self, units: Sequence[int] | None, cutter: Cutter | None, scale: Scalar, found_inf: Scalar, on_write: OnWrite
    ) -> None:
        on_write()
        if self._launch is None:
            self._launch = self._fusion.begin()
        if not self._as_read:
            pairs = zip(self._columns[0], self._grads, strict=True)
            self._columns[1] = [grad.to(param.dtype).contiguous() for param, grad in pairs]
            self._whole, self._of_unit = [], {}
        if cutter is None or units is None:
            pieces = self._whole or self._join()
        else:
            of_unit = self._of_unit or self._cut(cutter)
            pieces = [piece for unit in units for piece in of_unit[unit]]
        for decays, large in itertools.product((True, False), (True, False)):
            of_kind = [piece.tensors for piece in pieces if (piece.decays, piece.large) == (decays, large)]
            self._launch(self._fusion.decay.weight_decay if decays else 0.0, large, of_kind, scale, found_inf)

    def _join(self) -> list[Piece]:
        runs = leaf_runs(self._fusion.decay.mask, self.params)
        for of_leaf, large, leaves in zip(runs, self._large, zip(*self._columns, strict=True), strict=True):
            self._whole += _split(of_leaf, large, leaves)
        return self._whole

    def _cut(self, cutter: Cutter) -> dict[int, list[Piece]]:
        columns = zip(*self._columns, strict=True)
        for (group, handle), large, leaves in zip(cutter.leaves, self._large, columns, strict=True):
            runs = row_runs(self._fusion.decay.mask, handle, group, leaves[0].shape[-1])
            for unit, *of_unit in zip(group.units, *(rows(group, leaf) for leaf in leaves), strict=True):
                self._of_unit[unit] = _split(runs, large, of_unit)
        return self._of_unit

    def finish(self, found_inf: Scalar) -> None:
        self._launch = None
        self._fusion.advance(found_inf)


def _unit_numels(params: Tree) -> list[int]:
    """Elements of the units of every leaf, over all ranks; of a plain leaf, its own."""
    out: list[int] = []
    for node in optree.tree_leaves(params, is_leaf=is_sharded):
        if isinstance(node, Sharded):
            out += [group.layout.numel for _, group, _ in node.group_leaves()]
        else:
            out.append(node.numel())
    return out


def _split(runs: Runs, large: bool, leaves: Sequence[Tensor]) -> list[Piece]:
    pieces = zip(*(split_runs(leaf, runs) for leaf in leaves), strict=True)
    return [Piece(decays, large, list(piece)) for (decays, _), piece in zip(runs, pieces, strict=True)]


def _leaves(*trees: Tree) -> list[Any]:
    return [leaf for tree in trees for leaf in optree.tree_leaves(tree)]
