"""The timed steps of `make gpu-check`: a model beside its peers, single operations beside torch's.

Contenders are only ever compared inside one step, where they take turns. Times are medians of events on the device.
"""

from __future__ import annotations

import cProfile
import dataclasses
import functools
import gzip
import io
import json
import pstats
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_steps import Here, Say, gib, main
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import yafsdp_fn as ya
from benchmarks.cuda import gpu, sides
from models.parts import rotary as rotations
from train.running import flops
from yafsdp_fn.nn import linear
from yafsdp_fn.nn.linear import destination
from yafsdp_fn.runtime.slots import weight_leaf
from yafsdp_fn.util.on_gpu import vector_kernels

BF16 = torch.bfloat16


# ---- step: perf, compiled


def setting_of(here: Here, compiled: bool = False) -> gpu.Setting:
    return gpu.Setting(here.device, budget=gpu.here() if here.cuda else None, compiled=compiled)


class Contenders:
    """A 1B Llama of ours, as a plain module and under FSDP2, on one rank; each that can be built."""

    def __init__(self, here: Here, say: Say, compiled: bool) -> None:
        self.here, self.say, self.setting = here, say, setting_of(here, compiled)
        self.config = self.setting.config("llama3.2-1b")
        self.rows, self.seq = here.size(4, 2), self.setting.seq(2048)
        self.batch = self.setting.batch(self.config, 2048, self.rows)
        self.made: dict[str, Any] = {}
        mesh = ya.mesh(device=here.device)
        schedule = ya.schedules.zero3()
        say(parameters=self.config.num_parameters, layers=self.config.layers, rows=self.rows, seq=self.seq)

        def ours() -> Any:
            return sides.build(self.config, mesh, self.setting, {"zero3": schedule})["zero3"]

        def fsdp2() -> Any:
            module = sides.sharded(self.config, mesh, self.setting, recompute=0, separate=False)
            return sides.Sharded(module, sides.Fsdp2(1, False))

        peak = self.add("ours", ours)
        if "ours" in self.made:
            if not compiled and here.cuda:
                plan = gpu.planned(self.config, self.seq, schedule, rows=self.rows).peak_bytes
                say.expect("peak over the plan, from 1", abs(peak / plan - 1), 0.03)
            self.add("plain", lambda: sides.Plain(self.config, self.made["ours"].held, self.setting))
        self.add("fsdp2", fsdp2)

    def add(self, name: str, make: Callable[[], Any]) -> int:
        """Builds a contender and takes some steps; returns the most bytes that it had allocated."""
        most = 0
        with self.say.part(f"build {name}"):
            before, begun = self.here.allocated(), time.time()
            made = make()
            for _ in range(3):
                made.step(self.batch)
            self.here.sync()
            held = self.here.allocated() - before
            most = self.here.peak(lambda: made.step(self.batch)) - before
            self.made[name] = made
            seconds = round(time.time() - begun, 1)
            self.say(contender=name, built_s=seconds, held_gib=gib(held), peak_gib=gib(most))
        return most

    def rates(self, seconds: float, batch: Any) -> dict[str, Any]:
        """Rates of a step; MFU is of the data sheet's dense bf16, and counts attention without its causal half."""
        tokens, length = batch["tokens"].numel(), batch["tokens"].shape[1]
        rate = flops.per_token(self.config, length) * tokens / seconds
        peak = flops.peak(torch.device(self.here.device))
        found = {"ms": round(1e3 * seconds, 3), "tokens/s": round(tokens / seconds), "TFLOP/s": round(rate / 1e12, 1)}
        return {**found, "MFU": round(rate / peak, 4) if peak else None}

    def timed(self, what: str, batch: Any) -> dict[str, float]:
        """Steps in turn; returns the median seconds of each contender."""
        samples = gpu.turns(self.made, batch, self.setting, rounds=self.here.size(5, 1), warmup=1)
        medians = {name: statistics.median(times) for name, times in samples.items()}
        rates = {name: self.rates(seconds, batch) for name, seconds in medians.items()}
        over = {name: round(medians["ours"] / s, 4) for name, s in medians.items()} if "ours" in medians else {}
        spread = {name: [round(1e3 * min(t), 2), round(1e3 * max(t), 2)] for name, t in samples.items()}
        words = ", ".join(f"{name} {row['ms']} ms (MFU {row['MFU']})" for name, row in rates.items())
        short = f"{what}: {words}; ours over {over}"
        self.say(part=what, rates=rates, ours_over=over, min_max_ms=spread, short=short)
        return medians

    def host(self) -> None:
        """What the host takes: steps of so few tokens that nothing else matters."""
        few = self.setting.batch(self.config, 64, 1)
        few = {key: value[:, :16].contiguous() for key, value in few.items()}
        medians = self.timed("step of 1 x 16, the host's", few)
        if {"ours", "plain"} <= medians.keys() and self.here.cuda:
            layer = 1e6 * (medians["ours"] - medians["plain"]) / self.config.layers
            self.say.expect("host time a layer over the plain module's, us", layer, 250)
        seen = cProfile.Profile()
        seen.enable()
        for _ in range(3):
            self.made["ours"].step(few)
        seen.disable()
        self.here.sync()
        text = io.StringIO()
        pstats.Stats(seen, stream=text).sort_stats("tottime").print_stats(30)
        print(text.getvalue(), flush=True)  # the main thread's: backward runs in another one


