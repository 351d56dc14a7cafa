"""The library behind the page: what it asks, in JSON, and what it is answered. Needs no torch, and runs in a worker.

    open(name, text)      a trace, or a whole program, as `Program.to_json` writes it
    build(settings)       the program of a builder's options, on a cluster's mesh
    check(stages)         lists of ops, as they have been edited: the rule that they break, or their time and picture
    save(stages)          the program as JSON

An op is a string of JSON, `["gather",[1],[0],"shard"]`, in the page and here: equal strings are one op, read once.
"""

import functools
import inspect
import json
import re
from collections import Counter
from typing import Any, Literal, get_args, get_origin

from yafsdp_fn.pipelines import orders
from yafsdp_fn.planner.cluster import CLUSTERS, Cluster
from yafsdp_fn.planner.cluster import cluster as named
from yafsdp_fn.planner.plan import Plan, read_by
from yafsdp_fn.planner.simulate import check_costs
from yafsdp_fn.planner.space import Order, arrangements
from yafsdp_fn.program.json import NAMES
from yafsdp_fn.program.ops import AllReduce, Backward, Fetch, Op, Reduce
from yafsdp_fn.program.program import Program
from yafsdp_fn.program.text import describe
from yafsdp_fn.program.trace import Trace, arguments, chained_order
from yafsdp_fn.proof.errors import Refused
from yafsdp_fn.proof.verify import verify
from yafsdp_fn.schedules import builders
from yafsdp_fn.timeline.layout import GREY, BoxRow, Palette, of_stage, of_stages
from yafsdp_fn.timeline.text import longest, shown
from yafsdp_fn.timeline.timeline import Timeline
from yafsdp_fn.util.mesh_axes import MeshAxes
from yafsdp_fn.util.schema import kinds, typed

Colours = tuple[list[str], list[str]]
"""Of weights, and of gradients, by unit."""

ACROSS = 10.0
"""Inches of a step. Pictures are sent in parts of it, and drawn as wide as the page is."""


