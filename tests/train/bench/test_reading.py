"""What is counted is what there is."""

from __future__ import annotations

import json
from pathlib import Path

from train.bench import main
from train.bench.reading import Calls, circular, imported
from yafsdp_fn.params import tree


def test_imports_are_found_wherever_they_stand_and_circles_through_others(tmp_path: Path) -> None:
    library = tmp_path / "lib"
    (library / "sub").mkdir(parents=True)
    texts = {
        "__init__": "from lib.sub import a",
        "sub/__init__": "",
        "sub/a": "import lib.b, torch",
        "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lib.c import x",
        "c": "def f():\n    from lib.sub.a import g",
    }
    for name, text in texts.items():
        (library / f"{name}.py").write_text(text)
    edges = dict(imported(library))
    assert edges["lib"] == {"lib.sub.a"} and edges["lib.sub.a"] == {"lib.b"} and edges["lib.c"] == {"lib.sub.a"}
    assert circular(edges) == [["lib.b", "lib.c", "lib.sub.a"]]
    assert circular({"a": {"b"}, "b": set()}) == []


def test_calls_of_the_library_and_changes_of_file_are_counted() -> None:
    calls = Calls()
    calls.count(lambda: [tree.named_leaves({"a": 1}) for _ in range(2)])
    tree.named_leaves({"a": 1})  # not counted
    found = calls.found()
    assert found["calls"] >= 2 and found["files"] == [tree.__file__] and found["changes"] == 0


def test_the_command_counts_a_step(capfd, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "reading.json"
    assert main(["reading", "--ranks", "1", "--save", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["calls"] > found["changes"] > 10 and found["circles"] == 0
    assert {"yafsdp_fn/runtime/session.py", "yafsdp_fn/runtime/interpreter.py"} < set(found["entered"])
    assert found["library lines"] == sum(n for name, n in found["folders"].items() if "/lab" not in name)
    assert "calls per further layer" in capfd.readouterr().out
