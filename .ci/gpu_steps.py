"""The steps of `make gpu-check` that are neither tests nor timed: `python -m gpu_steps NAME --device cuda --out DIR`.

Everything that a step finds is a line of its own (`say`), so that a part that fails loses no other. Lines with `short`
are what the table at the end of a command shows. With `--device cpu` the same code runs on tiny models, where no time
means anything.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optree
import torch
import torch.nn.functional as F
from gpu_check import emit

import yafsdp_fn as ya
from models import llama

GIB = 2**30


class Say:
    """Writes what a step finds; counts the parts that failed."""

    def __init__(self, out: Path, step: str) -> None:
        self.out, self.step, self.lost = out, step, 0

    def __call__(self, **found: Any) -> None:
        emit(self.out, self.step, **found)

    def expect(self, what: str, value: float, most: float) -> None:
        """Writes down a figure, which fails the step where it is larger than `most`."""
        good = value <= most  # not if it is NaN
        self.lost += not good
        words = f"{what} {value:.3g}, at most {most:g} expected"
        self(expected=what, value=value, most=most, short=words if good else f"WRONG: {words}")

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Inside, a failure is written down and ends no more than this part."""
        begun = time.time()
        try:
            yield
        except Exception as error:
            self.lost += 1
            self(part=name, failed=f"{type(error).__name__}: {error}"[:2000])
            traceback.print_exc()
        finally:
            print(f"-- {name}: {time.time() - begun:.1f} s", flush=True)


class Here:
    """The device, and sizes."""

    def __init__(self, device: str) -> None:
        self.device, self.cuda = device, device == "cuda"
        if self.cuda:
            torch.cuda.set_device(0)
        else:
            torch.set_num_threads(1)

    def size(self, large: int, small: int) -> int:
        return large if self.cuda else small

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def milliseconds(self, work: Any, repeats: int = 10, warm: int = 3) -> float:
        """The median time of `work` on the device."""
        for _ in range(warm):
            work()
        self.sync()
        found = []
        for _ in range(repeats if self.cuda else 2):
            if self.cuda:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                work()
                end.record()
                end.synchronize()
                found.append(begin.elapsed_time(end))
            else:
                begun = time.perf_counter()
                work()
                found.append(1e3 * (time.perf_counter() - begun))
        return round(statistics.median(found), 4)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0

    def peak(self, work: Any) -> int:
        """The most bytes allocated while `work` runs."""
        if not self.cuda:
            work()
            return 0
        self.sync()
        torch.cuda.reset_peak_memory_stats()
        work()
        self.sync()
        return torch.cuda.max_memory_allocated()


def gib(n: float) -> float:
    return round(n / GIB, 3)


# ---- step: machine


