"""`python -m train bench unlike`: steps on which one rule for all layers is wrong.

    for each case: the best builder of `search`, what `search(synthesize=...)` writes from it, and the bound

Layers of unlike size, a head larger than the layers, room for a part of the gradients, few microbatches, little memory.
Every model is built of the same four blocks, on whole tensors, so that a small one of the same shape runs anywhere.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.status import Status
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import yafsdp_fn as ya
from train.bench.options import Options
from train.bench.report import Rows, table
from yafsdp_fn.planner import CLUSTERS, Cluster, Found, search, trace
from yafsdp_fn.schedules import Trace

Kind = Literal["global", "local", "experts", "gated"]
Tree = dict[str, Any]


class Sizes(NamedTuple):
    """E features, F of a feed-forward, H heads, V words, S positions, X experts; window: of local attention."""

    E: int = 2048
    F: int = 8192
    H: int = 16
    V: int = 32_768
    S: int = 4096
    X: int = 8
    window: int = 1024


TINY = Sizes(E=16, F=24, H=2, V=40, S=16, X=4, window=4)
"""The sizes of models that run on a few CPU ranks."""


# ---- Four kinds of layers. x: [B, S, E]


def attention(x: Tensor, w: Tree, heads: int, window: int) -> Tensor:
    """Causal attention within windows of so many positions."""
    b, s, e = x.shape
    q, k, v = ya.linear(x, w["qkv"]).view(b * (s // window), window, 3, heads, e // heads).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return ya.linear(out.transpose(1, 2).reshape(b, s, e), w["out"])


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def layer(kind: Kind, of: Sizes) -> Callable[[Tensor, Tree], tuple[Tensor, None]]:
    """A block: attention over all positions or in windows, experts that share positions evenly, or a long gate."""

    def block(x: Tensor, w: Tree) -> tuple[Tensor, None]:
        if kind in ("global", "local"):
            x = x + attention(normed(x), w, of.H, of.S if kind == "global" else of.window)
            return x + ya.linear(F.silu(ya.linear(normed(x), w["up"])), w["down"]), None
        if kind == "experts":  # each has an equal part of the positions
            x = x + attention(normed(x), w, of.H, of.window)
            b, s, e = x.shape
            parts = normed(x).view(b, of.X, s // of.X, e).transpose(0, 1).reshape(of.X, b * s // of.X, e)
            hidden = F.silu(torch.bmm(parts, w["ups"].transpose(1, 2)))
            made = torch.bmm(hidden, w["downs"].transpose(1, 2)).view(of.X, b, s // of.X, e)
            return x + made.transpose(0, 1).reshape(b, s, e), None
        gate = ya.linear(normed(x), w["gate"])
        for _ in range(6):
            gate = torch.sigmoid(gate) * torch.tanh(gate) + gate
        return x + gate, None

    return block


def weights(kind: Kind, count: int, of: Sizes) -> Any:
    shapes: dict[str, tuple[int, ...]] = {"qkv": (3 * of.E, of.E), "out": (of.E, of.E)}
    if kind in ("global", "local"):
        shapes |= {"up": (of.F, of.E), "down": (of.E, of.F)}
    elif kind == "experts":
        shapes |= {"ups": (of.X, of.F, of.E), "downs": (of.X, of.E, of.F)}
    else:
        shapes = {"gate": (of.E, of.E)}
    init = ya.params.initializers.normal(0.02)
    return ya.Stacked({name: ya.Param((count, *shape), init=init) for name, shape in shapes.items()})


class Model(NamedTuple):
    """A model of unlike layers. layers: kinds, with how many of each follow each other"""

    layers: tuple[tuple[Kind, int], ...]
    sizes: Sizes

    def params(self) -> Tree:
        of = self.sizes
        stacks = {f"{kind}_{k}": weights(kind, count, of) for k, (kind, count) in enumerate(self.layers)}
        words = ya.Param((of.V, of.E), init=ya.params.initializers.normal(0.02))
        return {"embed": ya.Unit({"table": words}), **stacks, "head": ya.Unit({"out": words})}

    def loss(self, params: Tree, batch: Tree) -> ya.Mean:
        x = ya.apply(lambda w, tokens: ya.embedding(tokens, w["table"]), params["embed"], batch["tokens"])
        for k, (kind, _) in enumerate(self.layers):
            x, _ = ya.scan(layer(kind, self.sizes), x, params[f"{kind}_{k}"])
        loss: ya.Mean = ya.apply(_head, params["head"], x, batch["targets"])
        return loss

    def batch(self, rows: int, device: str = "meta") -> Tree:
        """The batch of one rank."""
        tokens = torch.arange(rows * self.sizes.S, device=device).view(rows, self.sizes.S) % self.sizes.V
        return {"tokens": tokens, "targets": tokens}

    def small(self) -> Model:
        return self._replace(sizes=TINY)


def _head(w: Tree, x: Tensor, targets: Tensor) -> ya.Mean:
    return ya.Mean(ya.linear_cross_entropy(normed(x), w["out"], targets), targets.numel())


# ---- The cases.


class Case(NamedTuple):
    """A step: rows of a rank in so many microbatches, on ranks of a cluster with `gib` of memory each."""

    name: str
    why: str
    model: Model
    ranks: int
    cluster: Cluster
    gib: float
    microbatches: int = 1
    rows: int = 1
    stages: tuple[int, ...] = (1,)

    def trace(self) -> Trace:
        return trace(
            self.model.loss,
            self.model.params(),
            self.model.batch(self.rows),
            tx=ya.optim.chain(ya.optim.clip_by_global_norm(1.0), ya.optim.adamw(3e-4)),
            ranks=self.ranks,
            precision=ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16),
            microbatches=self.microbatches,
        )

    def found(self, seconds: float, moves: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Found:
        return search(
            self.trace(),
            self.cluster,
            memory=int(self.gib * 2**30),
            stages=self.stages,
            runners_up=4,
            synthesize=seconds,
            moves=moves,
            seed=seed,
            report=report,
        )


H100, A100 = CLUSTERS["h100-80g"], CLUSTERS["a100-80g"]
EVEN: tuple[tuple[Kind, int], ...] = (("global", 32),)
CASES = {
    case.name: case
    for case in (
        Case(
            "local-global",
            "five layers with windows, then one that sees all 65,536 positions",
            Model((("local", 5), ("global", 1)) * 6, Sizes(S=65_536)),
            64,
            H100,
            62,
        ),
        Case(
            "experts",
            "every other layer has 16 experts, and 16 times the bytes",
            Model((("local", 1), ("experts", 1)) * 12, Sizes(X=16, F=4096, S=4096)),
            64,
            A100,
            10,
            4,
            4,
        ),
        Case(
            "large-head",
            "262,144 words on sixteen layers",
            Model((("global", 16),), Sizes(V=262_144, S=4096)),
            16,
            A100,
            9,
            4,
            4,
        ),
        Case(
            "hybrid",
            "three gated layers, cheap to compute again, for each with attention",
            Model((("gated", 3), ("global", 1)) * 8, Sizes(S=16_384)),
            64,
            H100,
            16,
        ),
        Case(
            "half-the-gradients",
            "four microbatches, and memory for the sums of a part of the layers",
            Model(EVEN, Sizes(E=4096, F=14_336, H=32, S=2048)),
            64,
            A100.replace(network_bandwidth=25e9),
            16,
            4,
            4,
        ),
        Case(
            "few-microbatches",
            "eight microbatches on eight stages",
            Model(EVEN, Sizes(E=4096, F=14_336, H=32, S=2048)),
            64,
            A100,
            40,
            1,
            1,
            (8,),
        ),
        Case(
            "less-than-1f1b",
            "sixteen microbatches on eight stages, without room for eight of them",
            Model(EVEN, Sizes(E=4096, F=14_336, H=32, S=4096)),
            64,
            A100,
            14,
            2,
            2,
            (8,),
        ),
        Case(
            "weights-in-stages",
            "two stages, and memory for the weights and gradients of a part of their layers",
            Model(EVEN, Sizes(E=4096, F=14_336, H=32, S=2048)),
            64,
            A100.replace(network_bandwidth=25e9),
            13,
            2,
            2,
            (2,),
        ),
        Case(
            "large-head-in-stages",
            "262,144 words at the end of four stages",
            Model((("global", 16),), Sizes(V=262_144, S=4096)),
            16,
            A100,
            40,
            2,
            2,
            (4,),
        ),
    )
}


# ---- The command.


@dataclasses.dataclass(frozen=True)
class Unlike(Options):
    """Search the best builder's program for eight steps, and write better ones."""

    case: str | None = None
    """One of them alone, by name."""
    moves: int = 300
    """Changes that are tried in each."""
    seconds: float = 1800.0
    """The most that writing takes for each; what that ends is marked."""
    seed: int = 0
    """The seed of the random changes."""

    def __post_init__(self) -> None:
        if self.case is not None and self.case not in CASES:
            raise ValueError(f"--case {self.case}: expected one of {', '.join(CASES)}")
        if self.moves < 1 or self.seconds <= 0:
            raise ValueError(f"--moves {self.moves} --seconds {self.seconds}: expected more than 0")


