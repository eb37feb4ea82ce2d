# SPDX-License-Identifier: Apache-2.0
"""Windows in GPU memory across processes: VMM handles, and CUDA IPC as the fallback."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from gpu_ranks import num_ranks_here, run_on_gpus

import weft
from weft import _core
from weft.errors import Error
from weft.testing.ranks import Rank

SIZES = sorted({2, min(3, max(num_ranks_here(), 2)), max(num_ranks_here(), 2)})


def connect(rank: Rank, sharing: str = "auto") -> weft.Communicator:
    """Return a communicator on this rank's GPU that shares memory by ``sharing``."""
    os.environ["WEFT_CUDA_SHARING"] = sharing
    _core.config_reload()
    return weft.Communicator(rank.group, device="cuda", timeout_s=30)


def meet(comm: weft.Communicator) -> None:
    """Wait until every rank's GPU has done what it was given."""
    torch.cuda.synchronize()
    comm.barrier()


def write_around(comm: weft.Communicator, window: weft.Window, offset: int, count: int, mark: int) -> None:
    """Every rank stores int32[count] into its right neighbour; all check their own and its surroundings."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    own = window.tensor(comm.rank, (window.num_bytes // 4,), torch.int32)
    own.fill_(-1)
    meet(comm)
    values = torch.arange(count, dtype=torch.int32, device="cuda") * comm.size + mark
    window.tensor(right, (count,), torch.int32, offset).copy_(values + comm.rank)
    meet(comm)
    first = offset // 4
    assert torch.equal(own[first : first + count], values + left)
    assert (own[:first] == -1).all() and (own[first + count :] == -1).all()
    meet(comm)


def device_words(address: int, count: int) -> list[int]:
    """Return int64[count] that stands at ``address`` in this GPU's memory."""

    class Words:
        __cuda_array_interface__ = {  # noqa: RUF012 - the protocol asks for an attribute
            "shape": (count,),
            "typestr": "<i8",
            "data": (address, False),
            "version": 2,
        }

    words: list[int] = torch.as_tensor(Words(), device="cuda").tolist()
    return words


def _vmm(rank: Rank) -> None:
    comm = connect(rank)
    assert comm.device == f"cuda:{torch.cuda.current_device()}"
    assert comm.core.sharing == "CUDA VMM"
    window = weft.Window(comm, 1000)
    own = window.tensor(comm.rank, (window.num_bytes,), torch.uint8)
    assert own.device == torch.device("cuda", torch.cuda.current_device())
    assert not own.any()
    addresses = [window.address(peer) for peer in range(comm.size)]
    assert device_words(window.core.table, comm.size) == addresses
    write_around(comm, window, 0, 250, 5)
    write_around(comm, window, window.num_bytes - 4, 1, 6)
    old_bytes = window.num_bytes
    marker = own[:4].clone()
    meet(comm)  # nobody grows, which zeroes nothing old, while others still check
    window.grow(3 * old_bytes + 1)
    assert window.num_bytes >= 3 * old_bytes + 1
    assert addresses == [window.address(peer) for peer in range(comm.size)]
    assert torch.equal(own[:4], marker)
    assert not window.tensor(comm.rank, (window.num_bytes - old_bytes,), torch.uint8, old_bytes).any()
    write_around(comm, window, old_bytes - 400, 200, 7)  # across the seam of the two segments
    write_around(comm, window, window.num_bytes - 4, 1, 8)


@pytest.mark.parametrize("ranks", SIZES)
def test_vmm_windows(ranks: int) -> None:
    run_on_gpus(ranks, _vmm)


def _ipc(rank: Rank) -> None:
    comm = connect(rank, "ipc")
    assert comm.core.sharing == "CUDA IPC"
    window = weft.Window(comm, 5000)
    assert not window.tensor(comm.rank, (window.num_bytes,), torch.uint8).any()
    assert device_words(window.core.table, comm.size) == [window.address(peer) for peer in range(comm.size)]
    write_around(comm, window, 0, 1250, 5)
    num_bytes = window.num_bytes
    with pytest.raises(Error, match="cannot grow"):
        window.grow(2 * num_bytes)
    assert window.num_bytes == num_bytes
    write_around(comm, window, num_bytes - 4, 1, 6)


