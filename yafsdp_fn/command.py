"""`yafsdp`: plans of a loss of your own, and saved programs: proved, drawn, compared. Installed with the wheel.

yafsdp plan my_model:loss_fn my_model:params my_model:batch --ranks 64 --cluster a100-80g --save step.json
yafsdp verify step.json
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import yafsdp_fn as ya

ABOUT = "Plans a training step of your own, and proves, draws and compares saved programs: without GPUs, without ranks."
EPILOG = """MODULE:NAME is a name in a module of the current folder, or of what is installed: my_model:loss_fn.
FILE.json is a program, as program.to_json() gives it, or a timeline, as timeline.to_json() does.
CLUSTER is a name in ya.planner.CLUSTERS: a100-80g, h100-80g, h200-141g, local.

exit status: 0 for yes, 1 for no (a refused program, a plan that does not fit), 2 for an error

Training, the page about a run, and plans of this repository's models are `python -m train` in a checkout: they need its
folders `models` and `train`, which the wheel does not have."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command on `argv`, by default the process's own; returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        return 141
    except (ya.errors.Refused, ya.errors.DoesNotFit) as no:
        print(f"no: {no}")
        return 1
    except Exception as error:  # of the user's loss, too
        if options.traceback:
            raise
        said = " ".join(str(error).split())
        if not isinstance(error, ValueError | OSError):
            said = f"{type(error).__name__}: {said} (--traceback shows where)"
        print(f"yafsdp {options.command}: {said}", file=sys.stderr)
        return 2
    return 0


# ---- The commands.


def plan(options: argparse.Namespace) -> None:
    """Time and memory of a step of your loss on a cluster."""
    schedule = options.schedule
    chosen = {}
    if schedule:  # else the default, which across stages is a pipeline's
        chosen["schedule"] = _named(schedule) if ":" in schedule else getattr(ya.schedules, schedule)()
    found = ya.planner.plan(
        _named(options.loss),
        _made(options.params),
        _made(options.batch),
        tx=_named(options.tx) if options.tx else ya.optim.adamw(1e-3),
        ranks=options.ranks,
        cluster=options.cluster,
        microbatches=options.microbatches,
        **chosen,
        **dict(options.mesh),
    )
    print(found)
    if options.save:
        Path(options.save).write_text(found.program.to_json())
    found.check()


def verify(options: argparse.Namespace) -> None:
    """Proves a saved program, or says what is wrong."""
    print(repr(ya.verify(_read(options.file))))


def draw(options: argparse.Namespace) -> None:
    """Draws a saved program, simulated, or a recorded timeline."""
    ya.planner.compare({options.file: _read(options.file)}, options.cluster).save(options.out)


def compare(options: argparse.Namespace) -> None:
    """Programs and timelines of one step in a table, the fastest first."""
    found = ya.planner.compare({file: _read(file) for file in options.files}, options.cluster).ranked()
    print(found)
    if options.draw:
        found.save(options.draw)


# ---- What arguments stand for.


def axis(text: str) -> tuple[str, int]:
    """Reads AXIS=RANKS: argparse's error calls it by this function's name."""
    name, _, size = text.partition("=")
    return name, int(size)


def _named(place: str) -> Any:
    module, _, path = place.partition(":")
    if not path:
        raise ValueError(f"{place}: expected MODULE:NAME, such as my_model:loss_fn")
    sys.path.insert(0, "")  # the current folder, as `python -m` has it
    return attrgetter(path)(import_module(module))


def _made(place: str) -> Any:
    found = _named(place)
    return found() if callable(found) else found


def _read(file: str) -> Any:
    """Returns the program or the timeline in a file."""
    text = Path(file).read_text()
    kind = ya.timeline.Timeline if '"spans":' in text else ya.Program  # no program has that key
    try:
        return kind.from_json(text)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


# ---- The arguments: name -> kind, and after two spaces what it is for.

ARGUMENTS = {
    plan: {
        "loss": "LOSS  a function of parameters and batch, as MODULE:NAME: my_model:loss_fn",
        "params": "PARAMS  MODULE:NAME of the tree of ya.Param, or of a function that makes it",
        "batch": "BATCH  MODULE:NAME of one rank's batch, or of a function that makes it",
        "--ranks": "RANKS  how many GPUs",
        "--cluster": "GPUS  of which kind: a CLUSTER",
        "--tx": "MODULE:NAME  the optimizer; AdamW if it is left out",
        "--schedule": "SCHEDULE  zero3 (with stages one_f_one_b), zero2, ...; or MODULE:NAME, of a function of a trace",
        "--microbatches": "NUMBER  of a step; 1 if it is left out",
        "--mesh": "AXIS=RANKS  as ya.mesh takes them, and stages: --mesh tensor=4 --mesh stages=2",
        "--save": "OUT.json  save the program, for the other commands",
    },
    verify: {"file": "FILE.json  a program"},
    draw: {
        "file": "FILE.json  a program or a timeline",
        "out": "OUT.svg  where to (or .png, .pdf)",
        "--cluster": "CLUSTER  what to simulate a program on",
    },
    compare: {
        "files": "FILES.json  programs and timelines",
        "--cluster": "CLUSTER  what to simulate programs on",
        "--draw": "OUT.svg  draw all on one time axis (or .png, .pdf)",
    },
}


KINDS: dict[str, Any] = {
    "RANKS": {"type": int, "required": True},
    "GPUS": {"required": True},
    "NUMBER": {"type": int, "default": 1},
    "AXIS=RANKS": {"type": axis, "action": "append", "default": []},
    "FILES.json": {"nargs": "+"},
}
"""Kind of argument -> how argparse reads it; others are strings."""


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("yafsdp", description=ABOUT, epilog=EPILOG, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for run, arguments in ARGUMENTS.items():
        command = commands.add_parser(run.__name__, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("--traceback", action="store_true", help="show an error as Python does")
        for name, about in arguments.items():
            kind, _, text = about.partition("  ")
            command.add_argument(name, metavar=kind, help=text, **KINDS.get(kind, {}))
    return parser


if __name__ == "__main__":
    sys.exit(main())