def compiled(here: Here, say: Say) -> None:
    """The contenders with compiled blocks."""
    them = Contenders(here, say, compiled=True)
    with say.part("compiled"):
        them.timed(f"compiled, step of {them.rows} x {them.seq}", them.batch)


def perf(here: Here, say: Say) -> None:
    """The contenders eager: at many tokens, at few, the host alone, and a step of each under the profiler."""
    them = Contenders(here, say, compiled=False)
    with say.part("step"):
        medians = them.timed(f"step of {them.rows} x {them.seq}", them.batch)
        for peer, most in {"plain": 1.01, "fsdp2": 1.0}.items():
            if here.cuda and {"ours", peer} <= medians.keys():
                say.expect(f"step over {peer}'s", medians["ours"] / medians[peer], most)
    with say.part("one sequence"):
        them.timed(f"step of 1 x {them.seq}", them.setting.batch(them.config, 2048, 1))
    with say.part("host"):
        them.host()
    for name, contender in them.made.items():
        with say.part(f"profile {name}"):
            keep = say.out / f"trace_{name}.json.gz" if name != "fsdp2" else None
            step = functools.partial(contender.step, them.batch)
            found = profiled(here, step, keep, them.config.layers)
            short = f"{name}: {found.pop('short')}"
            say(contender=name, **found, short=short)


def profiled(here: Here, work: Any, keep: Path | None, layers: int) -> dict[str, Any]:
    """A step seen by torch's profiler: launches, time by kernel, busy and idle time of the GPU."""
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * here.cuda
    work()
    here.sync()
    with profile(activities=kinds) as seen:
        work()
        here.sync()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        text = path.read_text()
    if keep is not None:
        with gzip.open(keep, "wt", compresslevel=6) as file:
            file.write(text)
    events = [e for e in json.loads(text)["traceEvents"] if e.get("ph") == "X"]
    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = Counter(e["name"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver"))
    ops = Counter(e["name"] for e in events if e.get("cat") == "cpu_op")
    found: dict[str, Any] = {"kernels": len(on_gpu), "kernels_per_layer": round(len(on_gpu) / layers, 1)}
    found["runtime_calls"] = dict(calls.most_common(12))
    found["cpu_ops"] = dict(ops.most_common(15))
    if not on_gpu:
        return {**found, "short": "no kernels"}
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in on_gpu)
    begin, end, busy, gaps = spans[0][0], spans[0][0], 0.0, []
    for a, b in spans:
        if a > end:
            gaps.append(a - end)
            busy += b - a
        else:
            busy += max(0.0, b - end)
        end = max(end, b)
    by_name: dict[str, list[float]] = defaultdict(list)
    for e in on_gpu:
        by_name[re.sub(r"<.*", "", e["name"])[:70]].append(e["dur"])
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:25]
    streams: dict[str, float] = defaultdict(float)
    for e in on_gpu:
        streams[str(e.get("args", {}).get("stream"))] += e["dur"] / 1e3
    span = end - begin
    return {
        **found,
        "span_ms": round(span / 1e3, 3),
        "busy_ms": round(busy / 1e3, 3),
        "idle_share": round(1 - busy / span, 4),
        "gaps_over_20us": sum(gap > 20 for gap in gaps),
        "largest_gaps_us": sorted((round(g) for g in gaps), reverse=True)[:8],
        "busy_by_stream_ms": {k: round(v, 2) for k, v in streams.items()},
        "top_ms": [[name, len(d), round(sum(d) / 1e3, 3)] for name, d in top],
        "short": f"{len(on_gpu)} kernels, span {span / 1e3:.1f} ms, idle {100 * (1 - busy / span):.1f}%",
    }


