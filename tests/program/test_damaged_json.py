"""Programs in JSON from other people: each is refused with the place of what is wrong, or is a right program."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.damage import PARTS, json_damage, put, search
from tests.harness.marks import nightly
from tests.program.test_program import PROGRAMS
from tests.program.traces import model, on
from tests.proof.overlapped import right
from yafsdp_fn.schedules import Program, verify, zero3

SMALL = zero3(update=True)(on(model(2, 2), "replicas and nodes", "after norm", parts=3))


def searched(folder: Path, numbers: range) -> Counter[str]:
    good = [json.loads(program.to_json()) for program in (SMALL, *PROGRAMS)]
    Program.from_json(SMALL.to_json())
    given = [""]

    def make(rng: random.Random) -> int:
        data = json_damage(rng.choice(good), rng)
        given[0] = data.decode(errors="surrogateescape")
        return len(data)

    def load() -> None:
        program = Program.from_json(given[0])
        assert str(program)
        assert program.fingerprint()
        assert Program.from_json(program.to_json()) == program
        verify(program)
        assert right(program), "verify accepts it, and it computes something else"
        program.wire_bytes(), program.slot_bytes(), program.host_bytes(), program.secondary_bytes()

    return search("program", numbers, make, load, folder, (ValueError,))


@pytest.mark.parametrize("parts", [[range(25)], nightly(PARTS)])
def test_damaged_programs(in_child: Callable[..., Any], tmp_path: Path, parts: list[range]) -> None:
    found: Counter[str] = sum((in_child(searched, tmp_path, part) for part in parts), Counter())
    print(found)
    assert found.total() == sum(map(len, parts))
    assert found["ValueError"] > found["Refused"] > 0
    assert found["loaded"] > 0


TEXT = SMALL.to_json()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("trace", "units", 1, 4, "12"), r"trace\.units\[1\]\.numel: expected an int of 64 bits, got '12'"),
        (("trace", "units", 1, 4, -12), r"trace\.units\[1\]\.numel: expected 0 to inf, got -12"),
        (("trace", "units", 1, 4, 2**63), r"trace\.units\[1\]\.numel: expected an int of 64 bits, got 92"),
        (("trace", "units", 1, 0, 2), r"trace\.units\[1\]\.id: expected 1, its place, got 2"),
        (("trace", "units", 1, 1, "\ud800"), r"trace\.units\[1\]\.name: expected a string without half a surrogate"),
        (("trace", "visits", 0, 2, [9]), r"trace\.visits\[0\]\.units: expected different ones of the 4 units"),
        (("trace", "visits", 0, 3, [1]), r"trace\.visits\[0\]\.trained: expected different ones of its units"),
        (("trace", "units", 0, 7, False), r"trace\.visits\[0\]\.trained: units\[0\] is not trainable"),
        (
            ("trace", "visits", 0, 4, 0, None),
            r"trace\.visits\[0\]\.cost\.flops: expected an int of 64 bits, got None",
        ),
        (
            ("trace", "visits", 1, 4, 17, [[0, 0, [0, 9], 4, 4]]),
            r"trace\.visits\[1\]\.cost\.arguments\[0\]\.made: expected some of the 4 visits",
        ),
        (("trace", "loss_of", [-1]), r"trace\.loss_of: expected some of the 4 visits"),
        (
            ("trace", "order", 0, 0, "sideways"),
            r"trace\.order\[0\]\.kind: expected 'forward' or 'backward' or .*, got 'side",
        ),
        (("trace", "order", 0, 2, 2), r"trace\.order\[0\]: forward of visit 0 in microbatch 2: there is no such"),
        (("trace", "order", 1, ["forward", 0, 0, []]), r"trace\.order: one of its computes is there twice"),
        (("trace", "mesh", [["shard", 0]]), r"trace\.mesh\[0\]\[1\]: expected 1 to inf, got 0"),
        (("trace", "mesh", [["shard", 2**40]]), r"trace\.mesh: at most 131072 ranks"),
        (("trace", "mesh", 0, 1, True), r"trace\.mesh\[0\]\[1\]: expected an int of 64 bits, got True"),
        (("trace", "microbatches", 10**9), r"trace\.microbatches: 1000000000 of 16 computes"),
        (("trace", "lent", 0, 1, 10**9), r"trace\.lent\[0\]\.parts: expected 1 to 1,024, got 1000000000"),
        (
            ("trace", "units", 1, 9, ["local"]),
            r"trace\.units\[1\]\.over: expected axes inside blocks, each once, got",
        ),
        (
            ("trace", "optimizer", [0, [[8, 4, 3]], [0, 1]]),
            r"trace\.optimizer\.shards\[0\]: expected parts that 8 ranks divide into, got 3",
        ),
        (("trace", "kernels", "fast"), r"trace\.kernels: expected fused, eager or pieces, got 'fast'"),
        (("trace", "color", 1), r"trace: there is no 'color'; expected units, visits, "),
        (
            ("stages", 0, 0, ["gather", [0.5], [0]]),
            r"stages\[0\]\[0\], gather\.units\[0\]: expected an int of 64 bits, got 0\.5",
        ),
        (("stages", 0, 0, ["gather"]), r"stages\[0\]\[0\], gather: no units"),
        (
            ("stages", 0, 0, ["gather", [0], [0], "shard", 1]),
            r"stages\[0\]\[0\], gather: expected a list of at most 3, units, slots, ",
        ),
        (
            ("stages", 0, 0, [["gather"]]),
            r"stages\[0\]\[0\]: expected a list that begins with an op's name, got \[\['gather'\]\]",
        ),
        (("stages", None), r"expected an object of a version, a trace and a list of stages"),
        (("stages", []), r"expected an object of a version, a trace and a list of stages"),
        (("stages", 0, None), r"stages\[0\]: expected a list of ops, got None"),
        (("more", None), r"expected an object of a version, a trace and a list of stages"),
    ],
)
def test_the_place_of_what_is_wrong_is_named(path: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match="^not a program in JSON: " + text):
        Program.from_json(put(TEXT, *path))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "it is nested too deep"),
        ('{"trace": ' * 100_000, "it is nested too deep"),
        (TEXT.replace('"trace"', '"stages": [], "trace"', 1), "the key 'stages' is there twice"),
        (TEXT.replace('"microbatches": 2', '"microbatches": NaN'), "NaN is no number of JSON"),
        (TEXT.replace('"microbatches": 2', '"microbatches": ' + "9" * 5000), "Exceeds the limit"),
        (TEXT.replace('"microbatches": 2', '"microbatches": 1e400'), "expected an int of 64 bits, got inf"),
    ],
)
def test_text_that_has_no_meaning(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^not a program in JSON: .*{why}"):
        Program.from_json(text)


def test_memory_is_in_proportion_to_the_text() -> None:
    """A right program takes some ten times its text, as Python's objects do; nothing takes several times that."""

    def factor(text: str) -> float:
        tracemalloc.start()
        try:
            Program.from_json(text)
        except ValueError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return peak / len(text)

    Program.from_json(TEXT)  # imports, and what is read once
    right_one = factor(zero3()(model(50, 8)).to_json())
    hostile = [
        factor(f'{{"version": 1, "trace": {{}}, "stages": [{item}{f", {item}" * (50_000 // len(item))}]}}')
        for item in ("[]", "{}", "0", '"a"', "[[[]]]", '{"a": {}}', "0.5")
    ]
    print(f"memory over text: a program {right_one:.1f}, hostile {max(hostile):.1f}")
    assert right_one < 20
    assert max(hostile) < 60
