"""The curvature of a Llama while it learns a little of Python's standard library; draws docs/images/curvature.png.

python -m train launch --ranks 2 docs/examples/curvature.py          # some minutes on two cores

It trains on windows of four files. The curvature is that of other windows, and the same at any number of ranks that
divides sixteen; influences are those of the windows that it trained on last.
"""

from __future__ import annotations

import sysconfig
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import yafsdp_fn as ya
from models import llama
from yafsdp_fn.lab.curvature import (
    gauss_newton_product,
    gradient_noise_scale,
    hessian_product,
    influence,
    top_eigenpairs,
)

CONFIG = llama.CONFIGS["debug"]
FILES, LENGTH = ("argparse.py", "ast.py", "fractions.py", "tarfile.py"), 32
WINDOWS, BATCHES = 4, 4
"""Of each file in a batch; and batches to train on, in turn. The windows after these are not trained on."""
STEPS = (0, 4, 8, 16, 32, 64)
"""After which the curvature is taken."""
TESTED = 2
"""The file whose next window is the test, for influences."""
OUT = Path(__file__).parent.parent / "images" / "curvature.png"

Batch = dict[str, Tensor]
loss = llama.loss(CONFIG)


def windows(first: int, count: int = WINDOWS) -> Batch:
    """`count` windows of each file, from the one numbered `first` on; the files one after the other."""
    rows = []
    for name in FILES:
        text = Path(sysconfig.get_path("stdlib"), name).read_bytes()[4096:]
        rows += [list(text[i * LENGTH : (i + 1) * LENGTH + 1]) for i in range(first, first + count)]
    tokens = torch.tensor(rows)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def outputs(params: Any, batch: Batch) -> Tensor:
    return llama.logits(CONFIG, params, batch["tokens"])


def loss_of_outputs(logits: Tensor, batch: Batch) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


class Seen(NamedTuple):
    """What one moment of the training looks like. The eigenvalues are the largest ones, two of each matrix."""

    step: int
    loss: float
    hessian: list[float]
    gauss_newton: list[float]
    noise: float
    signal: float


def look(step: int, params: Any, batch: Batch, more: Batch) -> Seen:
    """more: windows for the noise scale, which takes more of them to be more than noise itself"""
    of_hessian = partial(hessian_product(loss), params, batch)
    of_gauss_newton = partial(gauss_newton_product(outputs, loss_of_outputs), params, batch)
    hessian, gauss_newton = (top_eigenpairs(of, params, 2, tolerance=0.03) for of in (of_hessian, of_gauss_newton))
    gradient = gradient_noise_scale(loss, params, more, at_once=4)
    value = float(ya.eval_step(loss)(params, batch)["loss"])
    return Seen(
        step,
        value,
        hessian.values.tolist(),
        gauss_newton.values.tolist(),
        float(gradient.noise),
        float(gradient.signal),
    )


def left_out(params: Any, batch: Batch, test: Batch, damping: float) -> list[float]:
    """By how much the loss of `test` rises without each window, of all ranks."""
    product = partial(gauss_newton_product(outputs, loss_of_outputs), params, batch)
    own = -influence(loss, params, batch, test, product, damping=damping, tolerance=1e-2) / (len(FILES) * WINDOWS)
    found: list[list[float]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(found, own.tolist())
    return [value for of_rank in found for value in of_rank]


def main() -> None:
    mesh = ya.mesh(device="cpu")
    state = ya.init(llama.params(CONFIG), tx := ya.optim.adamw(3e-4), mesh=mesh)
    own = partial(ya.shard_batch, mesh=mesh)
    batches = [own(windows(WINDOWS * part)) for part in range(BATCHES)]
    new = WINDOWS * BATCHES
    step, seen = ya.train_step(loss, tx), list[Seen]()
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no derivative of a derivative
        for number in range(STEPS[-1] + 1):
            if number in STEPS:
                seen.append(look(number, state.params, own(windows(new)), own(windows(new, 4 * WINDOWS))))
                if mesh.get_rank() == 0:
                    print(seen[-1], flush=True)
            if number < STEPS[-1]:
                state, _ = step(state, batches[number % BATCHES])
        test = {key: value[TESTED : TESTED + 1] for key, value in windows(new, 1).items()}
        rises = left_out(state.params, batches[-1], test, damping=0.1 * seen[-1].gauss_newton[0])
    if mesh.get_rank() == 0:
        print([round(rise, 4) for rise in rises], flush=True)
        draw(seen, rises)


# ---- the picture


def draw(seen: list[Seen], rises: list[float]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.7), layout="constrained")
    sharpness, gradient, influences = figure.subplots(1, 3)
    at = [str(moment.step) for moment in seen]
    for name, label, colour in (("hessian", "Hessian", "C0"), ("gauss_newton", "Gauss-Newton", "C1")):
        first, second = zip(*(getattr(moment, name) for moment in seen), strict=True)
        sharpness.plot(at, first, "o-", color=colour, label=label)
        sharpness.plot(at, second, ".-", color=colour, lw=0.8)
    sharpness.set_title("two largest eigenvalues")

    gradient.plot(at, [m.noise for m in seen], "o-", color="C2", label="noise")
    gradient.plot(at, [m.signal for m in seen], "o--", color="C4", label="signal")
    for x, moment in enumerate(seen):
        scale = f"{moment.noise / moment.signal:.0f}" if moment.signal > 0 else "?"
        gradient.annotate(scale, (x, moment.noise), (0, -15), textcoords="offset points", ha="center")
    gradient.set_title("gradient: noise, signal,\nand their ratio in windows")
    for axes in (sharpness, gradient):
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.legend()

    colours = ["C1" if i // WINDOWS == TESTED else "silver" for i in range(len(rises))]
    influences.bar(range(len(rises)), rises, color=colours)
    influences.set_xticks([WINDOWS * (i + 0.5) - 0.5 for i in range(len(FILES))], [f[:-3] for f in FILES])
    influences.set_xlabel("windows of")
    influences.set_title(f"rise of the loss on new {FILES[TESTED][:-3]} text\nwithout one training window", fontsize=10)
    figure.savefig(OUT, dpi=120)


if __name__ == "__main__":
    main()
