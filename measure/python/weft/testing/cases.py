# SPDX-License-Identifier: Apache-2.0
"""Inputs of a dispatch that every rank can compute for every rank, from one description and a seed.

case = MoeCase(tokens=(5, 0, 3), hidden=16, top_k=2, num_experts=7)
x, topk_idx = case.x(rank), case.topk_idx(rank)         # what this rank dispatches
rows = oracle.ht_dispatch(case.routes(), case.num_experts, rank)
assert torch.equal(recv_x, rows.take(case.all_x()))     # what it must receive
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ROUTINGS = ("distinct", "any", "one expert", "none")


@dataclass(frozen=True)
class MoeCase:
    """One dispatch among len(tokens) ranks.

    tokens: rows of each rank.
    routing: how slots choose experts: "distinct" within a row (as far as there are enough), "any" (a row may
        name an expert twice), "one expert" (every slot of every token the same), "none" (all slots empty).
    empty_share: the share of slots that become -1.
    """

    tokens: tuple[int, ...]
    hidden: int
    top_k: int
    num_experts: int
    routing: str = "distinct"
    empty_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.routing in _ROUTINGS, self.routing

    @property
    def num_ranks(self) -> int:
        """Ranks that take part."""
        return len(self.tokens)

    def x(self, rank: int) -> Tensor:
        """Return bf16 [tokens, hidden]."""
        return self._rows(rank, 1)

    def topk_idx(self, rank: int) -> Tensor:
        """Return int64 [tokens, top_k], -1 for empty slots."""
        shape, random = (self.tokens[rank], self.top_k), self._random(rank, 2)
        if self.routing == "none":
            return torch.full(shape, -1)
        if self.routing == "one expert":
            idx = torch.full(shape, self.seed % self.num_experts)
        elif self.routing == "distinct" and self.top_k <= self.num_experts:
            scores = torch.rand((self.tokens[rank], self.num_experts), generator=random)
            idx = scores.topk(self.top_k, dim=1).indices
        else:
            idx = torch.randint(self.num_experts, shape, generator=random)
        return idx.masked_fill(torch.rand(shape, generator=random) < self.empty_share, -1)

    def topk_weights(self, rank: int) -> Tensor:
        """Return float32 [tokens, top_k]."""
        return torch.rand((self.tokens[rank], self.top_k), generator=self._random(rank, 3))

    def scales(self, rank: int, words_per_row: int) -> Tensor:
        """Return float32 [tokens, words_per_row]."""
        return torch.rand((self.tokens[rank], words_per_row), generator=self._random(rank, 4))

    def bias(self, rank: int, which: int) -> Tensor:
        """Return bf16 [tokens, hidden]; ``which`` tells two of them apart."""
        return torch.randn(
            (self.tokens[rank], self.hidden), generator=self._random(rank, 5 + which)
        ).bfloat16()

    def routes(self) -> list[Tensor]:
        """Return topk_idx of every rank."""
        return [self.topk_idx(rank) for rank in range(self.num_ranks)]

    def all_x(self) -> list[Tensor]:
        """Return x of every rank."""
        return [self.x(rank) for rank in range(self.num_ranks)]

    def all_weights(self) -> list[Tensor]:
        """Return topk_weights of every rank."""
        return [self.topk_weights(rank) for rank in range(self.num_ranks)]

    def _rows(self, rank: int, purpose: int) -> Tensor:
        shape = (self.tokens[rank], self.hidden)
        return torch.randn(shape, generator=self._random(rank, purpose)).bfloat16()

    def _random(self, rank: int, purpose: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed * 1009 + rank) * 16 + purpose)
