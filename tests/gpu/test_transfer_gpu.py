# SPDX-License-Identifier: Apache-2.0
"""The transfer engine on tensors of GPUs: between processes over libfabric, and from numbers that kernels store."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from gpu_ranks import run_on_gpus

from weft.errors import Error
from weft.testing.ranks import Rank
from weft.transfer import Memory, Pages, Remote, TransferEngine, nics

TIMEOUT_S = 60.0
NUM_BYTES = (8 << 20) + 4096 + 3
PAGE_BYTES = 4096
SIZES = [1, 7, 4095, 65537, (1 << 20) + 1, NUM_BYTES]
WRITTEN, PAGED, DONE = 1, 2, 3


def pattern(seed: int, device: str) -> torch.Tensor:
    """Return uint8[NUM_BYTES] that a seed gives, the same on every device."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=made).to(device)


def gathered(rank: Rank, mine: Any) -> list[Any]:
    """Return what every rank gave, in rank order."""
    reports: list[Any] = [None] * rank.size
    torch.distributed.all_gather_object(reports, mine, group=rank.group)
    return reports


def page_lists() -> tuple[list[int], list[int]]:
    """Return which pages are written where."""
    order = random.Random(5)
    pages = range(NUM_BYTES // PAGE_BYTES)
    return order.sample(pages, 1000), order.sample(pages, 1000)


def write_all(engine: TransferEngine, memory: Memory, remote: Remote, source: torch.Tensor) -> None:
    """Writes of odd sizes to odd places, then pages; each time once the peer has looked at what came before."""
    acknowledged = engine.imm(remote.peer, DONE)
    for turn, size in enumerate(SIZES):
        offset = min(13 * turn, NUM_BYTES - size)
        source.copy_(pattern(turn, "cpu"))
        torch.cuda.synchronize()
        engine.write(memory, remote, size, src_offset=offset, dst_offset=offset, imm=WRITTEN).wait()
        acknowledged.wait(turn + 1)
    here, there = (Pages(indices, PAGE_BYTES) for indices in page_lists())
    engine.write_pages(memory, here, remote, there, PAGE_BYTES, imm=PAGED).wait()
    acknowledged.wait(len(SIZES) + 1)


def check_all(engine: TransferEngine, remote: Remote, target: torch.Tensor) -> None:
    """What write_all() writes arrives, and nothing around it changes."""
    for turn, size in enumerate(SIZES):
        engine.imm(remote.peer, WRITTEN).wait(turn + 1)
        offset = min(13 * turn, NUM_BYTES - size)
        expected = torch.zeros_like(target)
        expected[offset : offset + size] = pattern(turn, str(target.device))[offset : offset + size]
        assert torch.equal(target, expected), f"{size} bytes"
        target.zero_()
        torch.cuda.synchronize()
        engine.notify(remote.peer, DONE).wait()
    engine.imm(remote.peer, PAGED).wait(1)
    source, expected = pattern(len(SIZES) - 1, str(target.device)), torch.zeros_like(target)
    for here, there in zip(*page_lists(), strict=True):
        expected[there * PAGE_BYTES :][:PAGE_BYTES] = source[here * PAGE_BYTES :][:PAGE_BYTES]
    assert torch.equal(target, expected)
    engine.notify(remote.peer, DONE).wait()


def between(rank: Rank, provider: str, from_gpu: bool, to_gpu: bool) -> None:
    """Rank 0 writes into rank 1."""
    on_gpu = from_gpu if rank.rank == 0 else to_gpu
    buffer = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    torch.cuda.synchronize()
    with TransferEngine(provider, name=f"rank{rank.rank}", timeout_s=TIMEOUT_S) as engine:
        memory = engine.register(buffer, remote_write=True)
        assert memory.path and memory.path_reason
        reports = gathered(rank, (engine.address, memory.descriptor))
        engine.connect(reports[1 - rank.rank][0])
        remote = engine.attach(reports[1 - rank.rank][1])
        if rank.rank == 0:
            write_all(engine, memory, remote, buffer)
        else:
            check_all(engine, remote, buffer)
        if memory.is_staged and rank.rank == 1:
            with pytest.raises(Error, match="let its owner write"):
                engine.read(memory, remote, 8).wait()
        torch.distributed.barrier(group=rank.group)


@pytest.mark.parametrize("provider", ["cuda", "fabric:tcp", "fabric:shm"])
@pytest.mark.parametrize(("from_gpu", "to_gpu"), [(True, True), (True, False), (False, True)])
def test_gpu_memory_is_written_from_and_into(provider: str, from_gpu: bool, to_gpu: bool) -> None:
    # GPUs are asked by ranks alone: a process that has opened CUDA cannot fork any more.
    if provider != "cuda" and all(nic.unusable_because for nic in nics(provider)):
        pytest.skip(f"{provider} is unusable here")
    run_on_gpus(2, between, provider, from_gpu, to_gpu)


def device_number(address: int) -> torch.Tensor:
    """Return int64[1] that stands at ``address``, for kernels of this GPU."""

    class Number:
        __cuda_array_interface__ = {  # noqa: RUF012 - the protocol asks for an attribute
            "shape": (1,),
            "typestr": "<i8",
            "data": (address, False),
            "version": 2,
        }

    return torch.as_tensor(Number(), device="cuda")


def watched(rank: Rank) -> None:
    """A number that kernels of the GPU store is seen by its callback: the last value in any case."""
    seen: list[tuple[int, int]] = []
    is_last = threading.Event()

    def changed(old: int, new: int) -> bool:
        seen.append((old, new))
        if new == 100:
            is_last.set()
        return new != 100

    with TransferEngine("loopback", device=torch.cuda.current_device(), timeout_s=TIMEOUT_S) as engine:
        number = device_number(engine.watch(changed).address)
        for value in range(1, 101):
            number.fill_(value)
        assert is_last.wait(TIMEOUT_S), f"saw {seen[-3:]}"
    assert [old for old, _ in seen] == [0, *(new for _, new in seen[:-1])]
    assert all(old < new for old, new in seen)


def test_what_kernels_store_starts_callbacks() -> None:
    run_on_gpus(2, watched)