class Playground:
    """One page: the traces that it has opened, and the step and the cluster of what it shows."""

    def __init__(self) -> None:
        self.opened: dict[str, tuple[Program, int]] = {}
        self.trace: Trace | None = None
        self.colours: Colours = ([], [])
        self.rows: dict[tuple[type, Op], list[str]] = {}  # ops of two kinds can be equal as tuples
        self.cluster: Cluster = named("a100-80g")
        self.tokens = 0

    def answer(self, method: str, given: str) -> str:
        """Calls `method` with arguments in JSON; returns its result, or `{"error": ...}`, in JSON."""
        try:
            return json.dumps(getattr(self, method)(*json.loads(given)))
        except (TypeError, ValueError) as error:
            return json.dumps({"error": str(error)})
        except Exception as error:  # without an answer the page would wait for ever
            return json.dumps({"error": f"a fault of this page, {error!r}"})

    def choices(self) -> dict[str, Any]:
        """The clusters, the builders with their options, the orders of pipelines, and the fields of each kind of op."""
        return {
            "clusters": list(CLUSTERS),
            "builders": {name: _options(factory) for name, factory in builders.FACTORIES.items()},
            "orders": list(orders.FACTORIES),
            "ops": {name: [_field(op, field) for field in op._fields] for name, op in NAMES.items()},
        }

    def open(self, name: str, text: str, tokens: int = 0) -> dict[str, Any]:
        """Reads a program, or one without ops for its trace. tokens: that a rank reads in a microbatch, 0: unknown"""
        program = Program.from_json(text)
        _check_names(program.trace)
        self.opened[name] = program, tokens
        trace = program.trace
        return {
            "mesh": arguments(dict(trace.mesh)),
            "gpus": trace.world,
            "microbatches": trace.microbatches,
            "stages": trace.stages,
            "has ops": any(program.stages),
        }

    def meshes(self, settings: dict[str, Any]) -> list[str]:
        """The meshes of so many GPUs that the builder can run on, inside of a stage."""
        return [arguments(dict(mesh)) for mesh in self._meshes(settings)]

    def _meshes(self, settings: dict[str, Any]) -> list[MeshAxes]:
        gpus, stages, name = settings["gpus"], settings["stages"], settings["builder"]
        if gpus < 1 or stages < 1 or gpus % stages:
            raise ValueError(f"{stages} stages do not divide {gpus} GPUs")
        ranks, node = gpus // stages, named(settings["cluster"]).gpus_per_node
        if ranks > node and ranks % node:
            raise ValueError(
                f"{ranks} GPUs do not fill nodes of {node}: take {ranks // node * node} or {-(-ranks // node) * node}"
            )
        program, _ = self.opened[settings["trace"]]
        if program.trace.split is not None:
            raise ValueError(
                "the step has been cut into stages already: show it as it was imported, or trace a whole one"
            )
        trace = program.trace.on((("shard", ranks),))
        found = [mesh for of, mesh in arrangements(trace, named(settings["cluster"])) if of == name]
        if name in ("zero1", "zero2", "zero3"):
            return [(("shard", ranks),)]
        if not found:
            raise ValueError(f"{name} has no mesh of {ranks} GPUs in nodes of {node}; take zero3, or other numbers")
        return found

    def build(self, settings: dict[str, Any]) -> dict[str, Any]:
        """What a builder makes of a trace, with its ops; of an opened program with ops, and no builder, these."""
        program, tokens = self.opened[settings["trace"]]
        self.cluster = named(settings["cluster"])
        if settings["builder"] == "":
            found = program
        else:
            trace = self._step(program.trace, settings)
            factory: Any = builders.FACTORIES[settings["builder"]]
            schedule = factory(**settings["options"])
            if settings["stages"] > 1:
                schedule = orders.FACTORIES[settings["order"]](schedule)
            found = schedule(trace)
        palette, units = Palette(found.trace), range(len(found.trace.units))
        light, dark = ([palette.of(unit, dark) for unit in units] for dark in (False, True))
        self.colours = light, dark
        self.rows = {}
        self.trace, self.tokens = found.trace, tokens * found.trace.microbatches * read_by(found.trace)
        return {
            "stages": [[_text(op) for op in ops] for ops in found.stages],
            "units": [unit.name for unit in found.trace.units],
            "visits": [visit.name for visit in found.trace.visits],
            **self._shown(found),
        }

    def _step(self, trace: Trace, settings: dict[str, Any]) -> Trace:
        meshes = self._meshes(settings)
        mesh = next((each for each in meshes if arguments(dict(each)) == settings.get("mesh")), meshes[0])
        count = settings["microbatches"]
        if count < 1:
            raise ValueError(f"{count} microbatches: expected one or more")
        if settings["stages"] > 1:
            order = Order(settings["order"], settings["stages"], orders.SEGMENTS.get(settings["order"], 1), count)
            return order.whole(trace, (("stage", settings["stages"]), *mesh))
        return trace.on(mesh)._replace(microbatches=count, order=chained_order(trace.visits, count))

    def check(self, stages: list[list[str]]) -> dict[str, Any]:
        """The verdict on lists of ops for the step that was built last."""
        return self._shown(self._program(stages))

    def save(self, stages: list[list[str]]) -> str:
        """The program as JSON, of version 1, which `Program.from_json` reads."""
        return self._program(stages).to_json()

    def _program(self, stages: list[list[str]]) -> Program:
        if self.trace is None:
            raise ValueError("nothing has been built yet")
        return Program(self.trace, *[tuple(map(_op, ops)) for ops in stages])

    # ---- what is shown of a program

    def _shown(self, program: Program) -> dict[str, Any]:
        rows = [[self._row(op, program.trace) for op in ops] for ops in program.stages]
        try:
            verify(program)
        except Refused as refused:
            return {"rows": rows, "refused": _refusal(refused)}
        try:
            check_costs(program.trace)
            plan = Plan.of(program, self.cluster)._replace(tokens=self.tokens)
        except ValueError as error:  # it is right, and its time cannot be told
            return {"rows": rows, "unknown": str(error)}
        timeline = plan.timeline
        picture = _picture(timeline)
        return {"rows": rows, "figures": _figures(plan), "picture": picture}

    def _row(self, op: Any, trace: Trace) -> list[str]:
        """Stream, words and colour: that of its first layer, grey where it has no unit, or is out of form."""
        key = type(op), op
        if key in self.rows:
            return self.rows[key]
        try:
            units = trace.units_of(op)
        except (AttributeError, IndexError, TypeError):
            units = ()
        known = [unit for unit in units if 0 <= unit < len(trace.units)]
        colour = GREY
        if known and (len(units) <= 2 or hasattr(op, "visit")):
            first = next((unit for unit in known if trace.units[unit].stack is not None), known[0])
            colour = self.colours[isinstance(op, Backward | Reduce | AllReduce | Fetch)][first]
        self.rows[key] = [op.stream, describe(op, trace), colour]
        return self.rows[key]


def _check_names(trace: Trace) -> None:
    """Raises ValueError for a name that does not stand on one line: all that the page shows it takes by lines."""
    named = [(f"units[{unit.id}]", unit.name + (unit.stack or "")) for unit in trace.units]
    named += [(f"visits[{visit.id}]", visit.name) for visit in trace.visits]
    for place, name in named:
        if not name.isprintable():
            raise ValueError(f"trace.{place}.name: expected letters that are seen, on one line, got {name!r:.80}")


