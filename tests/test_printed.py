"""What is data prints as data in a terminal: optimizers, steps, schedules, parameters, states, programs, proofs."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import yafsdp_fn as ya
from tests.harness import failing
from tests.harness.pool import on_ranks
from tests.program.test_program import measured
from tests.program.traces import cut, model

PROGRAM = ya.schedules.zero3()(measured(model(3, 2)))
PIPELINE = ya.schedules.one_f_one_b()(cut(measured(model(4, 2)), (0, 1)))


@pytest.mark.parametrize(
    ("made", "printed"),
    [
        (ya.schedules.zero3(), "zero3()"),
        (ya.schedules.hpz(4, prefetch=2), "hpz(4, prefetch=2)"),
        (ya.schedules.one_f_one_b(ya.schedules.zero3(remat="all")), "one_f_one_b(zero3(remat='all'))"),
        (ya.schedules.zero2(remat=ya.schedules.remat.every(2)), "zero2(remat=every(2))"),
        (ya.params.initializers.normal(0.5), "normal(0.5)"),
        (ya.params.initializers.ones, "constant(1.0)"),
        (ya.optim.adamw(3e-4), "GradientTransformation(Adam(b1=0.9, b2=0.999, eps=1e-08), Decay(weight_decay=0.0001, "
         "mask=None), Scale(by=-0.0003))"),
        (ya.Param((3, 4), torch.bfloat16), "Param(shape=(3, 4), dtype=torch.bfloat16, init=normal(0.02), "
         "split=(), compute=None, reduce=None, wire=Wire(gather=None, reduce=None))"),
        (ya.schedules.verify(PROGRAM.with_ops(PROGRAM.ops))[3], repr(PROGRAM.ops[3])),
    ],
)  # fmt: skip
def test_it_prints_as_what_it_was_made_of(made: object, printed: str) -> None:
    assert repr(made) == printed


def test_no_optimizer_prints_an_address() -> None:
    rate = ya.optim.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    pair = (lambda params: (), lambda updates, state, params=None: (updates, state))
    some = [
        ya.optim.adamw(rate, mask=lambda path, param: True),
        ya.optim.as_transformation(pair),
        ya.optim.GradientTransformation(*pair),
        ya.optim.assume_elementwise(pair),
        ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.muon(0.02, others=ya.optim.adamw(3e-4))),
        ya.optim.contrib.schedule_free_adamw(1e-3),
    ]
    for tx in some:
        assert repr(tx).startswith("GradientTransformation(") and " at 0x" not in repr(tx), repr(tx)
    assert "ClipByGlobalNorm(max_norm=1.0)" in repr(some[-2])


def test_a_schedule_is_called_as_before() -> None:
    schedule = ya.schedules.zero3(prefetch=2)
    assert schedule(PROGRAM.trace) == schedule(trace=PROGRAM.trace)
    assert ya.schedules.zero3.__name__ == "zero3"
    assert (ya.schedules.zero3.__doc__ or "").startswith("ZeRO-3")
    with pytest.raises(TypeError, match="prefetsch"):
        ya.schedules.zero3(prefetsch=2)


def test_a_step_prints_its_arguments() -> None:
    step = ya.train_step(failing.loss, ya.optim.sgd(0.1), schedule=ya.schedules.zero3(prefetch=2), microbatches=4)
    tx = "GradientTransformation(Scale(by=-0.1))"
    assert repr(step) == f"train_step({failing.loss.__name__}, {tx}, schedule=zero3(prefetch=2), microbatches=4)"
    assert "schedule=default_schedule, " in repr(ya.train_step(failing.loss, ya.optim.sgd(0.1)))


def test_a_program_is_a_sequence_of_its_ops() -> None:
    assert (len(PROGRAM), list(PROGRAM), PROGRAM[-1]) == (len(PROGRAM.ops), list(PROGRAM.ops), PROGRAM.ops[-1])
    assert len(PIPELINE) == sum(map(len, PIPELINE.stages))
    assert repr(PIPELINE).startswith("<program of 2 stages, ")
    with pytest.raises(TypeError, match=r"program\.by_stage\[0\]"):
        _ = PIPELINE[3]


def test_a_proof_is_said_of_the_program_that_was_proved_and_of_no_other() -> None:
    program = PROGRAM.with_ops(PROGRAM.ops)
    assert "proved" not in repr(program)
    assert re.fullmatch(r"<program of \d+ ops: .*; proved: \d+ ops, \d+ rules>", repr(ya.verify(program)))
    assert program == PROGRAM
    assert hash(program) == hash(PROGRAM)
    assert "proved" not in repr(program.with_ops(program.ops[1:])) + repr(program.with_trace(program.trace))
    assert "proved" not in repr(ya.Program.from_json(program.to_json()))


@on_ranks(2)
def test_a_state_says_names_shapes_dtypes_and_bytes(mesh: Any) -> None:
    params = {"layers": ya.Stacked({"w": ya.Param((3, 4, 6)), "b": ya.Param((3, 4))}), "head": ya.Param((5, 4))}
    state = ya.init(params, ya.optim.adamw(1e-3), mesh=mesh)
    with pytest.raises(TypeError, match=r"ya\.unshard makes whole tensors of it"):
        _ = state.params["layers"]["w"].shape
    assert repr(state).splitlines() == [
        "ShardedState(step=0, seed=0) on the mesh (shard=2)",
        "  head: head (5, 4); local shards torch.float32 (16,)",
        "  layers: b (3, 4), w (3, 4, 6); local shards torch.float32 (3, 16)",
        "  parameters: 256 bytes here, 416 in all; optimizer: 516 here",
    ]
    layers, head = (repr(state.params[name]) for name in ("layers", "head"))
    assert layers == "Sharded('layers', b (3, 4), w (3, 4, 6); local shards torch.float32 (3, 16))"
    assert head == "Sharded('head', head (5, 4); local shards torch.float32 (16,))"


@pytest.mark.parametrize("name", ["planner", "schedules", "optim", "timeline", "params", "checkpoint"])
def test_dir_of_a_namespace_shows_public_names_alone(name: str) -> None:
    module = importlib.import_module(f"yafsdp_fn.{name}")
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, each) for each in dir(module))


USER = """
import torch
import yafsdp_fn as ya

