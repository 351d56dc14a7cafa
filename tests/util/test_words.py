"""Numbers in words."""

from __future__ import annotations

from yafsdp_fn.util.words import counted


def test_one_of_a_thing_is_no_plural() -> None:
    assert [counted(n, "microbatch") for n in (0, 1, 2)] == ["0 microbatches", "1 microbatch", "2 microbatches"]
    assert [counted(n, "file") for n in (1, 4096)] == ["1 file", "4,096 files"]
