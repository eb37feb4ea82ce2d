# SPDX-License-Identifier: Apache-2.0
"""DeepEP's HybridEPBuffer in the drop-in: rows in the order of experts, their way back, and gradients as clients do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from port_nodes import nodes
from test_elastic import node_of_rank
from torch import Tensor

from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, run_ranks

CASE = MoeCase(tokens=(13, 0, 7), hidden=64, top_k=3, num_experts=12, seed=5)
PAD = 8


def _buffer(rank: Rank, **options: Any) -> Any:
    import deep_ep

    return deep_ep.HybridEPBuffer(
        group=rank.group,
        hidden_dim=CASE.hidden,
        max_num_of_tokens_per_rank=4,  # grows
        num_local_experts=CASE.num_experts // rank.size,
        **options,
    )


def _maps(of: int) -> tuple[Tensor, Tensor]:
    from deep_ep.hybrid_ep_buffer import indices_to_map

    routing_map, probs = indices_to_map(
        CASE.topk_idx(of), CASE.topk_weights(of), CASE.tokens[of], CASE.num_experts
    )
    assert probs is not None
    return routing_map, probs


def _expected(rank: Rank, pad: int) -> tuple[Tensor, Tensor, list[int]]:
    """Rows, probabilities and padded counts, from every rank's inputs."""
    local = CASE.num_experts // rank.size
    rows, probs, counts = [], [], []
    for expert in range(rank.rank * local, (rank.rank + 1) * local):
        chosen = [_maps(source)[0][:, expert] for source in range(rank.size)]
        own = torch.cat([CASE.x(source)[chosen[source]] for source in range(rank.size)])
        own_probs = torch.cat([_maps(source)[1][chosen[source], expert] for source in range(rank.size)])
        missing = -own.size(0) % pad
        rows.append(torch.cat((own, own.new_zeros(missing, CASE.hidden))))
        probs.append(torch.cat((own_probs, own_probs.new_zeros(missing))))
        counts.append(own.size(0) + missing)
    return torch.cat(rows), torch.cat(probs), counts


def _sum_of_copies(rank: Rank, routing_map: Tensor) -> Tensor:
    return CASE.x(rank.rank).float() * routing_map.sum(1, keepdim=True)


def _there_and_back(rank: Rank) -> None:
    x, (routing_map, probs) = CASE.x(rank.rank), _maps(rank.rank)
    most = max(CASE.tokens)
    with _buffer(rank) as buffer:
        nodes = len(set(node_of_rank(rank.size)))
        assert (buffer.rank, buffer.group_size, buffer.num_of_nodes) == (rank.rank, rank.size, nodes)
        assert (buffer.node_rank, buffer.local_rank) == divmod(rank.rank, rank.size // nodes)
        for pad in (None, PAD):
            rows_ref, probs_ref, counts_ref = _expected(rank, pad or 1)
            rows, row_probs, scales, counts, handle = buffer.dispatch_with_permute(
                hidden=x,
                routing_map=routing_map,
                probs=probs,
                scaling_factor=None,
                num_of_experts_per_rank=CASE.num_experts // rank.size,
                pad_multiple=pad,
                num_of_tokens_per_rank=most,
            )
            assert torch.equal(rows, rows_ref) and torch.equal(row_probs, probs_ref) and scales is None
            assert counts.tolist() == counts_ref and counts.dtype == torch.int64
            _, _, _, num_rows, local_map, row_ids, num_tokens, config, overflowed = handle
            assert (num_tokens, config.hidden_dim, int(overflowed)) == (x.size(0), CASE.hidden, 0)
            assert local_map.shape == (int(num_rows), config.num_of_experts_per_rank)
            assert row_ids.size(0) == int(num_rows)

            combined, back = buffer.combine_with_unpermute(
                hidden=rows, probs=row_probs, handle=handle, pad_multiple=pad
            )
            torch.testing.assert_close(
                combined.float(), _sum_of_copies(rank, routing_map), rtol=2e-2, atol=1e-2
            )
            assert torch.equal(back, probs)
            weighted, _ = buffer.combine_with_unpermute(
                hidden=rows, probs=row_probs, handle=handle, apply_probs_to_hidden=True
            )
            reference = x.float() * probs.sum(1, keepdim=True)
            torch.testing.assert_close(weighted.float(), reference, rtol=2e-2, atol=2e-2)

            room = rows.size(0) + 5
            again = buffer.dispatch_with_permute(
                hidden=x, handle=handle, num_permuted_tokens=room, pad_multiple=pad, non_blocking=True
            )
            assert torch.equal(again[0][:-5], rows) and not again[0][-5:].any() and again[1] is None
            combined_again, none = buffer.combine_with_unpermute(hidden=again[0], handle=handle)
            assert torch.equal(combined_again, combined) and none is None
        with pytest.raises(RuntimeError, match="num_permuted_tokens: got 0, allowed: at least"):
            buffer.dispatch_with_permute(hidden=x, handle=handle, num_permuted_tokens=0)
    assert buffer.runtime is None


def _by_indices(rank: Rank) -> None:
    """Top-k routes, FP8 rows with scales; the plain calls, without a permutation."""
    buffer = _buffer(rank, use_fp8=True, num_sms_dispatch_api=24, num_sms_combine_api=24)
    idx, weights, (_, probs) = CASE.topk_idx(rank.rank), CASE.topk_weights(rank.rank), _maps(rank.rank)
    scales = CASE.scales(rank.rank, 2)
    x = CASE.x(rank.rank).view(torch.uint8)[:, :64].contiguous()
    buffer.update_template_config(num_of_tokens_per_rank=max(CASE.tokens))
    assert buffer.config.max_num_of_tokens_per_rank == 16
    rows, row_probs, row_scales, counts, handle = buffer.dispatch_with_permute(
        hidden=x, topk_idx=idx, topk_weights=weights, num_of_experts=CASE.num_experts, scaling_factor=scales
    )
    assert torch.equal(row_probs, _expected(rank, 1)[1])
    assert rows.dtype == torch.uint8 and row_scales.shape == (int(counts.sum()), 2)
    _, back = buffer.combine_with_unpermute(hidden=rows.to(torch.bfloat16), probs=row_probs, handle=handle)
    assert torch.equal(back, probs)

    y = CASE.x(rank.rank)
    got, got_probs, _, handle = buffer.dispatch(
        hidden=y, topk_idx=idx, topk_weights=weights, num_of_experts=CASE.num_experts
    )
    local_map = handle[4]
    assert torch.equal(got_probs[:, rank.rank * 4 : rank.rank * 4 + 4] > 0, local_map)
    combined, back = buffer.combine(got * local_map.sum(1, keepdim=True).to(got.dtype), got_probs, handle)
    torch.testing.assert_close(
        combined.float(), _sum_of_copies(rank, _maps(rank.rank)[0]), rtol=2e-2, atol=1e-2
    )
    assert torch.equal(back, probs)
    assert torch.equal(buffer.dispatch(hidden=y, handle=handle)[0], got)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Any, x: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        rows, row_probs, _, counts, handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=routing_map, probs=probs, num_of_tokens_per_rank=max(CASE.tokens)
        )
        ctx.buffer, ctx.handle = buffer, handle
        return rows, row_probs, counts, handle

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_probs: Tensor, *_: Any) -> Any:
        grad, grad_all = ctx.buffer.combine_with_unpermute(
            hidden=grad_rows, probs=grad_probs, handle=ctx.handle
        )
        return None, grad, None, grad_all


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Any, rows: Tensor, handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine_with_unpermute(hidden=rows, handle=handle)[0]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, ctx.buffer.dispatch_with_permute(hidden=grad, handle=ctx.handle)[0], None


