# SPDX-License-Identifier: Apache-2.0
"""Ports through NCCL's own GIN: two GPUs of one host as two nodes, over libnccl-rma-weft.so or NCCL's own backends.

NCCL has GIN here if NCCL_RMA_PLUGIN names a plug-in or a NIC is there; tools/gin-check brings everything. Kernels are
compiled with NCCL's headers at first use, which takes seconds each. GIN_SAME_HOST=1 tells NCCL the truth: both ranks on
one host.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_low_latency_gpu as low_latency
import test_ports_gpu as ports
import test_transports_gpu as transports
import torch
from gpu_ranks import num_ranks_here, run_on_gpus, why_no_ports

import weft
from weft import _core
from weft.errors import Error
from weft.testing.ranks import Rank

DEADLINE_S = 400.0  # a kernel compiles in up to 4 s, and high throughput has 30 forms here
TIMEOUT_S = 30.0
SHAPES = [(33, 512, 3, 4), (1, 512, 1, 1), (0, 512, 2, 3)]


# Ranks, and how many make a node.
PLACES = [(2, 1), (4, 2)][: num_ranks_here() // 2 or 1]


def _on_its_node(
    rank: Rank, function: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, str]
) -> Any:
    if not os.environ.get("GIN_SAME_HOST"):  # for NCCL, nodes are different machines
        os.environ["NCCL_HOSTID"] = f"node{rank.rank // int(settings['WEFT_RANKS_PER_NODE'])}"
    os.environ.update(settings)
    _core.config_reload()
    ports._comm = _comm  # whose windows lie in NCCL's memory
    return function(rank, *args)


def _run(function: Callable[..., Any], *args: Any, place: tuple[int, int] = (2, 1), **more: str) -> list[Any]:
    begin = time.monotonic()
    settings = {"WEFT_RANKS_PER_NODE": str(place[1])} | more
    results = run_on_gpus(place[0], _on_its_node, function, args, settings, deadline_s=DEADLINE_S)
    print(f"{getattr(function, '__name__', function)} {place}: {time.monotonic() - begin:.1f} s")
    return results


@pytest.fixture(autouse=True)
def _gin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nodes that NCCL alone joins."""
    if why := why_no_ports("nccl"):
        pytest.skip(f"nccl: {why}")
    settings = {
        "WEFT_TRANSPORT": "nccl",
        "WEFT_WINDOW_BYTES": str(1 << 30),
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MNNVL_ENABLE": "0",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    _core.config_reload()
    yield
    for name in settings:
        monkeypatch.delenv(name)
    _core.config_reload()


def _comm(rank: Rank) -> weft.Communicator:
    device = torch.device("cuda", torch.cuda.current_device())
    comm = weft.Communicator(rank.group, device=device, timeout_s=TIMEOUT_S)
    assert comm.transport_to((rank.rank + rank.size // 2) % rank.size) == "nccl"
    assert comm.core.sharing == "memory of the transport"
    assert "through nccl" in comm.core.why_not_all_mapped
    return comm


def test_every_call_of_a_channel() -> None:
    _run(transports._channel, "nccl")


def test_mapped_peers_named_beside_it_make_no_difference() -> None:
    _run(transports._channel, "nccl", WEFT_TRANSPORT="mapped,nccl")


def test_inboxes_wrap_and_fill_up() -> None:
    _run(transports._channel, "nccl", WEFT_NCCL_RECORDS="8", WEFT_NCCL_CONTEXTS="1")


def _latency(rank: Rank) -> dict[str, float]:
    """Medians of one way, as half of a round trip, in microseconds."""
    comm = _comm(rank)
    loop = _core.measure.ChannelLoop.create(comm.core, 1 << 20)
    found = {}
    calls = (("signal", 16), ("put_with_signal", 16), ("put_with_signal", 7168), ("put_with_signal", 1 << 20))
    for call, nbytes in calls:
        times = sorted(loop.run(call, True, nbytes, 20, 20))
        if rank.rank == 0:
            found[f"{call} {nbytes} B"] = round(times[len(times) // 2] / 40 / 1e3, 1)
    return found


def test_how_long_a_signal_takes() -> None:
    print("one way, us:", _run(_latency)[0])


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_collective_agrees_with_torch(place: tuple[int, int]) -> None:
    _run(ports._collectives, place=place)


def test_many_calls_in_a_row() -> None:
    _run(ports._calls_in_a_row, WEFT_NCCL_RECORDS="64")


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_captured_graph_replays(place: tuple[int, int]) -> None:
    _run(ports._replays, 100, place=place)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_low_latency_graphs_replay(place: tuple[int, int]) -> None:
    _run(ports._replayed_round_trips, 50, place=place)


@pytest.mark.parametrize("shape", [*SHAPES, (64, 1536, 8, 8)], ids=str)
def test_low_latency_rows_go_out_and_come_back(shape: tuple[int, int, int, int]) -> None:
    _run(low_latency._check_shape, shape)


def _low_latency_of_nodes(rank: Rank) -> None:
    low_latency._check_shape(rank, (64, 1536, 8, 8))


@pytest.mark.parametrize("place", PLACES[1:], ids=str)
def test_low_latency_rows_go_out_and_come_back_over_nodes(place: tuple[int, int]) -> None:
    _run(_low_latency_of_nodes, place=place)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_high_throughput_agrees_with_the_oracle(place: tuple[int, int]) -> None:
    _run(ports._high_throughput, place=place)


def _several(rank: Rank) -> None:
    for _ in range(2):
        comm = _comm(rank)
        windows = [weft.Window(comm, 4096) for _ in range(5)]
        comm.barrier()
        for number in (3, 1, 4, 0, 2) if rank.rank else (0, 1, 2, 3, 4):
            windows[number] = None  # type: ignore[call-overload]
        with pytest.raises(Error, match="cannot grow beyond"):
            weft.Window(comm, 4096).grow(64 << 20)
        comm.barrier()
        del comm


def test_communicators_and_windows_come_and_go() -> None:
    _run(_several)


def _refused(rank: Rank) -> str:
    with pytest.raises(Error) as raised:
        weft.Communicator(
            rank.group, device=torch.device("cuda", torch.cuda.current_device()), timeout_s=TIMEOUT_S
        )
    return str(raised.value)


def test_without_gin_it_says_what_is_missing() -> None:
    for message in _run(_refused, NCCL_RMA_PLUGIN="none", NCCL_GIN_ENABLE="0", NCCL_IB_DISABLE="1"):
        assert "has no GIN here" in message or "does not support symmetric memory" in message, message


def test_headers_of_another_release_are_refused(tmp_path: Path) -> None:
    code = """
import torch
from weft import _core
(row,) = [row for row in _core.transports("cuda:0") if row["name"] == "nccl"]
print("WHERE", row["details"])"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    library = re.search(r"(/\S*libnccl\S*)[,;]", ran.stdout)
    assert library, ran.stdout
    include = Path(os.environ.get("WEFT_NCCL_INCLUDE") or Path(library[1]).parents[1] / "include")
    shutil.copytree(include, tmp_path / "include")
    header = tmp_path / "include/nccl.h"
    header.write_text(re.sub(r"(#define NCCL_PATCH) \d+", r"\1 99", header.read_text()))
    for message in _run(_refused, WEFT_NCCL_INCLUDE=str(tmp_path / "include")):
        assert "has the headers of NCCL" in message and ".99" in message, message


def test_headers_that_are_missing_are_named(tmp_path: Path) -> None:
    for message in _run(_refused, WEFT_NCCL_INCLUDE=str(tmp_path)):
        assert str(tmp_path) in message and "no device headers" in message, message


def test_a_missing_library_is_named() -> None:
    for message in _run(_refused, WEFT_NCCL_LIBRARY="/nowhere/libnccl.so.2"):
        assert "/nowhere/libnccl.so.2" in message, message


def test_a_killed_rank_is_named_before_the_deadline() -> None:
    settings = {"WEFT_RANKS_PER_NODE": "1", "WEFT_PEER_DEAD_S": "3", "WEFT_HEARTBEAT_S": "0.5"}
    results = run_on_gpus(
        2, _on_its_node, ports._until_one_dies, (), settings, lost={1}, deadline_s=DEADLINE_S
    )
    message, waited_s = results[0]
    assert "rank 1" in message, message
    assert waited_s < 60, message
