# SPDX-License-Identifier: Apache-2.0
"""The demo's model: a byte-level transformer whose feed-forward layers are mixtures of experts.

The same code runs on one rank and over many. Where a layer's rows meet their experts is an ``Exchange``:
``Local`` keeps them where they are, ``OverRanks`` sends them through Weft. Rows are bf16 there in both cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from weft.moe import autograd

ExpertRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. ``experts`` is a multiple of the number of ranks."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    length: int = 64
    experts: int = 16
    top_k: int = 2
    expert_hidden: int = 256


class Exchange(Protocol):
    """Brings rows to the experts of this process and the results back."""

    first_expert: int
    num_local_experts: int

    def __call__(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, experts: ExpertRows
    ) -> torch.Tensor:
        """Return bf16[tokens, hidden]: for each row of ``x``, bf16[tokens, hidden], its experts' weighted
        sum.
        """
        ...


class Local:
    """All experts live here; nothing moves."""

    def __init__(self, num_experts: int) -> None:
        self.first_expert = 0
        self.num_local_experts = num_experts

    def __call__(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, experts: ExpertRows
    ) -> torch.Tensor:
        return experts(x, topk_idx, topk_weights)


class OverRanks:
    """Each rank owns an equal share of the experts; rows travel through a ``weft.Buffer``."""

    def __init__(
        self, num_experts: int, rank: int, num_ranks: int, buffer: autograd.DispatchingBuffer
    ) -> None:
        self.num_local_experts = num_experts // num_ranks
        self.first_expert = rank * self.num_local_experts
        self._num_experts = num_experts
        self._buffer = buffer

    def __call__(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, experts: ExpertRows
    ) -> torch.Tensor:
        arrived = autograd.dispatch(self._buffer, x, topk_idx, topk_weights, self._num_experts)
        y = experts(arrived.x, arrived.topk_idx, arrived.topk_weights)
        return autograd.combine(self._buffer, y, arrived.handle)


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequences, length, hidden = x.shape
        split = self.qkv(x).view(sequences, length, 3, self.heads, hidden // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(sequences, length, hidden))
        return out


class MixtureOfExperts(nn.Module):
    """Each row goes through its ``top_k`` best experts of all ranks; this process holds the exchange's
    share.
    """

    def __init__(self, shape: Shape, exchange: Exchange) -> None:
        super().__init__()
        self.shape = shape
        self.exchange = exchange
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        # All experts are drawn, so that every process draws the same model; the local ones are kept.
        up = torch.randn(shape.experts, shape.hidden, shape.expert_hidden) * shape.hidden**-0.5
        down = torch.randn(shape.experts, shape.expert_hidden, shape.hidden) * shape.expert_hidden**-0.5
        mine = slice(exchange.first_expert, exchange.first_expert + exchange.num_local_experts)
        self.up = nn.Parameter(up[mine].clone())
        self.down = nn.Parameter(down[mine].clone())
        self.rows_per_expert = torch.zeros(shape.experts, dtype=torch.int64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        best, topk_idx = self.router(rows).topk(self.shape.top_k, dim=-1)
        self.rows_per_expert += torch.bincount(topk_idx.flatten(), minlength=self.shape.experts).cpu()
        out = self.exchange(rows.bfloat16(), topk_idx, best.softmax(-1).float(), self._expert_rows)
        return out.to(x.dtype).view_as(x)

    def _expert_rows(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return bf16[rows, hidden]: each row's weighted sum over this process's experts, rounded once."""
        wide = x.float()
        rows, results = [], []
        for expert in range(self.exchange.num_local_experts):
            # An expert without rows still takes part, so that backward runs the same calls on every rank.
            row, slot = (topk_idx == expert).nonzero(as_tuple=True)
            y = functional.gelu(wide[row] @ self.up[expert]) @ self.down[expert]
            rows.append(row)
            results.append(y * topk_weights[row, slot].unsqueeze(1))
        total = torch.zeros_like(wide).index_add(0, torch.cat(rows), torch.cat(results))
        return total.bfloat16()


class Layer(nn.Module):
    """Attention, then the mixture of experts, each added to its normalised input."""

    def __init__(self, shape: Shape, exchange: Exchange) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(shape.hidden)
        self.attention = Attention(shape)
        self.norm_experts = nn.LayerNorm(shape.hidden)
        self.experts = MixtureOfExperts(shape, exchange)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_attention(x))
        out: torch.Tensor = x + self.experts(self.norm_experts(x))
        return out


class ByteModel(nn.Module):
    """Predicts the next byte. Build it under the same torch seed everywhere."""

    def __init__(self, shape: Shape, exchange: Exchange) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, shape.hidden)
        self.position = nn.Parameter(torch.randn(shape.length, shape.hidden) * 0.02)
        self.layers = nn.ModuleList(Layer(shape, exchange) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return float32[sequences, length, 256]: scores of the next byte, for int64[sequences, length]."""
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        scores: torch.Tensor = self.head(self.norm(x))
        return scores

    def mixtures(self) -> list[MixtureOfExperts]:
        """Return the mixture-of-experts layers, first to last."""
        return [module for module in self.modules() if isinstance(module, MixtureOfExperts)]

    def shared_parameters(self) -> list[nn.Parameter]:
        """Return what every rank holds a copy of: all but the experts."""
        own = {id(p) for mixture in self.mixtures() for p in (mixture.up, mixture.down)}
        return [p for p in self.parameters() if id(p) not in own]
