# SPDX-License-Identifier: Apache-2.0
"""Windows in memory of NCCL and of NVSHMEM, beside Weft's own: the channel, windows, and both modes of expert
parallelism. Two GPUs, one process each. NVLink multicast stays off: nothing here uses it."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import test_high_throughput_gpu as high_throughput
import test_low_latency_gpu as low_latency
import torch
from gpu_ranks import run_on_gpus
from programs import WEFT, run_program
from test_window_gpu import check_outlives, device_words, meet, write_around
from torch.utils.dlpack import from_dlpack

import weft
from weft import _core
from weft.errors import Error
from weft.testing.ranks import Rank

BROUGHT = ("nccl", "nvshmem")
ROOM = 1 << 20
TIMEOUT_S = 60.0
DEADLINE_S = 400.0
# Windows of a library do not grow: those of buffers have room for every shape here.
WINDOW_BYTES = 1 << 30
SETTINGS = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_SYMMETRIC_SIZE": "12G",  # where its heap does not grow by itself
}
SHAPES = [(33, 512, 3, 4), (1, 512, 1, 1), (0, 512, 2, 3), (128, 7168, 8, 32)]


@cache
def _why_not(transport: str) -> str:
    """Return why a transport is unusable here; asked of another process, since ranks are forked from this one."""
    code = f"""
import torch
from weft import _core
(row,) = [row for row in _core.transports("cuda:0") if row["name"] == {transport!r}]
print("WHY", row["unusable_because"])"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return ran.stdout.split("WHY", 1)[1].strip()


