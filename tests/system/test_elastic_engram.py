# SPDX-License-Identifier: Apache-2.0
"""Engram reads against the gathered table: types, odd sizes, scales, repeated writes, bad input, lost ranks."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import weft
from weft.testing.ranks import Rank, RankPool, run_ranks


def cached_buffer(rank: Rank) -> weft.ElasticBuffer:
    if "engram" not in rank.kept:
        rank.kept["engram"] = weft.ElasticBuffer(rank.group, num_bytes=2 << 20, num_cpu_timeout_secs=30)
    return rank.kept["engram"]


def entries_of(rank: int, num_entries: int, hidden: int, dtype: torch.dtype, round: int = 0) -> torch.Tensor:
    """Return a rank's entries; any rank can make them."""
    seed = torch.Generator().manual_seed(1000 * round + rank)
    values = torch.randint(0, 127, (num_entries, hidden * dtype.itemsize), dtype=torch.uint8, generator=seed)
    return values.view(dtype)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def read_back(rank: Rank, num_entries: int, hidden: int, dtype: torch.dtype, ids: torch.dtype) -> None:
    buffer = cached_buffer(rank)
    generator = torch.Generator().manual_seed(rank.rank)
    for round in range(3):
        shards = [entries_of(r, num_entries, hidden, dtype, round) for r in range(rank.size)]
        buffer.engram_write(shards[rank.rank])
        whole = torch.cat([shard.view(torch.uint8) for shard in shards])
        for tokens, per_token in ((0, 4), (1, 1), (9, 3), (300, 2)):
            indices = torch.randint(
                0, num_entries * rank.size, (tokens, per_token), dtype=ids, generator=generator
            )
            data, scales = buffer.engram_fetch(indices)()
            assert scales is None
            assert data.dtype == dtype
            assert data.shape == (tokens, per_token * hidden)
            assert torch.equal(
                data.view(torch.uint8), whole[indices.view(-1).long()].view(data.view(torch.uint8).shape)
            )


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("num_entries", "hidden", "dtype"),
    [(1, 1, torch.uint8), (7, 5, torch.bfloat16), (64, 256, torch.bfloat16), (33, 3, torch.float32)],
    ids=str,
)
def test_fetched_entries_are_those_of_the_whole_table(
    pool: RankPool, num_entries: int, hidden: int, dtype: torch.dtype, ids: torch.dtype
) -> None:
    pool.run(read_back, num_entries, hidden, dtype, ids)


def read_fp8(rank: Rank, scale_type: torch.dtype, col_major: bool) -> None:
    buffer, num_entries, hidden, words = cached_buffer(rank), 12, 256, 2
    shards = [entries_of(r, num_entries, hidden, torch.float8_e4m3fn) for r in range(rank.size)]
    scales = torch.arange(rank.size * num_entries * words).view(-1, words).to(scale_type)
    buffer.engram_write(shards[rank.rank], scales)
    indices = torch.randint(0, num_entries * rank.size, (7, 3), dtype=torch.int32)
    hooks = [buffer.engram_fetch(indices, use_tma_aligned_col_major_sf=col_major) for _ in range(2)]
    for hook in reversed(hooks):  # in any order
        data, got = hook()
        expected = torch.cat([shard.view(torch.uint8) for shard in shards])[indices.view(-1).long()]
        assert same_bytes(data.view(torch.uint8), expected.view(7, 3 * hidden))
        assert torch.equal(got, scales[indices.view(-1).long()].view(7, 3 * words))
        assert got.stride() == ((1, 8) if col_major else (3 * words, 1))


@pytest.mark.parametrize("col_major", [False, True])
@pytest.mark.parametrize("scale_type", [torch.float32, torch.int32])
def test_fp8_entries_bring_their_scales(pair: RankPool, scale_type: torch.dtype, col_major: bool) -> None:
    pair.run(read_fp8, scale_type, col_major)


def refuse(rank: Rank) -> None:
    buffer = weft.ElasticBuffer(rank.group, num_bytes=2 << 20, num_cpu_timeout_secs=30)
    indices = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(weft.Error, match="engram_write: got no call yet"):
        buffer.engram_fetch(indices)
    entries = entries_of(rank.rank, 4, 8, torch.bfloat16)
    bad: list[tuple[Any, Any, str]] = [
        (entries[0], None, "storage"),
        (entries.T, None, "storage"),
        (torch.empty(4, 0), None, "storage"),
        (entries, torch.ones(4 * rank.size, 1), "sf"),
        (entries.view(torch.float8_e4m3fn), None, "sf"),
        (entries.view(torch.float8_e4m3fn), torch.ones(4, 1), "sf"),
    ]
    for storage, sf, argument in bad:
        with pytest.raises(weft.Error, match=f"^{argument}: got"):
            buffer.engram_write(storage, sf)
    with pytest.raises(weft.Error, match=r"storage \(entries\): got \d on rank 0 and \d on rank 1"):
        buffer.engram_write(entries[: 2 + rank.rank])
    buffer.engram_write(entries[:0])
    with pytest.raises(weft.Error, match="allowed: none: the table has no entries"):
        buffer.engram_fetch(indices)
    buffer.engram_write(entries)
    last = 4 * rank.size
    for wrong in (-1, last):
        with pytest.raises(weft.Error, match=f"indices: got entry {wrong}, allowed: 0 to {last - 1}"):
            buffer.engram_fetch(indices + wrong)
    with pytest.raises(weft.Error, match="indices: got"):
        buffer.engram_fetch(indices.float())
    with pytest.raises(weft.Error, match=r"storage \(entries\): got \d on rank 0 and \d on rank 1"):
        buffer.engram_write(entries[: 2 + rank.rank])  # the table stays what it was
    data, _ = buffer.engram_fetch(indices + last - 1)()
    assert same_bytes(data, entries_of(rank.size - 1, 4, 8, torch.bfloat16)[3:4])
    buffer.barrier()  # others may still read


def test_bad_arguments_are_named_and_the_table_stays_usable(pair: RankPool) -> None:
    pair.run(refuse)


LOST, TIMEOUT_S = 1, 4.0


def lose_one(rank: Rank) -> str:
    buffer = weft.ElasticBuffer(
        rank.group, num_bytes=2 << 20, num_cpu_timeout_secs=TIMEOUT_S, num_gpu_timeout_secs=TIMEOUT_S
    )
    buffer.engram_write(entries_of(rank.rank, 4, 8, torch.bfloat16))
    torch.distributed.barrier(group=rank.group)
    if rank.rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    indices = torch.arange(4, dtype=torch.int32).view(1, 4) + 4 * LOST
    data, _ = buffer.engram_fetch(indices)()  # its memory is still mapped here
    assert same_bytes(data, entries_of(LOST, 4, 8, torch.bfloat16).view(1, -1))
    with pytest.raises(weft.PeerLost) as raised:
        buffer.engram_write(entries_of(rank.rank, 4, 8, torch.bfloat16))
    return str(raised.value)


def test_a_lost_rank_is_named_by_write_and_still_read_by_fetch() -> None:
    for rank, text in enumerate(run_ranks(3, lose_one, lost={LOST}, deadline_s=60, with_gpus=False)):
        if rank != LOST:
            assert f"rank {LOST}" in text
