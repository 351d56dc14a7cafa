"""World size 1: our step over the plain compiled module's, and how much of the device's matrix rate it reaches.

    MFU          = FLOPs of a token * tokens/s / FLOP/s of a large bf16 matrix product, measured
    (`ya.planner.calibrate`) of a token   = 6 P + 12 L H D S    forward and backward; causal: 6 P + 6 L H D S; see
    `flops.per_token`

P: parameters in matrices, L layers, H query heads, D head dim, S sequence length. Recomputation, of which there is
none here, would not count. Both contenders train the same memory in turn (`plain`), and both report the norm of the
gradient.

The peer is the same Llama as a plain nn.Module, which copies its gradients to fp32; ours refreshes the bf16 copy.
Blocks are compiled once for both, embedding, head and loss eager on both. Steps are those of `gpu`.

`calibrate`: what this device reaches, by `ya.planner.calibrate`, and which attention kernels torch takes on it.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import yafsdp_fn as ya
from train.bench.cuda import gpu, sides
from train.bench.cuda.emulated import Report
from train.bench.cuda.gpu import Contender, Place, Setting, shown, turns
from train.bench.cuda.sides import Plain
from train.bench.report import ratios
from train.running import flops

SEQS = (4096, 8192)
ROUNDS = 7


MODELS = {"1b": Place("llama3.2-1b", None, max(SEQS)), "8b": Place("llama3-8b", 16, max(SEQS))}
"""8B with 16 of its 32 layers: at 18 bytes a parameter (fp32 master, two moments, gradients; bf16 copy) all of it is
134.6 GiB before activations. On 80 GB fewer still: see `fit`."""
PLAIN_BYTES = 2
"""A parameter, which the plain module needs beyond ours: its bf16 gradients, until they are copied into the shards."""


def fit(setting: Setting, name: str) -> gpu.Fit:
    """The layers that both contenders have at both lengths: as many as the plain module fits at the longer one."""
    place = MODELS[name]

    def needs(config: Any) -> int:
        plan = place.planned(setting, config, ya.schedules.zero3())
        return plan.peak_bytes + PLAIN_BYTES * int(config.num_parameters)

    return place.fit(setting, needs)


def run(setting: Setting, report: Report, name: str) -> None:
    """The model called `name`, at both lengths."""
    model = MODELS[name].model
    fitting = fit(setting, name)
    config = setting.config(model, fitting.layers)
    held = sides.build(config, ya.mesh(device=setting.device), setting, {"zero3": ya.schedules.zero3()})["zero3"]
    contenders: dict[str, Contender] = {"ours": held}
    found: dict[str, Any] = {"model": model, **fitting.words(), "compiled": setting.compiles}
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
    """Tells which goals are met: at most 1.01 of the plain module's step; 50% MFU for 8B at 8192."""
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


def calibrate(setting: Setting, report: Report) -> None:
    here = ya.planner.calibrate(device="cuda" if setting.device == "cuda" else "cpu")
    report({"cluster": dataclasses.asdict(here)})
    found = {f"{name}, {tokens}": attention(setting, name, tokens) for name in MODELS for tokens in SEQS}
    report({"cluster": dataclasses.asdict(here), "attention backend": found})


def attention(setting: Setting, model: str, tokens: int) -> str:
    """The backend of scaled dot product attention as the model's blocks call it, in training."""
    config, seq = setting.config(*MODELS[model][:2]), setting.seq(tokens)

    def heads(count: int) -> torch.Tensor:
        shape = (1, seq, count, config.head_dim)
        return torch.randn(shape, dtype=setting.compute, device=setting.device).transpose(1, 2).requires_grad_()

    q, k, v = heads(config.heads), heads(config.kv_heads), heads(config.kv_heads)
    choice: int = torch._fused_sdp_choice(
        q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True, enable_gqa=config.kv_heads < config.heads
    )
    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=config.kv_heads < config.heads)  # it runs
    return SDPBackend(choice).name
