# SPDX-License-Identifier: Apache-2.0
"""One host cut into nodes whose ranks reach each other through ports, for tests."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import WEFT, run_program

import weft
from weft import _core
from weft.testing.ranks import Rank

SETTINGS = (
    *("WEFT_RANKS_PER_NODE", "WEFT_PROXY_PROVIDER", "WEFT_PEER_DEAD_S", "WEFT_HEARTBEAT_S"),
    *("WEFT_TRANSPORT", "WEFT_JITTER_US", "WEFT_PROXY_FIFO", "WEFT_LOW_LATENCY_FANOUT"),
    "WEFT_PORT_WINDOWS",
)


def tokens_of(num_ranks: int, *some: int) -> tuple[int, ...]:
    """Return how many tokens each rank has: those numbers by turns."""
    return tuple(some[rank % len(some)] for rank in range(num_ranks))


def has_nic(provider: str) -> bool:
    """Whether a provider has a NIC here that can be used."""
    return any(not nic["unusable_because"] for nic in _core.transfer_find_provider(provider).probe())


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a module that imports it: no test leaves settings of ports to the next one."""
    yield
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    _core.config_reload()


def use_ports(
    monkeypatch: pytest.MonkeyPatch, ranks_per_node: int, provider: str, is_usable: bool | None = None
) -> None:
    """Cut this host into nodes for a test. ``is_usable``: None asks the provider, in this process."""
    if not (has_nic(provider) if is_usable is None else is_usable):
        pytest.skip(f"{provider} is not usable here")
    monkeypatch.setenv("WEFT_RANKS_PER_NODE", str(ranks_per_node))
    monkeypatch.setenv("WEFT_PROXY_PROVIDER", provider)
    _core.config_reload()


@contextmanager
def nodes(ranks_per_node: int, provider: str, **more: str) -> Iterator[None]:
    """Cut this host into nodes for the ranks that are started meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in more.items():
            patch.setenv(name, value)
        use_ports(patch, ranks_per_node, provider)
        yield
    _core.config_reload()


def network_bytes() -> int:
    """Return the bytes of this rank's finished writes. One is counted when it has finished, which may be after the call
    has."""

    def counted() -> int:
        peers = weft.metrics().peers
        return sum(int(peer["bytes"]) for peer in peers if peer["transport"].startswith("fabric"))

    seen = [counted()]
    while len(seen) < 4 or len(set(seen[-4:])) > 1:  # the same for 0.15 s
        time.sleep(0.05)
        seen.append(counted())
    return seen[-1]


def sum_over(rank: Rank, number: int) -> int:
    """Return the sum of what all ranks give. Collective."""
    numbers: list[Any] = [None] * rank.size
    torch.distributed.all_gather_object(numbers, number, group=rank.group)
    return sum(numbers)


def bench_moe(mode: str, tokens: int, hidden: int, folder: Path, ranks_per_node: int = 2) -> tuple[Any, Any]:
    """Run ``weft bench moe`` on 3 ranks over tcp; return what ran and its rows, None where it failed."""
    with nodes(1, "fabric:tcp"):
        pass  # skips where it is not usable
    sizes = f"--tokens {tokens} --hidden {hidden} --top-k 2 --experts 6 --iterations 1 --warmup 0".split()
    places = f"--device cpu --ranks 3 --ranks-per-node {ranks_per_node} --provider tcp".split()
    ran = run_program([*WEFT, "bench", "moe", "--mode", mode, *places, *sizes, "--json", "out.json"], folder)
    return ran, json.loads((folder / "out.json").read_text())["rows"] if ran.returncode == 0 else None


def check_network_rows(rows: Any) -> None:
    """Check that rows of a benchmark over nodes have a floor of memory and one of the network."""
    for row in rows:
        assert row["checked"]
        assert row["floor_us"] > row["network_us"] > 0
        assert row["network_mb"] > 0
