"""Steps through fused kernels: which sequences of rules have one, and the memory that it runs on."""

import ctypes
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from yafsdp_fn.optim.base import OnWrite, Scalar, Stage
from yafsdp_fn.optim.partition import Decay
from yafsdp_fn.optim.rules import Adam, Momentum, ScaleByAdamState
from yafsdp_fn.optim.scaling import Scale, ScaleByScheduleState
from yafsdp_fn.optim.step.cutting import Cutter, Runs, leaf_runs, row_runs, rows, split_runs
from yafsdp_fn.params.leaf_mask import LeafRule
from yafsdp_fn.params.sharded import Sharded, is_sharded
from yafsdp_fn.params.tree import Param, Tree
from yafsdp_fn.util.torch_private import foreach_copy, fused_adam, fused_adamw, fused_sgd

# ---- Adam's step of large units on CUDA, which writes the parameters' working copies in the same pass (kernels.py).
#
# It launches once for every piece. A unit's own size decides whether it is used, so bits do not depend on how units
# are grouped, cut or dealt to ranks, and a model of small units keeps its few launches.

Leaves = list[Tensor]


def copying_step(
    rule: Adam, device: torch.device, *, decoupled: bool
) -> Callable[[Tensor], Callable[..., None]] | None:
    """Returns a function from a step's count to its kernel, `(params, grads, mu, nu, copies, lr=, weight_decay=,
    grad_scale=, found_inf=)`, or None without such a kernel."""
    kernel = copying_kernel(device)
    if kernel is None:
        return None
    launch, betas = kernel, {"beta1": rule.b1, "beta2": rule.b2, "eps": rule.eps}

    def begin(count: Tensor) -> Callable[..., None]:
        step, corrected = count.float(), corrections(rule, count)

        def copying(*columns: Leaves, lr: Any, weight_decay: float, grad_scale: Any, found_inf: Any) -> None:
            given = (lr, 1.0 if grad_scale is None else grad_scale, 0.0 if found_inf is None else found_inf)
            # `full_like`: to copy a number from the host could make it wait
            known = [x if isinstance(x, Tensor) else torch.full_like(step, x) for x in given]
            scalars = torch.stack([*known, *corrected])
            for row in zip(*columns, strict=True):
                launch(*row, scalars, weight_decay=weight_decay, decoupled=decoupled, **betas)

        return copying

    return begin


