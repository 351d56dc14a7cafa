"""The transformations against Optax.

Its numbers are in optax_0_2_8.json, which make_optax_numbers.py has made: no test needs Optax.
"""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import optree
import pytest
import torch

from tests.optim.make_optax_numbers import CASES as OPTAX
from tests.optim.make_optax_numbers import FILE, SHOWN, Case, digest, gradients, named, run, tree
from tests.optim.trees import clone, defined_step
from yafsdp_fn import optim

NUMBERS: dict[str, Any] = json.loads(FILE.read_text())
ELSEWHERE = {name for name in OPTAX if name.startswith("muon")}
"""Optax's Muon takes weights as [in, out] and others by a NAdam, so that it is put together of other parts here."""


ALL = SimpleNamespace(**{name: getattr(of, name) for of in (optim, optim.contrib) for name in of.__all__})
ALL.of_leaf = lambda said: lambda path, param: said[path.partition(".")[0]]
OURS = {name: case for name, case in OPTAX.items() if name not in ELSEWHERE}
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
"""Relative to the largest element of a leaf, and of a total to the leaf's norm."""
LOOSER = {
    ("float32", "chain"): 2e-6,  # Optax's 1 - 0.999 ** count has few digits in float32
    # Optax's rates are float32 even here
    **{("float64", name): 1e-7 for name in OURS if "rate" in name},
    **{("float64", name): 1e-7 for name in ("nesterov", "partition clipped", "schedule_free")},
    **{("float64", f"schedule_free_adamw {of}"): 1e-7 for of in ("warm", "evaluated")},
}


def like_optax(case: Case, dtype: torch.dtype, in_place: bool) -> dict[str, Any]:
    """What the case makes of the inputs here: the leaves after each step that the file shows."""

    def tensors(of: Any) -> Any:
        return optree.tree_map(lambda leaf: torch.from_numpy(leaf).to(dtype), of)

    tx = case.make(ALL)
    params = tensors(tree(0, case.shapes, case.apart))
    shown = {}
    state = tx.init(params)
    for step in range(1, SHOWN[-1] + 1):
        grads = tensors(gradients(step, case.shapes, case.apart))
        if in_place:
            state = optim.step_(tx, params, grads, state)
        else:
            params, state = defined_step(tx, params, grads, state)
        if step in SHOWN:
            shown[str(step)] = clone(dict(named(case.read(ALL, state, params))))
    return shown


def in_float32(first: float, peak: float, steps: int) -> optim.Rate:
    """The warm-up of Optax, whose rates are float32 under `jax_enable_x64`, too."""
    return lambda count: (first - peak) * (1 - count.clamp(0, steps) / steps) + peak


ALL.warmup_constant_schedule = in_float32


@pytest.mark.sampled
@pytest.mark.parametrize("in_place", [False, True], ids=["update", "step_"])
@pytest.mark.parametrize("name", OURS)
def test_equals_optax(name: str, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("yafsdp_fn.optim.contrib.schedule_free")  # the function has its name
    monkeypatch.setattr(module, "warmup_constant_schedule", in_float32)
    for dtype, tolerance in TOLERANCE.items():
        tolerance = LOOSER.get((dtype, name), tolerance)
        for step, leaves in like_optax(OURS[name], getattr(torch, dtype), in_place).items():
            expected = NUMBERS[dtype][name][step]
            assert leaves.keys() == expected.keys()
            for at, (path, leaf) in enumerate(leaves.items()):
                *elements, total = digest(leaf.numpy(), at)
                where = f"{path} after {step} steps in {dtype}"
                largest = float(leaf.abs().max())
                norm = float(leaf.double().norm())
                np.testing.assert_allclose(elements, expected[path][:3], 0, tolerance * largest, err_msg=where)
                np.testing.assert_allclose(total, expected[path][3], 0, tolerance * norm, err_msg=where)


def test_every_number_is_of_a_case() -> None:
    assert set(OPTAX) == set(NUMBERS["float32"]) == set(NUMBERS["float64"])


def test_the_numbers_are_those_of_optax() -> None:
    """Where it is installed: see make_optax_numbers.py."""
    optax = pytest.importorskip("optax")
    if optax.__version__ != NUMBERS["optax"]:
        pytest.skip(f"the numbers are of Optax {NUMBERS['optax']}, installed is {optax.__version__}")
    for name, case in OPTAX.items():
        for step, leaves in run(case, "float32").items():
            for path, shown in leaves.items():
                np.testing.assert_allclose(shown, NUMBERS["float32"][name][step][path], 1e-5, 1e-5, err_msg=name)
