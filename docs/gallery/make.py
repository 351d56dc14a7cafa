"""Makes the gallery: every published schedule, and every submission, as a page, a picture and a program in JSON.

    python docs/gallery/make.py             # proves and ranks them; from the root of a checkout, with '.[dev]'
    python docs/gallery/make.py FOLDER      # and writes all pages; `make site` does so, in a minute of CPU

One step, on one cluster: what differs is the schedule alone. A submission is a program of that very step, proved by
`verify` and simulated by us; what it says of itself is a name, an author and a note.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

import yafsdp_fn as ya
from models import llama
from yafsdp_fn.planner.space import Order
from yafsdp_fn.proof.verify import RULES
from yafsdp_fn.schedules import Assignment, Program, Refused, Trace, chained_order, cut
from yafsdp_fn.util import strict_json
from yafsdp_fn.util.mesh_axes import MeshAxes

SUBMISSIONS = Path(__file__).resolve().parent / "submissions"

# ---- The step: eight layers as wide as Llama 2 70B's, 32 sequences of 2048 tokens, one in each microbatch.

CLUSTER, RANKS, STAGES = "a100-80g", 16, 4
CONFIG = dataclasses.replace(llama.CONFIGS["llama2-70b"], layers=8)
LENGTH, SEQUENCES = 2048, 32
TOKENS = LENGTH * SEQUENCES
PRECISION = ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16)
STEP = """\
from models import llama