def machine(here: Here, say: Say) -> None:
    names = ("torch", "triton", "numpy", "optree", "jaxtyping", "einops", "pytest", "tyro", "nvidia-nccl-cu13")
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    nccl = ctypes.c_int()
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(nccl))
    say(
        python=sys.version.split()[0],
        kernel=platform.release(),
        cpus=os.cpu_count(),
        versions=versions,
        nccl_loaded=nccl.value,
        cuda=torch.version.cuda,
    )
    for words in (
        ["nvidia-smi"],
        [
            "nvidia-smi",
            "--query-gpu=name,driver_version,clocks.max.sm,clocks.sm,clocks.mem,"
            "power.limit,temperature.gpu,memory.total,memory.used,compute_mode,mig.mode.current",
            "--format=csv",
        ],
    ):
        with contextlib.suppress(OSError):
            print(subprocess.run(words, capture_output=True, text=True).stdout, flush=True)
    if here.cuda:
        p = torch.cuda.get_device_properties(0)
        say(
            gpu=p.name,
            sms=p.multi_processor_count,
            memory_gib=gib(p.total_memory),
            l2=p.L2_cache_size,
            capability=[p.major, p.minor],
            free_gib=gib(torch.cuda.mem_get_info()[0]),
        )
        free, total = torch.cuda.mem_get_info()
        if total - free > 2 << 30:
            say(short=f"WARNING: {gib(total - free)} GiB of the GPU are taken by others")
    with say.part("rates"):
        n = here.size(8192, 64)
        a, b = (torch.randn(n, n, device=here.device).bfloat16() for _ in range(2))
        ms = here.milliseconds(lambda: a @ b)
        x = torch.empty(here.size(1 << 30, 1 << 12), dtype=torch.uint8, device=here.device)
        y = torch.empty_like(x)
        copy = here.milliseconds(lambda: y.copy_(x))
        rate, moved = 2 * n**3 / ms * 1e3, 2 * x.numel() / copy * 1e3
        say(
            matmul_flops=rate,
            copy_bytes_per_s=moved,
            short=f"bf16 {rate / 1e12:.0f} TFLOP/s, copy {moved / 1e12:.2f} TB/s",
        )
    with say.part("launch"):  # what a launch costs the host of this machine
        z = torch.zeros(1, device=here.device)
        here.sync()
        begun = time.perf_counter()
        for _ in range(500):
            z.add_(1)
        host = (time.perf_counter() - begun) / 500 * 1e6
        here.sync()
        say(host_us_per_small_op=round(host, 2), short=f"host {host:.1f} us an op")


# ---- step: oracle


def oracle(here: Here, say: Say) -> None:
    """Everything against float64 on the CPU, which runs the same loss on plain tensors.

    On a CPU fp32 is off by 1e-6 (gradients) and 4.5e-5 (change of weights), bf16 by 5e-4 (losses) and 0.11: Adam's
    first steps are signs. Ten times as much, or less, is expected here.
    """
    torch.set_num_threads(8 if here.cuda else 1)
    config = dataclasses.replace(llama.CONFIGS["debug"], layers=4, vocab=here.size(8192, 256))
    loss, abstract, seed, rows, length = llama.loss(config), llama.params(config), 0, 4, here.size(256, 16)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(config.vocab, (rows, length + 1), generator=generator) for _ in range(5)]
    batches = [{"tokens": t[:, :-1].contiguous(), "targets": t[:, 1:].contiguous()} for t in texts]
    on_device = [{key: value.to(here.device) for key, value in batch.items()} for batch in batches]
    s = ya.schedules

    def tx() -> Any:
        return ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(1e-3, weight_decay=0.1))

    def off(got: Any, expected: Any) -> float:
        a, b = got.detach().double().cpu(), expected.detach().double().cpu()
        return float((a - b).norm() / b.norm().clamp_min(1e-30))

    def worst(got: Any, expected: Any) -> float:
        pairs = zip(optree.tree_leaves(got), optree.tree_leaves(expected), strict=True)
        return max(off(a, b) for a, b in pairs)

    plain = ya.PlainState.create(abstract, tx(), seed=seed)
    wide = optree.tree_map(lambda x: x.double(), plain.params)

    def differentiate(params: Any, batch: Any) -> tuple[Any, Any]:
        leaves, spec = optree.tree_flatten(params)
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        mean = loss(optree.tree_unflatten(spec, leaves), batch)
        value = mean.total / mean.weight
        return value.detach(), optree.tree_unflatten(spec, list(torch.autograd.grad(value, leaves)))

    begun = time.time()
    value64, grads64 = differentiate(wide, batches[0])
    losses64, state = [], ya.PlainState(wide, tx().init(wide), 0, seed)
    step = ya.train_step(loss, tx())
    for batch in batches:
        state, metrics = step(state, batch)
        losses64.append(float(metrics["loss"]))
    params64 = state.params
    say(oracle_s=round(time.time() - begun, 1), losses=losses64)

    def moved(params: Any) -> float:
        """How far the change of the weights is off, relative to the change."""
        leaves = (optree.tree_leaves(tree) for tree in (params, params64, wide))
        return max(off(got.double().cpu() - first, last - first) for got, last, first in zip(*leaves, strict=True))

    mesh = ya.mesh(device=here.device)
    bf16 = ya.Precision(compute=torch.bfloat16, reduce=torch.float32)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with say.part(f"plain tensors, {name}"):  # what the same block does without this library
            whole = optree.tree_map(lambda x, d=dtype: x.to(here.device, d), plain.params)
            value, grads = differentiate(whole, on_device[0])
            say(case=f"plain {name}", loss_off=off(value, value64), grads_off=worst(grads, grads64))
    with say.part("value_and_grad"):
        state = ya.shard(plain.params, tx(), mesh=mesh, seed=seed)
        value, grads = ya.value_and_grad(loss)(state.params, on_device[0])
        say.expect("fp32 loss, off", off(value, value64), 1e-5)
        say.expect("fp32 gradients, off", worst(ya.unshard(grads), grads64), 1e-5)
    remat = s.remat
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "fp32 zero3": (ya.Precision(), s.zero3(), {}),
        "fp32 recomputed": (ya.Precision(), s.zero3(remat=remat.all), {}),
        "fp32 updates": (ya.Precision(), s.zero3(update=True), {"microbatches": 2}),
        "bf16 zero3": (bf16, s.zero3(), {}),
        "bf16 microbatches": (bf16, s.zero2(), {"microbatches": 2}),
        "bf16 offloaded": (bf16, s.zero3(remat=remat.offload()), {}),
        "bf16 all bf16": (ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16), s.zero3(), {}),
    }
    for name, (precision, schedule, options) in cases.items():
        with say.part(name):
            state = ya.shard(plain.params, tx(), mesh=mesh, seed=seed, precision=precision)
            step, losses = ya.train_step(loss, tx(), schedule=schedule, **options), []
            for batch in on_device:
                state, metrics = step(state, batch)
                losses.append(metrics["loss"])
            losses = [float(x) for x in losses]
            far = max(abs(a - b) / b for a, b in zip(losses, losses64, strict=True))
            change = moved(ya.unshard(state.params))
            say(case=name, losses=losses)
            say.expect(f"{name}: losses, off", far, 5e-3 if "bf16" in name else 1e-4)
            say.expect(f"{name}: change of weights, off", change, 0.5 if "bf16" in name else 5e-4)