def corrections(rule: Adam, count: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `1 - b1^count` and `sqrt(1 - b2^count)`, 0-dim, float32, rounded once. The host does not wait for
    `count`.

    They are the sums of the weights of gradients in the moments. A kernel computes those weights from betas in float32,
    so the betas here are float32 too: with 0.999 as written, the second correction of the first step would have a
    relative error of 1.3e-5. Powers are taken in float64: from powers in float32, as torch's CUDA kernel takes them,
    the error is 7e-6 at the second step.
    """
    b1, b2 = (ctypes.c_float(beta).value for beta in (rule.b1, rule.b2))
    t = count.double()
    return (1 - torch.pow(b1, t)).float(), (1 - torch.pow(b2, t)).sqrt().float()


def copying_kernel(device: torch.device) -> Callable[..., None] | None:
    """Returns a kernel that takes a step and writes the copies in one pass, or None."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from yafsdp_fn.optim.step import kernels

    return kernels.adam_copying


# ---- Takes the step by one of torch's fused kernels, on stretches of memory that it treats alike.
#
# It is one pass over parameters, gradients and moments, and allocates nothing of their size. The kernels divide
# gradients by `grad_scale` (and write the quotient back), and do nothing if `found_inf` is 1, without the host
# knowing. A mask of the decay cuts every leaf into views that decay and views that do not; each kind is one call.
#
# fused.py maps rules to kernels. cutting.py explains why the bits of a step on the CPU do not depend on how many
# units take it at once.

Columns = Sequence[Leaves]
"""Parameters, gradients and moments, and maybe copies of the parameters: lists of tensors of one order."""
LARGE = 1 << 22
"""Elements of a unit, over all ranks, from which its own launches of the copying kernel cost less than they save."""
Pieces = Sequence[Sequence[Tensor]]
"""Stretches of elements, each `(param, grad, *moments, [copy])`."""
Launch = Callable[[float, bool, Pieces, Scalar, Scalar], None]
"""`(weight decay, large, pieces, grad_scale, found_inf)`: one call of the kernel for all pieces.

large: the pieces are of large units; with copies, each may then have its own launch
"""


class Fusion(NamedTuple):
    """A sequence of rules that one kernel implements.

    stages: its rules and their states; moments: trees that it updates beside the parameters
    kernel: torch's, `(params, grads, *moments, [], [count] * len(params), lr=, weight_decay=, grad_scale=, found_inf=,
        maximize=, **settings)`; without a count, `(params, grads, *moments or [], ...)`
    taken: completed steps, if the kernel needs them
    copying: from the count of the step, a kernel that takes copies too, for float32 parameters, or None
    lossy: the kernel is wrong for 16-bit parameters on the CPU
    """

    stages: Sequence[Stage]
    moments: tuple[Tree, ...]
    kernel: Callable[..., None]
    settings: dict[str, Any]
    taken: Tensor | None = None
    copying: Callable[[Tensor], Callable[..., None]] | None = None
    lossy: bool = False

    @property
    def decay(self) -> Decay:
        return next((tx.rule for tx, _ in self.stages if isinstance(tx.rule, Decay)), Decay(0.0))

    def columns(self, params: Tree, grads: Tree, copies: Tree | None) -> list[Leaves] | None:
        """Returns the leaves of parameters, gradients, moments and copies, or None if the kernel does not accept them.

        It reads raw memory of parameters and moments, of one dtype, in one order.
        """
        spec = optree.tree_structure(params)
        columns: list[Leaves] = [spec.flatten_up_to(tree) for tree in (params, grads, *self.moments)]  # type: ignore[misc]
        rows = list(zip(columns[0], *columns[2:], strict=True))
        if len({(leaf.device, leaf.dtype) for row in rows for leaf in row}) != 1:
            return None
        kind, half = columns[0][0].device.type, columns[0][0].element_size() < 4
        if kind not in ("cpu", "cuda") or (kind == "cpu" and half and self.lossy):
            return None
        if kind == "cuda" and columns[0][0].dtype == torch.float64:  # rates and powers of betas would be in float32
            return None
        if not all(leaf.is_contiguous() and leaf.shape == row[0].shape for row in rows for leaf in row):
            return None
        return columns if copies is None else [*columns, spec.flatten_up_to(copies)]  # type: ignore[list-item]

    def begin(self) -> Launch:
        """Returns a step's kernel. Values that depend on counts are computed here, before any part of the step."""
        width = 2 + len(self.moments)
        count = None if self.taken is None else self.taken + 1
        step = None if count is None else count.float()
        copying = None if self.copying is None or count is None else self.copying(count)
        scale, state = self.stages[-1][0].rule, self.stages[-1][1]
        assert isinstance(scale, Scale)
        lr = -(scale.by(state.count) if callable(scale.by) else scale.by)

        def launch(weight_decay: float, large: bool, pieces: Pieces, grad_scale: Scalar, found_inf: Scalar) -> None:
            full = [piece for piece in pieces if piece[0].numel()]  # the CUDA kernels refuse empty tensors
            if not full:
                return
            columns: Columns = [list(column) for column in zip(*full, strict=True)]
            device = columns[0][0].device
            if grad_scale is not None and columns[0][0].dtype == torch.float64:
                for grad in columns[1]:
                    grad.div_(grad_scale)  # the kernels read it in float32
                grad_scale = None
            scalars = {"grad_scale": _fp32(grad_scale, device), "found_inf": _fp32(found_inf, device)}
            scalars |= {"lr": lr if device.type == "cpu" else _fp32(lr, device), "weight_decay": weight_decay}
            if copying is not None and large and len(columns) > width and columns[0][0].dtype == torch.float32:
                copying(*columns, **scalars)
                return
            rest: Columns = [[], [step] * len(full)] if step is not None else [] if self.moments else [[]]
            self.kernel(*columns[:width], *rest, **scalars, maximize=False, **self.settings)
            for copies in columns[width:]:
                foreach_copy(copies, columns[0])

        return launch

    def advance(self, found_inf: Scalar) -> None:
        """Counts the step, unless it is skipped."""
        for _, state in self.stages:
            if isinstance(state, ScaleByAdamState | ScaleByScheduleState):
                state.count.add_(1 if found_inf is None else found_inf != 1)


class Piece(NamedTuple):
    """A stretch of elements of one leaf.

    large: it is of a large unit; tensors: its parameters, gradients and moments, and maybe copies
    """

    decays: bool
    large: bool
    tensors: list[Tensor]


class FusedSteps:
    """Takes steps by one kernel, on leaves or rows of units, cut into runs that decay alike.

    chosen: the leaves that take the step, None for all
    """

    rounds = 0

    def __init__(self, fusion: Fusion, columns: Sequence[Leaves], params: Tree, chosen: LeafRule | None) -> None:
        self._fusion, self._columns, self.params, self._chosen = fusion, list(columns), params, chosen
        self._launch: Launch | None = None  # of the step under way
        self._whole: list[Piece] = []
        self._of_unit: dict[int, list[Piece]] = {}
        # the kernels read memory as it lies: autograd may give a transposed view, and a caller another dtype
        self._grads: Leaves = columns[1]
        self._readable = all(g.dtype == p.dtype and g.is_contiguous() for p, g in zip(*columns[:2], strict=True))
        self._large = [numel >= LARGE for numel in _unit_numels(params)]

    def run(
        self, units: Sequence[int] | None, cutter: Cutter | None, scale: Scalar, found_inf: Scalar, on_write: OnWrite
    ) -> None:
        on_write()
        if self._launch is None:
            self._launch = self._fusion.begin()
        if not self._readable:
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

    def _decays(self, path: str, param: Param) -> bool | None:
        """Returns whether a leaf decays; None if it takes no step."""
        if self._chosen is not None and not self._chosen(path, param):
            return None
        mask = self._fusion.decay.mask
        return mask is None or bool(mask(path, param))

    def _join(self) -> list[Piece]:
        runs = leaf_runs(self._decays, self.params)
        for of_leaf, large, leaves in zip(runs, self._large, zip(*self._columns, strict=True), strict=True):
            self._whole += _split(of_leaf, large, leaves)
        return self._whole

    def _cut(self, cutter: Cutter) -> dict[int, list[Piece]]:
        columns = zip(*self._columns, strict=True)
        for (group, handle), large, leaves in zip(cutter.leaves, self._large, columns, strict=True):
            runs = row_runs(self._decays, handle, group, leaves[0].shape[-1])
            for unit, *of_unit in zip(group.held, *(rows(group, leaf) for leaf in leaves), strict=True):
                self._of_unit[unit] = _split(runs, large, of_unit)
        return self._of_unit

    def finish(self, found_inf: Scalar) -> None:
        self._launch = None
        self._fusion.advance(found_inf)


def _unit_numels(params: Tree) -> list[int]:
    """Returns the elements of each leaf's unit, over all ranks; for a plain leaf, its own."""
    out: list[int] = []
    for node in optree.tree_leaves(params, is_leaf=is_sharded):
        if isinstance(node, Sharded):
            out += [group.layout.numel for _, group, _ in node.group_leaves()]
        else:
            out.append(node.numel())
    return out


def _split(runs: Runs, large: bool, leaves: Sequence[Tensor]) -> list[Piece]:
    pieces = zip(*(split_runs(leaf, runs) for leaf in leaves), strict=True)
    of_runs = zip(runs, pieces, strict=True)
    return [Piece(decays, large, list(piece)) for (decays, _), piece in of_runs if decays is not None]


def _fp32(value: Any, device: torch.device) -> Any:
    """Converts a scalar to float32: the CUDA kernels read scalars through float pointers."""
    return value.to(device=device, dtype=torch.float32) if isinstance(value, Tensor) else value


# ---- Maps sequences of rules to torch's fused kernels:
#
#     scale_by_adam, [add_decayed_weights], scale     ->  torch._fused_adamw_
#     [add_decayed_weights], scale_by_adam, scale     ->  torch._fused_adam_
#     [add_decayed_weights], [trace], scale           ->  torch._fused_sgd_
#
# fused.py runs them.


def recognise(stages: Sequence[Stage]) -> Fusion | None:
    """Returns the kernel for these rules, or None."""
    rules, states = [tx.rule for tx, _ in stages], [state for _, state in stages]
    match rules:
        case [Adam() as adam, Scale()] | [Adam() as adam, Decay(), Scale()]:
            return _adam(fused_adamw, stages, adam, states[0], decoupled=True)
        case [Decay(), Adam() as adam, Scale()]:
            return _adam(fused_adam, stages, adam, states[1], decoupled=False)
        case [Momentum() as rule, Scale()] | [Decay(), Momentum() as rule, Scale()] if rule.decay > 0:
            return _sgd(stages, (states[-2].trace,), rule.decay, rule.nesterov)
        case [Scale()] | [Decay(), Scale()]:
            return _sgd(stages, (), 0.0, False)
    return None


def _adam(
    kernel: Callable[..., None], stages: Sequence[Stage], rule: Adam, state: ScaleByAdamState, *, decoupled: bool
) -> Fusion:
    settings = {"beta1": rule.b1, "beta2": rule.b2, "eps": rule.eps, "amsgrad": False}
    with_copies = copying_step(rule, state.count.device, decoupled=decoupled)
    return Fusion(stages, (state.mu, state.nu), kernel, settings, state.count, with_copies)


def _sgd(stages: Sequence[Stage], moments: tuple[Tree, ...], momentum: float, nesterov: bool) -> Fusion:
    rule: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "dampening": 0.0, "is_first_step": False}
    # in torch 2.13 it leaves all but the last few elements as they are (pytorch issue 191763)
    return Fusion(stages, moments, fused_sgd, rule, lossy=True)
