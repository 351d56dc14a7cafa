"""Steps through fused kernels: which sequences of rules have one, and the memory that it runs on."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.base import Scalar, Stage
from yafsdp_fn.optim.cutting import Runs, row_runs, rows
from yafsdp_fn.optim.leaf_exchange import Messages
from yafsdp_fn.optim.partition import Decay
from yafsdp_fn.optim.rules import Adam, Momentum, ScaleByAdamState
from yafsdp_fn.optim.scaling import Scale, ScaleByScheduleState
from yafsdp_fn.optim.step.definition import Lane, StepCall
from yafsdp_fn.params.leaf_mask import plain_param
from yafsdp_fn.params.sharded import Sharded, handles_and_leaves
from yafsdp_fn.params.tree import Param, Tree, dotted
from yafsdp_fn.util.torch_private import foreach_copy, fused_adam, fused_adamw, fused_sgd

# ---- Takes the step by one of torch's fused kernels, on stretches of memory that it treats alike.
#
# It is one pass over parameters, gradients and moments, and allocates nothing of their size. The kernels divide
# gradients by `grad_scale` (and write the quotient back), and do nothing if `found_inf` is 1, without the host
# knowing. A mask of the decay cuts every row into views that decay and views that do not; each kind is one call.

Leaves = list[Tensor]


class Fusion(NamedTuple):
    """A sequence of rules that one kernel implements.

    kernel: torch's, `(params, grads, *moments, [], [count] * len(params), lr=, weight_decay=, grad_scale=, found_inf=,
        maximize=, **settings)`; without a count, `(params, grads, *moments or [], ...)`
    moments: trees that it updates beside the parameters
    taken: completed steps, if it is Adam's
    """

    kernel: Callable[..., None]
    settings: dict[str, Any]
    moments: tuple[Tree, ...]
    taken: Tensor | None = None

    def columns(self, lane: Lane) -> list[Leaves] | None:
        """Returns the leaves of parameters, gradients, moments and copies, or None if the kernel does not accept them.

        It reads raw memory of parameters and moments, of one dtype, in one order.
        """
        spec = optree.tree_structure(lane.params)
        trees = [lane.params, lane.grads, *self.moments]
        if lane.copies is not None:
            trees.append(lane.copies)
        columns: list[Leaves] = [spec.flatten_up_to(tree) for tree in trees]  # type: ignore[misc]
        kinds: set[Any] = set()
        for param, *moments in zip(columns[0], *columns[2 : 2 + len(self.moments)], strict=True):
            for leaf in (param, *moments):
                if not leaf.is_contiguous() or leaf.shape != param.shape:
                    return None
                kinds.update((here.device, here.dtype) for here in lane.host.get(id(leaf), [leaf]))
        if len(kinds) != 1:
            return None
        ((device, dtype),) = kinds
        if (
            device.type == "cpu"
        ):  # in torch 2.13 that of SGD leaves all but the last few elements as they are (issue 191763)
            accepted = self.taken is not None or dtype.itemsize >= 4
        else:  # rates and powers of betas would be in float32
            accepted = device.type == "cuda" and dtype != torch.float64
        return columns if accepted else None


class RowStretch(NamedTuple):
    """A stretch of elements of one row: its parameters, gradients and moments, and maybe copies."""

    decays: bool
    tensors: Leaves


class FusedSteps:
    """Takes steps by one kernel, on rows of units, cut into runs that decay alike; plain leaves are such runs."""

    def __init__(self, lane: Lane, fusion: Fusion, columns: list[Leaves]) -> None:
        self.lane = lane
        self._fusion = fusion
        self._columns = columns
        self._like = columns[0][0]
        self._decay = next((tx.rule for tx, _ in lane.stages if isinstance(tx.rule, Decay)), Decay(0.0))
        self._width = 2 + len(fusion.moments)  # columns without copies
        # of the step under way, which all its parts share
        self._scalars: dict[str, Any] | None = None
        self._counts: Scalar = None

    def steps(self, call: StepCall) -> Iterator[list[Messages]]:
        """Takes the step of some units, or of all, in the last of its parts."""
        for _ in range(1, call.parts):
            yield []
        if self._scalars is None:
            self._begin(call.scale, call.found_inf)
        kinds: dict[bool, list[Leaves]] = {}
        for unit in self._pieces if call.units is None else call.units:
            for piece in self._pieces[unit]:
                if piece.tensors[0].numel():  # the CUDA kernels refuse empty tensors
                    kinds.setdefault(piece.decays, []).append(piece.tensors)
        call.on_write()  # the user's learning rate and decay mask have been asked
        for decays, pieces in kinds.items():
            self._launch(pieces, self._decay.weight_decay if decays else 0.0, call.scale)

    def _begin(self, scale: Scalar, found_inf: Scalar) -> None:
        """Computes a step's scalars, of which some depend on counts, before any part of it. The host waits for none."""
        rule, state = self.lane.stages[-1][0].rule, self.lane.stages[-1][1]
        assert isinstance(rule, Scale)
        lr = -(rule.by(state.count) if callable(rule.by) else rule.by)
        wide = self._like.dtype == torch.float64
        self._scalars = {
            "lr": lr if self._like.device.type == "cpu" else _fp32(lr, self._like.device),
            "grad_scale": None if wide else _fp32(scale, self._like.device),
            "found_inf": _fp32(found_inf, self._like.device),
        }
        if self._fusion.taken is not None:
            self._counts = (self._fusion.taken + 1).float()

    def _launch(self, pieces: Sequence[Leaves], weight_decay: float, scale: Scalar) -> None:
        """Calls the kernel for all pieces, and copies their parameters."""
        columns = [list(column) for column in zip(*pieces, strict=True)]
        # the kernels read memory as it lies: autograd may give a transposed view, and a caller another dtype
        columns[1] = [grad.to(self._like.dtype).contiguous() for grad in columns[1]]
        if scale is not None and self._like.dtype == torch.float64:
            for grad in columns[1]:
                grad.div_(scale)  # the kernels read it in float32
        fusion = self._fusion
        rest: list[Any] = [] if fusion.moments else [[]]
        if self._counts is not None:
            rest = [[], [self._counts] * len(pieces)]
        how = {**(self._scalars or {}), **fusion.settings, "weight_decay": weight_decay, "maximize": False}
        fusion.kernel(*columns[: self._width], *rest, **how)
        for copies in columns[self._width :]:
            foreach_copy(copies, columns[0])

    @cached_property
    def _pieces(self) -> dict[int, list[RowStretch]]:
        """The pieces of each unit; leaves of a plain tree count as units."""
        out: dict[int, list[RowStretch]] = {}
        columns = iter(list(zip(*self._columns, strict=True)))
        for accessor, node in handles_and_leaves(self.lane.params):
            if not isinstance(node, Sharded):
                decays = self._decays(dotted(accessor), plain_param(accessor, node))
                leaves = list(next(columns))
                out[len(out)] = [] if decays is None else [RowStretch(decays, leaves)]
                continue
            for _, group, leaf in node.group_leaves():
                runs = row_runs(self._decays, node, group, leaf.shape[-1])
                of_columns = [rows(group, x, self.lane.host) for x in next(columns)]
                for unit, *of_unit in zip(group.held, *of_columns, strict=True):
                    out[unit] = _split(runs, of_unit)
        return out

    def _decays(self, path: str, param: Param) -> bool | None:
        """Returns whether a leaf decays; None if it takes no step."""
        if self.lane.chosen is not None and not self.lane.chosen(path, param):
            return None
        mask = self._decay.mask
        return mask is None or bool(mask(path, param))

    def finish(self, found_inf: Scalar) -> None:
        """Ends a step, after all units have taken it: counts advance, unless it is skipped."""
        self._scalars = None
        for _, state in self.lane.stages:
            if isinstance(state, ScaleByAdamState | ScaleByScheduleState):
                state.count.add_(1 if found_inf is None else found_inf != 1)


def _split(runs: Runs, rows: Sequence[Tensor]) -> list[RowStretch]:
    """Splits a row of each column."""
    pieces = [torch.split(row, [length for _, length in runs]) for row in rows]
    of_runs = zip(runs, zip(*pieces, strict=True), strict=True)
    return [RowStretch(decays, list(piece)) for (decays, _), piece in of_runs if decays is not None]


def _fp32(value: Any, device: torch.device) -> Any:
    """Converts a scalar to float32: the CUDA kernels read scalars through float pointers."""
    return value.to(device=device, dtype=torch.float32) if isinstance(value, Tensor) else value


# ---- Maps sequences of rules to torch's fused kernels:
#
#     scale_by_adam, [add_decayed_weights], scale     ->  torch._fused_adamw_
#     [add_decayed_weights], scale_by_adam, scale     ->  torch._fused_adam_
#     [add_decayed_weights], [trace], scale           ->  torch._fused_sgd_


def fused_steps(lane: Lane) -> FusedSteps | None:
    """Returns the steps of a lane by a kernel, or None if there is none for its rules, or for its memory."""
    fusion = recognise(lane.stages)
    columns = None if fusion is None else fusion.columns(lane)
    return None if fusion is None or columns is None else FusedSteps(lane, fusion, columns)


def recognise(stages: Sequence[Stage]) -> Fusion | None:
    """Returns the kernel for these rules, or None."""
    rules, states = [tx.rule for tx, _ in stages], [state for _, state in stages]
    match rules:
        case [Adam() as rule, Scale()] | [Adam() as rule, Decay(), Scale()]:
            return _adam(fused_adamw, rule, states[0])
        case [Decay(), Adam() as rule, Scale()]:
            return _adam(fused_adam, rule, states[1])
        case [Momentum() as momentum, Scale()] | [Decay(), Momentum() as momentum, Scale()] if momentum.decay > 0:
            return _sgd(momentum, states[-2].trace)
        case [Scale()] | [Decay(), Scale()]:
            return _sgd(Momentum(0.0, False))
    return None


def _adam(kernel: Callable[..., None], rule: Adam, state: ScaleByAdamState) -> Fusion:
    settings = {"beta1": rule.b1, "beta2": rule.b2, "eps": rule.eps, "amsgrad": False}
    return Fusion(kernel, settings, (state.mu, state.nu), state.count)


def _sgd(rule: Momentum, *moments: Tree) -> Fusion:
    settings = {"momentum": rule.decay, "nesterov": rule.nesterov, "dampening": 0.0, "is_first_step": False}
    return Fusion(fused_sgd, settings, moments)