# ---- step: traced


def traced(here: Here, say: Say) -> None:
    """`ya.planner.trace` where there is a GPU: fake tensors are on it, and a Triton kernel that gets one would read
    address 0, which ends the context. Few rows first, which take no such kernel."""
    config = dataclasses.replace(llama.CONFIGS["debug"], layers=2, vocab=128_256)
    for rows in (512, 8192):
        with say.part(f"{rows} rows"):
            tokens = torch.empty((1, rows), dtype=torch.int64, device="meta")
            batch, how = {"tokens": tokens, "targets": tokens}, {"tx": ya.optim.adamw(1e-3), "device": here.device}
            begun = time.time()
            found = ya.planner.trace(llama.loss(config), llama.params(config), batch, ranks=2, **how)
            here.sync()
            cost = found.visits[-1].cost
            say(
                rows=rows,
                seconds=round(time.time() - begun, 1),
                kept=cost.kept_bytes,
                peak=cost.peak_bytes,
                bwd_peak=cost.bwd_peak_bytes,
                short=f"{rows} rows: traced; the head's peak {gib(cost.peak_bytes)} GiB",
            )


# ---- step: sanitized


def sanitized(here: Here, say: Say) -> None:
    """Launches of every kernel that Triton compiles here, at sizes that are no multiples of anything; and results."""
    if not here.cuda:
        say(short="kernels run on a GPU")
        return
    from yafsdp_fn.nn.cross_entropy_kernel import softmax_
    from yafsdp_fn.util.vector_kernels import scale_, sum_rows

    def rand(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.randn(*shape, device="cuda").to(dtype)

    def off(a: Any, b: Any) -> float:
        return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))

    for n in (1, 5, 1023, 1025, 100_003):
        for rows, dtype, add, ordered in (
            (1, torch.bfloat16, True, False),
            (3, torch.float32, False, True),
            (8, torch.bfloat16, True, True),
        ):
            with say.part(f"sum_rows {rows} x {n}"):
                x, out = rand(rows, n, dtype=dtype), rand(n)
                wanted = x.double().sum(0) + (out.double() if add else 0)
                sum_rows(out, x, torch.float32, add, ordered)
                say.expect(f"sum_rows of {rows} x {n}, off", off(out, wanted), 1e-5)
        with say.part(f"scale_ {n}"):
            x = rand(n)
            wanted = x.double() * 0.3
            scale_(x, torch.full((), 0.3, device="cuda"))
            say.expect(f"scale_ of {n}, off", off(x, wanted), 1e-6)
    for columns in (1, 97, 4096, 4097, 128_256):
        with say.part(f"softmax_ {columns}"):
            logits, factors = rand(7, columns, dtype=torch.bfloat16), torch.ones(7, device="cuda")
            labels = torch.randint(columns, (7,), device="cuda")
            wide = logits.double()
            losses = softmax_(logits, labels, factors, gradient=True)
            wanted = F.cross_entropy(wide, labels, reduction="none")
            grads = wide.softmax(1) - F.one_hot(labels, columns)
            say.expect(f"softmax_ of {columns}, losses, off", off(losses, wanted) if columns > 1 else 0.0, 1e-4)
            say.expect(f"softmax_ of {columns}, gradients, off", off(logits, grads) if columns > 1 else 0.0, 1e-2)
    torch.cuda.synchronize()
    say(short="every kernel ran")


