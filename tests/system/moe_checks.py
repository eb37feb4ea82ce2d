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
from weft.testing.round_trips import check_combined, check_received, dispatch, expert_output

WINDOW_BYTES = 64 << 20


def kept_buffer(rank: Rank, **options: Any) -> weft.Buffer:
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
    layout = kept_buffer(rank).get_dispatch_layout(topk_idx, case.num_experts)
    per_rank, per_expert, in_rank = oracle.layout(topk_idx, case.num_experts, rank.size)
    assert torch.equal(layout[0], per_rank)
    assert torch.equal(layout[2], per_expert)
    assert layout[3].dtype == torch.bool
    assert torch.equal(layout[3], in_rank)


def check_round_trip(rank: Rank, case: MoeCase) -> None:
    """Layout, dispatch with weights, combine with weights and two biases: all exact."""
    buffer = kept_buffer(rank)
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


def barrier(rank: Rank) -> None:
    """Wait for all ranks of the run."""
    torch.distributed.barrier(group=rank.group)


class FakeMpi:
    """The few methods of an mpi4py communicator that a buffer uses; a message is a file."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

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
