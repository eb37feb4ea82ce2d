# SPDX-License-Identifier: Apache-2.0
"""What crosses between nodes, and the least time that a network needs for it.

The floor is the provider's own loop (``fi_writemsg``, no engine, no proxy, no kernel) in the same processes: every rank
writes to one other the bytes that it sends to other nodes, in large pieces, half of the ranks after the other half.
``network_us`` is the sum of the halves, ``raw_us`` the slower one: ranks that have a core and a NIC each need no more.
The provider ``cuda`` has copy engines for a loop: there the driver copies all bytes at once, from GPU to GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor

from weft import _core
from weft.bench.moe.floors import row_bytes
from weft.testing import oracle
from weft.testing.ranks import Rank

if TYPE_CHECKING:
    from weft.bench.moe.clock import Bench
    from weft.bench.report import Row

PIECE_BYTES = 256 << 10
RAW_FACTOR, RAW_BEYOND_US = (
    2.0,
    15.0,
)  # a low-latency call should take no more than this times the loop, and this more
WINDOW = 64
TIMEOUT_S = 60.0


def far_rows(sets: Sequence[Sequence[Tensor]], experts: int, ranks_per_node: int) -> float:
    """Return the rows that a rank sends to other nodes, one per (token, rank); the mean over ranks and routes."""
    far = 0
    for routes in sets:
        for rank, topk_idx in enumerate(routes):
            per_rank = oracle.layout(topk_idx, experts, len(routes))[0].tolist()
            far += sum(
                n for peer, n in enumerate(per_rank) if peer // ranks_per_node != rank // ranks_per_node
            )
    return far / len(sets) / len(sets[0])


def far_messages(sets: Sequence[Sequence[Tensor]], experts: int, ranks_per_node: int) -> float:
    """Return the rows that a rank sends to other nodes, one per (token, node); the mean over ranks and routes."""
    far = 0
    for routes in sets:
        for rank, topk_idx in enumerate(routes):
            in_rank = oracle.layout(topk_idx, experts, len(routes))[2]
            for first in range(0, len(routes), ranks_per_node):
                if first // ranks_per_node != rank // ranks_per_node:
                    far += int(in_rank[:, first : first + ranks_per_node].any(dim=1).sum())
    return far / len(sets) / len(sets[0])


class NetworkSamples:
    """The network's time for rows to other nodes and back, sampled beside the calls. Collective."""

    def __init__(self, bench: Bench, out_rows: float, back_rows: float) -> None:
        o = bench.options
        self._floor: NetworkFloor | CopyFloor = (
            CopyFloor(bench.me) if o.provider == "cuda" else NetworkFloor(bench.me, o.provider, o.nic)
        )
        self._bytes = {
            "dispatch": out_rows * row_bytes(o.dtype, o.hidden),
            "combine": back_rows * row_bytes("bf16", o.hidden),
        }
        self._us: dict[str, list[tuple[float, float]]] = {step: [] for step in self._bytes}
        self._warmup = o.warmup

    def take(self) -> None:
        """Take one sample of each step."""
        for step, num_bytes in self._bytes.items():
            self._us[step].append(self._floor.halves_us(num_bytes))

    def add_to(self, row: Row, step: str) -> None:
        """Add to a row's floor what the network needs for the bytes that cross, warm-up left out."""
        halves = self._us[step][self._warmup :]
        network_us = statistics.median(sum(pair) for pair in halves)
        raw_us = statistics.median(max(pair) for pair in halves)
        row.extra["network_us"] = round(network_us, 1)
        row.extra["raw_us"] = round(raw_us, 1)
        if row.call.startswith("ll_"):
            row.extra["bound_us"] = round(RAW_FACTOR * raw_us + RAW_BEYOND_US, 1)
            row.extra["within_bound"] = row.us <= row.extra["bound_us"]
        row.extra["network_mb"] = round(self._bytes[step] / 1e6, 6)
        row.floor_us = (row.floor_us or 0.0) + network_us


class NetworkFloor:
    """The provider's loop between pairs of ranks; one rank of an odd number is left out. Collective."""

    def __init__(self, me: Rank, provider: str, nic: str) -> None:
        self._me, half = me, me.size // 2
        self._is_first, self._other = _partner(me)
        self._buffer = torch.zeros(16 * PIECE_BYTES, dtype=torch.uint8)
        self._raw: Any = None
        if me.rank < 2 * half:
            found = _core.transfer_find_provider(provider)
            self._raw = _core.measure.transfer_raw_loop(
                found, nic, self._buffer.data_ptr(), self._buffer.numel()
            )
        addresses: list[Any] = [None] * me.size
        torch.distributed.all_gather_object(addresses, self._raw and self._raw.address, group=me.group)
        if self._raw:
            self._raw.connect(addresses[self._other])

    def halves_us(self, num_bytes: float) -> tuple[float, float]:
        """Return how long it takes until each half of the ranks has written so many bytes: the slowest of it."""
        mine = 0.0
        for is_first in (True, False):
            torch.distributed.barrier(group=self._me.group)
            if self._raw and self._is_first == is_first:
                mine = self._write_us(num_bytes)
            elif self._raw:
                self._raw.serve(TIMEOUT_S)
        return _slowest_of_halves(self._me, self._is_first, mine)

    def _write_us(self, num_bytes: float) -> float:
        piece = max(min(PIECE_BYTES, round(num_bytes)), 16)
        count = max(round(num_bytes / piece), 1)
        seconds = self._raw.measure("write", piece, count, WINDOW, 1, 1, None, TIMEOUT_S)[0]
        self._raw.stop_serving(TIMEOUT_S)
        return float(seconds * 1e6)


class CopyFloor:
    """Driver copies between the GPUs of pairs of ranks, each with a GPU of its own. Collective."""

    def __init__(self, me: Rank) -> None:
        self._me = me
        self._is_first, self._other = _partner(me)
        self._from = self._to = torch.empty(0)

    def halves_us(self, num_bytes: float) -> tuple[float, float]:
        """Return how long it takes until each half of the ranks has copied so many bytes: the slowest of it."""
        mine = 0.0
        for is_first in (True, False):
            torch.distributed.barrier(group=self._me.group)
            if self._is_first == is_first and self._other < self._me.size:
                mine = self._copy_us(max(round(num_bytes), 16))
        return _slowest_of_halves(self._me, self._is_first, mine)

    def _copy_us(self, num_bytes: int) -> float:
        if self._from.numel() != num_bytes:
            self._from = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
            self._to = torch.zeros(num_bytes, dtype=torch.uint8, device=f"cuda:{self._other}")
            self._to.copy_(self._from)
            torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._to.copy_(self._from, non_blocking=True)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3


def _partner(me: Rank) -> tuple[bool, int]:
    """Whether this rank is of the first half, and which of the other it writes to; of an odd number one has none."""
    half = me.size // 2
    is_first = me.rank < half
    return is_first, me.rank + half if is_first else me.rank - half


def _slowest_of_halves(me: Rank, is_first: bool, mine: float) -> tuple[float, float]:
    of_ranks: list[Any] = [None] * me.size
    torch.distributed.all_gather_object(of_ranks, (is_first, mine), group=me.group)
    first, second = (max(us for of_first, us in of_ranks if of_first == half) for half in (True, False))
    return float(first), float(second)
