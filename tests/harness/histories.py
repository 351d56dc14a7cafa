"""One state, its step functions, and all that may happen to it between steps: `ACTIONS`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import yafsdp_fn as ya
from tests.harness.meshes import made
from tests.harness.oracle import batch_of
from tests.harness.problems import Batch, Params, base_params, block, embed, head, layer, mixed_block, pinned
from yafsdp_fn.checkpoint import load, save
from yafsdp_fn.params.sharded import trainable

s = ya.schedules

# ---- a model, and a loss that does what it is told


def abstract(kind: str) -> Params:
    """Pinned leaves in trained layers; or frozen layers, then layers with a frozen, partly pinned, part."""
    base = base_params(3)
    if kind == "pinned":
        return base._replace(layers=ya.Stacked(pinned(layer(3), "bias", "gate")))
    mixed = {"main": ya.frozen(pinned(layer(3), "gate")), "side": layer(3, f=3)}
    return base._replace(layers=ya.frozen(base.layers), more=ya.Stacked(mixed))


class Planned(Exception):
    """The failure that a test asked for."""


class Told:
    """What the loss of this process does beside its work."""

    failure: tuple[str, type[BaseException]] | None = None  # where, and what is raised there
    evaluates = False
    regularises = False
    factor = 1.0


def reached(place: str) -> None:
    if Told.failure is not None and Told.failure[0] == place:
        raise Told.failure[1]


def watched(x: Tensor, place: str) -> Tensor:
    """Its gradient passes `place`."""
    if x.requires_grad:
        x.register_hook(lambda _: reached(place))
    return x


def layers(params: Params, x: Tensor) -> Tensor:
    x, _ = ya.scan(block, x, params.layers)
    return x if params.more is None else ya.scan(mixed_block, x, params.more)[0]


def loss(params: Params, batch: Batch) -> ya.Mean:
    x = watched(ya.apply(embed, params.embed, batch["tokens"]), "end of the backward")
    if Told.evaluates:
        with torch.no_grad():
            layers(params, x)
    x = watched(layers(params, x), "backward")
    reached("forward")
    total, weight = ya.apply(head, params.head, x, batch["targets"])
    if Told.regularises:
        total = total + 0.1 * torch.stack([leaf.square().sum() for leaf in optree.tree_leaves(params.head)]).sum()
    return ya.Mean(total * Told.factor, weight)


# ---- what may happen to a state


class Setting(NamedTuple):
    """builder: name in BUILDERS; clips: updates wait for the norm; kind: of the model"""

    mesh: str
    builder: str
    clips: bool
    kind: str
    precision: ya.Precision = ya.Precision()


BUILDERS: dict[str, Callable[..., Any]] = {
    "ddp": s.ddp,
    "zero1": s.zero1,
    "zero2": s.zero2,
    "zero3": s.zero3,
    "resident": functools.partial(s.zero3, resident=2, prefetch=2),
    "defer": functools.partial(s.zero3, defer=True, remat="all"),
    "hsdp": functools.partial(s.hsdp, resident=1),
    "hpz": functools.partial(s.hpz, 2),
}


class Life:
    """One state, and the functions that it goes through."""

    def __init__(self, setting: Setting, update: bool, folder: Path) -> None:
        mesh = made(setting.mesh)
        self.setting = setting
        self.folder = folder
        clip = [ya.optim.clip_by_global_norm(0.1)] if setting.clips else []
        self.tx = ya.optim.chain(*clip, ya.optim.adamw(1e-2, weight_decay=0.1))
        self.init = functools.partial(ya.init, abstract(setting.kind), self.tx, mesh=mesh, precision=setting.precision)
        self.state = self.init()
        self.train = functools.partial(ya.train_step, loss, self.tx, skip_nonfinite=setting.clips)
        build = functools.partial(BUILDERS[setting.builder], update=update)
        self.step = self.train(schedule=build())
        self.other = self.train(schedule=s.zero2(prefetch=1, update=update), microbatches=3)
        self.keeping = self.train(schedule=build(), donate=False)
        self.evaluate = ya.eval_step(loss, schedule=s.zero3(prefetch=3), microbatches=3)
        self.gradients = ya.value_and_grad(loss, schedule=s.zero2())
        self.rank = mesh.get_rank()
        self.times = 0

    def batch(self) -> Batch:
        self.times += 1
        return batch_of(self.rank, seed=self.times)

    def take(self, step: Any) -> list[Tensor]:
        """One step; its metrics, of which the norm is exact where the gradient is measured as a whole."""
        self.state, metrics = step(self.state, self.batch())
        return [metrics["loss"], metrics["skipped"], *([metrics["grad_norm"]] if self.setting.clips else [])]

    @contextlib.contextmanager
    def told(self, **what: Any) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in what.items():
                patch.setattr(Told, name, value)
            yield

    def fail(self, place: str) -> None:
        """A step that does not happen."""
        error = KeyboardInterrupt if self.times % 2 else Planned
        with self.told(failure=(place, error)), pytest.raises(error):
            self.step(self.state, self.batch())


def within(life: Life) -> Any:
    with life.told(evaluates=True):
        return life.take(life.step)


def averaged(life: Life) -> Any:
    """Of the state's parameters and others."""
    return optree.tree_map(lambda a, b: 0.9 * a + 0.1 * b, life.state.params, life.init(seed=1).params)


