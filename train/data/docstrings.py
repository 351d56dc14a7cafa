"""Signatures and docstrings of Python source as conversations: a question and its answer, on every machine."""

from __future__ import annotations

import ast
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path

from train.data import files
from train.data.chat import Messages


@dataclasses.dataclass(frozen=True)
class Docstrings:
    """The user says `def f(a, b=0):`, the assistant what its docstring says."""

    paths: tuple[Path, ...]

    @property
    def label(self) -> str:
        return f"docstrings of {len(self.paths)} files"

    def key(self) -> str:
        return files.fingerprint(self.label, self.paths, "docstrings")

    def conversations(self) -> Iterator[Messages]:
        for path in self.paths:
            try:
                with warnings.catch_warnings(action="ignore"):  # of the text's own: an escape that is none
                    tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):  # of another Python, or for tools alone
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (said := ast.get_docstring(node)):
                    yield [{"role": "user", "content": signature(node)}, {"role": "assistant", "content": said}]


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """`def f(a, b=0) -> int:`"""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{word} {node.name}({ast.unparse(node.args)}){returns}:"
