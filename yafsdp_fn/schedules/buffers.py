"""What ops read and write, by name: hazards are found from that alone (scoreboard.py)."""

from collections.abc import Hashable

Buffer = tuple[Hashable, ...]
"""`("slot", set, i)`, `("grad slot", set, i)`, `("carry slot", set, i)`, `("secondary", set, unit)`, `("host", set,
visit)`: of a slot set. `("shard", unit)`, `("grad shard", unit)`, `("optimizer", unit)`, `("receive",)`,
`("replicate",)`, `("norm",)`: of a state. The working copy of a shard is refreshed by the update that writes the shard:
one buffer."""

OF_A_SET = ("slot", "grad slot", "carry slot", "secondary", "host")
"""The kinds of buffers that belong to a slot set."""

Uses = tuple[list[Buffer], list[Buffer]]
"""What an op reads, and what it writes."""


def in_set(kind: str, at: Hashable, numbers: tuple[int, ...]) -> list[Buffer]:
    return [(kind, at, number) for number in numbers]


def of_units(kind: str, units: tuple[int, ...]) -> list[Buffer]:
    return [(kind, unit) for unit in units]


def carry(at: Hashable, slot: int | None) -> list[Buffer]:
    return [] if slot is None else [("carry slot", at, slot)]
