"""Rematerialisation: a function of tensors that saves its arguments only, and runs again in the backward.

outs = Rematerialised.apply(f, *tensors)            # composes with every transform of torch.func

def f(*tensors):
    with replay.as_before():               # the same random numbers and autocast in every run
        ...
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from yafsdp_fn.engine.block_call import autocast_state
from yafsdp_fn.engine.gradients import DESTINATION, Task, destination
from yafsdp_fn.engine.randomness import VisitCounter, counting, generators, in_step, next_visit_seed, seeded
from yafsdp_fn.torch_private import transforms_active

Flat = Callable[..., tuple[Tensor, ...]]


class Rematerialised(torch.autograd.Function):
    """`f(*tensors) -> tuple of tensors` that saves its arguments only.

    A backward that is differentiated in its turn (torch.func, create_graph) is the gradient of a sum of products by
    `torch.func.grad`, which composes with every transform; `torch.func.vjp` in its place, and `torch.utils.checkpoint`,
    do not. Any other backward takes autograd's way, without the wrappers.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(f: Flat, *args: Tensor) -> tuple[Tensor, ...]:
        return f(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        ctx.f, *args = inputs
        ctx.save_for_backward(*args)
        ctx.save_for_forward(*args)
        ctx.mark_non_differentiable(*[out for out in output if not is_smooth(out)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        args = ctx.saved_tensors
        if not (torch.is_grad_enabled() or transforms_active()):
            return None, *_first_order(ctx.f, args, ctx.needs_input_grad[1:], grads)
        wanted = tuple(i for i, arg in enumerate(args) if is_smooth(arg))

        def against(*args: Tensor) -> Tensor:
            outs = ctx.f(*args)
            parts = [(o * g.conj()).real.sum() for o, g in zip(outs, grads, strict=True) if is_smooth(o)]
            return torch.stack([part.to(parts[0].dtype) for part in parts]).sum()

        found = dict(zip(wanted, torch.func.grad(against, argnums=wanted)(*args), strict=True))
        return None, *[found.get(i) for i in range(len(args))]

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        args = ctx.saved_tensors
        moving = [i for i, arg in enumerate(args) if is_smooth(arg)]

        def along(*values: Tensor) -> tuple[Tensor, ...]:
            filled = list(args)
            for i, value in zip(moving, values, strict=True):
                filled[i] = value
            return ctx.f(*filled)  # type: ignore[no-any-return]

        given = tuple(torch.zeros_like(args[i]) if tangents[i] is None else tangents[i] for i in moving)
        outs = torch.func.jvp(along, tuple(args[i] for i in moving), given)[1]
        return tuple(out if is_smooth(out) else None for out in outs)

    @staticmethod
    def vmap(info: Any, dims: Any, f: Flat, *args: Tensor) -> Any:
        outs = Rematerialised.apply(torch.vmap(f, in_dims=dims[1:], randomness=info.randomness), *args)  # type: ignore[no-untyped-call]
        return outs, (0,) * len(outs)


def is_smooth(tensor: Tensor) -> bool:
    """Whether derivatives with respect to it exist."""
    return tensor.is_floating_point() or tensor.is_complex()


def _first_order(
    f: Flat, args: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients of the arguments that need one, by running `f` under a graph of its own."""
    with torch.enable_grad():
        inputs = [
            _same_destination(arg.detach().requires_grad_(need), arg) for arg, need in zip(args, needs, strict=True)
        ]
        pairs = [(o, g) for o, g in zip(f(*inputs), grads, strict=True) if o.requires_grad]
    found: list[Tensor | None] = [None] * len(inputs)
    wanted = [i for i, need in enumerate(needs) if need]
    if pairs and wanted:
        outs, out_grads = zip(*pairs, strict=True)
        with _within(inputs, outs):
            fresh = torch.autograd.grad(outs, [inputs[i] for i in wanted], out_grads, allow_unused=True)
        for i, grad in zip(wanted, fresh, strict=True):
            found[i] = grad
    return found


def _same_destination(leaf: Tensor, weight: Tensor) -> Tensor:
    """`leaf`, a new leaf in the place of `weight`, with its destination if that takes a gradient now."""
    if (found := destination(weight)) is not None and leaf.requires_grad and found.takes:
        setattr(leaf, DESTINATION, found)
    return leaf


@contextlib.contextmanager
def _within(leaves: Sequence[Tensor], roots: Sequence[Tensor]) -> Iterator[None]:
    """What is written to the destinations of `leaves` counts in the run of autograd from `roots` that follows."""
    found = [here for leaf in leaves if (here := destination(leaf)) is not None]
    before = [here.task for here in found]
    task = Task(roots) if found and not any(leaf._backward_hooks for leaf in leaves) else None
    if task is not None:
        task.watch()
    for here in found:
        here.task = task
    try:
        yield
    finally:
        for here, outer in zip(found, before, strict=True):
            here.task = outer


class Replay:
    """Gives every run of a function after the first the random numbers and the autocast of the first.

    seed: where the function draws from, made anew in every run; None: the default generators as they come, whose states
        are kept (5 kB on the CPU, 16 bytes on a GPU) and put back after a later run
    """

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        self._device, self._seed = device, seed
        self._autocast = autocast_state(self._device.type)
        self._visits = _Seeds() if in_step() else None
        self._states: list[Tensor] | None = None

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for (device, enabled, dtype), now in zip(self._autocast, autocast_state(self._device.type), strict=True):
                if enabled or now[1]:
                    # its cache of casted weights would keep those of every run until the user's autocast ends
                    stack.enter_context(torch.autocast(device, enabled=enabled, dtype=dtype, cache_enabled=False))
            if self._visits is not None:
                stack.enter_context(counting(self._visits.again()))
            if self._seed is not None:
                stack.enter_context(seeded(self._seed, self._device))
            elif self._states is None:
                self._states = [generator.get_state() for generator in generators(self._device)]
            else:
                stack.enter_context(_drawing_from(generators(self._device), self._states))
            yield


@contextlib.contextmanager
def _drawing_from(found: Sequence[torch.Generator], states: Sequence[Tensor]) -> Iterator[None]:
    now = [generator.get_state() for generator in found]
    for generator, state in zip(found, states, strict=True):
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state in zip(found, now, strict=True):
            generator.set_state(state)


class _Seeds(VisitCounter):
    """The seeds that the counter around it gives to visits inside the function, and the same ones in every run.

    A backward has no counter, and a scan over plain tensors inside a function would draw other numbers there.
    """

    def __init__(self) -> None:
        self._around = contextvars.copy_context()
        self._given: list[int | None] = []
        self._taken = 0

    def again(self) -> "_Seeds":
        self._taken = 0
        return self

    def next_seed(self) -> int:
        if self._taken == len(self._given):
            self._given.append(self._around.run(next_visit_seed))
        self._taken += 1
        seed = self._given[self._taken - 1]
        assert seed is not None
        return seed
