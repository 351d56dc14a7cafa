"""Where ranks of one machine meet: on its loopback address, and nowhere else."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
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


def others() -> list[str]:
    """Addresses of this host that another one could reach it by."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only chooses the interface
        except OSError:
            return []
        return [address for address in [probe.getsockname()[0]] if not address.startswith("127.")]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_store_listens_on_the_loopback_address_alone(environment: pytest.MonkeyPatch, address: str) -> None:
    environment.setenv("MASTER_ADDR", address)
    served: Any = rendezvous_store(SECONDS)
    assert (served["rank"], served["world_size"]) == (0, 2)
    served["store"].set("key", "value")
    environment.setenv("RANK", "1")
    joined = rendezvous_store(SECONDS)
    assert joined["rank"] == 1 and joined["store"].get("key") == b"value"
    port = served["store"].underlying_store.port
    for other in others():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), timeout=5)
    if sys.platform == "linux":
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        listening = [row[1] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"]
        assert listening == [f"0100007F:{port:04X}"]


def test_a_port_in_use_is_named(environment: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment.setenv("MASTER_PORT", str(port))
        with pytest.raises(
            RuntimeError, match=f"rank 0 cannot listen on 127.0.0.1, port {port}: .*another MASTER_PORT"
        ):
            rendezvous_store(SECONDS)


def test_elsewhere_torch_makes_the_store(environment: pytest.MonkeyPatch) -> None:
    for address in ("192.0.2.1", "a-host"):
        environment.setenv("MASTER_ADDR", address)
        assert rendezvous_store(SECONDS) == {}


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
    assert not of(1, 0).check(["address"]) and not of(0, 0, 3).check(["address"])
    of(1, 1).set("address", "new")
    assert of(1, 0).get("address") == b"new" and of(0, 0).get("address") == b"old"


def test_a_process_group_after_another_meets_at_the_same_place(environment: pytest.MonkeyPatch) -> None:
    first: Any = rendezvous_store(SECONDS)["store"]
    first.set("key", "of the first")
    second: Any = rendezvous_store(SECONDS)["store"]
    assert not second.check(["key"])
    second.set("key", "of the second")
    assert first.get("key") == b"of the first"
