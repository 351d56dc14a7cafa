"""What the package shows of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yafsdp_fn as ya

ROOT = Path(__file__).resolve().parents[1]


def test_dir_shows_public_names_alone_and_each_is_there() -> None:
    shown = [name for name in dir(ya) if not (name.startswith("__") and name.endswith("__"))]
    assert sorted(shown) == sorted(ya.__all__) and not any(name.startswith("_") for name in shown)
    assert all(getattr(ya, name) is not None for name in shown)


def test_the_face_is_small() -> None:
    """A user learns the names of `ya` by heart; the others are found by the namespace that they belong to."""
    as_in_jax = {"psum", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute", "axis_index", "axis_size"}
    assert len(set(ya.__all__) - as_in_jax) <= 53 and as_in_jax <= set(ya.__all__)
    assert {"errors", "params", "planner", "schedules", "timeline", "optim", "checkpoint"} <= set(ya.__all__)


def test_importing_brings_no_compiler_along() -> None:
    """It takes torch a second, in every rank and every command."""
    code = "import sys, yafsdp_fn, models.llama; print('torch._dynamo' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.strip() == "False"