# ---- step: micro


def micro(here: Here, say: Say) -> None:
    """Single operations at the sizes of a 1B Llama, ours beside torch's."""
    linear.LARGE = here.size(linear.LARGE, 0)
    rows, embed, vocab = here.size(8192, 64), here.size(2048, 32), here.size(128_256, 96)
    with say.part("head"):
        head(here, say, rows, embed, vocab)
    for outs, ins in ((embed, embed), (4 * embed, embed), (embed, 4 * embed)):
        with say.part(f"product {outs} x {ins}"):
            product(here, say, rows, outs, ins)
    with say.part("attention"):
        attention(here, say)
    with say.part("rotary"):
        rotary(here, say)
    with say.part("embedding"):
        embedding(here, say, rows, embed, vocab)
    with say.part("optimizer"):
        optimizer(here, say)
    with say.part("vectors"):
        vectors(here, say)


def random(here: Here, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=here.device).to(dtype)


def told(say: Say, part: str, row: dict[str, Any], **more: Any) -> None:
    """Says a row of milliseconds by contender."""
    say(part=part, **more, **row, short=f"{part}: " + ", ".join(f"{name} {value}" for name, value in row.items()))


def off(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def head(here: Here, say: Say, rows: int, embed: int, vocab: int) -> None:
    """The head and its loss, in chunks or whole: forward and both gradients."""
    x = random(here, rows, embed, dtype=BF16).requires_grad_()
    w = (random(here, vocab, embed) * 0.02).to(BF16).requires_grad_()
    targets = torch.randint(vocab, (rows,), device=here.device)

    def chunked() -> Any:
        return torch.autograd.grad(ya.linear_cross_entropy(x, w, targets), (x, w))

    def whole(dtype: torch.dtype = torch.float32) -> Any:
        logits = F.linear(x, w).to(dtype)
        return torch.autograd.grad(F.cross_entropy(logits, targets, reduction="sum"), (x, w))

    base = here.allocated()
    for name, work in (("ours", chunked), ("whole", whole), ("whole, bf16", lambda: whole(BF16))):
        with say.part(f"head {name}"):
            row = {"ms": here.milliseconds(work, repeats=5), "extra GiB": gib(here.peak(work) - base)}
            told(say, f"head, {name}", row)
    say(part="head, off", off=[off(a, b) for a, b in zip(chunked(), whole(), strict=True)])


def product(here: Here, say: Say, rows: int, outs: int, ins: int) -> None:
    """A weight's gradient: factors in bf16, an fp32 slot."""
    g, x = random(here, rows, outs, dtype=BF16), random(here, rows, ins, dtype=BF16)
    slot, narrow = (torch.empty(outs, ins, device=here.device, dtype=dtype) for dtype in (torch.float32, BF16))
    weight = torch.empty(outs, ins, device=here.device, dtype=BF16)
    found = destination(weight_leaf(weight, lambda shape, dtype: torch.empty(shape, dtype=dtype, device=here.device)))
    assert found is not None, "a leaf of ours has a destination"
    found.view = slot

    def fresh() -> None:
        found.state = "free"
        found.write_mm(g.t(), x)

    row = {
        "bf16 to bf16": here.milliseconds(lambda: torch.mm(g.t(), x, out=narrow)),
        "bf16, then a copy": here.milliseconds(lambda: slot.copy_(torch.mm(g.t(), x, out=narrow))),
        "ours, fresh": here.milliseconds(fresh),
        "ours, added": here.milliseconds(lambda: found.write_mm(g.t(), x)),
    }
    if here.cuda:
        row["bf16 to fp32"] = here.milliseconds(lambda: torch.mm(g.t(), x, out_dtype=torch.float32))
    fresh()
    rate = 2 * rows * outs * ins / row["bf16 to bf16"] / 1e9
    told(
        say, f"product {outs} x {rows} x {ins}", row, off=off(slot, g.double().t() @ x.double()), tflops=round(rate, 1)
    )


def attention(here: Here, say: Say) -> None:
    """Forward and backward by the kernel that torch takes, and by the others; whether two runs are alike."""
    B, H, K, S, D = here.size(4, 1), here.size(32, 2), here.size(8, 1), here.size(2048, 16), here.size(64, 8)
    q, k, v = (random(here, B, S, heads, D, dtype=BF16).transpose(1, 2).requires_grad_() for heads in (H, K, K))

    def attend() -> Any:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, (q, k, v), out)

    choice = torch._fused_sdp_choice(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True, enable_gqa=True)
    row: dict[str, Any] = {"torch takes": SDPBackend(choice).name, "ms": here.milliseconds(attend, repeats=5)}
    row["two runs alike"] = all(torch.equal(a, b) for a, b in zip(attend(), attend(), strict=True))
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if here.cuda else ():
        with say.part(f"attention {backend.name}"), sdpa_kernel(backend):
            row[backend.name] = here.milliseconds(attend, repeats=5)
    told(say, "attention", row)


