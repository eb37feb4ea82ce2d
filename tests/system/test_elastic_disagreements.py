# SPDX-License-Identifier: Apache-2.0
"""Elastic calls that ranks make differently: refused on the CPU, where rows of one would pass for another's."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.testing.ranks import Rank, RankPool


def gather_of_other_sizes(rank: Rank, lengths: tuple[int, int]) -> None:
    buffer = weft.ElasticBuffer(rank.group, num_bytes=4 << 20)
    buffer.agrs_set_config(8 << 20, 2)
    with buffer.agrs_new_session():
        with pytest.raises(weft.Error, match=r"t: got .* on rank .* allowed: the same shapes and types"):
            buffer.all_gather(torch.full((lengths[rank.rank],), rank.rank, dtype=torch.int32))
        gathered, wait = buffer.all_gather(torch.full((5123,), rank.rank, dtype=torch.int32))
        wait()
        assert [part.unique().tolist() for part in gathered] == [[0], [1]]


# More rows, as many rows with another tail, nothing; each one was taken for data of the shorter or longer length.
@pytest.mark.parametrize("lengths", [(25 << 10, 50 << 10), (5121, 5123), (0, 4)], ids=str)
def test_gathers_of_other_sizes_are_refused_on_all_ranks(pair: RankPool, lengths: tuple[int, int]) -> None:
    pair.run(gather_of_other_sizes, lengths)


def gather_of_other_types(rank: Rank) -> None:
    buffer = weft.ElasticBuffer(rank.group, num_bytes=4 << 20)
    buffer.agrs_set_config(8 << 20, 2)
    dtype = (torch.bfloat16, torch.float16)[rank.rank]
    with buffer.agrs_new_session(), pytest.raises(weft.Error, match="other sizes or types on rank"):
        buffer.all_gather(torch.ones(64, dtype=dtype))


def test_gathers_of_other_types_are_refused(pair: RankPool) -> None:
    pair.run(gather_of_other_types)


def weights_of_one_rank(rank: Rank, sync: bool | None) -> None:
    buffer = weft.ElasticBuffer(rank.group, num_bytes=4 << 20)
    x, ids, weights = torch.ones(3, 64).bfloat16(), torch.tensor([[0, 3], [1, 2], [2, -1]]), torch.ones(3, 2)
    sizes = {"num_experts": 4, "num_max_tokens_per_rank": 4, "do_cpu_sync": sync}
    with pytest.raises(weft.Error, match=r"topk_weights: got .*None on rank .*allowed: weights on all ranks"):
        buffer.dispatch(x, ids, weights if rank.rank == 0 else None, **sizes)
    assert buffer.dispatch(x, ids, **sizes)[2] is None
    received, _, came, handle, _ = buffer.dispatch(x, ids, weights, **sizes)
    assert (came[: 4 + 2 * rank.rank] == 1).all()
    assert torch.equal(buffer.combine(received, handle)[0], x * torch.tensor([[2], [2], [1]]))


@pytest.mark.parametrize("sync", [None, False])
def test_weights_of_one_rank_alone_are_refused(pair: RankPool, sync: bool | None) -> None:
    pair.run(weights_of_one_rank, sync)


def entries_of_other_types(rank: Rank) -> None:
    buffer = weft.ElasticBuffer(rank.group, num_bytes=4 << 20)
    dtype = (torch.float32, torch.int32)[rank.rank]
    allowed = r"storage \(type\): got float32 on rank 0 and int32 on rank 1, allowed: the same"
    with pytest.raises(weft.Error, match=allowed):
        buffer.engram_write(torch.ones(3, 8, dtype=dtype))
    buffer.engram_write(torch.full((3, 8), float(rank.rank)))
    data, _ = buffer.engram_fetch(torch.tensor([[0, 5]]))()
    assert data.tolist() == [[0.0] * 8 + [1.0] * 8]


def test_entries_of_other_types_are_refused_though_they_have_as_many_bytes(pair: RankPool) -> None:
    pair.run(entries_of_other_types)
