# SPDX-License-Identifier: Apache-2.0
"""One dispatch and its combine in each mode, for tests that do something to ranks or networks in between."""

from __future__ import annotations

from typing import Any

import torch

import weft

MODES = ("high throughput", "low latency", "elastic")
TOKENS, HIDDEN, TOP_K = 40, 256, 2


class Calls:
    """A buffer of a mode. combine() of what dispatch() sent gives ``expected``: experts return rows as they are."""

    def __init__(self, mode: str, group: Any, rank: int, ranks: int, timeout_s: float) -> None:
        self._mode, self._experts = mode, 2 * ranks
        self._x = torch.full((TOKENS, HIDDEN), rank + 1.0).bfloat16()
        seed = torch.Generator().manual_seed(rank)
        self._ids = torch.rand(TOKENS, self._experts, generator=seed).topk(TOP_K).indices
        self._weights = torch.full((TOKENS, TOP_K), 0.5)
        owners = self._ids // 2
        copies = 1.0 if mode == "low latency" else 1.0 + (owners[:, :1] != owners[:, 1:])
        self.expected = (self._x.float() * copies).bfloat16()
        self._sent: Any = None
        if mode == "elastic":
            self._buffer: Any = weft.ElasticBuffer(
                group, num_bytes=4 << 20, num_cpu_timeout_secs=timeout_s, num_gpu_timeout_secs=timeout_s
            )
        else:
            hint = weft.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, ranks, self._experts)
            self._buffer = weft.Buffer(
                group, 4 << 20, hint, low_latency_mode=mode == "low latency", timeout_s=timeout_s
            )

    def dispatch(self) -> None:
        """Send the rows; they are here, and those of others, when it returns."""
        if self._mode == "low latency":
            rows, _, handle, _, _ = self._buffer.low_latency_dispatch(
                self._x, self._ids, TOKENS, self._experts, use_fp8=False
            )
        elif self._mode == "elastic":
            rows, _, _, handle, _ = self._buffer.dispatch(
                self._x, self._ids, num_experts=self._experts, num_max_tokens_per_rank=TOKENS
            )
        else:
            per_rank, per_node, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(
                self._ids, self._experts
            )
            rows, _, _, _, handle, _ = self._buffer.dispatch(
                self._x,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=self._ids,
                topk_weights=self._weights,
            )
        self._sent = rows, handle

    def combine(self) -> None:
        """Bring the rows back. Raises: AssertionError unless they are right; weft.PeerLost."""
        rows, handle = self._sent
        if self._mode == "low latency":
            combined = self._buffer.low_latency_combine(rows, self._ids, self._weights, handle)[0]
        else:
            combined = self._buffer.combine(rows, handle)[0]
        assert torch.equal(combined, self.expected), (self._mode, combined, self.expected)
