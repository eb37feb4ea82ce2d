# SPDX-License-Identifier: Apache-2.0
"""Collectives among ranks that cannot map each other: one host, cut into nodes that reach each other by proxies."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from port_nodes import _settings, use_ports  # noqa: F401
from programs import WEFT, run_program
from test_communicator_calls import _every_call

import weft
from weft import Communicator
from weft.testing.ranks import Rank, run_ranks

RANKS, LOST = 4, 3


def _calls(rank: Rank) -> None:
    _every_call(rank)
    comm = Communicator(rank.group, timeout_s=60)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        for elems in (1, 17, 4099, 300_001):
            every = torch.stack([(torch.arange(elems) % 13 + r).to(dtype) for r in range(rank.size)])
            own = every[rank.rank].clone()
            assert torch.equal(comm.all_reduce(own.clone()), every.sum(0).to(dtype)), (dtype, elems)
            assert torch.equal(comm.all_reduce(own.clone(), "max"), every.max(0).values), (dtype, elems)
            assert torch.equal(comm.all_gather(own), every), (dtype, elems)
    chosen = str([*comm.collectives.chosen("allreduce", 4 * 300_001)])
    assert ("two_level" in chosen) == (len(set(comm.nodes)) == 2), chosen
    for turn in range(100):  # rings and numbers go around many times
        own = torch.full((257,), float(rank.rank + turn))
        assert torch.equal(comm.all_reduce(own), torch.full((257,), 6.0 + 4 * turn))


@pytest.mark.parametrize(("ranks_per_node", "provider"), [(2, "fabric:tcp"), (1, "fabric:shm")])
def test_every_call_is_right_over_ports(
    ranks_per_node: int, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ports(monkeypatch, ranks_per_node, provider)
    run_ranks(RANKS, _calls)


@pytest.mark.parametrize("transport", ["jitter:proxy", "mapped,jitter:proxy"])
def test_every_call_is_right_where_calls_are_late(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TRANSPORT", transport)
    monkeypatch.setenv("WEFT_JITTER_US", "100")
    use_ports(monkeypatch, 2, "fabric:tcp")
    reached = run_ranks(RANKS, _late_calls)
    ports = transport.split(",")[-1]
    near = transport.split(",")[0]
    assert reached[0] == [None, near, ports, ports]


def _late_calls(rank: Rank) -> list[str | None]:
    _calls(rank)
    comm = Communicator(rank.group, timeout_s=60)
    return [comm.transport_to(peer) for peer in range(comm.size)]


def _until_one_dies(rank: Rank) -> tuple[str, float]:
    comm = Communicator(rank.group, timeout_s=100)
    data = torch.ones(1000)
    comm.all_reduce(data)
    torch.distributed.barrier(rank.group)  # nobody is in the first call any more
    if rank.rank == LOST:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(weft.PeerLost) as raised:
        comm.all_reduce(data)
    with pytest.raises(weft.PeerLost):
        comm.all_reduce(data)
    return str(raised.value), time.monotonic() - began


def test_a_killed_rank_of_another_node_is_named_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_PEER_DEAD_S", "3")
    monkeypatch.setenv("WEFT_HEARTBEAT_S", "0.5")
    use_ports(monkeypatch, 2, "fabric:tcp")
    results = run_ranks(RANKS, _until_one_dies, lost={LOST})
    for rank in range(LOST):
        message, waited_s = results[rank]
        assert f"rank {LOST}" in message, message
        assert waited_s < 60, message


def test_bench_collective_measures_over_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_ports(monkeypatch, 2, "fabric:tcp")
    sizes = ["-b", "64K", "-e", "64K", "-n", "1", "-w", "0", "--calls", "all_reduce,all_to_all"]
    command = [*WEFT, "bench", "collective", "--ranks-per-node", "2", "--provider", "tcp", *sizes]
    ran = run_program([*command, "--json", "out.json"], tmp_path)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert ["two_level" in row["algorithm"] for row in rows] == [True, False]
    assert all(row["checked"] and row["baselines"]["gloo"] > 0 and row["floor_us"] > 0 for row in rows)
