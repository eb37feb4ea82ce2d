# SPDX-License-Identifier: Apache-2.0
"""What is measured beside each other: a ``Buffer`` (Weft's, or the real DeepEP's), torch.distributed, and
memcpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor

_ROWS_AT_ONCE = 1024  # that are held in float32 on the CPU
Payload = Tensor | tuple[Tensor, Tensor]  # rows, or fp8 rows and their scales


@dataclass
class HighThroughput:
    """The high-throughput calls of a buffer with DeepEP's signatures.

    ``worst_rows`` above 0 asks for that many rows without a wait on the host, so that the call can be
    captured.
    """

    buffer: Any
    experts: int
    worst_rows: int = 0

    def layout(self, topk_idx: Tensor) -> Any:
        """Return what ``dispatch`` needs of the routes."""
        return self.buffer.get_dispatch_layout(topk_idx, self.experts)[:4]

    def dispatch(self, x: Payload, topk_idx: Tensor, topk_weights: Tensor, layout: Any) -> Any:
        """Return the buffer's six results."""
        per_rank, per_node, per_expert, in_rank = layout
        return self.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_worst_tokens=self.worst_rows,
        )

    def dispatch_cached(self, x: Payload, handle: Any) -> Any:
        """Return the six results of a dispatch along the routes of an earlier one."""
        return self.buffer.dispatch(x, handle=handle)

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        """Return bf16[tokens, hidden]."""
        combined: Tensor = self.buffer.combine(y, handle)[0]
        return combined


@dataclass
class Elastic(HighThroughput):
    """The same calls of an ``ElasticBuffer`` with the signatures of DeepEP V2. Rows may come in any order."""

    def layout(self, topk_idx: Tensor) -> None:
        """Return nothing: a dispatch counts by itself."""

    def dispatch(self, x: Payload, topk_idx: Tensor, topk_weights: Tensor, layout: Any) -> Any:
        """Return six results as a Buffer does, without counts."""
        rows, ids, weights, handle, event = self.buffer.dispatch(
            x, topk_idx, topk_weights, num_experts=self.experts, do_cpu_sync=self.worst_rows == 0
        )
        return rows, ids, weights, [], handle, event

    def dispatch_cached(self, x: Payload, handle: Any) -> Any:
        """Return the six results of a dispatch along the routes of an earlier one."""
        rows, ids, weights, again, event = self.buffer.dispatch(x, handle=handle, num_experts=self.experts)
        return rows, ids, weights, [], again, event


