"""Levers, on and off: rank 0 of a few on a network that takes no time, so that what is seen is compute and the host.

A row is two variants of one step, all of them interleaved; below 1 is what the lever buys. A variant that cannot be
built or run here is named with its reason.

Registered memory is no row: its collectives are NCCL's, between GPUs, and there is one. Tests marked gpu register it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import yafsdp_fn as ya
from train.bench.cuda import network, ours
from train.bench.cuda.emulated import Report
from train.bench.cuda.ours import How
from train.bench.cuda.setting import Setting
from train.bench.cuda.turns import Contender, shown, turns
from train.bench.report import ratios

MODEL, LAYERS, SEQ, RANKS = "llama2-7b", 8, 2048, 8
ROUNDS = 6


class Variant(NamedTuple):
    how: How
    remat: bool = False


EAGER, COMPILED, BF16 = How(compiled=False), How(compiled=True), How(compiled=False, reduce=torch.bfloat16)

LEVERS: dict[str, tuple[Variant, Variant]] = {
    "gradients in bf16": (Variant(BF16), Variant(EAGER)),
    "weight gradients straight into slots": (Variant(BF16), Variant(How(False, torch.bfloat16, linear=False))),
    "fused optimizer": (Variant(EAGER), Variant(How(False, fused=False))),
    "torch.compile of blocks": (Variant(COMPILED), Variant(EAGER)),
    "CUDA graphs, recomputing": (Variant(How(False, graphs=True), True), Variant(EAGER, True)),
    "CUDA graphs, recomputing, compiled": (Variant(How(True, graphs=True), True), Variant(COMPILED, True)),
    "two layers as one, compiled": (Variant(How(True, unroll=2)), Variant(COMPILED)),
}
"""lever -> (on, off)"""


def run(setting: Setting, report: Report) -> None:
    config, found = setting.config(MODEL, LAYERS), dict[str, Any]()
    batch = setting.batch(config, SEQ)
    variants = list(dict.fromkeys(each for pair in LEVERS.values() for each in pair))
    contenders: dict[str, Contender] = {}
    names: dict[Variant, str] = {}
    with ya.emulate(network.free(), RANKS):
        mesh = ya.mesh(device=setting.device)
        for variant in variants:
            names[variant] = name = words(variant)
            why = "blocks are not compiled on the CPU here" if setting.tiny and variant.how.compiled else ""
            try:
                if not why:
                    contenders[name] = built(variant, config, mesh, setting)
                    for _ in range(4):  # graphs are captured in the third
                        contenders[name].step(batch)
                    setting.synchronize()
            except Exception as error:  # one that this machine cannot run must not lose the others
                why = f"{type(error).__name__}: {error}"
                contenders.pop(name, None)
            if why:
                found.setdefault("not run", {})[name] = why
        samples = turns(contenders, batch, setting, rounds=2 if setting.tiny else ROUNDS)
    found["step_ms"] = {name: shown(each) for name, each in samples.items()}
    found["on over off"] = {
        lever: ratios(samples[names[on]], samples[names[off]])
        for lever, (on, off) in LEVERS.items()
        if names[on] in samples and names[off] in samples
    }
    found["below 1%"] = [lever for lever, each in found["on over off"].items() if each["median"] > 0.99]
    report(found)


def built(variant: Variant, config: Any, mesh: Any, setting: Setting) -> Contender:
    remat = ya.remat.all if variant.remat else ya.remat.none
    return ours.build(config, mesh, setting, {"zero3": ya.schedules.zero3(remat=remat)}, variant.how)["zero3"]


def words(variant: Variant) -> str:
    """What a variant has and has not, as its name."""
    how, remat = variant
    found = ["compiled" if how.compiled else "eager"]
    found += ["bf16 gradients"] * (how.reduce == torch.bfloat16) + ["recomputing"] * remat + ["graphs"] * how.graphs
    found += [f"unroll {how.unroll}"] * (how.unroll > 1) + ["no fused optimizer"] * (not how.fused)
    return ", ".join(found + ["F.linear"] * (not how.linear))
