# SPDX-License-Identifier: Apache-2.0
"""One host cut into nodes whose ranks reach each other through ports, for tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from programs import WEFT, run_program

from weft import _core

SETTINGS = (
    *("WEFT_RANKS_PER_NODE", "WEFT_PROXY_PROVIDER", "WEFT_PEER_DEAD_S", "WEFT_HEARTBEAT_S"),
    *("WEFT_TRANSPORT", "WEFT_JITTER_US", "WEFT_PROXY_FIFO"),
)


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
