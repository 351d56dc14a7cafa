"""Steps through fused kernels (kernels.py), and the memory that they run on."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.optim.base import Scalar
from yafsdp_fn.optim.cutting import row_runs, rows
from yafsdp_fn.optim.leaf_exchange import Messages
from yafsdp_fn.optim.partition import Decay
from yafsdp_fn.optim.rules import ScaleByAdamState
from yafsdp_fn.optim.scaling import Scale, ScaleByScheduleState
from yafsdp_fn.optim.step.definition import Lane, StepCall
from yafsdp_fn.optim.step.kernels import Fusion, Leaves, recognise
from yafsdp_fn.params.leaf_mask import plain_param
from yafsdp_fn.params.sharded import Sharded, handles_and_leaves
from yafsdp_fn.params.tree import Param, dotted
from yafsdp_fn.util.torch_private import foreach_copy

# ---- Takes the step, on stretches of memory that the kernel treats alike. It allocates nothing of their size.
#
# The kernels divide gradients by `grad_scale` (and write the quotient back), and do nothing if `found_inf` is 1,
# without the host knowing. A mask of the decay cuts every row into views that decay and views that do not; each kind
# is one call.


class FusedSteps:
    """Takes steps by one kernel, on rows of units, cut into runs that decay alike; plain leaves are such runs."""

    def __init__(self, lane: Lane, fusion: Fusion, columns: list[Leaves]) -> None:
        self.lane = lane
        self._fusion = fusion
        self._columns = columns
        self._like = columns[0][0]
        self._decay = next((tx.rule for tx, _ in lane.stages if isinstance(tx.rule, Decay)), Decay(0.0))
        # of the step under way, which all its parts share
        self._scalars: dict[str, Any] = {}
        self._counts: Scalar = None

    def steps(self, call: StepCall) -> Iterator[list[Messages]]:
        """Takes the step of some units, or of all, in the last of its parts."""
        for _ in range(1, call.parts):
            yield []
        if not self._scalars:
            self._begin(call.scale, call.found_inf)
        kinds: dict[bool, list[Leaves]] = {}
        for unit in self._stretches if call.units is None else call.units:
            for decays, leaves in self._stretches[unit]:
                kinds.setdefault(decays, []).append(leaves)
        call.on_write()  # the user's learning rate and decay mask have been asked
        for decays, stretches in kinds.items():
            self._launch(stretches, self._decay.weight_decay if decays else 0.0, call.scale)

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

    def _launch(self, stretches: Sequence[Leaves], weight_decay: float, scale: Scalar) -> None:
        """Calls the kernel for all stretches, and copies their parameters."""
        params, grads, *others = [list(column) for column in zip(*stretches, strict=True)]
        # the kernels read memory as it lies: autograd may give a transposed view, and a caller another dtype
        grads = [grad.to(self._like.dtype).contiguous() for grad in grads]
        if scale is not None and self._like.dtype == torch.float64:
            for grad in grads:
                grad.div_(scale)  # the kernels read it in float32
        fusion = self._fusion
        count = len(fusion.moments)
        given: list[Any] = others[:count] or [[]]
        if self._counts is not None:
            given += [[], [self._counts] * len(stretches)]
        how = {**self._scalars, **fusion.settings, "weight_decay": weight_decay, "maximize": False}
        fusion.kernel(params, grads, *given, **how)
        for copies in others[count:]:
            foreach_copy(copies, params)

    @cached_property
    def _stretches(self) -> dict[int, list[tuple[bool, Leaves]]]:
        """The stretches of each unit's row that take the step: whether each decays, and its part of each column.
        Leaves of a plain tree count as units."""
        out: dict[int, list[tuple[bool, Leaves]]] = {}
        columns = zip(*self._columns, strict=True)
        for accessor, node in handles_and_leaves(self.lane.params):
            if not isinstance(node, Sharded):
                decays = self._decays(dotted(accessor), plain_param(accessor, node))
                out[len(out)] = _some([(decays, next(columns))])
                continue
            for _, group, leaf in node.group_leaves():
                kinds, lengths = zip(*row_runs(self._decays, node, group, leaf.shape[-1]), strict=True)
                of_columns = [rows(group, x, self.lane.host) for x in next(columns)]
                for unit, *of_unit in zip(group.held, *of_columns, strict=True):
                    parts = [torch.split(row, list(lengths)) for row in of_unit]
                    out[unit] = _some(zip(kinds, zip(*parts, strict=True), strict=True))
        return out

    def _decays(self, path: str, param: Param) -> bool | None:
        """Returns whether a leaf decays; None if it takes no step."""
        if self.lane.chosen is not None and not self.lane.chosen(path, param):
            return None
        mask = self._decay.mask
        return mask is None or bool(mask(path, param))

    def finish(self, found_inf: Scalar) -> None:
        """Ends a step, after all units have taken it: counts advance, unless it is skipped."""
        self._scalars = {}
        for _, state in self.lane.stages:
            if isinstance(state, ScaleByAdamState | ScaleByScheduleState):
                state.count.add_(1 if found_inf is None else found_inf != 1)


def _some(stretches: Iterable[tuple[bool | None, Sequence[Tensor]]]) -> list[tuple[bool, Leaves]]:
    """Returns the stretches that take a step, without empty ones, which the CUDA kernels refuse."""
    return [(decays, list(leaves)) for decays, leaves in stretches if decays is not None and leaves[0].numel()]


def _fp32(value: Any, device: torch.device) -> Any:
    """Converts a scalar to float32: the CUDA kernels read scalars through float pointers."""
    return value.to(device=device, dtype=torch.float32) if isinstance(value, Tensor) else value


def fused_steps(lane: Lane) -> FusedSteps | None:
    """Returns the steps of a lane by a kernel, or None if there is none for its rules, or for its memory."""
    fusion = recognise(lane.stages)
    if fusion is None:
        return None
    columns = fusion.columns(lane)
    return None if columns is None else FusedSteps(lane, fusion, columns)
