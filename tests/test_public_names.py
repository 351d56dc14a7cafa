"""What the package shows of itself."""

from __future__ import annotations

import re
import subprocess
import sys
from operator import attrgetter
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.harness.pages import ROOT
from tests.harness.small import one_rank
from tests.test_printed import WEIGHTS, loss
from yafsdp_fn.optim import adamw
from yafsdp_fn.util.foreign_names import MEANT

WIDE = ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16, accumulate=torch.float32)


def test_dir_shows_public_names_alone_and_each_is_there() -> None:
    shown = [name for name in dir(ya) if not (name.startswith("__") and name.endswith("__"))]
    assert sorted(shown) == sorted(ya.__all__)
    assert not any(name.startswith("_") for name in shown)
    assert all(getattr(ya, name) is not None for name in shown)


def test_the_face_is_small() -> None:
    """A user learns the names of `ya` by heart; the others are found by the namespace that they belong to."""
    as_in_jax = {"psum", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute", "axis_index", "axis_size"}
    assert len(set(ya.__all__) - as_in_jax) <= 53
    assert as_in_jax <= set(ya.__all__)
    assert {"errors", "params", "planner", "schedules", "timeline", "optim", "checkpoint"} <= set(ya.__all__)


def test_a_name_that_is_elsewhere_or_misspelt_is_named() -> None:
    meant = {
        "remat": "schedules.remat",
        "trace": r"optim\.trace or ya\.planner.trace",
        "adamw": "optim.adamw",
        "train_setp": "train_step",
    }
    for name, place in meant.items():
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'; did you mean ya\.{place}\?"):
            getattr(ya, name)
    with pytest.raises(AttributeError, match=r"no attribute 'unlike_all'$"):
        _ = ya.unlike_all
    assert not hasattr(ya, "__wrapped__")
    with pytest.raises(AttributeError) as misspelt:
        _ = ya.planner.simulat
    assert misspelt.value.name == "simulat" and misspelt.value.obj is ya.planner  # Python adds "did you mean" by these


def function_of_a_module() -> Any:
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    return ya.functionalize(torch.nn.Sequential(layers), "0")[1]


OBJECTS = {
    "tx": lambda: ya.optim.adamw(1e-3),
    "state": lambda: ya.init({"w": ya.Param((2,))}, mesh=one_rank()),
    "leaf": lambda: ya.init({"w": ya.Param((2,))}, mesh=one_rank()).params["w"],
    "model": function_of_a_module,
}


@pytest.mark.parametrize("name", sorted(MEANT))
def test_a_name_of_another_library_says_what_it_is_here(name: str) -> None:
    within, _, last = name.rpartition(".")
    space = ya
    if within:
        space = OBJECTS[within]() if within in OBJECTS else getattr(ya, within)
    with pytest.raises(AttributeError, match=rf"(no attribute '{last}'|\.{last}: .*); it is here: \w") as error:
        getattr(space, last)
    for path in re.findall(r"\bya((?:\.\w+)+)", str(error.value)):  # what it says is there
        assert attrgetter(path[1:])(ya) is not None
    for path in re.findall(r"torch\.func\.(\w+)", str(error.value)):
        assert callable(getattr(torch.func, path))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ya.optim.adamw(lr=1e-3), r"adamw\(lr=\.\.\.\): it is here learning_rate="),
        (lambda: ya.optim.adamw(1e-3, betas=(0.9, 0.95)), r"adamw\(betas=\.\.\.\): it is here b1="),
        (lambda: ya.optim.adamw(1e-3, (0.9, 0.95)), r"expected b1 and b2 in \[0, 1\) .* got Adam\(b1=\(0\.9, 0\.95\)"),
        (lambda: ya.optim.sgd(1e-3, betas=(0.9, 0.95)), "unexpected keyword argument 'betas'"),
        (lambda: ya.lora({}, r=8), r"lora\(r=\.\.\.\): it is here rank="),
        (lambda: ya.lora({}, 8, target_modules=["q_proj"]), r"lora\(target_modules=\.\.\.\): it is here where="),
        (lambda: ya.launch(print, ranks=2, nprocs=2), r"launch\(nprocs=\.\.\.\): its only keyword is ranks=, of forks"),
        (lambda: ya.launch(print, ranks=2, start_method="spawn"), "its only keyword is ranks=, of forks of this"),
        (lambda: ya.launch(print, ranks=2, lr=1e-3), r"those of the function go into it: .*partial\(train, lr=1e-3"),
    ],
)
def test_a_keyword_of_another_library_says_what_it_is_here(call: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        call()


def test_a_name_that_nobody_has_is_refused_as_before() -> None:
    with pytest.raises(AttributeError, match=r"module 'yafsdp_fn.checkpoint' has no attribute 'nothing'$"):
        _ = ya.checkpoint.nothing
    assert not hasattr(ya, "jit")
    assert not hasattr(ya.checkpoint, "restore")


WITHOUT_TORCH = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("torch", "optree", "einops", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.modules |= dict.fromkeys(("torch", "optree", "einops", "numpy"))  # as if they were not installed
sys.meta_path.insert(0, Blocked())
import yafsdp_fn as ya
import yafsdp_fn.schedules, yafsdp_fn.proof.verify, yafsdp_fn.planner.simulate, yafsdp_fn.planner.search
program = ya.Program.from_json(sys.stdin.read())
again = ya.schedules.zero3()(program.trace)
try:
    ya.train_step
except AttributeError as error:
    print(error)
seconds = ya.planner.simulate(again, "a100-80g").seconds
print(again == ya.verify(program), seconds, ya.planner.Plan.of(again, "a100-80g"))
"""


def test_programs_are_built_proved_and_planned_without_torch() -> None:
    """In a browser, say. To the same figures: they come from the same code."""
    trace = ya.planner.trace(loss, WEIGHTS, torch.empty(4, 16, device="meta"), ranks=8, precision=WIDE, tx=adamw(1e-3))
    program = ya.schedules.zero3()(trace)
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input=program.to_json(), capture_output=True, text=True, cwd=ROOT
    )
    seconds = ya.planner.simulate(program, "a100-80g").seconds
    said = "module 'yafsdp_fn' has no attribute 'train_step' without torch, which is not installed"
    expected = f"{said}\nTrue {seconds} {ya.planner.Plan.of(program, 'a100-80g')}\n"
    assert ran.stderr == ""
    assert ran.stdout == expected


CORE = """
import sys
import yafsdp_fn as ya
ours = lambda: {name for name in sys.modules if name.startswith("yafsdp_fn")}
assert ours() == {"yafsdp_fn", "yafsdp_fn.util", "yafsdp_fn.util.late_names"}, ours()  # which finds the others
for verb in ("init", "shard", "mesh", "scan", "train_step", "grad", "linear", "verify"):
    getattr(ya, verb)
print(sorted({name.split(".")[1] for name in ours() - {"yafsdp_fn"}}))
print(ya.formats.Scaled().name)
import models.llama, yafsdp_fn.timeline
print([name for name in ("torch._dynamo", "matplotlib") if name in sys.modules])
"""


def test_the_core_loads_nothing_that_stands_beside_it() -> None:
    """What does is there when it is asked for; no compiler comes along, which takes torch a second in every rank and
    every command, and nothing that draws."""
    ran = subprocess.run([sys.executable, "-c", CORE], capture_output=True, text=True, cwd=ROOT)
    core = ["api", "communication", "nn", "optim", "params", "program", "proof", "runtime", "schedules", "util"]
    assert ran.stderr == ""
    assert ran.stdout == f"{core}\nint8/64\n[]\n"
