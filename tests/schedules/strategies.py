"""Random traces and random options of every builder, for hypothesis."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.program.traces import MESHES, batched, layers, trace_of, unit
from yafsdp_fn.schedules import Schedule, Trace, UpdateWhen, chained_order, ddp, hpz, hsdp, remat, zero1, zero2, zero3

UPDATES: tuple[UpdateWhen, ...] = ("never", "after norm")
POLICIES: dict[str, remat.Remat] = {
    "none": remat.none,
    "all": remat.all,
    "first": remat.first(2),
    "every": remat.every(2),
    "offload": remat.offload(ahead=0),
    "offload every": remat.offload(remat.every(2), recompute=remat.all),
}


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any visits of up to two stacks and three other units: repeated, unrolled, paired, frozen, left out."""
    units = []
    stacks: list[list[int]] = []
    for name in "ab"[: draw(st.integers(0, 2))]:
        new = layers(name, draw(st.integers(1, 5)), len(units), trainable=draw(st.integers(0, 3)) > 0)
        stacks.append([u.id for u in new])
        units += new
    others = draw(st.integers(0 if units else 1, 3))
    for k in range(others):
        units.append(unit(len(units), "xyz"[k], trainable=draw(st.integers(0, 3)) > 0))
    ids = range(len(units))
    kinds = ["scan", "pairs", "one"] if stacks else ["one"]
    uses: list[list[int]] = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(kinds))
        if kind == "scan":
            stack = draw(st.sampled_from(stacks))
            stack = stack[::-1] if draw(st.integers(0, 3)) == 0 else stack
            uses += [list(chunk) for chunk in batched(stack, draw(st.integers(1, 2)))]
        elif kind == "pairs":
            uses += [list(pair) for pair in zip(stacks[0], stacks[-1][::-1], strict=False) if len(set(pair)) == 2]
        else:
            uses.append(draw(st.lists(st.sampled_from(ids), min_size=1, max_size=3, unique=True)))
    uses = uses[:12] or [[0]]
    backward = draw(st.integers(0, 7)) > 0
    trace = trace_of(units, uses, draw(st.integers(1, 3)), backward=backward)
    if not backward and draw(st.booleans()):  # an evaluation on demand records what a step would train
        trained = [v._replace(trained=tuple(u for u in v.units if units[u].trainable)) for v in trace.visits]
        trace = trace._replace(visits=tuple(trained))
    if backward and draw(st.integers(0, 5)) == 0:  # a visit need not train a unit that others train
        some = [v._replace(trained=tuple(u for u in v.trained if draw(st.booleans()))) for v in trace.visits]
        trace = trace._replace(visits=tuple(some), order=chained_order(some, trace.microbatches))
    return trace


class Choice(NamedTuple):
    """A builder with its options, and where it runs: on a mesh that fits it as a rule."""

    name: str
    options: dict[str, Any]
    mesh: str
    updates: UpdateWhen
    parts: int

    @property
    def schedule(self) -> Schedule:
        options = dict(self.options)
        if "remat" in options:
            options["remat"] = POLICIES[options["remat"]]
        if self.name == "hpz":
            return hpz(options.pop("layers"), **options)
        return {"zero1": zero1, "zero2": zero2, "zero3": zero3, "ddp": ddp, "hsdp": hsdp}[self.name](**options)

    def refusal(self, trace: Trace) -> str | None:
        """How the error begins that the builder must raise for `trace`, if it must."""
        axes = dict(trace.mesh)
        if self.name == "ddp" and trace.ranks > 1:
            return "ddp: the state is cut into"
        if self.name == "hsdp" and "replicate" not in axes:
            return "hsdp: the state's mesh .* has no replicas"
        if self.name == "hpz" and "local" not in axes:
            return "hpz: the state's mesh .* does not tell nodes apart"
        if self.options["update"] and trace.trains and trace.update_when == "never":
            return "update=True: this step has no optimizer"
        return None


def _options(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    every: dict[str, st.SearchStrategy[Any]] = {
        "resident": st.integers(0, 3),
        "prefetch": st.integers(0, 3),
        "remat": st.sampled_from(sorted(POLICIES)),
        "defer": st.booleans(),
        "update": st.booleans(),
        "layers": st.integers(0, 5),
    }
    return st.fixed_dictionaries({name: every[name] for name in names})


OPTIONS = {
    "zero1": _options("prefetch", "remat", "update"),
    "zero2": _options("prefetch", "remat", "update"),
    "zero3": _options("resident", "prefetch", "remat", "defer", "update"),
    "ddp": _options("remat", "update"),
    "hsdp": _options("resident", "prefetch", "remat", "defer", "update"),
    "hpz": _options("layers", "prefetch", "remat", "defer", "update"),
}


FITTING = {
    "ddp": ("one rank", "replicas of the whole"),
    "hsdp": ("replicas", "replicas and nodes", "replicas of the whole"),
    "hpz": ("nodes", "replicas and nodes"),
}


@st.composite
def choices(draw: st.DrawFn) -> list[Choice]:
    """Every builder, each with some options."""
    found = []
    for name, options in OPTIONS.items():
        any_mesh = name not in FITTING or draw(st.integers(0, 7)) == 0
        mesh = draw(st.sampled_from(sorted(MESHES) if any_mesh else FITTING[name]))
        chosen = draw(options)
        updates = draw(st.sampled_from(UPDATES[chosen["update"] and draw(st.integers(0, 7)) > 0 :]))
        found.append(Choice(name, chosen, mesh, updates, draw(st.sampled_from((1, 1, 3, 5)))))
    return found
