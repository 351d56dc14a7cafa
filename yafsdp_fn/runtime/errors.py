"""Constructors of errors about a loss or a block. Successful steps do not enter this file."""

from typing import Any

import optree
import torch
from torch import Tensor

from yafsdp_fn.params.layout import TreeLayout
from yafsdp_fn.params.tree import Tree, shape_of
from yafsdp_fn.program.ops import Op
from yafsdp_fn.program.text import describe
from yafsdp_fn.program.trace import Trace
from yafsdp_fn.runtime.graph_walks import OF_VISIT

SAME_ORDER = (
    "A loss must visit the same units in the same order at every step and in every microbatch; make another step "
    "function for another order"
)

SAME_CALLS = (
    "Blocks and losses must call the same collectives in the same order in every step, on every rank; else ranks wait "
    "for each other. Is there a branch on values around it (if, .item())? Take torch.where, or call it on both sides. "
    "On batches of one shape it must have one size; sizes from data are for the split_sizes of ya.all_to_all"
)

READ_BESIDE_VISITS = (
    "the loss reads sharded leaves beside its visits (a regulariser, say): each stage has only its own, and the sum "
    "would lack the others'. Visit them (ya.apply, ya.scan)"
)

ORDERED = (
    "the loss reads sharded leaves beside its visits (a regulariser, say): on a deterministic mesh their gradient "
    "would be added up in another order at another number of ranks. Visit them (ya.apply, ya.scan)"
)


def shards_added(name: str) -> str:
    """Warns of a loss that computes with shards as if they were whole."""
    return (
        f"the loss computes with leaves of {name} beside its visits, and each rank with its own shards alone: a sum of "
        "them counts once for every rank in a mean over ranks, a mean or a maximum is of other elements. "
        "ya.vdot(params, params) and ya.global_norm(params) are the same at every number of ranks"
    )


SCALED = (
    "a torch.amp.GradScaler scales the loss, and no optimizer here would unscale its gradients. Return the loss as it "
    "is; bfloat16 (ya.Precision(compute=torch.bfloat16)) needs no scale"
)


class OrderChanged(RuntimeError):
    """A step visits other units, or in another order, than its program."""


# ---- Another order than the program or the trace has.


def visit_differs_from_trace(visit: str, what: str) -> OrderChanged:
    """Returns the error for a visit in a pipeline that differs from the trace: other stages rely on the traced
    outputs."""
    return OrderChanged(f"{visit}: {what} than when the step was traced. {SAME_ORDER}")


def number_differs_from_trace(visit: str) -> OrderChanged:
    """Returns the error for a visit in a pipeline that returns another number than in the trace."""
    return OrderChanged(
        f"{visit}: it returns another number, beside its tensors, than when the step was traced, and other stages have "
        "that of the trace alone. Return a tensor (x.new_tensor(number)), or use the number where the loss has it"
    )


def arguments_differ_from_trace(visit: str, came: Any, traced: Any) -> OrderChanged:
    """Returns the error for a visit in a pipeline with other tensors than in the trace. came, traced: shapes and
    dtypes"""
    what = f"({_shown(came)}, where there were {_shown(traced)})"
    if len(came) != len(traced):
        what += " (what some microbatches lack, as transformers' mask where nothing is padded, must be in all of them)"
    return visit_differs_from_trace(visit, f"it is given tensors of other shapes or dtypes {what}")


def _shown(given: Any) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in given) or "none"


def value_on_other_stage(what: str, error: Exception) -> RuntimeError:
    """Returns the error for a loss that reads values of tensors that another stage has."""
    return RuntimeError(
        f"{what} depends on the values of tensors ({error}), and across stages each has those of its own visits alone: "
        "ask for them inside of the visit that has them, and return tensors (torch.where in place of a branch); report "
        "what is to be shown as aux (ya.Mean, ya.Sum, ya.Max)"
    )


def visit_differs_from_program(position: str, op: Op | None, trace: Trace) -> OrderChanged:
    """Returns the error for a visit at `position` where the program has `op`, or has ended."""
    wanted = "has ended" if op is None else f"expects {describe(op, trace).partition(' in slot')[0]} here"
    return OrderChanged(f"{position}: the program {wanted}. {SAME_ORDER}")


def collective_differs(position: str, at: int, wanted: str, got: str) -> OrderChanged:
    """Returns the error for a block, or a loss, that calls `got` as its collective number `at`."""
    return OrderChanged(f"{position}: expected its collective {at} to be {wanted}; got {got}. {SAME_CALLS}")


def step_ended_early(op: Op, trace: Trace) -> OrderChanged:
    """Returns the error for a step that has ended where the program has `op`."""
    return OrderChanged(f"the step ended, but its program goes on with {describe(op, trace)}. {SAME_ORDER}")


