# SPDX-License-Identifier: Apache-2.0
"""pp_send and pp_recv: order, odd sizes, both directions, full slots, bad input, lost neighbours."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
import torch

import weft
from weft.testing.ranks import Rank, RankPool, run_ranks

MAX_BYTES = 300_000
IN_FLIGHT = 3


@pytest.fixture(scope="module")
def trio() -> Iterator[RankPool]:
    with RankPool(3, with_gpus=False) as ranks:
        yield ranks


def cached_buffer(rank: Rank) -> weft.ElasticBuffer:
    if "ring" not in rank.kept:
        buffer = weft.ElasticBuffer(rank.group, num_bytes=2 << 20, num_cpu_timeout_secs=30)
        buffer.pp_set_config(MAX_BYTES, IN_FLIGHT)
        rank.kept["ring"] = buffer
    return rank.kept["ring"]


def message(src: int, dst: int, number: int, num_bytes: int, offset: int = 0) -> torch.Tensor:
    """Return uint8[num_bytes], ``offset`` bytes off any alignment; any rank can make it."""
    seed = torch.Generator().manual_seed((src * 64 + dst) * 4096 + number)
    values = torch.randint(0, 256, (num_bytes + offset,), dtype=torch.uint8, generator=seed)
    return values[offset:]


def pass_around(rank: Rank, num_bytes: int, offset: int) -> None:
    """Every rank sends to both neighbours, then receives from both, several rounds on end."""
    buffer = cached_buffer(rank)
    ahead, behind = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    for number in range(2 * IN_FLIGHT + 1):
        for peer in (ahead, behind):
            buffer.pp_send(message(rank.rank, peer, number, num_bytes, offset), peer)
        for peer in (behind, ahead):
            # With one or two ranks both neighbours are the same, and its messages come twice.
            memory = torch.full((num_bytes + offset + 7,), 255, dtype=torch.uint8)
            buffer.pp_recv(memory[offset : offset + num_bytes], peer)
            assert torch.equal(
                memory[offset : offset + num_bytes], message(peer, rank.rank, number, num_bytes, offset)
            )
            assert (memory[:offset] == 255).all()
            assert (memory[offset + num_bytes :] == 255).all()


@pytest.mark.parametrize("num_bytes", [0, 1, 15, 16, 4097, 65536, MAX_BYTES])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_messages_arrive_whole_and_in_order(pool: RankPool, num_bytes: int, offset: int) -> None:
    pool.run(pass_around, num_bytes, offset)


def follow_schedule(rank: Rank, seed: int) -> None:
    """The same random schedule on all ranks: a send never has more than IN_FLIGHT before it unreceived."""
    buffer = cached_buffer(rank)
    chooser = random.Random(seed)
    under_way: dict[tuple[int, int], list[tuple[int, int]]] = {}
    number = 0
    for _ in range(200):
        src = chooser.randrange(rank.size)
        dst = (src + chooser.choice((1, -1))) % rank.size
        queue = under_way.setdefault((src, dst), [])
        if len(queue) == IN_FLIGHT or (queue and chooser.random() < 0.5):
            sent, num_bytes = queue.pop(0)
            if rank.rank == dst:
                got = torch.empty(num_bytes, dtype=torch.uint8)
                buffer.pp_recv(got, src)
                assert torch.equal(got, message(src, dst, sent, num_bytes))
        else:
            num_bytes = chooser.randrange(5000)
            queue.append((number, num_bytes))
            if rank.rank == src:
                buffer.pp_send(message(src, dst, number, num_bytes), dst)
            number += 1
    for (src, dst), queue in sorted(under_way.items()):
        for sent, num_bytes in queue:
            if rank.rank == dst:
                got = torch.empty(num_bytes, dtype=torch.uint8)
                buffer.pp_recv(got, src)
                assert torch.equal(got, message(src, dst, sent, num_bytes))


@pytest.mark.parametrize("seed", range(3))
def test_any_schedule_within_the_slots(pool: RankPool, seed: int) -> None:
    pool.run(follow_schedule, seed)


def send_more_than_slots(rank: Rank) -> None:
    """The sender runs ahead of a slow receiver and waits for it."""
    buffer = cached_buffer(rank)
    buffer.barrier(with_cpu_sync=True)
    many = 4 * IN_FLIGHT
    if rank.rank == 0:
        for number in range(many):
            buffer.pp_send(message(0, 1, number, 1000), 1)
    elif rank.rank == 1:
        for number in range(many):
            time.sleep(0.005)
            got = torch.empty(250, dtype=torch.float32)
            buffer.pp_recv(got, 0)
            assert torch.equal(got.view(torch.uint8), message(0, 1, number, 1000))


def test_a_sender_waits_for_a_slot(trio: RankPool) -> None:
    trio.run(send_more_than_slots)


def refuse(rank: Rank) -> None:
    buffer = cached_buffer(rank)
    ahead = (rank.rank + 1) % rank.size
    t = torch.ones(10)
    with pytest.raises(weft.Error, match="t: got"):
        buffer.pp_send([1, 2], ahead)
    with pytest.raises(weft.Error, match="t: got"):
        buffer.pp_send(torch.ones(4, 4).T, ahead)
    with pytest.raises(weft.Error, match="t: got 400000 bytes, allowed: at most the 300000"):
        buffer.pp_send(torch.ones(100_000), ahead)
    with pytest.raises(weft.Error, match="dst_rank_idx"):
        buffer.pp_send(t, rank.size)
    with pytest.raises(weft.Error, match="src_rank_idx"):
        buffer.pp_recv(t, -1)
    with pytest.raises(weft.Error, match="num_sms"):
        buffer.pp_recv(t, ahead, num_sms=-1)
    with pytest.raises(weft.Error, match="num_max_tensor_bytes"):
        buffer.pp_set_config(0, 1)
    # Sizes that differ: the receiver is told, and the next message comes through.
    behind = (rank.rank - 1) % rank.size
    buffer.pp_send(t, ahead)
    buffer.pp_send(2 * t, ahead)
    wrong = torch.zeros(9)
    with pytest.raises(weft.Error, match=f"rank {rank.rank} receives 36 bytes, rank {behind} sent 40"):
        buffer.pp_recv(wrong, behind)
    assert not wrong.any()
    got = torch.empty(10)
    buffer.pp_recv(got, behind)
    assert torch.equal(got, 2 * t)


def test_bad_arguments_are_named_and_the_ring_stays_usable(trio: RankPool) -> None:
    trio.run(refuse)


def only_neighbours(rank: Rank) -> str:
    buffer = cached_buffer(rank)
    with pytest.raises(weft.Error) as refused:
        buffer.pp_send(torch.ones(1), (rank.rank + 2) % rank.size)
    return str(refused.value)


def test_only_neighbours_are_reached() -> None:
    for rank, text in enumerate(run_ranks(4, only_neighbours, with_gpus=False)):
        far, before, after = (rank + 2) % 4, (rank - 1) % 4, (rank + 1) % 4
        assert text == (
            f"dst_rank_idx: got {far}, allowed: the neighbours of rank {rank} among 4 ranks, {before} and {after}"
        )


def configure(rank: Rank) -> None:
    buffer = weft.ElasticBuffer(rank.group, num_bytes=2 << 20, num_cpu_timeout_secs=30)
    with pytest.raises(weft.Error, match="pp_set_config: got no call yet"):
        buffer.pp_send(torch.ones(1), (rank.rank + 1) % rank.size)
    with pytest.raises(weft.Error, match=r"num_max_inflight_tensors: got \d on rank 0 and \d on rank \d"):
        buffer.pp_set_config(64, 2 + rank.rank)
    for num_bytes in (64, 1 << 20):  # again, larger, with a message left behind
        buffer.pp_set_config(num_bytes, 2)
        buffer.pp_send(torch.full((16,), float(rank.rank)), (rank.rank + 1) % rank.size)
        got = torch.empty(16)
        buffer.pp_recv(got, (rank.rank - 1) % rank.size)
        assert (got == (rank.rank - 1) % rank.size).all()
        buffer.pp_send(torch.full((16,), -1.0), (rank.rank + 1) % rank.size)
        buffer.barrier(with_cpu_sync=True)


def test_configuration_is_the_same_everywhere_and_can_change(trio: RankPool) -> None:
    trio.run(configure)


TIMEOUT_S = 4.0
LOST = 1


def lose_neighbour(rank: Rank, call: str, number: int) -> tuple[str, float]:
    buffer = weft.ElasticBuffer(
        rank.group, num_bytes=2 << 20, num_cpu_timeout_secs=TIMEOUT_S, num_gpu_timeout_secs=TIMEOUT_S
    )
    buffer.pp_set_config(1000, 1)
    torch.distributed.barrier(group=rank.group)
    if rank.rank == LOST:
        os.kill(os.getpid(), number)
    start = time.monotonic()
    with pytest.raises(weft.PeerLost) as raised:
        if call == "send":
            buffer.pp_send(torch.ones(2), LOST)  # its slot takes this one
            buffer.pp_send(torch.ones(2), LOST)
        else:
            buffer.pp_recv(torch.ones(2), LOST)
    return str(raised.value), time.monotonic() - start


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("call", ["send", "recv"])
def test_a_lost_neighbour_is_named(call: str, number: int) -> None:
    results = run_ranks(3, lose_neighbour, call, number, lost={LOST}, deadline_s=60, with_gpus=False)
    for rank, result in enumerate(results):
        if rank != LOST:
            text, waited_s = result
            assert waited_s < TIMEOUT_S + 15
            if number == signal.SIGKILL:  # found at once
                assert text.startswith(f"rank {rank}: rank {LOST} (pid ")
                assert text.endswith("was killed by signal 9")
                continue
            assert text.startswith(f"rank {rank}, pp_{call}, waited")
            assert f"for rank {LOST}: expected epoch 1, saw 0" in text
            assert text.endswith("is stopped")
