"""The command line of a subcommand: tyro's, whose help breaks lines where the terminal ends, not where ours do; and
what is said beside its output."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

T = TypeVar("T")


def say_apart(text: str) -> None:
    """A line on standard error, if anybody reads that."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def cli(kind: type[T], argv: Sequence[str] | None, prog: str, **more: Any) -> T:
    """`kind`, a dataclass, from `argv`. more: of `tyro.cli`"""
    registry = ConstructorRegistry()
    asking: list[StructTypeInfo] = []

    @registry.struct_rule
    def _rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        """Gives what tyro makes of `info`, each help in one line: by itself it keeps breaks before indented lines."""
        if info in asking:  # by this rule itself
            return None
        asking.append(info)
        spec = ConstructorRegistry.get_struct_spec(info)
        asking.pop()
        if not isinstance(spec, StructConstructorSpec):
            return None
        fields = tuple(dataclasses.replace(each, helptext=_joined(each.helptext)) for each in spec.fields)
        return dataclasses.replace(spec, fields=fields)

    with registry:
        found: T = tyro.cli(kind, args=argv, prog=prog, **more)
    return found


def _joined(text: str | Callable[[], str | None] | None) -> Callable[[], str | None]:
    def joined() -> str | None:
        found = text() if callable(text) else text
        return found and " ".join(found.split())

    return joined