config = dataclasses.replace(llama.CONFIGS["llama2-70b"], layers=8)      # 7.4B parameters
tokens = torch.empty(2, 2048, dtype=torch.long, device="meta")           # two sequences a rank, two microbatches
how = {"precision": ya.Precision(compute=torch.bfloat16, reduce=torch.bfloat16), "tx": ya.optim.adamw(3e-4)}
batch = {"tokens": tokens, "targets": tokens}
trace = ya.planner.trace(llama.loss(config), llama.params(config), batch, ranks=16, microbatches=2, **how)"""


@functools.cache
def flat(layers: int = CONFIG.layers) -> Trace:
    """The step on 16 ranks without stages: two sequences each."""
    config, rows = dataclasses.replace(CONFIG, layers=layers), SEQUENCES // RANKS
    tokens = torch.empty(rows, LENGTH, dtype=torch.int64, device="meta")
    batch = {"tokens": tokens, "targets": tokens}
    how: dict[str, Any] = {"precision": PRECISION, "tx": ya.optim.adamw(3e-4), "microbatches": rows}
    return ya.planner.trace(llama.loss(config), llama.params(config), batch, ranks=RANKS, **how)


def on(trace: Trace, mesh: MeshAxes, microbatches: int) -> Trace:
    """The step on another mesh, in other microbatches of one sequence each."""
    order = chained_order(trace.visits, microbatches)
    return trace.on(mesh)._replace(microbatches=microbatches, order=order)


# ---- What is shown.


class Entry(NamedTuple):
    """A published schedule. name: of its files; line: the Python that makes it, in STAGES and MICROBATCHES

    axes: arguments of `ya.mesh`; segments: of each stage, for a pipeline; shape: how they lie on stages
    """

    name: str
    title: str
    line: str
    what: str
    source: str
    axes: str = ""
    segments: int = 0
    shape: str = "loop"

    @property
    def python(self) -> str:
        """The line, for the gallery's step."""
        return self._line(STAGES)

    def program(self) -> Program:
        """Its program of the gallery's step."""
        return self.schedule()(self._on(flat(), RANKS, STAGES))

    def small(self) -> Program:
        """Its program of a step of two layers on four ranks: z3 can be asked about it."""
        return self.schedule(2)(self._on(flat(layers=2), 4, 2))

    def _line(self, stages: int) -> str:
        return self.line.replace("STAGES", str(stages)).replace("MICROBATCHES", str(2 * stages))

    def schedule(self, stages: int = STAGES) -> ya.schedules.Schedule:
        """The schedule; of pipelines on so many stages, in twice as many microbatches."""
        made: ya.schedules.Schedule = eval(self._line(stages), {"ya": ya, "get_schedule_ops": get_schedule_ops})
        return made

    def _on(self, trace: Trace, ranks: int, stages: int) -> Trace:
        if not self.segments:
            meshes: dict[str, MeshAxes] = {
                "": (("shard", ranks),),
                "replicate=-1, shard=1": (("replicate", ranks), ("shard", 1)),
                "replicate=2": (("replicate", 2), ("shard", ranks // 2)),
                "local=8": (("node", 2), ("local", ranks // 2)),
            }
            return on(trace, meshes[self.axes], 2)
        name = "v_shaped" if self.shape == "v" else "interleaved"  # as segments lie on stages, whatever the order
        order = Order(name, stages, self.segments, microbatches=2 * stages)
        return order.whole(trace, (("stage", stages), ("shard", ranks // stages)))


def paper(authors: str, number: str) -> str:
    return f"[{authors}](https://arxiv.org/abs/{number})"


ZERO = paper("Rajbhandari et al. 2020", "1910.02054")
FSDP = paper("Zhao et al. 2023", "2304.11277")
ZERO_BUBBLE = paper("Qi et al. 2024", "2401.10241")
MEGATRON = paper("Narayanan et al. 2021", "2104.04473")
TORCH = "[torch.distributed.pipelining](https://docs.pytorch.org/docs/stable/distributed.pipelining.html)"
S = "ya.schedules"

PUBLISHED = (
    Entry(
        "ddp",
        "Data parallelism",
        f"{S}.ddp()",
        "Every rank holds everything. Gradients add up over the microbatches and are summed over all ranks in the last "
        "one, layer by layer, behind the backward of the layers before.",
        paper("Li et al. 2020", "2006.15704"),
        axes="replicate=-1, shard=1",
    ),
    Entry(
        "zero1",
        "ZeRO-1",
        f"{S}.zero1()",
        "The optimizer's state is sharded: weights are gathered once a step, gradients reduced once a step. Between "
        "them every rank holds all weights and all gradients.",
        ZERO,
    ),
    Entry(
        "zero2",
        "ZeRO-2",
        f"{S}.zero2()",
        "Gradients are sharded, too: each microbatch reduces them, so that two gradient slots are enough. Weights are "
        "gathered once a step and stay.",
        ZERO,
    ),
    Entry(
        "zero3",
        "ZeRO-3 in two slots",
        f"{S}.zero3()",
        "Weights are sharded, too: each layer is gathered ahead of its forward and again ahead of its backward, into "
        "one of two slots that alternate.",
        f"{ZERO}; the two slots: [YaFSDP](https://github.com/yandex/YaFSDP)",
    ),
    Entry(
        "zero3-defer",
        "ZeRO-3, gradients reduced once",
        f"{S}.zero3(defer=True)",
        "ZeRO-3 that adds gradients up over the microbatches without communication, and reduces them in the last one: "
        "fewer bytes for the memory of all gradients.",
        FSDP,
    ),
    Entry(
        "zero3-remat",
        "ZeRO-3, recomputed",
        f'{S}.zero3(remat="all")',
        "ZeRO-3 in which every layer keeps its input alone and runs its forward again in the backward: a third more "
        "compute for the memory of activations.",
        paper("Chen et al. 2016", "1604.06174"),
    ),
    Entry(
        "zero3-offload",
        "ZeRO-3, carries on the host",
        f"{S}.zero3(remat={S}.remat.offload())",
        "As recomputed, and the layers' inputs wait in the host's memory between forward and backward, copied by a "
        "stream of their own.",
        paper("Rajbhandari et al. 2021", "2104.07857"),
    ),
    Entry(
        "hsdp",
        "Hybrid sharding",
        f"{S}.hsdp()",
        "ZeRO-3 inside each node of eight, whose shards of gradients are summed over the two nodes: gathers never "
        "leave a node.",
        f"{FSDP}; {paper('Zhang et al. 2022', '2205.00119')}",
        axes="replicate=2",
    ),
    Entry(
        "hpz",
        "ZeRO++'s secondary shards",
        f"{S}.hpz({CONFIG.layers})",
        "ZeRO-3 over all ranks whose layers are gathered from all of them once a step. Each node keeps a copy cut over "
        "its ranks, from which all later gathers are made.",
        paper("Wang et al. 2023", "2306.10209"),
        axes="local=8",
    ),
    Entry(
        "gpipe",
        "GPipe",
        f"{S}.gpipe()",
        "Four stages: all microbatches forward, then all backward. Simple, and all microbatches are kept at once.",
        paper("Huang et al. 2018", "1811.06965"),
        segments=1,
    ),
    Entry(
        "1f1b",
        "1F1B",
        f"{S}.one_f_one_b()",
        "A backward as soon as there can be one: as much idle time as GPipe, with at most four microbatches kept.",
        f"{paper('Narayanan et al. 2020', '2006.09503')}; {paper('Fan et al. 2020', '2007.01045')}",
        segments=1,
    ),
    Entry(
        "1f1b-zero1",
        "1F1B, gradients reduced once",
        f"{S}.one_f_one_b({S}.zero1())",
        "1F1B whose stages add gradients up and reduce them in the last microbatch, as Megatron-LM does.",
        MEGATRON,
        segments=1,
    ),
    Entry(
        "interleaved",
        "Interleaved 1F1B",
        f"{S}.interleaved()",
        "Two segments of layers on each stage, visited in turn: half of the idle time, for twice as many messages and "
        "more microbatches kept.",
        MEGATRON,
        segments=2,
    ),
    Entry(
        "looped-bfs",
        "Looped breadth-first",
        f"{S}.gpipe()",
        "Two segments on each stage, and all microbatches through one segment before the next: a segment's weights and "
        "gradients are needed in one stretch.",
        paper("Lamy-Poirier 2022", "2211.05953"),
        segments=2,
    ),
    Entry(
        "zb-h1",
        "ZB-H1",
        f"{S}.zero_bubble()",
        "Backwards in halves: other stages wait for gradients of inputs alone, and those of weights fill what would be "
        "idle. No more microbatches are kept than by 1F1B.",
        ZERO_BUBBLE,
        segments=1,
    ),
    Entry(
        "zb-v",
        "ZB-V",
        f"{S}.v_shaped()",
        "Halves of backwards over two segments a stage that lie like a V, so that the first stage also has the last "
        "segment, and all stages keep as much.",
        ZERO_BUBBLE,
        segments=2,
        shape="v",
    ),
    Entry(
        "v-half",
        "V-Half",
        f"{S}.v_half()",
        "The V of ZB-V with half as many microbatches kept: calls of a microbatch at fixed times, those of the next "
        "one six calls later.",
        paper("Qi et al. 2024", "2405.15362"),
        segments=2,
        shape="v",
    ),
    Entry(
        "v-min",
        "V-Min",
        f"{S}.v_min()",
        "The V of ZB-V with a third of the microbatches kept: each call as soon as its microbatch can have it, down "
        "the V and up.",
        paper("Qi et al. 2024", "2405.15362"),
        segments=2,
        shape="v",
    ),
    Entry(
        "interleaved-zb",
        "Interleaved zero bubble",
        f'{S}.from_actions(get_schedule_ops("InterleavedZeroBubble", STAGES, MICROBATCHES, 2))',
        "Halves of backwards over two interleaved segments a stage. The rows are those of torch's class; gathers, "
        "reductions and messages are ours.",
        f"{ZERO_BUBBLE}; {TORCH}",
        segments=2,
    ),
    Entry(
        "dualpipe-v",
        "DualPipeV",
        f'{S}.from_actions(get_schedule_ops("DualPipeV", STAGES, MICROBATCHES, 2))',
        "DualPipe cut in half: two segments a stage that lie like a V, where forwards of one run beside backwards of "
        "the other. The rows are those of torch's class; here the two run one after the other.",
        f"{paper('DeepSeek-AI 2024', '2412.19437')}; {TORCH}",
        segments=2,
        shape="v",
    ),
)

# ---- Submissions.

WORDS = re.compile(r"[^<>|\[\]`{}]{1,300}")
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class Submission(NamedTuple):
    """A program of somebody else, proved. name: that of its file"""

    name: str
    author: str
    note: str
    program: Program


def submitted(path: Path) -> Submission:
    """Reads a submission and proves it. Raises ValueError with the file's name: what is no submission, a program of
    another step, and what `verify` refuses, with the rule's sentence."""
    try:
        data = strict_json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.keys() != {"name", "author", "note", "program"}:
            raise ValueError("expected an object of name, author, note and program")
        for key in ("name", "author", "note"):
            if not isinstance(data[key], str) or not WORDS.fullmatch(data[key]) or not data[key].isprintable():
                raise ValueError(f"{key}: expected a line of plain text of at most 300 characters")
        if data["name"] != path.stem or not NAME.fullmatch(path.stem):
            raise ValueError(f"name: expected that of the file, {path.stem!r}, of small letters, digits and dashes")
        if data["name"] in {entry.name for entry in PUBLISHED}:
            raise ValueError(f"name: {data['name']!r} is that of a published schedule")
        program = Program.from_json(json.dumps(data["program"]))
        check_step(program.trace)
        return Submission(data["name"], data["author"], data["note"], ya.verify(program))
    except Refused as refused:
        raise ValueError("\n".join([f"{path.name}: {refused}", *getattr(refused, "__notes__", ())])) from refused
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def check_step(trace: Trace) -> None:
    """Raises ValueError where `trace` is not the gallery's step, on a mesh and in stages of its own choice."""
    width = trace.stage_ranks
    if trace.world != RANKS or trace.microbatches * width != SEQUENCES:
        raise ValueError(
            f"expected {RANKS} ranks and {SEQUENCES} microbatches over those of a stage, got {trace.stages} stages of "
            f"{width} ranks with {trace.microbatches} microbatches each"
        )
    ours = on(flat(), trace.mesh, trace.microbatches)
    if trace.split is not None:
        used: list[list[int]] = [[] for _ in ours.units]
        for segment, ends in enumerate(trace.split.segments):
            for unit in {unit for visit in ours.visits[slice(*ends)] for unit in visit.units}:
                used[unit].append(segment)
        ours = cut(ours, Assignment(tuple(map(tuple, used)), trace.split.homes))
    for field, mine, theirs in zip(Trace._fields, ours, trace, strict=True):
        if mine != theirs:
            raise ValueError(
                f"trace.{field}: not that of the gallery's step (docs/gallery/index.md says how to get it)"
            )


def submissions() -> list[Submission]:
    return [submitted(path) for path in sorted(SUBMISSIONS.glob("*.json"))]


# ---- The pages.


class Shown(NamedTuple):
    """What is shown of a program. small: ops of its schedule's program of two layers, 0 where there is no schedule"""

    title: str
    what: str
    source: str
    program: Program
    get: str
    small: int
    json: str


def all_shown() -> dict[str, Shown]:
    """Everything in the gallery by name. Raises Refused for a program that is wrong."""
    found = {}
    for entry in PUBLISHED:
        axes = f"ya.mesh({'stage=' + str(STAGES) if entry.segments else entry.axes})"
        rows = "from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops\n"
        get = rows * ("get_schedule_ops" in entry.line) + f"schedule = {entry.python}    # on {axes}"
        if entry.segments > 1:
            get += f", two segments a stage{', like a V' * (entry.shape == 'v')}"
        ops = sum(map(len, ya.verify(entry.small()).stages))
        program = ya.verify(entry.program())
        found[entry.name] = Shown(entry.title, entry.what, entry.source, program, get, ops, f"{entry.name}.json")
    for each in submissions():
        path = f"submissions/{each.name}.json"
        get = f'entry = json.loads(Path("docs/gallery/{path}").read_text())\n'
        get += 'program = ya.Program.from_json(json.dumps(entry["program"]))'
        what = f"{each.note.rstrip('.')}."
        found[each.name] = Shown(each.name, what, f"submitted by {each.author}", each.program, get, 0, path)
    return found


def compared(shown: dict[str, Shown]) -> ya.planner.Comparison:
    """All programs on the cluster, the fastest first."""
    return ya.planner.compare({name: each.program for name, each in shown.items()}, CLUSTER, tokens=TOKENS).ranked()


def files(shown: dict[str, Shown], found: ya.planner.Comparison) -> Iterator[tuple[str, str]]:
    """`(name, text)` of every page, and of every published program."""
    head, *rows = found.table
    yield "index.md", index(shown, found)
    for name, *cells in rows:
        yield f"{name}.md", page(name, shown[name], found, [["", ""], *map(list, zip(head[1:], cells, strict=True))])
        if not shown[name].json.startswith("submissions"):
            yield shown[name].json, shown[name].program.to_json() + "\n"


def markdown(table: list[list[str]], words: int) -> str:
    """A table in Markdown, aligned to the right but for the column of `words`."""
    rule = ["---" if at == words else "---:" for at in range(len(table[0]))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [table[0], rule, *table[1:]])


def page(name: str, each: Shown, found: ya.planner.Comparison, figures: list[list[str]]) -> str:
    plan, stages = found.plans[name], len(each.program.stages)
    ops, rank = sum(map(len, each.program.stages)), [*found.timelines].index(name) + 1
    count, where = len(found.timelines), f" on {stages} stages" * (stages > 1)
    fits = "" if plan.fits else f" **It does not fit** into {plan.budget / 2**30:.0f} GiB, and is ranked last."
    z3 = (
        f"Of its program of two layers, {each.small} ops, z3 is asked for an order that the waits permit in which it "
        "goes wrong, or does not end: there is none. On four ranks a small step of it is that of the plain loop.\n"
        "`pytest --nightly tests/test_gallery.py` asks both."
    )
    return f"""\
# {each.title}

{each.what}
Source: {each.source}.

```python
{each.get}
```

![A step of {name}]({name}.png)

Predicted, on the step and the cluster of [the gallery](index.md), where it is number {rank} of {count}.{fits}

{markdown(figures, words=0)}

## Proof

`verify` proves the program, {ops} ops{where}, by [its {len(RULES)} rules](../schedules.md#the-rules-of-verify).
{z3 * bool(each.small)}
[proof.md](../proof.md) has more.

## Program

As JSON: [{each.json}]({each.json}), {"whose `program`" if not each.small else "which"} `ya.Program.from_json` reads.

<details>
<summary>All {ops} ops</summary>
<pre>
{html.escape(str(each.program), quote=False)}
</pre>
</details>
"""


INDEX = """\
# A gallery of schedules

Every published schedule that is here, on one step and one cluster: with its picture, its figures, its program and
its proof. The figures are predictions of [the planner](../planner.md), on the preset `%CLUSTER%`: nothing here has
run on these GPUs. `docs/gallery/make.py` makes all of it when the site is built.

## The step

Eight layers as wide as Llama 2 70B's, 7.4B parameters; %SEQUENCES% sequences of %LENGTH% tokens; %RANKS% GPUs in two
nodes; bf16, reduced in bf16. Every microbatch is one sequence: without stages a rank has two of them, on four stages
of four ranks eight.

```python
import dataclasses

import torch

import yafsdp_fn as ya
%STEP%

def on_stages(per_stage=1, shape="loop"):                                # the same step for a pipeline
    moved = trace.on((("stage", 4), ("shard", 4)))
    moved = moved._replace(microbatches=8, order=ya.schedules.chained_order(trace.visits, 8))
    return ya.schedules.cut(moved, ya.schedules.assign(moved, 4, per_stage=per_stage, shape=shape))

programs = {"zero3": ya.schedules.zero3()(trace), "1F1B": ya.schedules.one_f_one_b()(on_stages())}
print(ya.planner.compare(programs, "%CLUSTER%", tokens=%TOKENS%))
```

## Ranked

%TABLE%

Bound: what the same ops take if nothing ever waits. Idle: the part of the step in which no compute runs, a mean over
stages. Sent and peak: of a rank of the stage that has most. `4 x 4`: four stages of four ranks. Data parallelism aside,
this step leaves room on every GPU, so that what saves memory shows as a loss of time.

![A step of each](index.png)

## Submit one

A program of yours, proved by CI and ranked beside the others. It is one file, `docs/gallery/submissions/NAME.json`:

```python
program = my_schedule(trace)                         # or of on_stages(), or of trace.on(another mesh)
ya.verify(program)
entry = {"name": "my-name", "author": "Who", "note": "A line about it.", "program": json.loads(program.to_json())}
Path("docs/gallery/submissions/my-name.json").write_text(json.dumps(entry) + "\\n")
```

`program` is JSON of [version 1](../program-1.schema.json), of the step above: any mesh of %RANKS% ranks, any stages,
the same sequences in microbatches of one. Its trace must be this one to the last number, since what is predicted
follows from it. Then

    python docs/gallery/make.py                # proves it and ranks it
    pytest tests/test_gallery.py

and commit the file. A program that is wrong fails both, with the file's name, the op and the rule. Submitted so far:

%SUBMISSIONS%
"""


COLUMNS = ("ranks", "step", "bound", "idle", "sent", "peak", "tokens/s")
"""Figures in the table of all, which a page of the site has room for."""


def index(shown: dict[str, Shown], found: ya.planner.Comparison) -> str:
    head, *rows = found.table
    columns = [at for at, heading in enumerate(head) if heading.partition(",")[0] in COLUMNS]
    table = [["", head[0], *(head[at] for at in columns)]]
    for at, (name, *cells) in enumerate(([row[0], *(row[at] for at in columns)] for row in rows), 1):
        each = shown[name]
        more = f", {each.source}" * (not each.small) + ", does not fit" * (not found.plans[name].fits)
        table.append([f"{at}", f"[{each.title}]({name}.md){more}", *cells])
    others = [f"- [{name}]({name}.md), {each.source}: {each.what}" for name, each in shown.items() if not each.small]
    given: dict[str, Any] = {
        "TABLE": markdown(table, words=1),
        "STEP": STEP,
        "SUBMISSIONS": "\n".join(others) or "none.",
    }
    given |= {"CLUSTER": CLUSTER, "RANKS": RANKS, "SEQUENCES": SEQUENCES, "LENGTH": f"{LENGTH:,}", "TOKENS": TOKENS}
    return re.sub("%([A-Z]+)%", lambda key: str(given[key[1]]), INDEX)


# ---- Pictures.


def picture(draw: Any, path: Path) -> None:
    """Writes a picture as a PNG of 256 colours: a third of the size."""
    from PIL import Image

    draw(path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(256).save(path, optimize=True)


def write(folder: Path) -> ya.planner.Comparison:
    """Writes all pages, programs and pictures."""
    shown = all_shown()
    found = compared(shown)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files(shown, found):
        (folder / name).write_text(text, encoding="utf-8")
    for name, timeline in found.timelines.items():
        title = f"{shown[name].title}, simulated on {RANKS} GPUs ({CLUSTER})"
        picture(timeline._replace(title=title).save, folder / f"{name}.png")
    picture(found.save, folder / "index.png")
    return found


if __name__ == "__main__":
    try:
        print(write(Path(sys.argv[1])) if sys.argv[1:] else compared(all_shown()))
    except ValueError as error:
        sys.exit(f"gallery: {error}")
