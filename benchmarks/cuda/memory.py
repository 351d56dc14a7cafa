"""Peak memory of a step against the planner's (`ya.planner.predict_memory`), which must be within `TOLERANCE` of it.

On CUDA the allocator's peak over a step, without what was there before the state was made; on the CPU the peak of live
tensors under torch's profiler. What the allocator rounds up, CUDA's context and workspaces are left out. Blocks are not
compiled: the planner reads the graph that autograd saves, and a compiler saves another one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import yafsdp_fn as ya
from benchmarks.contenders import Batch
from benchmarks.counting import tensor_peak
from benchmarks.cuda import gpu, sides
from benchmarks.cuda.emulated import Report
from benchmarks.cuda.gpu import Place, Setting
from benchmarks.cuda.sides import Ours

TOLERANCE = 0.03
WARMUP = 3


class Case(NamedTuple):
    place: Place
    remat: ya.schedules.remat.Remat = ya.schedules.remat.none


CASES = {
    "1B, seq 8192": Case(Place("llama3.2-1b", None, 8192)),
    "8B, 16 layers or fewer, seq 8192, all recomputed": Case(Place("llama3-8b", 16, 8192), ya.schedules.remat.all),
    "7B, rank 0 of 64, seq 2048": Case(Place("llama2-7b", None, 2048, 64)),
}


def run(setting: Setting, report: Report, *names: str) -> None:
    """The cases called `names`, by default all."""
    found: dict[str, Any] = {"tolerance": TOLERANCE}
    for name in names or CASES:
        case = CASES[name]
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # emulating makes one
        with case.place.there():
            found[name] = compared(case, setting)
            gc.collect()
        setting.empty_cache()
        goals = found.setdefault("goals", {})
        goals[f"{name}: within {TOLERANCE:.0%} of the plan"] = abs(found[name]["error"]) <= TOLERANCE
        report(found)


def fit(setting: Setting, case: Case) -> gpu.Fit:
    """The layers of a case."""
    place, schedule = case.place, ya.schedules.zero3(remat=case.remat)
    return place.fit(setting, lambda config: place.planned(setting, config, schedule).peak_bytes)


def compared(case: Case, setting: Setting) -> dict[str, Any]:
    """Bytes predicted and measured, and the items of the prediction."""
    fitting = fit(setting, case)
    config = setting.config(case.place.model, fitting.layers)
    mesh, batch = ya.mesh(device=setting.device), setting.batch(config, case.place.seq)
    schedule = {"zero3": ya.schedules.zero3(remat=case.remat)}

    def build() -> Ours:
        return sides.build(config, mesh, setting, schedule)["zero3"]

    one = build()
    program = one.train_step.lower(one.held.state, batch)
    predicted = ya.planner.predict_memory(program, device=setting.device)
    del one
    gc.collect()
    real = measured(build, batch, setting)
    return {
        "fits": fitting.words(),
        "predicted_bytes": predicted.peak_bytes,
        "measured_bytes": real,
        "error": predicted.peak_bytes / real - 1.0,
        "at": predicted.at,
        "items": {item: size for item, size in predicted.itemised().items() if size},
    }


def measured(build: Callable[[], Ours], batch: Batch, setting: Setting) -> int:
    """The peak of a step after the first few, of a state that is made here."""
    if setting.device == "cpu":

        def stepper() -> Callable[[int], object]:
            contender = build()
            return lambda number: contender.step(batch)

        return tensor_peak(stepper, torch.device("cpu"), WARMUP)
    setting.empty_cache()
    before = torch.cuda.memory_allocated()
    contender = build()
    for _ in range(WARMUP):
        contender.step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    contender.step(batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