def _use(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if _why_not(name):
        pytest.skip(f"{name}: {_why_not(name)}")
    for variable, value in SETTINGS.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("WEFT_TRANSPORT", name)
    monkeypatch.setenv("WEFT_WINDOW_BYTES", str(WINDOW_BYTES))
    _core.config_reload()
    yield name
    for variable in ("WEFT_TRANSPORT", "WEFT_WINDOW_BYTES"):
        monkeypatch.delenv(variable)
    _core.config_reload()


@pytest.fixture(params=BROUGHT)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each transport that brings the memory of windows, named for all communicators of the test's ranks."""
    yield from _use(str(request.param), monkeypatch)


@pytest.fixture(params=("mapped", *BROUGHT))
def any_transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """These, and Weft's own memory."""
    yield from _use(str(request.param), monkeypatch)


def _comm(rank: Rank, transport: str) -> weft.Communicator:
    comm = weft.Communicator(rank.group, device="cuda", timeout_s=TIMEOUT_S)
    assert comm.transport_to(1 - rank.rank) == transport
    assert comm.core.sharing == ("CUDA VMM" if transport == "mapped" else "memory of the transport")
    return comm


def _check_sizes(comm: weft.Communicator) -> None:
    for num_bytes in (1000, (2 << 20) + 4, 64 << 20):
        window = weft.Window(comm, num_bytes)
        own = window.tensor(comm.rank, (window.num_bytes,), torch.uint8)
        assert not own.any(), num_bytes
        addresses = [window.address(peer) for peer in range(comm.size)]
        assert device_words(window.core.table, comm.size) == addresses
        write_around(comm, window, 0, 250, 5)
        write_around(comm, window, window.num_bytes - 4, 1, 6)
        del own, window
        gc.collect()


def _check_several(comm: weft.Communicator) -> None:
    windows: list[Any] = [weft.Window(comm, 4096) for _ in range(5)]
    for number, window in enumerate(windows):
        window.tensor(1 - comm.rank, (1024,), torch.int32).fill_(number)
    meet(comm)
    for number, window in enumerate(windows):
        assert (window.tensor(comm.rank, (1024,), torch.int32) == number).all()
    meet(comm)
    del window
    # Each rank destroys them in its own order, and new ones are zero.
    for number in (0, 1, 2, 3, 4) if comm.rank else (3, 1, 4, 0, 2):
        windows[number] = None
        gc.collect()
    again = weft.Window(comm, 4096)
    assert not again.tensor(comm.rank, (again.num_bytes,), torch.uint8).any()
    write_around(comm, again, 0, 1024, 9)


def _check_refusals(comm: weft.Communicator) -> None:
    window = weft.Window(comm, 4096)
    with pytest.raises(Error, match="cannot grow beyond"):
        window.grow(5 * window.num_bytes)
    write_around(comm, window, 0, 1024, 10)
    with pytest.raises(Error, match="bytes: got"):
        weft.Window(comm, 4 << 20 if comm.rank else 2 << 20)
    write_around(comm, weft.Window(comm, 4096), 0, 1024, 11)


def _windows(rank: Rank, transport: str) -> None:
    for _ in range(2):  # communicators come and go
        comm = _comm(rank, transport)
        _check_sizes(comm)
        _check_several(comm)
        _check_refusals(comm)
        check_outlives(comm)


def test_windows_hold_what_peers_store(transport: str) -> None:
    run_on_gpus(2, _windows, transport, deadline_s=DEADLINE_S)


def _channel(rank: Rank, transport: str) -> None:
    """Every call of a channel, in both directions or one, with places that go around the window."""
    comm = _comm(rank, transport)
    loop = _core.measure.ChannelLoop.create(comm.core, ROOM)
    sent, received = from_dlpack(loop.sent(ROOM)), from_dlpack(loop.received(ROOM))
    adds = 0
    for turn, nbytes in enumerate((16, 448, 464, 4096, 65536 + 16, ROOM)):
        what = ((torch.arange(nbytes // 4) * 7 + turn * 5) % 13).float()
        for call, is_round_trip in (("put_with_signal", True), ("put_flush", False), ("put", False)):
            sent[:nbytes].view(torch.float32).copy_(what + rank.rank)
            received.fill_(255)
            meet(comm)
            loop.run(call, is_round_trip, nbytes, 1, 1)
            meet(comm)
            if is_round_trip or rank.rank == 1:
                found = received[:nbytes].view(torch.float32).cpu()
                assert torch.equal(found, what + (1 - rank.rank)), (call, nbytes)
                assert bool((received[nbytes:] == 255).all()), (call, nbytes)
            meet(comm)
            loop.run(call, is_round_trip, nbytes, 20, 2)
    for call in ("signal", "add"):
        loop.run(call, True, 16, 300, 2)
        adds += 600 if call == "add" else 0
    assert loop.added == adds


def test_every_call_of_a_channel(any_transport: str) -> None:
    run_on_gpus(2, _channel, any_transport, deadline_s=DEADLINE_S)


def _low_latency(rank: Rank) -> None:
    for shape in SHAPES:
        low_latency._check_shape(rank, shape)
    low_latency._check_graph(rank)


def test_low_latency_rows_go_out_and_come_back(transport: str) -> None:
    run_on_gpus(2, _low_latency, deadline_s=DEADLINE_S)


def _high_throughput(rank: Rank) -> None:
    for shape in (*SHAPES, (1024, 7168, 8, 32)):
        high_throughput._check_shape(rank, *shape)
    high_throughput._check_graph(rank)


def test_high_throughput_rows_go_out_and_come_back(transport: str) -> None:
    run_on_gpus(2, _high_throughput, deadline_s=DEADLINE_S)


def _collectives(rank: Rank, transport: str) -> None:
    comm = _comm(rank, transport)
    for elems in (1, 1000, 100_001, 1 << 20):
        for turn in range(3):
            values = torch.full((elems,), float(turn + rank.rank), device="cuda")
            comm.all_reduce(values)
            assert bool((values == 2 * turn + 1).all()), (elems, turn)
    meet(comm)


def test_collectives_run_over_it(transport: str) -> None:
    run_on_gpus(2, _collectives, transport, deadline_s=DEADLINE_S)


def test_info_says_which_library_it_is(transport: str) -> None:
    ran = run_program([*WEFT, "info"], Path.cwd())
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert transport in ran.stdout


def _one_gpu(rank: Rank) -> str:
    torch.cuda.set_device(0)
    with pytest.raises(Error) as raised:
        weft.Communicator(rank.group, device="cuda:0", timeout_s=TIMEOUT_S)
    return str(raised.value)


def test_two_ranks_of_one_gpu_are_refused_by_nccl(transport: str) -> None:
    if transport != "nccl":
        pytest.skip("only NCCL refuses that")
    for message in run_on_gpus(2, _one_gpu):
        assert "NCCL takes one rank for each" in message


def _bench(folder: Path, transport: str, mode: str) -> dict[str, Any]:
    options = (
        f"--mode {mode} --device cuda --ranks 2 --tokens 128 --hidden 7168 --top-k 8 --experts 64".split()
    )
    ran = run_program([*WEFT, "bench", "moe", *options, "--json", f"{transport}.json"], folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows: dict[str, Any] = json.loads((folder / f"{transport}.json").read_text())
    return rows


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_bench_moe_runs_over_it(transport: str, mode: str, tmp_path: Path) -> None:
    assert all(row["checked"] for row in _bench(tmp_path, transport, mode)["rows"])
