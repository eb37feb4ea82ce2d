# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of a MoeCase, compared with the oracle: what tests and ``weft chaos`` make of an outcome.

    received = dispatch(buffer, case, rank)
    check_received(case, rank, oracle.ht_dispatch(case.routes(), case.num_experts, rank), *received[:3])

Every check raises AssertionError. Experts compute something simple, which any rank can compute for any other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import weft
from weft.testing import oracle
from weft.testing.cases import MoeCase

# ---- high throughput


def expert_output(rows: Tensor, rank: int) -> Tensor:
    """Return what the experts of ``rank`` make of their rows; any rank can compute it for any."""
    return (rows.float() * (1 + rank / 8)).to(rows.dtype)


def dispatch(
    buffer: weft.Buffer, case: MoeCase, rank: int, x: Any = None, **options: Any
) -> tuple[Any, Tensor, Tensor, list[int], Any, Any]:
    """Lay out and dispatch the case's tokens with their weights."""
    topk_idx = case.topk_idx(rank)
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(topk_idx, case.num_experts)
    result: Any = buffer.dispatch(
        case.x(rank) if x is None else x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=case.topk_weights(rank),
        **options,
    )
    assert event.event is None
    return result  # type: ignore[no-any-return]


def check_received(
    case: MoeCase, rank: int, rows: oracle.Rows, recv_x: Tensor, recv_idx: Tensor, recv_weights: Tensor
) -> None:
    """Compare all that a dispatch returned, row by row."""
    num_rows = len(rows.src_rank)
    assert recv_x.shape == (num_rows, case.hidden)
    assert torch.equal(recv_x, rows.take(case.all_x()))
    assert torch.equal(recv_idx.long(), rows.topk_idx)
    assert torch.equal(recv_weights, rows.take_weights(case.all_weights()))


def check_combined(case: MoeCase, rank: int, combined: Tensor, biases: tuple[Tensor, ...] = ()) -> None:
    """Compare a combine of expert_output() with the oracle, bit by bit: sums of nodes are rounded first."""
    routes = case.routes()
    sent_back = [
        expert_output(oracle.ht_dispatch(routes, case.num_experts, r).take(case.all_x()), r)
        for r in range(case.num_ranks)
    ]
    expected = oracle.ht_combine(
        sent_back, routes, case.num_experts, rank, biases, ranks_per_node(case.num_ranks)
    )
    assert torch.equal(combined, expected)


def ranks_per_node(num_ranks: int) -> int | None:
    """Return of how many ranks WEFT_RANKS_PER_NODE makes a node; None where that is all of them."""
    wanted = int(os.environ.get("WEFT_RANKS_PER_NODE", "0"))
    return wanted if 0 < wanted < num_ranks else None


# ---- low latency


@dataclass(frozen=True)
class Format:
    """How low-latency dispatch sends rows."""

    use_fp8: bool = False
    round_scale: bool = False
    use_ue8m0: bool = False

    def options(self) -> dict[str, bool]:
        """Return the arguments of low_latency_dispatch()."""
        return {"use_fp8": self.use_fp8, "round_scale": self.round_scale, "use_ue8m0": self.use_ue8m0}


BF16, FP8, ROUNDED, UE8M0 = Format(), Format(True), Format(True, True), Format(True, True, True)
FORMATS = (BF16, FP8, ROUNDED, UE8M0)


def received_rows(recv: Any, expert: int) -> Tensor:
    """Return float32 [rows, hidden] of one local expert, dequantised."""
    if isinstance(recv, tuple):
        return oracle.dequantize_fp8(recv[0][expert], recv[1][expert])
    rows: Tensor = recv[expert].float()
    return rows


def sent_rows(x: Tensor, form: Format) -> Tensor:
    """Return float32 of what a dispatch in this format delivers of x."""
    if not form.use_fp8:
        return x.float()
    return oracle.dequantize_fp8(*oracle.quantize_fp8(x, form.round_scale))


def check_dispatched(
    case: MoeCase, rank: int, most_tokens: int, form: Format, recv: Any, counts: Tensor, handle: Any
) -> None:
    """Compare counts, ranges, sources and rows of every local expert and source rank with the oracle."""
    expected = oracle.ll_dispatch(case.routes(), case.num_experts, rank)
    recv_x = recv[0] if isinstance(recv, tuple) else recv
    assert recv_x.shape == (len(expected), case.num_ranks * most_tokens, case.hidden)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [sum(len(tokens) for tokens in sources) for sources in expected]
    src_info, layout_range = handle[0], handle[1]
    assert src_info.shape == recv_x.shape[:2]
    assert layout_range.shape == (len(expected), case.num_ranks)
    delivered = [sent_rows(x, form) for x in case.all_x()]
    for expert, sources in enumerate(expected):
        rows = received_rows(recv, expert)
        for source, tokens in enumerate(sources):
            begin, count = divmod(int(layout_range[expert, source]), 1 << 32)
            assert count == len(tokens)
            found = src_info[expert, begin : begin + count].long()
            assert found.sort().values.tolist() == tokens.tolist()
            assert torch.equal(rows[begin : begin + count], delivered[source][found])


def outputs_of(recv: Any) -> Tensor:
    """Return bf16 [local experts, rows, hidden] of expert results, each a function of its row and expert."""
    recv_x = recv[0] if isinstance(recv, tuple) else recv
    results = torch.full(recv_x.shape, float("nan"), dtype=torch.bfloat16)
    for expert in range(len(recv_x)):
        results[expert] = (received_rows(recv, expert) * 0.25).bfloat16()
    return results


def expected_combined(case: MoeCase, rank: int, form: Format) -> Tensor:
    """Return what comes back to this rank: every expert multiplies its row by a quarter."""
    row = (sent_rows(case.x(rank), form) * 0.25).bfloat16()
    slot_rows = row.unsqueeze(1).expand(-1, case.top_k, -1)
    return oracle.ll_combine(slot_rows, case.topk_idx(rank), case.topk_weights(rank))