def kept_from_trace(what: str) -> str:
    """Says that a tensor of a trace is used after it."""
    return (
        f"{what} has no values: it was made while the loss was traced (.trace, .lower, ya.planner), and the loss or a "
        "block has kept it, in a functools.cache or an attribute. Make it before the trace (call the function that is "
        "cached, or run a step first), or clear the cache after it"
    )


def untracked(visit: str) -> RuntimeError:
    """Returns the error for a visit without grad in a step of a pipeline."""
    return RuntimeError(
        f"{visit}: a visit under no_grad inside of a step across stages, whose program has none. Take what it gives "
        "from an evaluation before the step (ya.eval_step), or detach its outputs instead"
    )


# ---- Visits that cannot be, or a loss that goes on after an error.


def nothing_visited() -> ValueError:
    """Returns the error for a loss that no parameter of the state goes into: its gradients would all be zero."""
    return ValueError(
        "the loss does not depend on the differentiated arguments: it should use those that it is given, in ya.scan "
        "and ya.apply, or in the function that ya.functionalize returns; a module that is called itself has weights of "
        "its own, and under torch.no_grad() nothing is learnt"
    )


def closed_over(visit: str) -> ValueError:
    """Returns the error for a loss that uses the state that is stepped in place of its argument."""
    return ValueError(
        f"{visit}: the loss uses params of the state that this step trains, but not those that it is given: from "
        "outside (state.params) they get no gradient. Use its argument; what is to be a constant, under torch.no_grad()"
    )


def parameter_of_a_module(leaf: Tensor) -> ValueError:
    """Returns the error for a loss that calls a module which has weights of its own, beside the state's, or uses
    weights outside of their visit."""
    if (visit := getattr(leaf, OF_VISIT, None)) is not None:
        return ValueError(
            f"{visit}: the block keeps a weight {tuple(leaf.shape)}, and the loss uses it afterwards, when its memory "
            "holds others, and where no gradient comes back. Use it in the block, or visit its unit again"
        )
    return ValueError(
        f"the loss depends on a torch.nn.Parameter {tuple(leaf.shape)} that is none of its arguments: it would not be "
        "trained. ya.functionalize makes a tree of its module's weights, for ya.shard; if it is to stay as it is, "
        "module.requires_grad_(False)"
    )


def not_by_torch(collective: str) -> RuntimeError:
    """Returns the error for a tensor with a gradient that is given to a collective of torch.distributed."""
    return RuntimeError(
        f"the loss, or a block, gives a tensor with a gradient to a collective of torch.distributed ({collective}), "
        "through which the gradient would be wrong. A mean over ranks needs none: return ya.Mean(total, weight). In a "
        "loss a sum over ranks is ya.params.sum_over_ranks(x, params); in a block ya.psum, ya.all_gather and others "
        "act over an axis of ya.mesh. Detach what is only looked at"
    )


def nested_visit(visit: str, outer: str) -> RuntimeError:
    """Returns the error for a visit inside another one: each recomputation of the outer block would visit again."""
    return RuntimeError(
        f"forward of {visit} begins inside {outer}: a block cannot visit sharded parameters; "
        "visit them beside it, or give them to the block (a pytree of units to ya.apply, two stacks to ya.scan). "
        "Without torch.utils.checkpoint: a schedule's remat= says what is recomputed"
    )


def advice(error: BaseException, compute: torch.dtype) -> str | None:
    """Returns advice on an error of torch's own, None if there is none. compute: the dtype that blocks compute in"""
    told = str(error) if type(error) is RuntimeError else ""
    if "use_reentrant" in told:
        return "Take torch.utils.checkpoint away: a schedule's remat= says what is recomputed"
    if "nference tensor" in told:
        return (
            "A tensor was made under torch.inference_mode, in which no gradient passes it: make batches and buffers "
            "outside of it, or copy it (x.clone())"
        )
    if any(words in told for words in ("same dtype", "scalar type", "should be the same")):
        return (
            f"Blocks compute in {compute} (Precision.compute), and neither batches nor buffers are converted to it: in "
            f"the loss, x.to({compute}); before ya.functionalize, module.to({compute}), which converts buffers, too "
            "(weights are trained in Precision.param in any case)"
        )
    return None


def partial_stack(name: str, leaf: object, layers: int) -> ValueError:
    """Returns the error for a scan over a part of a stack. leaf: local shards of one group; layers: the number held
    here"""
    return ValueError(
        f"scan: local shards of {name} are {shape_of(leaf)}, expected {layers} layers of them: a part of a stack "
        "cannot be scanned. Give the whole stack, and say which layers to visit: ya.scan(f, x, layers, order=range(k))"
    )


def laid_out_otherwise(got: Tree, layout: TreeLayout) -> ValueError:
    """Returns the error for parameters of a state in another tree than theirs. got: the names of its entries"""
    made = optree.tree_unflatten(layout.container, [entry.name for entry in layout.entries])
    how = " with leaves that are frozen, cut or encoded otherwise" if got == made else ""
    return ValueError(
        f"the state's params are {got} now, and were made as {made}{how}, to which a step would return. Rename, "
        "swap or leave out parts inside of the loss, or make a state of the new tree: "
        "ya.shard(ya.unshard(tree), tx)"
    )


