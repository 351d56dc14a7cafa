"""What Optax 0.2.8 makes of small trees in 20 steps, as numbers: optax_0_2_8.json beside this file.

    pip install --target optax-site optax==0.2.8 jax
    PYTHONPATH=optax-site python -m tests.optim.make_optax_numbers

A case is made by `make(o)`, where `o` has Optax's names: Optax and its `contrib`, or this library, which
`test_reference` runs on the same inputs; and `of_leaf`, which makes masks or labels of what is said of each
leaf. Importing this file needs no Optax.

    numbers[dtype][case][step][leaf] = [three elements, total]

Elements are those at `places`; the total is a sum of all elements with weights from [-1, 1), which a change of any of
them moves. float32 is Optax as it is used; float64 is the same under `jax_enable_x64`, where mistakes of meaning show
that float32 would hide among its roundings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Tree = dict[str, Any]
"""Leaves by name; a stack that is taken apart is a tuple of its layers."""

FILE = Path(__file__).with_name("optax_0_2_8.json")
STEPS = 20
SHOWN = (1, 5, 20)

SMALL = {"matrix": (5, 7), "stack": (3, 6, 7), "vector": (13,)}
LARGE = SMALL | {"large": (130, 128), "layers": (2, 128, 131)}
STACKS = ("layers", "stack")


def values(seed: int, leaf: int, shape: tuple[int, ...]) -> Array:
    """Multiples of 2^-16 in [-1, 1), exact in float32: a hash (splitmix64) of seed, leaf and place."""
    mask = (1 << 64) - 1
    x = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64((1000 * seed + leaf) << 32)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor & mask)
    return ((x >> np.uint64(47)).astype(np.float64) / 2**16 - 1).reshape(shape)


def tree(seed: int, shapes: dict[str, tuple[int, ...]], apart: bool = False) -> Tree:
    """Values in the given shapes, as float64. apart: stacks as tuples of layers."""
    leaves = {name: values(seed, number, shape) for number, (name, shape) in enumerate(shapes.items())}
    return {name: tuple(leaf) if apart and name in STACKS else leaf for name, leaf in leaves.items()}


def gradients(step: int, shapes: dict[str, tuple[int, ...]], apart: bool = False) -> Tree:
    """Of step 1, 2, ...: of three sizes in turn, so that a clip has something to do in some steps alone."""
    scaled = {name: values(step, at, shape) * 0.5 ** (step % 3) for at, (name, shape) in enumerate(shapes.items())}
    return {name: tuple(leaf) if apart and name in STACKS else leaf for name, leaf in scaled.items()}


def named(of: Tree) -> Iterator[tuple[str, Any]]:
    """Leaves with their names, in the order of JAX and optree; of layers `stack.0`, ..."""
    for name in sorted(of):
        parts = of[name]
        yield from (
            ((f"{name}.{at}", part) for at, part in enumerate(parts)) if isinstance(parts, tuple) else [(name, parts)]
        )


def digest(leaf: Array, number: int) -> list[float]:
    """`[three elements, total]` of a leaf."""
    flat = leaf.astype(np.float64).reshape(-1)
    return [*(float(flat[at]) for at in places(flat.size)), float(flat @ values(99, number, flat.shape))]


def places(size: int) -> tuple[int, int, int]:
    """Of the elements that are shown."""
    return 0, size // 2 + 1, size - 1


class Case(NamedTuple):
    """make: the transformation, from Optax's names; shapes: of the leaves; apart: see `tree`

    read: `(o, state, params)` -> what is compared in the place of the parameters
    """

    make: Callable[[Any], Any]
    shapes: dict[str, tuple[int, ...]] = SMALL
    apart: bool = False
    read: Callable[[Any, Any, Any], Any] = lambda o, state, params: params


MATRICES = {"matrix": True, "stack": True, "vector": False}
LABELS = {"matrix": "adam", "stack": "sgd", "vector": "adam"}


def ramp(o: Any) -> Any:
    return o.warmup_cosine_decay_schedule(0.001, 0.02, 4, 16, 0.002)


def warm_up(o: Any) -> Any:
    return o.warmup_constant_schedule(0.0, 0.1, 3)


def evaluated(o: Any, state: Any, params: Any) -> Any:
    return o.schedule_free_eval_params(state, params)


CASES: dict[str, Case] = {
    # what was there before
    "sgd": Case(lambda o: o.sgd(0.1)),
    "momentum": Case(lambda o: o.sgd(0.05, momentum=0.9)),
    "nesterov": Case(lambda o: o.sgd(ramp(o), momentum=0.9, nesterov=True)),
    "adam": Case(lambda o: o.adam(0.01)),
    "adamw": Case(lambda o: o.adamw(0.01, 0.8, 0.95, 1e-6, weight_decay=0.1)),
    "adamw at a rate": Case(lambda o: o.adamw(ramp(o), weight_decay=0.1, mask=o.of_leaf(MATRICES))),
    "chain": Case(
        lambda o: o.chain(
            o.clip_by_global_norm(3.0),
            o.add_decayed_weights(0.1, mask=o.of_leaf(MATRICES)),
            o.scale_by_adam(),
            o.scale(-0.01),
        )
    ),
    "masked": Case(
        lambda o: o.chain(o.masked(o.adam(0.01), o.of_leaf(MATRICES)), o.masked(o.sgd(0.1), o.of_leaf(_not(MATRICES))))
    ),
    # elementwise
    "lion": Case(lambda o: o.lion(0.01)),
    "lion at a rate": Case(lambda o: o.lion(ramp(o), b1=0.8, b2=0.9, weight_decay=0.1, mask=o.of_leaf(MATRICES))),
    "rms": Case(lambda o: o.chain(o.scale_by_rms(initial_scale=0.1), o.scale(-0.01))),
    "rms corrected": Case(
        lambda o: o.chain(o.scale_by_rms(0.95, eps_in_sqrt=False, bias_correction=True), o.scale(-0.01))
    ),
    "schedule_free_adamw": Case(lambda o: o.schedule_free_adamw()),
    "schedule_free_adamw warm": Case(lambda o: o.schedule_free_adamw(0.02, 5, b1=0.95, b2=0.99, weight_decay=0.1)),
    "schedule_free_adamw evaluated": Case(
        lambda o: o.schedule_free_adamw(0.02, 5, b1=0.95, b2=0.99, weight_decay=0.1), read=evaluated
    ),
    "schedule_free of sgd": Case(
        lambda o: o.schedule_free(o.chain(o.add_decayed_weights(0.1), o.sgd(warm_up(o))), warm_up(o)), read=evaluated
    ),
    "schedule_free": Case(
        lambda o: o.schedule_free(o.sgd(ramp(o), momentum=0.5), ramp(o), b1=0.8, weight_lr_power=1.0)
    ),
    "clip": Case(lambda o: o.chain(o.clip(0.3), o.sgd(0.1))),
    "rmsprop": Case(lambda o: o.rmsprop(0.01)),
    # over rows, columns, whole leaves
    "muon": Case(lambda o: o.muon(0.02)),
    "muon, layers apart": Case(lambda o: o.muon(0.02), apart=True),
    "muon large, layers apart": Case(lambda o: o.muon(0.02, weight_decay=0.1, adam_weight_decay=0.05), LARGE, True),
    "muon plain, layers apart": Case(lambda o: o.muon(ramp(o), beta=0.9, nesterov=False, ns_steps=3), apart=True),
    "muon adaptive, layers apart": Case(lambda o: o.muon(0.02, adaptive=True, consistent_rms=0.2), apart=True),
    "partition": Case(
        lambda o: o.partition({"adam": o.adam(0.01), "sgd": o.sgd(0.1, momentum=0.9)}, o.of_leaf(LABELS))
    ),
    "partition clipped": Case(
        lambda o: o.partition(
            {"adam": o.chain(o.clip_by_global_norm(1.0), o.adamw(0.01, weight_decay=0.1)), "sgd": o.sgd(ramp(o))},
            o.of_leaf(LABELS),
        )
    ),
}


def _not(mask: dict[str, bool]) -> dict[str, bool]:
    return {name: not chosen for name, chosen in mask.items()}


def optax_names() -> Any:
    """Optax and its contrib in one."""
    import optax

    return SimpleNamespace(**vars(optax.contrib) | vars(optax) | {"of_leaf": lambda said: said})


def run(case: Case, dtype: str) -> dict[str, dict[str, list[float]]]:
    """`{step: {leaf: digest}}` of Optax."""
    import jax
    import jax.numpy as jnp

    o = optax_names()
    tx = case.make(o)
    out = {}

    def given(of: Tree) -> Any:
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), of)

    params = given(tree(0, case.shapes, case.apart))
    state = tx.init(params)
    update = jax.jit(tx.update)
    for step in range(1, STEPS + 1):
        updates, state = update(given(gradients(step, case.shapes, case.apart)), state, params)
        params = o.apply_updates(params, updates)
        assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(params))
        if step in SHOWN:
            shown = enumerate(named(case.read(o, state, params)))
            out[str(step)] = {name: digest(np.asarray(leaf), at) for at, (name, leaf) in shown}
    return out


def main() -> None:
    import jax
    import optax

    numbers: dict[str, Any] = {"optax": optax.__version__, "jax": jax.__version__}
    for dtype in ("float32", "float64"):
        jax.config.update("jax_enable_x64", dtype == "float64")
        numbers[dtype] = {name: run(case, dtype) for name, case in CASES.items()}
    digits = {"float32": 9, "float64": 15}
    for dtype, of in digits.items():
        for steps in numbers[dtype].values():
            for leaves in steps.values():
                leaves |= {name: [float(f"{x:.{of}g}") for x in shown] for name, shown in leaves.items()}
    text = json.dumps(numbers, indent=1)
    FILE.write_text(_one_line_a_leaf(text) + "\n")


def _one_line_a_leaf(text: str) -> str:
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if inside:
            lines[-1] += line.strip() + (" " if line.endswith(",") else "")
        else:
            lines.append(line)
        inside = lines[-1].rstrip().endswith("[") or (inside and not line.strip().startswith("]"))
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    main()
