"""The places of the library that only CUDA has, and which test goes there: docs/benchmarks/cuda.json.

    python -m tests.cuda.places                      # runs TESTS, ten minutes, and writes the table
    python -m tests.cuda.places tests/cuda/test_races.py    # these; what they do not reach stays as it was

A place is a branch whose condition asks for the kind of device or for kernels, a statement that uses `torch.cuda`, or
one that launches a kernel of Triton. It is entered where a statement there begins on the fake device (or a real one);
a kernel's also in Triton's interpreter or compiler. Tests run on a copy, each of whose places tells that it is reached.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.harness.pages import ROOT

TABLE = ROOT / "docs" / "benchmarks" / "cuda.json"
TESTS = ("tests/cuda", "tests/kernels", "tests/axes/test_cuda.py")
CHOOSERS = {"kernels_run_on", "vector_kernels", "is_cuda"}
REACHED = """
import os, sys
import torch


FOLDER, KERNELS, SEEN = {folder!r}, {kernels!r}, set()

def at(number):
    cuda = torch.cuda.is_initialized() or torch.cuda.Stream.__module__.startswith("tests.")
    if number in SEEN or not (cuda or number in KERNELS):
        return
    SEEN.add(number)
    with open(FOLDER + "/test") as test, open(FOLDER + "/reached", "a") as reached:
        reached.write(f"{{number}} {{test.read()}}\\n")

def pytest_runtest_setup(item):
    with open(FOLDER + "/test", "w") as test:
        test.write(item.nodeid.partition("[")[0])
"""


class Place(NamedTuple):
    """name: file, function and code, which is unlike all others; line, column: of a statement that begins there"""

    name: str
    line: int
    column: int
    kernel: bool


def places(path: Path) -> Iterator[Place]:
    """The places of a file, from top to bottom."""
    source = path.read_text()
    tree = ast.parse(source)
    kernels = {
        name.id
        for node in tree.body
        if isinstance(node, ast.Assign) and "triton.jit" in ast.unparse(node.value)
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    for function, node in _statements(tree, str(path.relative_to(ROOT / "yafsdp_fn"))):
        found = list(_own(node))
        launched = [x.value.id for x in found if isinstance(x, ast.Subscript) and isinstance(x.value, ast.Name)]
        kernel = any(name in kernels for name in launched)
        asks = [x for x in found if _asks(x)]
        if not asks and not kernel:
            continue
        code = source.splitlines()[node.lineno - 1].strip()
        at = node.lineno
        column = node.col_offset
        if isinstance(node, ast.If):
            side = node.orelse if any(map(_denies, found)) else node.body
            at, column = (side[0].lineno, side[0].col_offset) if side else ((node.end_lineno or 0) + 1, column)
        yield Place(f"{function}: {code}", at, column, kernel)


def _statements(node: ast.AST, where: str) -> Iterator[tuple[str, ast.stmt]]:
    """Statements inside of functions, with where they are; those that hold others are given, too."""
    for child in ast.iter_child_nodes(node):
        inner = where
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{where} {child.name}" if where.endswith(".py") else f"{where}.{child.name}"
        elif isinstance(child, ast.stmt) and not where.endswith(".py"):
            yield where, child
        yield from _statements(child, inner)


def _own(node: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without those of statements inside and without annotations."""
    for name, value in ast.iter_fields(node):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST) and not isinstance(each, ast.stmt) and name != "annotation":
                yield from ast.walk(each)


def _asks(node: ast.AST) -> bool:
    """Whether an expression asks for the kind of device or for kernels, or is of `torch.cuda`."""
    if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.In | ast.NotIn):
        return any(isinstance(x, ast.Constant) and x.value in ("cuda", "cpu") for x in ast.walk(node))
    if isinstance(node, ast.Attribute | ast.Name):
        return (
            ast.unparse(node).removeprefix("self.").rpartition(".")[2] in CHOOSERS or ast.unparse(node) == "torch.cuda"
        )
    return False


def _denies(node: ast.AST) -> bool:
    """Whether an expression of a condition is true where there is no CUDA."""
    if isinstance(node, ast.Compare) and _asks(node):
        kinds = [x.value for x in node.comparators if isinstance(x, ast.Constant)]
        return (isinstance(node.ops[0], ast.NotEq), kinds) in ((True, ["cuda"]), (False, ["cpu"]))
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and any(map(_asks, ast.walk(node.operand)))


def all_places() -> dict[str, Place]:
    """All places of the library by name."""
    files = sorted((ROOT / "yafsdp_fn").rglob("*.py"))
    return {place.name: place for path in files for place in places(path)}


def main(tests: Sequence[str]) -> int:
    before = json.loads(TABLE.read_text()) if TABLE.exists() and tests else {}
    found = all_places()
    names = list(found)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "site", ".*_cache")
        shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
        for path in {name.partition(" ")[0] for name in names}:
            lines = (copy / "yafsdp_fn" / path).read_text().splitlines()
            own = [(place, k) for k, place in enumerate(found.values()) if place.name.startswith(f"{path} ")]
            for place, k in sorted(own, key=lambda each: -each[0].line):
                lines.insert(place.line - 1, f"{' ' * place.column}__import__('reached').at({k})")
            (copy / "yafsdp_fn" / path).write_text("\n".join(lines) + "\n")
        kernels = {k for k, place in enumerate(found.values()) if place.kernel}
        (copy / "reached.py").write_text(REACHED.format(folder=folder, kernels=kernels))
        (Path(folder) / "reached").touch()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--nightly",
            "-p",
            "reached",
            "-p",
            "no:cacheprovider",
            *(tests or TESTS),
        ]
        status = subprocess.run(command, cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}).returncode
        said = [line.split(" ", 1) for line in (Path(folder) / "reached").read_text().splitlines()]
    first = {names[int(k)]: test for k, test in reversed(said)}
    table = {name: first.get(name, before.get(name)) for name in names}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    print("entered by no test:", *[name for name, test in table.items() if test is None], sep="\n    ")
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
