"""World size 1: our step over the plain compiled module's, and how much of the device's matrix rate it reaches.

    MFU          = FLOPs of a token * tokens/s / FLOP/s of a large bf16 matrix product, measured (`ya.calibrate`)
    of a token   = 6 P + 12 L H D S    forward and backward; causal: 6 P + 6 L H D S; see `train.flops`

P: parameters in matrices, L layers, H query heads, D head dim, S sequence length. Recomputation, of which there is
none here, would not count. Both contenders train the same memory in turn (`plain`), and both report the norm of the
gradient.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

import torch

import yafsdp_fn as ya
from train.bench.cuda import fits, ours
from train.bench.cuda.emulated import Report
from train.bench.cuda.plain import Plain
from train.bench.cuda.setting import Setting
from train.bench.cuda.turns import Contender, shown, turns
from train.bench.report import ratios
from train.running import flops

SEQS = (4096, 8192)
ROUNDS = 7


class Model(NamedTuple):
    """layers: None for all of them"""

    name: str
    layers: int | None


MODELS = {"1b": Model("llama3.2-1b", None), "8b": Model("llama3-8b", 16)}
"""8B with 16 of its 32 layers: at 18 bytes a parameter (fp32 master, two moments, gradients; bf16 copy) all of it is
134.6 GiB before activations. On 80 GB fewer still: see `fit`."""
PLAIN_BYTES = 2
"""A parameter, which the plain module needs beyond ours: its bf16 gradients, until they are copied into the shards."""


def fit(setting: Setting, name: str) -> fits.Fit:
    """The layers that both contenders have at both lengths: as many as the plain module fits at the longer one."""
    model, schedule = MODELS[name], ya.schedules.zero3()

    def needs(layers: int) -> int:
        config = setting.config(model.name, layers)
        plan = fits.planned(config, setting.seq(max(SEQS)), schedule)
        return plan.peak_bytes + PLAIN_BYTES * config.num_parameters

    return fits.layers(setting.config(*model).layers, needs, setting.budget)


def run(setting: Setting, report: Report, name: str) -> None:
    """The model called `name`, at both lengths."""
    model = MODELS[name]
    fitting = fit(setting, name)
    config = setting.config(model.name, fitting.layers)
    held = ours.build(config, ya.mesh(device=setting.device), setting, {"zero3": ya.schedules.zero3()})["zero3"]
    contenders: dict[str, Contender] = {"ours": held}
    found: dict[str, Any] = {"model": model.name, **fitting.words(), "compiled": setting.compiles}
    found["parameters"] = config.num_parameters
    for tokens in SEQS:
        batch, seq = setting.batch(config, tokens), setting.seq(tokens)
        if "plain" not in contenders:
            held.step(batch)  # makes what a state makes in its first step
            contenders["plain"] = Plain(config, held.held, setting)
        samples = turns(contenders, batch, setting, rounds=2 if setting.tiny else ROUNDS)
        found[f"seq {tokens}"] = {
            "step_ms": {each: shown(times) for each, times in samples.items()},
            "ours over plain": ratios(samples["ours"], samples["plain"]),
            **{each: rates(config, seq, statistics.median(times), setting) for each, times in samples.items()},
        }
        found["goals"] = {**found.get("goals", {}), **goals(found[f"seq {tokens}"], name, tokens)}
        if setting.device == "cuda":
            found["peak allocated, GiB"] = torch.cuda.max_memory_allocated() / 2**30
        report(found)


def goals(found: dict[str, Any], name: str, tokens: int) -> dict[str, bool]:
    """At most 1.01 of the plain module's step; 50% MFU for 8B at 8192."""
    out = {f"seq {tokens}: at most 1.01 of plain": found["ours over plain"]["median"] <= 1.01}
    if (name, tokens) == ("8b", 8192) and "MFU" in found["ours"]:
        out[f"seq {tokens}: 50% MFU"] = found["ours"]["MFU"] >= 0.5
    return out


def rates(config: Any, seq: int, seconds: float, setting: Setting) -> dict[str, float]:
    """Tokens/s, FLOP/s and MFU of a step of one sequence."""
    whole = flops.per_token(config, seq)
    causal = whole - 6 * config.layers * config.heads * config.head_dim * seq
    out = {"tokens/s": seq / seconds, "FLOP/s": whole * seq / seconds}
    if setting.matmul_flops is not None:
        out["MFU"] = whole * seq / seconds / setting.matmul_flops
        out["MFU, causal"] = causal * seq / seconds / setting.matmul_flops
    peak = flops.peak(torch.device(setting.device))
    if peak is not None:
        out["MFU of the data sheet"] = whole * seq / seconds / peak
    return out
