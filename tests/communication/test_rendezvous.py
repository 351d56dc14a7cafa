"""Where ranks meet: each attempt and each process group by keys of its own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from yafsdp_fn.communication.store import rendezvous_store

SECONDS = timedelta(seconds=60)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    yield monkeypatch


def test_rank_0_serves_the_store_and_waits_for_nobody(environment: pytest.MonkeyPatch) -> None:
    served: Any = rendezvous_store(SECONDS)
    assert (served["rank"], served["world_size"]) == (0, 2)
    served["store"].set("key", "value")
    environment.setenv("RANK", "1")
    joined = rendezvous_store(SECONDS)
    assert joined["rank"] == 1
    assert joined["store"].get("key") == b"value"


def test_an_environment_that_no_launcher_makes_is_refused(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("RANK", "2")
    with pytest.raises(RuntimeError, match="RANK=2, WORLD_SIZE=2: expected a rank below WORLD_SIZE"):
        rendezvous_store(SECONDS)
    environment.delenv("MASTER_ADDR")
    with pytest.raises(RuntimeError, match=r"and MASTER_ADDR is not, .* to be alone, unset WORLD_SIZE"):
        rendezvous_store(SECONDS)


def test_a_port_in_use_is_named(environment: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        environment.setenv("MASTER_PORT", str(port))
        with pytest.raises(RuntimeError, match=rf"{port}.*(address already in use|EADDRINUSE)"):
            rendezvous_store(SECONDS)


def test_an_attempt_of_torchrun_does_not_see_what_the_one_before_left(environment: pytest.MonkeyPatch) -> None:
    """torchrun keeps its store from attempt to attempt."""
    served: Any = rendezvous_store(SECONDS)["store"]
    environment.setenv("MASTER_PORT", str(served.underlying_store.port))
    environment.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def of(attempt: int, rank: int, world: int = 2) -> Any:
        for name, value in {"TORCHELASTIC_RESTART_COUNT": attempt, "RANK": rank, "WORLD_SIZE": world}.items():
            environment.setenv(name, str(value))
        return rendezvous_store(SECONDS)["store"]

    of(0, 0).set("address", "old")
    assert of(0, 1).get("address") == b"old"
    assert not of(1, 0).check(["address"])
    assert not of(0, 0, 3).check(["address"])
    of(1, 1).set("address", "new")
    assert of(1, 0).get("address") == b"new"
    assert of(0, 0).get("address") == b"old"


def test_a_process_group_after_another_meets_at_the_same_place(environment: pytest.MonkeyPatch) -> None:
    first: Any = rendezvous_store(SECONDS)["store"]
    first.set("key", "of the first")
    second: Any = rendezvous_store(SECONDS)["store"]
    assert not second.check(["key"])
    second.set("key", "of the second")
    assert first.get("key") == b"of the first"
