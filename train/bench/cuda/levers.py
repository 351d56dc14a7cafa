"""Levers, on and off, where each can show: on one rank, or on rank 0 of a few on a network that takes no time.

A lever is two variants of one step (`gpu`'s, whose blocks are compiled where the name says so); all variants of a
place are interleaved, and below 1 is what the lever buys. A variant that cannot be built or run here is named with its
reason.

Registered memory is no row: its collectives are NCCL's, between GPUs, and there is one. Tests marked gpu register it.
"""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import torch

import yafsdp_fn as ya
from train.bench.cuda import gpu, sides
from train.bench.cuda.emulated import Report
from train.bench.cuda.gpu import Contender, Place, Setting, shown, turns
from train.bench.cuda.sides import How
from train.bench.report import ratios

ROUNDS = 6
CAPTURED = 4
"""Steps after which graphs are captured."""


class Variant(NamedTuple):
    how: How
    remat: bool = False


class Lever(NamedTuple):
    place: Place
    on: Variant
    off: Variant


FEW, ONE = Place("llama2-7b", 8, 2048, 8), Place("llama3.2-1b", None, 4096, 1)
PLAIN, EAGER, COMPILED = How(), How(compiled=False), How(compiled=True)
BF16 = torch.bfloat16

LEVERS = {
    "gradients in bf16": Lever(FEW, Variant(How(False, BF16)), Variant(EAGER)),
    "weight gradients straight into slots": Lever(
        FEW, Variant(How(False, BF16)), Variant(How(False, BF16, off=frozenset({"nolinear"})))
    ),
    "torch.compile of blocks": Lever(FEW, Variant(COMPILED), Variant(EAGER)),
    "CUDA graphs, recomputing": Lever(FEW, Variant(How(False, graphs=True), True), Variant(EAGER, True)),
    "CUDA graphs, recomputing, compiled": Lever(FEW, Variant(How(True, graphs=True), True), Variant(COMPILED, True)),
    "two layers as one, compiled": Lever(FEW, Variant(How(True, unroll=2)), Variant(COMPILED)),
    "fused optimizer": Lever(ONE, Variant(PLAIN), Variant(How(fused=False))),
    "optimizer and working copy in one pass": Lever(ONE, Variant(PLAIN), Variant(How(off=frozenset({"twopasses"})))),
}


def run(setting: Setting, report: Report) -> None:
    """Every place with its levers."""
    found: dict[str, Any] = {"fits": {}, "not run": {}, "step_ms": {}, "on over off": {}}
    for place in (FEW, ONE):
        measure({name: lever for name, lever in LEVERS.items() if lever.place == place}, setting, found)
        found["below 1%"] = [lever for lever, each in found["on over off"].items() if each["median"] > 0.99]
        report(found)
        gc.collect()
        setting.empty_cache()


def variants_at(place: Place) -> list[Variant]:
    """All that take turns there, each once."""
    levers = [lever for lever in LEVERS.values() if lever.place == place]
    return list(dict.fromkeys(variant for lever in levers for variant in (lever.on, lever.off)))


def fit(setting: Setting, place: Place) -> gpu.Fit:
    """The layers of all variants of a place, each with a state of its own, at once; even, for those of two as one."""

    def needs(config: Any) -> int:
        plans = [(how, planned(setting, place, config, how, remat)) for how, remat in variants_at(place)]
        own = sum(gpu.beside(plan) for how, plan in plans if how.graphs)  # graphs keep the memory that they ran in
        return gpu.together([plan] for _, plan in plans) + own

    return place.fit(setting, needs, every=2)


def planned(setting: Setting, place: Place, config: Any, how: How, remat: bool) -> Any:
    schedule = ya.schedules.zero3(remat=ya.schedules.remat.all if remat else ya.schedules.remat.none)
    return place.planned(setting, config, schedule, reduce=how.reduce, fused=how.fused, unroll=how.unroll)


def measure(levers: dict[str, Lever], setting: Setting, found: dict[str, Any]) -> None:
    """All variants of one place in turn; adds to `found`."""
    place = next(iter(levers.values())).place
    fitting = fit(setting, place)
    config = setting.config(place.model, fitting.layers)
    batch = setting.batch(config, place.seq)
    where = f"{place.model}, rank 0 of {place.ranks}"
    found["fits"][where] = fitting.words()
    variants = variants_at(place)
    names = {variant: words(variant) for variant in variants}
    contenders: dict[str, Contender] = {}
    with place.there():
        mesh = ya.mesh(device=setting.device)
        for variant, name in names.items():
            why = "CPU or a tiny model: not compiled" if setting.tiny and variant.how.compiled else ""
            try:
                if not why:
                    contenders[name] = one = built(variant, config, mesh, setting)
                    for _ in range(CAPTURED):
                        one.step(batch)
                    setting.synchronize()
            except Exception as error:  # one that this machine cannot run must not lose the others
                why = f"{type(error).__name__}: {error}"
                contenders.pop(name, None)
            if why:
                found["not run"][name] = why
        samples = turns(contenders, batch, setting, rounds=2 if setting.tiny else ROUNDS)
    found["step_ms"][where] = _shown(samples)
    for lever, (_, on, off) in levers.items():
        if names[on] in samples and names[off] in samples:
            found["on over off"][lever] = ratios(samples[names[on]], samples[names[off]])


def _shown(samples: dict[str, list[float]]) -> dict[str, Any]:
    return {name: shown(each) for name, each in samples.items()}


def built(variant: Variant, config: Any, mesh: Any, setting: Setting) -> Contender:
    """A state of its own, and the step of the variant on it."""
    remat = ya.schedules.remat.all if variant.remat else ya.schedules.remat.none
    return sides.build(config, mesh, setting, {"zero3": ya.schedules.zero3(remat=remat)}, variant.how)["zero3"]


def words(variant: Variant) -> str:
    """A variant's name: what it has and has not."""
    how, remat = variant
    found = [{None: "step", True: "compiled", False: "eager"}[how.compiled]]
    found += ["bf16 gradients"] * (how.reduce == BF16) + ["recomputing"] * remat + ["graphs"] * how.graphs
    found += [f"unroll {how.unroll}"] * (how.unroll > 1) + ["no fused optimizer"] * (not how.fused)
    return ", ".join(found + sorted(how.off))
