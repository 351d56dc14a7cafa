"""What a session and its visits refuse of a loss or a block, in words. A step that goes well enters nothing of this."""

import itertools
from collections.abc import Sequence

from torch import Tensor

from yafsdp_fn.schedules.ops import Op
from yafsdp_fn.schedules.text import describe
from yafsdp_fn.schedules.trace import Trace, Visit

SAME_ORDER = (
    "A loss must visit the same units in the same order at every step and in every microbatch; make another step "
    "function for another order"
)


class OrderChanged(RuntimeError):
    """A step visits other units, or in another order, than the program it runs."""


def unlike_the_first(microbatch: int, visits: Sequence[Visit], first: Sequence[Visit]) -> OrderChanged:
    """Of a microbatch whose `visits` are not those of the first one."""
    pairs = itertools.zip_longest(first, visits)
    expected, found = next([v.name if v else "nothing" for v in pair] for pair in pairs if pair[0] != pair[1])
    return OrderChanged(f"microbatch {microbatch} visits {found} where microbatch 0 visits {expected}. {SAME_ORDER}")


def unlike_the_program(place: str, op: Op | None, trace: Trace) -> OrderChanged:
    """Of a visit at `place` where the program has `op`, or has ended."""
    wanted = "has ended" if op is None else f"expects {describe(op, trace).partition(' in slot')[0]} here"
    return OrderChanged(f"{place}: the program {wanted}. {SAME_ORDER}")


def ended_early(op: Op, trace: Trace) -> OrderChanged:
    """Of a step that has ended where the program has `op`."""
    return OrderChanged(f"the step ended, but its program goes on with {describe(op, trace)}. {SAME_ORDER}")


def inside_another(visit: str, outer: str) -> RuntimeError:
    """Of a visit that begins inside of another one: a block that visits would visit again in every recomputation."""
    return RuntimeError(
        f"forward of {visit} begins inside {outer}: a block cannot visit sharded parameters; "
        "visit them beside it, or give them to the block (a pytree of units to ya.apply, two stacks to ya.scan)"
    )


def after_failure(place: str, error: BaseException) -> RuntimeError:
    """Of a loss that goes on after `error` at `place`."""
    return RuntimeError(
        f"{place} raised {type(error).__name__}, and the loss went on: a step cannot continue after a failed "
        "visit; let the exception out of the loss"
    )


def second_backward(visit: str) -> RuntimeError:
    return RuntimeError(f"{visit}: a second backward through a visit; its graph is gone after the first")


def backward_inside(visit: str) -> RuntimeError:
    """Of a backward that the step did not start."""
    return RuntimeError(
        f"{visit}: a backward through a visit outside the step's own, as by torch.autograd.grad or .backward() "
        "inside the loss, would be added to the step's gradients; use torch.func.grad on a function of params"
    )


def second_order(visit: str) -> RuntimeError:
    return RuntimeError(f"{visit}: create_graph through a step; for second order use torch.func on the loss")


def weight_written(visit: str) -> RuntimeError:
    return RuntimeError(f"{visit}: the block writes into its weights in place; work on a copy")


def argument_written(visit: str, argument: Tensor) -> RuntimeError:
    return RuntimeError(
        f"{visit}: the block writes into an argument of shape {tuple(argument.shape)} in "
        "place; a recomputation would write again. Work on a copy, or run it under no_grad"
    )


def view_of_weights(visit: str, out: Tensor) -> RuntimeError:
    return RuntimeError(
        f"{visit}: an output of shape {tuple(out.shape)} is a view of the block's weights, whose "
        "memory will hold others soon; return a copy (.clone())"
    )