# ---- Ops as strings.


@functools.cache
def _op(text: str) -> Op:
    """Reads an op. Raises ValueError that names the field that is wrong."""
    name, *fields = json.loads(text)
    try:
        op: Op = typed(NAMES[name], fields)
    except KeyError:
        raise ValueError(f"there is no op {name!r}; there are {', '.join(NAMES)}") from None
    except ValueError as error:
        raise ValueError(f"{name}{error}") from None
    return op


def _text(op: Op) -> str:
    return json.dumps([type(op).__name__.lower(), *op], separators=(",", ":"))  # as the page writes it


def _options(factory: Any) -> list[list[Any]]:
    """`[name, default]` of a builder's options; of one without a default 1."""
    each = inspect.signature(factory).parameters.values()
    return [[one.name, 1 if one.default is one.empty else one.default] for one in each]


def _field(op: Any, field: str) -> list[Any]:
    """`[name, how it is edited, default]` of a field: by an example of the values that it takes, or by its choices."""
    kind = kinds(op)[field]
    default = op._field_defaults.get(field)
    if get_origin(kind) is Literal:
        return [field, list(get_args(kind)), default]
    how = {int: "number", bool: "truth", int | None: "number or none"}.get(kind, "numbers")
    return [field, "units" if field == "units" else "visit" if field == "visit" else how, default]


def _refusal(refused: Refused) -> dict[str, Any]:
    """The rule, its sentence, and the lines of the message: what is wrong, and the uses of what two ops want."""
    sentence = refused.__notes__[0].split(" says: ", 1)[1]
    head, *uses = str(refused).splitlines()
    against = next((re.search(r"op (\d+)", use) for use in uses if use.endswith("<- against this")), None)
    of = {"rule": refused.rule, "op": refused.op, "stage": refused.stage or 0, "against": against and int(against[1])}
    return {
        **of,
        "sentence": sentence,
        "why": head.split(f"rule {refused.rule!r}: ", 1)[1],
        "at": head.split(": rule ")[0],
        "uses": uses,
    }


# ---- Figures and pictures.


def _figures(plan: Plan) -> dict[str, Any]:
    timeline, memory = plan.timeline, plan.memory
    wire: dict[str, int] = {}
    for part in plan.program.by_stage:  # of a pipeline, the stage that sends most of each kind
        for name, nbytes in part.wire_bytes().items():
            wire[name] = max(nbytes, wire.get(name, 0))
    sent = Counter[int]()
    for crossing in timeline.crossings:
        sent[crossing.source] += crossing.nbytes
    wire["to other stages"] = max(sent.values(), default=0)
    one = timeline.stage_count == 1
    return {
        "step_s": plan.step_s,
        "step": shown(plan.step_s),
        "tokens_per_s": plan.tokens_per_s,
        "bound": plan.bound,
        "headroom": plan.headroom_in_words,
        "least": plan.least.against(plan.step_s),
        "busy": timeline.compute_s / plan.step_s if one else 1 - timeline.bubble,
        "bubble": None if one else timeline.bubble,
        "idle": longest(timeline.bubbles(), 2 if one else 3),
        "peak": memory.peak_bytes,
        "budget": plan.budget,
        "at": memory.at,
        "memory": [[name.replace("_", " "), nbytes] for name, nbytes in memory.itemised().items() if nbytes],
        "wire": [[name, nbytes] for name, nbytes in wire.items() if nbytes],
    }


def _picture(timeline: Timeline) -> dict[str, Any]:
    """The picture of a step: rows in inches, boxes in parts of the step, as `timeline.layout` lays them out.

    lanes: `[name, top, height, whether it is large]`; path: `[start, end, top, height]` of what follows in one row
    boxes: `[kind, start, end, top, height, colour, text, op, stage]`. op: its number, None where it is no op
    """
    several = timeline.stage_count > 1
    layout = of_stages(timeline) if several else of_stage(timeline)

    def at(row: BoxRow) -> list[float]:
        return [round(row.top, 3), round(row.height, 3)]

    return {
        "title": timeline.title,
        "seconds": timeline.seconds,
        "stages": timeline.stage_count,
        "height": round(layout.height, 3),
        "lanes": [[row.name, *at(row), bool(row.stream)] for row in layout.rows if row.name],
        "boxes": [
            [bar.kind, *_parts(bar.start, bar.end, timeline.seconds), *at(row), bar.colour, bar.text, bar.op]
            + [row.stage] * several
            for row in layout.rows
            for bar in row.bars
        ],
        "path": [[*_parts(start, end, timeline.seconds), *at(row)] for row, start, end in layout.path],
    }


def _parts(start: float, end: float, seconds: float) -> list[float]:
    return [round(start / seconds, 6), round(end / seconds, 6)]