@dataclass
class LowLatency:
    """The low-latency calls of a buffer with DeepEP's signatures."""

    buffer: Any
    experts: int
    max_tokens: int
    use_fp8: bool

    def dispatch(self, x: Tensor, topk_idx: Tensor) -> Any:
        """Return (rows, counts, handle)."""
        return self.buffer.low_latency_dispatch(
            x, topk_idx, self.max_tokens, self.experts, use_fp8=self.use_fp8
        )[:3]

    def combine(self, y: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any) -> Tensor:
        """Return bf16[tokens, hidden]."""
        combined: Tensor = self.buffer.low_latency_combine(y, topk_idx, topk_weights, handle)[0]
        return combined

    def once_per_node(self, top_k: int, hidden: int) -> bool:
        """Return whether Weft sends a token of a dispatch once to each other node, not once to each rank."""
        row, scales = (hidden, hidden // 128 * 4) if self.use_fp8 else (hidden * 2, 0)
        mode = self.buffer.runtime.low_latency
        return bool(mode.sends_once_per_domain(self.max_tokens, top_k, self.experts, row, scales))

    def replies_once_per_node(self, top_k: int, hidden: int) -> bool:
        """Return whether each other node sends one sum for a token of a combine, not one for each of its ranks."""
        mode = self.buffer.runtime.low_latency
        return bool(mode.replies_once_per_domain(self.max_tokens, top_k, self.experts, hidden * 2))

    def new_results(self, num_ranks: int, hidden: int, device: torch.device) -> Tensor:
        """Return room for the experts' outputs."""
        shape = (-(-self.experts // num_ranks), self.max_tokens * num_ranks, hidden)
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)


@dataclass
class HighThroughputPairs:
    """The high-throughput calls as split ones are made: layout and dispatch as one, then combine."""

    calls: HighThroughput
    payload: Payload
    topk_weights: Tensor

    @property
    def buffer(self) -> Any:
        """Return what ends with ``destroy()``."""
        return self.calls.buffer

    def dispatch(self, _: Tensor, topk_idx: Tensor) -> Any:
        """Return (rows, counts, handle)."""
        layout = self.calls.layout(topk_idx)
        results = self.calls.dispatch(self.payload, topk_idx, self.topk_weights, layout)
        return results[0], results[3], (results[4], len(results[1]))

    def combine(self, y: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any) -> Tensor:
        """Return bf16[tokens, hidden]; rows are added as they are."""
        of_dispatch, count = handle
        return self.calls.combine(y[:count], of_dispatch)

    def new_results(self, num_ranks: int, hidden: int, device: torch.device) -> Tensor:
        """Return room for the experts' outputs."""
        return torch.zeros(len(self.topk_weights) * num_ranks, hidden, dtype=torch.bfloat16, device=device)


class P2P:
    """The split all-to-all, each pair of phases as one call, of rows that are quantised already."""

    def __init__(self, all_to_all: Any, x: Payload, topk_weights: Tensor) -> None:
        self.buffer = all_to_all
        self._x = x[0] if isinstance(x, tuple) else x
        self._scale: Tensor | None = x[1] if isinstance(x, tuple) else None
        self._weights = topk_weights

    def send(self, topk_idx: Tensor) -> Any:
        """Return the handle of tokens on their way."""
        return self.buffer.dispatch_send(self._x, topk_idx, self._weights, self._scale)

    def dispatch(self, x: Tensor, topk_idx: Tensor) -> Any:
        """Return (rows, counts, handle)."""
        handle = self.send(topk_idx)
        rows = self.buffer.dispatch_recv(handle)
        return rows, rows.num_tokens, handle

    def combine(self, y: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any) -> Tensor:
        """Return bf16[tokens, hidden]."""
        self.buffer.combine_send(y, handle)
        combined: Tensor = self.buffer.combine_recv(handle)
        return combined

    def new_results(self, num_ranks: int, hidden: int, device: torch.device) -> Tensor:
        """Return room for the experts' outputs."""
        results = torch.empty(self.buffer.max_recv_tokens, hidden, dtype=torch.bfloat16, device=device)
        # Rows are packed: random routes bring no more than ten standard deviations above the mean, and of the rest
        # nothing is read.
        mean = self._weights.numel()
        results[: mean + math.ceil(10 * math.sqrt(mean))].zero_()
        return results


class AllToAll:
    """Dispatch and combine with torch.distributed alone: what one would write without a library.

    Each row is sent once per destination rank, as Weft does; counts first, then rows, experts and weights.
    Combine sends the rows back and sums them in float32.
    """

    def __init__(self, group: Any, rank: int, num_ranks: int, experts: int) -> None:
        self._group = group
        self._first_expert = rank * (-(-experts // num_ranks))
        self._num_ranks = num_ranks
        self._experts_per_rank = -(-experts // num_ranks)

    def dispatch(self, x: Payload, topk_idx: Tensor, topk_weights: Tensor) -> Any:
        """Return (received rows, local experts, weights, handle)."""
        rank_of = torch.where(topk_idx >= 0, topk_idx // self._experts_per_rank, -1)
        token_of = [(rank_of == peer).any(1).nonzero().flatten() for peer in range(self._num_ranks)]
        send = torch.tensor([len(tokens) for tokens in token_of], device=topk_idx.device)
        receive = torch.empty_like(send)
        torch.distributed.all_to_all_single(receive, send, group=self._group)
        counts = (send.tolist(), receive.tolist())
        tokens = torch.cat(token_of)
        parts = x if isinstance(x, tuple) else (x,)
        rows = tuple(self._exchange(part[tokens], *counts) for part in parts)
        idx = self._exchange(topk_idx[tokens], *counts) - self._first_expert
        weights = self._exchange(topk_weights[tokens], *counts)
        elsewhere = (idx < 0) | (idx >= self._experts_per_rank)
        idx = idx.masked_fill(elsewhere, -1)
        weights = weights.masked_fill(elsewhere, 0.0)
        return rows[0] if len(rows) == 1 else rows, idx, weights, (tokens, counts, topk_idx.shape[0])

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        """Return bf16[tokens, hidden]."""
        tokens, (sent, received), num_tokens = handle
        back = self._exchange(y, received, sent)
        total = torch.zeros(num_tokens, y.shape[1], dtype=torch.float32, device=y.device)
        at_once = max(len(back), 1) if y.is_cuda else _ROWS_AT_ONCE
        for of, rows in zip(tokens.split(at_once), back.split(at_once), strict=True):
            total.index_add_(0, of, rows.float())
        return total.to(y.dtype)

    def _exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        # Bytes, because not every backend carries every type.
        raw = rows.contiguous().view(torch.uint8)
        out = raw.new_empty((sum(receive), *raw.shape[1:]))
        torch.distributed.all_to_all_single(out, raw, receive, send, group=self._group)
        return out.view(rows.dtype)


class Memcpy:
    """A plain copy of as many bytes as a rank receives: one thread per rank, all ranks at once."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._src = torch.ones(max(num_bytes, 1), dtype=torch.uint8, device=device)
        self._dst = torch.zeros_like(self._src)

    def copy(self) -> None:
        """Copy once."""
        self._dst.copy_(self._src)


def real_deep_ep() -> Any | None:
    """Return the installed deep_ep module if it is DeepEP's own, not Weft's drop-in; else None."""
    try:
        import deep_ep
    except ImportError:
        return None
    is_drop_in = getattr(deep_ep.Buffer, "__module__", "").startswith("weft")
    return None if is_drop_in else deep_ep