def rotary(here: Here, say: Say) -> None:
    """The rotation of queries, forward and backward."""
    B, H, S, D = here.size(4, 1), here.size(32, 2), here.size(2048, 16), here.size(64, 8)
    config = setting_of(here).config("llama3.2-1b")
    at = rotations.rotary(dataclasses.replace(config, head_dim=D), torch.arange(S, device=here.device), BF16)
    x = random(here, B, S, H, D, dtype=BF16).requires_grad_()

    def turn() -> Any:
        out = rotations.turn(x, at)
        return torch.autograd.grad(out, x, out)

    told(say, "rotary", {"ms": here.milliseconds(turn)}, bytes=2 * x.numel())


def embedding(here: Here, say: Say, rows: int, embed: int, vocab: int) -> None:
    """The gradient of an embedding, added to an fp32 slot, for tokens that are even or, as in a text, mostly few."""
    grad, slot = random(here, rows, embed, dtype=BF16), torch.zeros(vocab, embed, device=here.device)
    even = torch.randint(vocab, (rows,), device=here.device)
    skewed = (torch.rand(rows, device=here.device) ** 4 * vocab).long()

    def measured(at: Tensor) -> dict[str, Any]:
        dense = torch.ops.aten.embedding_dense_backward
        return {
            "zero_": here.milliseconds(slot.zero_),
            "index_put_": here.milliseconds(lambda: slot.index_put_((at,), grad.float(), accumulate=True)),
            "index_add_": here.milliseconds(lambda: slot.index_add_(0, at, grad.float())),
            "dense_backward": here.milliseconds(lambda: dense(grad, at, vocab, -1, False)),
        }

    for name, at in (("even", even), ("skewed", skewed)):
        told(say, f"embedding, {name}", measured(at))


def optimizer(here: Here, say: Say) -> None:
    """AdamW of one flat vector with its bf16 copy, and a norm."""
    n = here.size(1 << 28, 1 << 12)
    p, g, m, v = (torch.rand(n, device=here.device) for _ in range(4))
    copy = torch.empty(n, device=here.device, dtype=BF16)
    one, lr = torch.ones((), device=here.device), torch.full((), 1e-4, device=here.device)
    adam: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

    def torchs() -> None:
        rest: dict[str, Any] = {"amsgrad": False, "maximize": False, "grad_scale": one, "found_inf": None}
        torch._fused_adamw_([p], [g], [m], [v], [], [one], lr=lr, **adam, **rest)
        torch._foreach_copy_([copy], [p])

    row: dict[str, Any] = {"torch, then a copy": here.milliseconds(torchs, repeats=5)}
    row["norm, fp64"] = here.milliseconds(lambda: torch._foreach_norm([g], 2, dtype=torch.float64), repeats=5)
    row["norm, fp32"] = here.milliseconds(lambda: torch._foreach_norm([g]), repeats=5)
    told(say, f"optimizer of {n}", row)


def vectors(here: Here, say: Say) -> None:
    """Sums of what eight ranks sent, and a scale, by our kernels and torch's."""
    out = torch.rand(here.size(1 << 26, 1), device=here.device)
    kernels = vector_kernels(out)
    if kernels is None:
        return
    n = len(out)
    rows = torch.rand(8, n, device=here.device).to(BF16)
    one, half = torch.ones((), device=here.device), torch.full((), 0.5, device=here.device)
    row = {
        "sum_rows": here.milliseconds(lambda: kernels.sum_rows(out, rows, torch.float32, True, False)),
        "torch.sum": here.milliseconds(lambda: torch.sum(rows, 0, dtype=torch.float32, out=out)),
        "scale by 1": here.milliseconds(lambda: kernels.scale_(out, one)),
        "scale by 0.5": here.milliseconds(lambda: kernels.scale_(out, half)),
        "mul_": here.milliseconds(lambda: out.mul_(half)),
    }
    told(say, "vectors", row, sum_rows_tb_s=round((8 * 2 + 8) * n / row["sum_rows"] / 1e9, 2))


STEPS = {"perf": perf, "compiled": compiled, "micro": micro}

if __name__ == "__main__":
    main(STEPS)