# ---- step: train20


def train20(here: Here, say: Say) -> None:
    """The main job, on this device and on the CPU: its losses side by side."""
    with tempfile.TemporaryDirectory() as folder:
        how = f"--steps 20 --eval-every 0 --checkpoint-every 0 --timeline-every 10 --runs {folder}".split()
        begun, made = time.time(), {}
        for device in dict.fromkeys((here.device, "cpu")):
            words = [sys.executable, "-m", "train", "clm", "--name", device, "--device", device, *how]
            env = {**os.environ, "OMP_NUM_THREADS": "6"} if here.cuda else dict(os.environ)
            made[device] = subprocess.Popen(words, stdout=sys.stdout, stderr=sys.stderr, env=env)
        losses: dict[str, list[float]] = {}
        for device, process in made.items():
            status = process.wait()
            rows = []
            with contextlib.suppress(OSError):
                text = (Path(folder) / device / "metrics.jsonl").read_text()
                rows = [json.loads(line) for line in text.splitlines()]
            losses[device] = [row["loss"] for row in rows if "loss" in row and "step" in row]
            seconds = round(time.time() - begun, 1)
            say(device=device, status=status, seconds=seconds, losses=losses[device], last=rows[-1:])
            say.expect(f"exit status on {device}", abs(status), 0)
            say.expect(f"steps without a loss on {device}", 20 - len(losses[device]), 0)
        if here.cuda:
            off = [abs(a - b) / b for a, b in zip(*losses.values(), strict=False)]
            say.expect("losses of 20 steps, off", max(off, default=0.0), 0.02)


STEPS: dict[str, Any] = {
    "machine": machine,
    "oracle": oracle,
    "traced": traced,
    "sanitized": sanitized,
    "train20": train20,
}


def main(steps: Mapping[str, Callable[[Here, Say], None]]) -> None:
    """Runs the step that is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=steps)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    say = Say(options.out, options.step)
    with say.part("all of it"):
        steps[options.step](Here(options.device), say)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if say.lost else 0)  # threads of process groups may abort the teardown


if __name__ == "__main__":
    main(STEPS)
