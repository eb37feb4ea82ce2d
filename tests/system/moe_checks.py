# SPDX-License-Identifier: Apache-2.0
"""What the expert-parallel tests run on every rank: one call or round trip, compared with the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import weft
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, RankPool
from weft.testing.round_trips import (
    check_combined,
    check_received,
    dispatch,
    expert_output,
    ranks_per_node,
)

WINDOW_BYTES = 64 << 20


def cached_buffer(rank: Rank, **options: Any) -> weft.Buffer:
    """Return this rank's buffer of the pool, made at its first use."""
    if "buffer" not in rank.kept:
        rank.kept["buffer"] = weft.Buffer(rank.group, WINDOW_BYTES, **options)
    return rank.kept["buffer"]


def check_case(pool: RankPool, case: MoeCase) -> None:
    """Compare the layout and a round trip of a case with the oracle, on all ranks."""
    pool.run(check_layout, case)
    pool.run(check_round_trip, case)


def check_layout(rank: Rank, case: MoeCase) -> None:
    """Compare get_dispatch_layout with the oracle."""
    topk_idx = case.topk_idx(rank.rank)
    layout = cached_buffer(rank).get_dispatch_layout(topk_idx, case.num_experts)
    per_rank, per_expert, in_rank = oracle.layout(topk_idx, case.num_experts, rank.size)
    assert torch.equal(layout[0], per_rank)
    assert torch.equal(layout[2], per_expert)
    assert layout[3].dtype == torch.bool
    assert torch.equal(layout[3], in_rank)


def check_round_trip(rank: Rank, case: MoeCase) -> None:
    """Layout, dispatch with weights, combine with weights and two biases: all exact."""
    buffer = cached_buffer(rank)
    me, routes = rank.rank, case.routes()
    recv_x, recv_idx, recv_weights, counts, handle, _ = dispatch(buffer, case, me)
    rows = oracle.ht_dispatch(routes, case.num_experts, me)
    check_received(case, me, rows, recv_x, recv_idx, recv_weights)
    assert counts == rows.per_expert
    assert torch.equal(handle[0][:, me].long(), rows.per_source.cumsum(0))
    biases = (case.bias(me, 0), case.bias(me, 1))
    combined, weights, _ = buffer.combine(
        expert_output(recv_x, me), handle, topk_weights=recv_weights, bias=biases
    )
    check_combined(case, me, combined, biases)
    all_rows = [oracle.ht_dispatch(routes, case.num_experts, r) for r in range(rank.size)]
    all_weights = [r.take_weights(case.all_weights()) for r in all_rows]
    assert torch.equal(weights, oracle.ht_combine_weights(all_weights, routes, case.num_experts, me))


def check_scales(rank: Rank, case: MoeCase, words: int, dtype: torch.dtype, column_major: bool) -> None:
    """Rows of FP8 bring their scales, in a cached dispatch, too."""
    quantized = [x.to(torch.float8_e4m3fn) for x in case.all_x()]
    scales = [case.scales(r, words).view(dtype) for r in range(rank.size)]
    mine = scales[rank.rank]
    if column_major:
        mine = mine.T.contiguous().T
    (recv_x, recv_scales), idx, weights, _, handle, _ = dispatch(
        cached_buffer(rank), case, rank.rank, (quantized[rank.rank], mine)
    )
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, rank.rank)
    assert recv_x.dtype == torch.float8_e4m3fn
    assert torch.equal(recv_x.view(torch.uint8), rows.take([q.view(torch.uint8) for q in quantized]))
    assert recv_scales.is_contiguous()
    assert torch.equal(recv_scales, rows.take(scales))
    assert torch.equal(idx, rows.topk_idx)
    assert torch.equal(weights, rows.take_weights(case.all_weights()))
    cached, none, *_ = cached_buffer(rank).dispatch((quantized[rank.rank], mine), handle=handle)
    assert none is None
    assert torch.equal(cached[1], recv_scales)


