# SPDX-License-Identifier: Apache-2.0
"""Two micro-batches in flight on two streams, with hooks, as serving frameworks overlap them.

Experts return their rows as they got them, and values have few digits, so that every sum is exact: a token comes back
as itself times the sum of its weights. A row of another round, another micro-batch or another source shows.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import torch
from torch import Tensor

import weft
from weft.testing.ranks import Rank

_MOST, _HIDDEN, _TOP_K, _EXPERTS_PER_RANK = 48, 512, 4, 5
_ROUNDS_PER_LOOK = 50  # rounds between two waits for the GPU


class _MicroBatch:
    """One micro-batch: its stream, its random numbers, and what is in flight."""

    def __init__(self, buffer: weft.Buffer, rank: Rank, device: str, number: int) -> None:
        self.buffer, self.device = buffer, device
        self.num_experts = rank.size * _EXPERTS_PER_RANK
        self.sizes = random.Random(1000 * number + rank.rank)
        self.values = torch.Generator(device).manual_seed(1000 * number + rank.rank)
        self.stream = torch.cuda.Stream() if device != "cpu" else None
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def send_tokens(self) -> None:
        tokens = self.sizes.choice((0, 1, 3, _MOST, self.sizes.randint(0, _MOST)))
        shape = (tokens, self.num_experts)
        scores = torch.rand(shape, generator=self.values, device=self.device)
        self.ids = scores.topk(_TOP_K).indices
        if self.sizes.random() < 0.3:
            self.ids[::3, 1] = -1
        drawn = torch.randint(-8, 9, (tokens, _HIDDEN), generator=self.values, device=self.device)
        self.x = drawn.bfloat16()
        self.weights = torch.full((tokens, _TOP_K), 0.25, device=self.device)
        self.rows, self.counts, self.handle, _, self.hook = self.buffer.low_latency_dispatch(
            self.x, self.ids, _MOST, self.num_experts, use_fp8=False, return_recv_hook=True
        )

    def receive_tokens_send_results(self) -> None:
        self.hook()
        results = self.rows.clone()
        self.rows.fill_(float("nan"))  # who still reads it shows
        self.combined, _, self.hook = self.buffer.low_latency_combine(
            results, self.ids, self.weights, self.handle, return_recv_hook=True
        )

    def receive_results(self) -> None:
        self.hook()
        expected = (self.x.float() * self._weight_sums()).bfloat16()
        self.wrong += (self.combined != expected).any(dim=1).sum()

    def _weight_sums(self) -> Tensor:
        return (self.weights * (self.ids >= 0)).sum(dim=1, keepdim=True)


def overlap_two_micro_batches(rank: Rank, rounds: int, device: str) -> None:
    """Run that many rounds of random sizes; raise AssertionError with how many tokens of a look were wrong."""
    room = weft.Buffer.get_low_latency_rdma_size_hint(
        _MOST, _HIDDEN, rank.size, rank.size * _EXPERTS_PER_RANK
    )
    buffer = weft.Buffer(rank.group, 0, room, low_latency_mode=True, device=device)
    batches = [_MicroBatch(buffer, rank, device, number) for number in range(2)]
    for done in range(rounds):
        for step in (
            _MicroBatch.send_tokens,
            _MicroBatch.receive_tokens_send_results,
            _MicroBatch.receive_results,
        ):
            for batch in batches:
                with batch.on_stream():
                    step(batch)
        if done % _ROUNDS_PER_LOOK == _ROUNDS_PER_LOOK - 1 or done == rounds - 1:
            wrong = [int(batch.wrong) for batch in batches]
            assert wrong == [0, 0], (
                f"rank {rank.rank}: wrong tokens of each micro-batch by round {done}: {wrong}"
            )