def measure(options: Unlike, console: Console) -> dict[str, Any]:
    """Seconds of each case: of the builder's program, of the one that is written, and the bound."""
    cases = []
    for name in [options.case] if options.case else CASES:
        began = time.monotonic()
        with console.status(name) as status:
            found = CASES[name].found(options.seconds, options.moves, options.seed, partial(_told, status, name))
        written = found.written
        assert written is not None
        cases.append(
            {
                "case": name,
                "why": CASES[name].why,
                "builder": str(written.point),
                "builder_s": written.builder_s,
                "written_s": written.step_s,
                "least_s": written.least.seconds,
                "least_by": written.least.by,
                "differences": written.differences,
                "moves": written.moves,
                "early": written.early,
                "seconds": round(time.monotonic() - began, 1),
            }
        )
    return {"cases": cases}


def _told(status: Status, name: str, line: str) -> None:
    status.update(f"{name}: {line}")


def show(options: Unlike, found: dict[str, Any]) -> Iterator[str | Table]:
    """A row for each case, and what each program does otherwise."""
    rows: Rows = {}
    for case in found["cases"]:
        saved = 1 - case["written_s"] / case["builder_s"]
        above = 1 - case["least_s"] / case["written_s"]
        rows[case["case"]] = {
            "best builder, s": f"{case['builder_s']:.4g}",
            "written, s": f"{case['written_s']:.4g}",
            "saved": f"{saved:.1%}",
            "no program below, s": f"{case['least_s']:.4g}",
            "above it": f"{above:.1%}",
            "by": case["least_by"],
            "moves": f"{case['moves']}{' (early)' * case['early']}",
            "search, s": f"{case['seconds']}",
        }
    yield "simulated steps"
    yield table("case", rows)
    for case in found["cases"]:
        lines = "\n".join(f"  {line}" for line in case["differences"])
        yield f"{case['case']}: {case['why']}\nbuilder: {case['builder']}\n{lines}"