def block(x: torch.Tensor, w: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
    return ya.linear(x, w["up"]), None

schedule = ya.schedules.zero3(prefetch=2)
reveal_type(ya.__version__)
reveal_type(schedule)
reveal_type(ya.optim.adamw(1e-3))
reveal_type(ya.init({"w": ya.Param((3, 4))}, ya.optim.adamw(1e-3)))
ya.schedules.zero3(prefetch="two")
"""


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(ya.__file__).parent / "py.typed").is_file()


@pytest.mark.nightly
def test_mypy_sees_the_types_from_outside(tmp_path: Path) -> None:
    """Of an installed package: not a line of the repository's settings, nor its files as sources."""
    root = Path(__file__).parents[1]
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "yafsdp_fn").symlink_to(root / "yafsdp_fn")
    options = ["--strict", "--no-incremental", "--config-file=", "--cache-dir=/dev/null", "user.py"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "MYPYPATH": ""}
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", *options], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    said = ran.stdout
    assert said.count("error:") == 1 and '"prefetch" to "zero3" has incompatible type "str"' in said, said
    for of_type in ('"str"', "GradientTransformation", "ShardedState", "Program"):
        assert re.search(rf"Revealed type is .*{of_type}", said), said


WEIGHTS = {"layers": ya.Stacked({"w": ya.Param((2, 16, 16))})}


def loss(params: Any, batch: Any) -> Any:
    return ya.scan(lambda x, w: (x + ya.linear(x, w["w"]), None), batch, params["layers"])[0].square().mean()


def test_what_is_large_prints_in_a_line() -> None:
    trace = ya.planner.trace(loss, WEIGHTS, torch.empty(4, 16), ranks=8, tx=ya.optim.sgd(0.1))
    plan = ya.planner.Plan.of(ya.schedules.zero3()(trace), "a100-80g")
    lazy = ya.Lazy((2, 3), torch.float32, lambda layer: torch.zeros(3))
    both = ya.planner.compare({"zero3": plan, "again": plan.timeline})
    found = ya.planner.search(trace, "a100-80g", runners_up=1)
    step = re.escape(repr(plan)[5:].partition(" a step")[0])
    for printed, pattern in {
        repr(plan.timeline): rf"Timeline\('simulated on a100-80g, 8 ranks': {step}, \d+ ops\)",
        repr(both): r"Comparison\(zero3, again\)",
        repr(found): rf"Found\({re.escape(str(found).splitlines()[0])}\)",
        repr(lazy): r"Lazy\(shape=\(2, 3\), dtype=torch\.float32, split=\(\), in_memory=False, .*\)",
        repr(trace.visits[0].cost): r"Cost\(flops=\d+, bwd_flops=\d+, kept_bytes=\d+, \.\.\.\)",
    }.items():
        assert re.fullmatch(pattern, printed), printed
    assert len(repr([plan, plan.program, plan.timeline, trace, both, found])) < 1200
    plain = ya.PlainState.create(WEIGHTS, ya.optim.adamw(1e-3))
    assert repr(plain) == "PlainState(step=0, seed=0: layers.w)"


def test_a_printed_proof_ends_with_what_was_proved() -> None:
    program = PROGRAM.with_ops(PROGRAM.ops)
    before = str(program).splitlines()
    *lines, last = str(ya.verify(program)).splitlines()
    assert lines == before
    assert re.fullmatch(r"proved: \d+ ops, \d+ rules", last)
    assert re.fullmatch(r"proved: \d+ ops, \d+ rules", str(ya.verify(PIPELINE)).splitlines()[-1])