def of_two_trees(visit: str, group: str) -> ValueError:
    """Returns the error for a visit to one group in two trees."""
    return ValueError(
        f"{visit}: the block gets {group} of two trees, of two states or of a state and its masks or moments, say; a "
        "visit gathers one of them. Visit them one after the other, put both into one state (ya.frozen), or combine "
        "the trees first (optree.tree_map)"
    )


def after_failure(position: str, error: BaseException) -> RuntimeError:
    """Returns the error for a loss that goes on after `error` at `position`."""
    return RuntimeError(
        f"{position} raised {type(error).__name__}, and the loss went on: a step cannot continue after a failed "
        "visit; let the exception out of the loss"
    )


# ---- A backward that is not the step's own.


def second_backward(visit: str) -> RuntimeError:
    return RuntimeError(f"{visit}: a second backward through a visit; its graph is gone after the first")


def backward_inside(visit: str) -> RuntimeError:
    """Returns the error for a backward that the step did not start."""
    return RuntimeError(
        f"{visit}: a backward through a visit outside the step's own, as by torch.autograd.grad or .backward() "
        "inside the loss, would be added to the step's gradients; use torch.func.grad on a function of params"
    )


def second_order(visit: str) -> RuntimeError:
    return RuntimeError(f"{visit}: create_graph through a step; for second order use torch.func on the loss")


# ---- Blocks that write in place, or return their weights.


def weight_written(visit: str) -> RuntimeError:
    return RuntimeError(f"{visit}: the block writes into its weights in place; work on a copy")


def of_an_earlier_call(visit: str) -> RuntimeError:
    """Returns the error for a loss that uses what an earlier call of it has kept, with its graph."""
    return RuntimeError(
        f"the loss depends on an output of {visit} that an earlier call of the loss has kept, and no gradient goes "
        "back through that call. Keep it detached (x.detach())"
    )


def leaf_written() -> RuntimeError:
    """Returns the error for a loss that writes to the shards of its parameters."""
    return RuntimeError(
        "the loss writes into the leaves of its parameters in place, while their units may have been gathered already. "
        "Write between two steps, to the leaves of state.params, on all ranks (optree.tree_map under torch.no_grad())"
    )


def leaf_hooked() -> RuntimeError:
    """Returns the error for a hook on the shards of a state, where no gradient comes by."""
    return RuntimeError(
        "a leaf of the parameters has a hook for its gradient, which would not be called: gradients of visits go to "
        "gradient shards. Put it on the weight in its block (w.register_hook), or change what ya.grad returns"
    )


def leaf_written_unseen() -> RuntimeError:
    """Returns the error for a write to the shards of a state of which copies were not told."""
    return RuntimeError(
        "a leaf of the state's params was written through .data or .numpy(), or given other memory (leaf.data = ...), "
        "which nothing counts: a copy of it would be computed with. Write under torch.no_grad() to the leaf itself "
        "(leaf.mul_(0.5), leaf.copy_(new)), on all ranks"
    )


def argument_written(visit: str, argument: Tensor) -> RuntimeError:
    return RuntimeError(
        f"{visit}: the block writes into an argument of shape {tuple(argument.shape)} in "
        "place; a recomputation would write again. Work on a copy"
    )


def other_outputs(visit: str) -> RuntimeError:
    return RuntimeError(
        f"{visit}: run again for its backward, the block returned other values than in its forward: its gradient would "
        "be that of another function. It draws from a generator of its own, or Python's random or NumPy's, or changes "
        "what it reads. Draw from torch's default generators (torch.rand, dropout), which a step seeds for every run; "
        "make a generator in the block, torch.Generator().manual_seed(torch.initial_seed()); or keep the graphs of "
        "visits, schedule=ya.schedules.zero3(remat='none')"
    )


def used_after(visit: str, weight: Tensor) -> RuntimeError:
    return RuntimeError(
        f"{visit}: the loss uses weights of this block, of shape {tuple(weight.shape)}, after its visit, when their "
        "memory holds others; keep a copy (w.detach().clone()), or return it from the block"
    )


def hidden_outputs(visit: str, out: object) -> TypeError:
    """Returns the error for a block that returns an object, and runs again for its backward."""
    return TypeError(
        f"{visit}: the block returns a {type(out).__name__} with tensors inside, and no gradient comes back to them "
        "where it runs again for its backward. Return the tensors, in a tuple or a dict; or keep the graphs of visits, "
        "schedule=ya.schedules.zero3(remat='none')"
    )


def view_of_weights(visit: str, out: Tensor) -> RuntimeError:
    return RuntimeError(
        f"{visit}: an output of shape {tuple(out.shape)} is a view of the block's weights, whose "
        "memory will hold others soon; return a copy (.clone())"
    )
