# SPDX-License-Identifier: Apache-2.0
"""Ports through NVSHMEM's device calls: GPUs of one host that are cut into nodes, 2 and 4 as loners, 4 as two pairs.
NVSHMEM itself joins them by NVLink, so its calls are loads and stores there; tools/nvshmem-check brings what machines
lack. Kernels are linked with NVSHMEM's device library at first use."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
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

TIMEOUT_S = 30.0
DEADLINE_S = 240.0  # a kernel is linked in 5 s, and low latency has many
# Ranks, and how many make a node.
PLACES = [place for place in ((2, 1), (4, 2), (4, 1)) if place[0] <= max(num_ranks_here(), 2)]
SHAPES = [(33, 512, 3, 4), (1, 512, 1, 1), (0, 512, 2, 3), (64, 1536, 8, 8)]
SETTINGS = transports.SETTINGS | {
    "WEFT_TRANSPORT": "nvshmem",
    "WEFT_WINDOW_BYTES": str(1 << 30),  # windows do not grow
}


@pytest.fixture(autouse=True)
def _nvshmem(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if why := why_no_ports("nvshmem"):
        pytest.skip(f"nvshmem: {why}")
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    yield
    monkeypatch.undo()
    _core.config_reload()


def _with(rank: Rank, function: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, str]) -> Any:
    os.environ.update(settings)
    _core.config_reload()
    ports._comm = _comm  # whose windows lie in NVSHMEM's memory
    return function(rank, *args)


def _run(place: tuple[int, int], function: Callable[..., Any], *args: Any, **more: str) -> list[Any]:
    begin = time.monotonic()
    settings = {"WEFT_RANKS_PER_NODE": str(place[1])} | more
    results = run_on_gpus(place[0], _with, function, args, settings, deadline_s=DEADLINE_S)
    print(f"{getattr(function, '__name__', function)} {place}: {time.monotonic() - begin:.1f} s")
    return results


def _comm(rank: Rank) -> weft.Communicator:
    device = torch.device("cuda", torch.cuda.current_device())
    comm = weft.Communicator(rank.group, device=device, timeout_s=TIMEOUT_S)
    assert comm.transport_to((rank.rank + rank.size // 2) % rank.size) == "nvshmem"
    assert comm.core.sharing == "memory of the transport"
    assert "through nvshmem" in comm.core.why_not_all_mapped
    return comm


def test_every_call_of_a_channel() -> None:
    _run((2, 1), transports._channel, "nvshmem")


def test_mapped_peers_named_beside_it_make_no_difference() -> None:
    _run((2, 1), transports._channel, "nvshmem", WEFT_TRANSPORT="mapped,nvshmem")


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_collective_agrees_with_torch(place: tuple[int, int]) -> None:
    _run(place, ports._collectives)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_low_latency_rows_go_out_and_come_back(
    shape: tuple[int, int, int, int], place: tuple[int, int]
) -> None:
    _run(place, low_latency._check_shape, shape)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_high_throughput_agrees_with_the_oracle(place: tuple[int, int]) -> None:
    _run(place, ports._high_throughput)


def _latency(rank: Rank) -> dict[str, float]:
    """Medians of one way, as half of a round trip, in microseconds."""
    device = torch.device("cuda", torch.cuda.current_device())
    comm = weft.Communicator(rank.group, device=device, timeout_s=TIMEOUT_S)
    loop = _core.measure.ChannelLoop.create(comm.core, 1 << 20)
    found = {}
    for call, nbytes in (
        ("signal", 16),
        ("put_with_signal", 16),
        ("put_with_signal", 7168),
        ("put_with_signal", 1 << 20),
    ):
        times = sorted(loop.run(call, True, nbytes, 20, 20))
        found[f"{call} {nbytes} B"] = round(times[len(times) // 2] / 40 / 1e3, 2)
    return found


def test_how_long_a_signal_takes_beside_mapped() -> None:
    print("one way, us, ports through nvshmem:", _run((2, 1), _latency)[0])
    print("one way, us, mapped:", _run((2, 0), _latency, WEFT_TRANSPORT="mapped")[0])


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_many_calls_in_a_row(place: tuple[int, int]) -> None:
    _run(place, ports._calls_in_a_row)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_captured_graph_replays(place: tuple[int, int]) -> None:
    _run(place, ports._replays, 100)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_low_latency_graphs_replay(place: tuple[int, int]) -> None:
    _run(place, ports._replayed_round_trips, 50)


def _several(rank: Rank) -> None:
    for _ in range(2):
        comm = _comm(rank)
        windows = [weft.Window(comm, 4096) for _ in range(5)]
        comm.barrier()
        for number in (3, 1, 4, 0, 2) if rank.rank else (0, 1, 2, 3, 4):
            windows[number] = None  # type: ignore[call-overload]
            gc.collect()
        with pytest.raises(Error, match="cannot grow beyond"):
            weft.Window(comm, 4096).grow(64 << 20)
        comm.barrier()
        del comm


def test_communicators_and_windows_come_and_go() -> None:
    _run((2, 1), _several)


def test_a_killed_rank_is_named_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_PEER_DEAD_S", "3")
    monkeypatch.setenv("WEFT_HEARTBEAT_S", "0.5")
    settings = {"WEFT_RANKS_PER_NODE": "1"}
    results = run_on_gpus(2, _with, ports._until_one_dies, (), settings, lost={1}, deadline_s=DEADLINE_S)
    message, waited_s = results[0]
    assert "rank 1" in message, message
    assert waited_s < 60, message


def _refused(rank: Rank) -> str:
    device = torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(Error) as raised:
        weft.Communicator(rank.group, device=device, timeout_s=TIMEOUT_S)
    return str(raised.value)


def test_a_missing_device_library_is_named() -> None:
    for message in _run((2, 1), _refused, WEFT_NVSHMEM_HOME="/nowhere"):
        assert "no device library of NVSHMEM" in message and "/nowhere" in message, message


def test_a_missing_linker_is_named() -> None:
    for message in _run((2, 1), _refused, WEFT_NVJITLINK="/nowhere/libnvJitLink.so.13"):
        assert "no nvJitLink to link kernels with" in message and "/nowhere" in message, message