def check_worst_tokens(rank: Rank, case: MoeCase, num_worst_tokens: int) -> None:
    """Outputs have as many rows as asked for, and no counts come."""
    buffer = cached_buffer(rank)
    recv_x, recv_idx, recv_weights, counts, handle, _ = dispatch(
        buffer, case, rank.rank, num_worst_tokens=num_worst_tokens
    )
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, rank.rank)
    received = len(rows.src_rank)
    assert counts == []
    assert len(recv_x) == len(recv_idx) == len(recv_weights) == num_worst_tokens
    check_received(case, rank.rank, rows, recv_x[:received], recv_idx[:received], recv_weights[:received])
    assert bool((recv_idx[received:] == -1).all())
    combined, _, _ = buffer.combine(expert_output(recv_x, rank.rank), handle)
    check_combined(case, rank.rank, combined)


def check_cached(rank: Rank, case: MoeCase) -> None:
    """A handle repeats a dispatch with other rows."""
    buffer = cached_buffer(rank)
    recv_x, _, _, _, handle, _ = dispatch(buffer, case, rank.rank)
    again = buffer.dispatch(case.x(rank.rank) * 2, handle=handle)
    assert torch.equal(again[0], recv_x * 2)
    assert again[1:5] == (None, None, None, None)
    assert again[5].event is None
    combined, weights, _ = buffer.combine(expert_output(recv_x, rank.rank), handle)
    assert weights is None
    check_combined(case, rank.rank, combined)


def check_no_top_k(rank: Rank, case: MoeCase) -> None:
    """Without ids and weights rows alone travel."""
    buffer = cached_buffer(rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(
        case.topk_idx(rank.rank), case.num_experts
    )
    recv_x, idx, weights, counts, handle, _ = buffer.dispatch(
        case.x(rank.rank),
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
    )
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, rank.rank)
    assert torch.equal(recv_x, rows.take(case.all_x()))
    assert idx is None
    assert weights is None
    assert counts == rows.per_expert
    check_combined(case, rank.rank, buffer.combine(expert_output(recv_x, rank.rank), handle)[0])


def check_repeats(rank: Rank, case: MoeCase) -> None:
    """A buffer serves many round trips."""
    buffer = cached_buffer(rank)
    for _ in range(40):
        recv_x, _, _, _, handle, _ = dispatch(buffer, case, rank.rank)
        combined, _, _ = buffer.combine(expert_output(recv_x, rank.rank), handle)
    check_combined(case, rank.rank, combined)


def check_float32_rows(rank: Rank, case: MoeCase) -> None:
    """Sums of float32 are those of the oracle."""
    buffer = cached_buffer(rank)
    xs = [x.float() for x in case.all_x()]
    recv_x, _, _, _, handle, _ = dispatch(buffer, case, rank.rank, xs[rank.rank])
    rows = [oracle.ht_dispatch(case.routes(), case.num_experts, r) for r in range(rank.size)]
    assert torch.equal(recv_x, rows[rank.rank].take(xs))
    combined, _, _ = buffer.combine(recv_x, handle)
    sent_back = [r.take(xs) for r in rows]
    expected = oracle.ht_combine(
        sent_back, case.routes(), case.num_experts, rank.rank, ranks_per_node=ranks_per_node(rank.size)
    )
    assert torch.equal(combined, expected)


def barrier(rank: Rank) -> None:
    """Wait for all ranks of the run."""
    torch.distributed.barrier(group=rank.group)


class FakeMpi:
    """The few methods of an mpi4py communicator that a buffer uses; a message is a file."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    @classmethod
    def of(cls, rank: Rank) -> FakeMpi:
        """Return the rank's only one: another would find files of the same numbers."""
        mpi: FakeMpi = rank.kept.setdefault("mpi", cls(rank))
        return mpi

    def Get_rank(self) -> int:
        return self._rank.rank

    def Get_size(self) -> int:
        return self._rank.size

    def _file(self, src: int, dst: int, number: int) -> Path:
        return self._rank.folder / f"mpi-{src}-{dst}-{number}"

    def isend(self, data: bytes, dest: int, tag: int) -> FakeMpi:
        number = self._sent.get(dest, 0)
        self._sent[dest] = number + 1
        file = self._file(self._rank.rank, dest, number)
        file.with_suffix(".part").write_bytes(data)
        file.with_suffix(".part").rename(file)
        return self

    def test(self) -> tuple[bool, None]:
        return True, None

    def iprobe(self, source: int, tag: int) -> bool:
        return self._file(source, self._rank.rank, self._received.get(source, 0)).exists()

    def recv(self, source: int, tag: int) -> bytes:
        number = self._received.get(source, 0)
        self._received[source] = number + 1
        return self._file(source, self._rank.rank, number).read_bytes()