@pytest.mark.parametrize("ranks", SIZES)
def test_ipc_windows(ranks: int) -> None:
    run_on_gpus(ranks, _ipc)


def _several(rank: Rank) -> None:
    comm = connect(rank)
    windows = [weft.Window(comm, 4096) for _ in range(4)]
    peer = (comm.rank + 1) % comm.size
    for number, window in enumerate(windows):
        window.tensor(peer, (1024,), torch.int32).fill_(number)
    meet(comm)
    for number, window in enumerate(windows):
        assert (window.tensor(comm.rank, (1024,), torch.int32) == number).all()
    meet(comm)


def test_several_windows_are_apart() -> None:
    run_on_gpus(2, _several)


def check_outlives(comm: weft.Communicator) -> None:
    """A rank that destroys its window leaves its memory to those that still map it."""
    window = weft.Window(comm, 4096)
    window.tensor(comm.rank, (1024,), torch.int32).fill_(comm.rank + 40)
    meet(comm)
    view = window.tensor(0, (1024,), torch.int32)
    if comm.rank == 0:
        del window, view
        gc.collect()
    comm.barrier()
    if comm.rank != 0:
        assert (view == 40).all()
    comm.barrier()


def _outlives(rank: Rank) -> None:
    check_outlives(connect(rank))


def test_a_window_outlives_the_peer_that_destroys_its_own() -> None:
    run_on_gpus(2, _outlives)


def _mismatch(rank: Rank) -> None:
    comm = connect(rank)
    with pytest.raises(Error, match="bytes: got"):
        weft.Window(comm, 4 << 20 if comm.rank else 2 << 20)
    with pytest.raises(Error, match="device: got cuda:99"):
        weft.Communicator(device="cuda:99")
    with pytest.raises(Error, match=r"window\.create, on rank 0: .*CUDA_ERROR"):
        weft.Window(comm, 1 << 45)  # more than any GPU has
    write_around(comm, weft.Window(comm, 4096), 0, 1024, 1)


def test_refusals_leave_the_communicator_usable() -> None:
    run_on_gpus(2, _mismatch)


def _one_gpu(rank: Rank) -> None:
    torch.cuda.set_device(0)
    comm = connect(rank)
    assert comm.device == "cuda:0"
    write_around(comm, weft.Window(comm, 4096), 0, 1024, 1)


def test_two_ranks_may_share_one_gpu() -> None:
    run_on_gpus(2, _one_gpu)


def _mixed(rank: Rank) -> None:
    with pytest.raises(Error, match="one rank uses"):
        weft.Communicator(rank.group, device="cuda" if rank.rank else "cpu", timeout_s=30)


def test_cpu_and_gpu_ranks_do_not_mix() -> None:
    run_on_gpus(2, _mixed)


def _facts(rank: Rank) -> None:
    gpus = _core.gpus()
    assert [gpu["ordinal"] for gpu in gpus] == list(range(torch.cuda.device_count()))
    properties = torch.cuda.get_device_properties(0)
    assert gpus[0]["name"] == properties.name
    assert gpus[0]["sms"] == properties.multi_processor_count
    assert gpus[0]["bytes"] == properties.total_memory
    assert gpus[0]["compute_capability"] == f"{properties.major}.{properties.minor}"
    for other in range(1, torch.cuda.device_count()):
        assert _core.gpu_link(0, other)["can_access"] == torch.cuda.can_device_access_peer(0, other)
    (mapped,) = [row for row in _core.transports("cuda:0") if row["name"] == "mapped"]
    assert mapped["unusable_because"] == ""


def test_topology_agrees_with_torch() -> None:
    run_on_gpus(2, _facts)
