"""Examples in docstrings: every public name has one, it runs, and docs/api shows it.

    for each name on the pages of docs/api:
        names = what docs/api/index.md defines
        each `>>>` of its docstring prints what is below it

All in one process, on one rank. Steps donate their state, so each example has a new one.
"""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import yafsdp_fn as ya
from tests.harness.pages import ROOT

PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md"))}
SHOWN = re.findall(r"^::: ya\.([\w.]+)$", "\n".join(PAGES.values()), re.M)

NO_DOCSTRING = "an object of another class, whose docstring that is: those of what it is made of have examples"
NO_EXAMPLE = {
    "optim.Rate": NO_DOCSTRING,
    "planner.CLUSTERS": NO_DOCSTRING,
    "schedules.Op": NO_DOCSTRING,
    "schedules.Schedule": NO_DOCSTRING,
    "schedules.UpdateWhen": NO_DOCSTRING,
    "schedules.remat.Offloading": "what `remat.offload` returns, which has the example",
    "schedules.remat.offloaded": "for builders: what `build` does with an `Offloading`",
}
"""Names for which an example makes no sense, and why. Not here, by kind: errors, which the library raises, and states
of optimizers, which are what `init` of a transformation returns."""


def named(name: str) -> Any:
    found = ya
    for part in name.split("."):
        found = getattr(found, part)
    return found


def public(package: str = "") -> Iterator[str]:
    """Yields all public names, without those of namespaces that have names of their own."""
    for name in (named(package) if package else ya).__all__:
        path = f"{package}.{name}".lstrip(".")
        if hasattr(named(path), "__all__"):
            yield from public(path)
        else:
            yield path


def documented(name: str) -> list[str]:
    """Returns the name, or of a module of functions, such as `schedules.remat`, the names of those."""
    if not isinstance(module := named(name), ModuleType):
        return [name]
    found = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    named_so = [key for key, value in found.items() if getattr(value, "__qualname__", "") == key]  # no lambda, no alias
    return [f"{name}.{key}" for key in named_so if not key.startswith("_")]


def examples(name: str) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(named(name)) or "", name)


def may_do_without(name: str) -> bool:
    error = inspect.isclass(named(name)) and issubclass(named(name), Exception)
    return error or name in NO_EXAMPLE or re.fullmatch(r"optim\.(contrib\.)?\w+State", name) is not None


DOCUMENTED = [each for name in SHOWN for each in documented(name)]


def test_the_reference_shows_every_public_name_once() -> None:
    assert sorted(SHOWN) == sorted(set(SHOWN))
    assert set(SHOWN) <= set(public())
    shown = {id(named(name)) for name in SHOWN}
    assert [name for name in public() if id(named(name)) not in shown] == []


def test_every_public_name_has_an_example() -> None:
    assert [name for name in DOCUMENTED if not examples(name) and not may_do_without(name)] == []
    assert [name for name in NO_EXAMPLE if name not in DOCUMENTED or examples(name)] == []


@pytest.fixture(scope="module")
def common() -> dict[str, Any]:
    """What docs/api/index.md says that examples share."""
    names: dict[str, Any] = {}
    code = re.search(r"^```python\n(.*?)^```", PAGES["index.md"], re.S | re.M)
    assert code is not None
    exec(code[1], names)
    return names


@pytest.mark.parametrize("name", [name for name in DOCUMENTED if examples(name)])
def test_an_example_prints_what_it_says(name: str, common: dict[str, Any], tmp_path: Path) -> None:
    names = {**common, "folder": str(tmp_path), "w": common["w"].clone(), "g": common["g"].clone()}
    names["state"] = ya.init(common["params"], common["tx"], mesh=common["mesh"])
    names["plain"] = ya.materialize(common["params"])
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    runner.run(doctest.DocTest(examples(name), names, name, None, None, None), out=said.append)
    assert not said, "".join(said)