def replaced(life: Life) -> Any:
    life.state = dataclasses.replace(life.state, params=averaged(life))


@torch.no_grad()
def written(life: Life) -> Any:
    """Trained leaves: the first unit, which is carried, and one layer of a stack."""
    params = life.state.params
    params.embed.leaves[0].mul_(0.9)
    trained = params.layers if params.more is None else params.more
    optree.tree_leaves(trainable(trained))[0][1].add_(0.01)


@torch.no_grad()
def written_frozen(life: Life) -> Any:
    life.state.params.layers.leaves[0][0].mul_(0.9)


def loaded(life: Life) -> Any:
    save(life.folder, life.state)
    at = life.state.step
    life.take(life.step)
    life.state, _ = load(life.folder, life.state, step=at)


def loaded_into_another(life: Life) -> Any:
    save(life.folder, life.state)
    state, _ = life.step(life.init(seed=2), life.batch())
    life.state, _ = load(life.folder, state, step=life.state.step)


def kept(life: Life) -> Any:
    """Without donation: both states go on, the old one for good."""
    old = life.state
    out = life.take(life.keeping) + life.take(life.step)
    life.state = old
    return out


def applied(life: Life) -> Any:
    """By hand, then a step; a frozen leaf is written between gradient and update."""
    value, grads = life.gradients(life.state.params, life.batch())
    written_frozen(life)
    life.state = life.state.apply_gradients(grads, life.tx)
    return [value, *life.take(life.step)]


def by_program(life: Life) -> Any:
    """A program from JSON, from the first step on."""
    program = ya.Program.from_json(life.step.lower(life.state, batch_of(life.rank)).to_json())
    step = life.train(schedule=program)
    return life.take(step) + life.take(step)


def skipped(life: Life) -> Any:
    if not life.setting.clips:
        return None
    with life.told(factor=float("nan")):
        out = life.take(life.step)
    assert out[1] == 1
    return out[1]


def regularised(life: Life) -> Any:
    with life.told(regularises=True):
        return life.take(life.step)


ACTIONS: dict[str, Callable[[Life], Any]] = {
    "step": lambda life: life.take(life.step),
    "other step": lambda life: life.take(life.other),
    "evaluation": lambda life: life.evaluate(life.state, life.batch()),
    "evaluation in the loss": within,
    "average": lambda life: life.evaluate(averaged(life), life.batch()),
    "replaced": replaced,
    "written": written,
    "frozen written": written_frozen,
    "loaded": loaded,
    "loaded into another": loaded_into_another,
    "kept": kept,
    "gradients": lambda life: [ya.unshard(x) for x in life.gradients(life.state.params, life.batch())],
    "applied": applied,
    "program": by_program,
    "skipped": skipped,
    "regularised": regularised,
    "map_whole_layers": lambda life: ya.map_whole_layers(lambda w: w[0].square().sum(), life.state.params.layers),
    "unshard": lambda life: ya.unshard(life.state),
    "failed forward": lambda life: life.fail("forward"),
    "failed backward": lambda life: life.fail("backward"),
}
"""Each returns tensors to compare, if any, and may leave another state."""