def _layer(rank: Rank) -> None:
    """A mixture of experts as clients write it, its outputs and gradients beside those of one process."""
    local = CASE.num_experts // rank.size
    torch.manual_seed(3)
    experts = torch.randn(CASE.num_experts, CASE.hidden, CASE.hidden) / 8
    routing_map, probs = _maps(rank.rank)
    x = CASE.x(rank.rank).requires_grad_()
    probs.requires_grad_()
    own = experts[rank.rank * local : (rank.rank + 1) * local].bfloat16().requires_grad_()

    buffer = _buffer(rank)
    rows, row_probs, counts, handle = _Dispatch.apply(buffer, x, routing_map, probs)
    parts = [part @ own[i] for i, part in enumerate(rows.split(counts.tolist()))]
    y = (torch.cat(parts).float() * row_probs.unsqueeze(1)).bfloat16()
    out = _Combine.apply(buffer, y, handle)
    out.float().square().sum().backward()

    x_ref, probs_ref = CASE.x(rank.rank).float().requires_grad_(), _maps(rank.rank)[1].requires_grad_()
    every = torch.einsum("th,ehj->tej", x_ref, experts)
    out_ref = (every * (probs_ref * routing_map).unsqueeze(2)).sum(1)
    out_ref.square().sum().backward()
    torch.testing.assert_close(out.float(), out_ref, rtol=5e-2, atol=5e-2)
    for mine, reference in ((x.grad, x_ref.grad), (probs.grad, probs_ref.grad)):
        assert mine is not None and reference is not None
        scale = float(reference.abs().max()) if reference.numel() else 0
        torch.testing.assert_close(mine.float(), reference, rtol=5e-2, atol=2e-2 * scale + 1e-6)


@pytest.mark.parametrize("program", [_there_and_back, _by_indices, _layer])
def test_hybrid_ep_buffer(program: Any) -> None:
    run_ranks(CASE.num_ranks, program)


@pytest.mark.parametrize("program", [_there_and_back, _by_indices, _layer])
def test_hybrid_ep_buffer_over_nodes_of_one(program: Any) -> None:
    with nodes(1, "fabric:tcp"):
        run_ranks(CASE.num_ranks, program, with_gpus=False)


def _over_two_nodes(rank: Rank) -> None:
    """Four ranks as 2 x 2: the same as on one node, but for one rounding of each node's sum."""
    case = MoeCase(tokens=(13, 0, 7, 22), hidden=64, top_k=3, num_experts=8, seed=5)
    import deep_ep

    idx, weights = case.topk_idx(rank.rank), case.topk_weights(rank.rank)
    with deep_ep.HybridEPBuffer(
        group=rank.group, hidden_dim=64, max_num_of_tokens_per_rank=22, num_local_experts=2
    ) as buffer:
        assert (buffer.num_of_nodes, buffer.node_rank, buffer.local_rank) == (2, *divmod(rank.rank, 2))
        rows, probs, _, _, handle = buffer.dispatch_with_permute(
            hidden=case.x(rank.rank), topk_idx=idx, topk_weights=weights, num_of_experts=case.num_experts
        )
        combined, back = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)
        copies = case.x(rank.rank).float() * (idx >= 0).sum(1, keepdim=True)
        torch.testing.assert_close(combined.float(), copies, rtol=2e-2, atol=1e-2)
        dense = torch.zeros(idx.size(0), case.num_experts + 1)
        dense.scatter_add_(1, idx.masked_fill(idx < 0, case.num_experts), weights)
        assert torch.equal(back, dense[:, :-1])


def test_hybrid_ep_buffer_over_two_nodes() -> None:
    with nodes(2, "fabric:shm"):
        run_ranks(4, _over_two_nodes, with_gpus=False)
