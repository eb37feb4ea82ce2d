# SPDX-License-Identifier: Apache-2.0
"""High-throughput dispatch and combine on GPUs against the oracle: shapes, caching, graphs, streams, growth."""

from __future__ import annotations

import pytest
import torch
from gpu_ranks import rank_counts, run_on_gpus

import weft
from weft.testing import oracle
from weft.testing.ranks import Rank

SHAPES = [  # tokens, hidden, top_k, experts per rank
    (128, 7168, 8, 32),
    (4096, 7168, 8, 32),
    (1, 8, 1, 1),
    (0, 512, 2, 3),
    (333, 2056, 32, 16),
    (77, 20000, 3, 5),
]


def _inputs(rank: int, tokens: int, hidden: int, top_k: int, experts: int) -> tuple[torch.Tensor, ...]:
    """Return (x bf16, topk_idx with some -1, topk_weights) of one rank; every rank can make everyone's."""
    generator = torch.Generator().manual_seed(1000 + rank)
    tokens = max(0, tokens - rank)
    x = torch.randn((tokens, hidden), generator=generator).bfloat16()
    idx = torch.rand((tokens, experts), generator=generator).topk(min(top_k, experts)).indices
    idx[torch.rand(idx.shape, generator=generator) < 0.1] = -1
    return x, idx, torch.rand(idx.shape, generator=generator)


def _dispatch_args(buffer: weft.Buffer, idx: torch.Tensor, experts: int) -> dict[str, torch.Tensor]:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, experts)
    return {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}


def _check_shape(rank: Rank, tokens: int, hidden: int, top_k: int, per_rank: int) -> None:
    experts = per_rank * rank.size
    every = [_inputs(r, tokens, hidden, top_k, experts) for r in range(rank.size)]
    x, idx, weights = (tensor.cuda() for tensor in every[rank.rank])
    buffer = weft.Buffer(rank.group, num_nvl_bytes=1 << 20)  # too small for some shapes: it grows
    routes = [inputs[1] for inputs in every]
    want = oracle.ht_dispatch(routes, experts, rank.rank)
    want_x = want.take([inputs[0] for inputs in every])
    want_weights = want.take_weights([inputs[2] for inputs in every])
    sent_back = [
        oracle.ht_dispatch(routes, experts, r).take([inputs[0] for inputs in every]) for r in range(rank.size)
    ]
    want_sums = oracle.ht_combine(sent_back, routes, experts, rank.rank)
    for repeat in range(3):
        layout = _dispatch_args(buffer, idx, experts)
        recv_x, recv_idx, recv_weights, counts, handle, _ = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, **layout
        )
        assert torch.equal(recv_x.cpu(), want_x), f"rows, repeat {repeat}"
        assert torch.equal(recv_idx.cpu(), want.topk_idx)
        assert torch.equal(recv_weights.cpu(), want_weights)
        assert counts == want.per_expert
        cached = buffer.dispatch(x, handle=handle)[0]
        assert torch.equal(cached.cpu(), want_x), "cached"
        # Other rows every time, at first into memory that was never written: a signal that is early shows.
        factor = repeat - 3
        combined = buffer.combine(recv_x * factor, handle)[0]
        want_scaled = oracle.ht_combine([rows * factor for rows in sent_back], routes, experts, rank.rank)
        assert torch.equal(combined.cpu(), want_scaled), f"combined alone, repeat {repeat}"
        combined, combined_weights, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights)
        assert torch.equal(combined.cpu(), want_sums), f"combined with weights, repeat {repeat}"
        chosen = idx >= 0
        assert torch.equal(combined_weights[chosen], weights[chosen])
        assert int((combined_weights[~chosen] != 0).sum()) == 0


@pytest.mark.one_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_go_out_and_come_back(shape: tuple[int, int, int, int]) -> None:
    for num_ranks in rank_counts():
        run_on_gpus(num_ranks, _check_shape, *shape)


def _check_graph(rank: Rank) -> None:
    tokens, hidden, top_k, experts = 256, 1024, 4, 8 * rank.size
    worst = tokens * rank.size
    buffer = weft.Buffer(rank.group, num_nvl_bytes=64 << 20)
    x, idx, weights = (tensor.cuda() for tensor in _inputs(rank.rank, tokens, hidden, top_k, experts))

    def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layout = _dispatch_args(buffer, idx, experts)
        recv_x, recv_idx, _, counts, handle, _ = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_worst_tokens=worst, **layout
        )
        assert counts == []
        return recv_x, recv_idx, buffer.combine(recv_x, handle)[0]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recv_x, recv_idx, combined = step()
    for seed in range(4):
        every = [
            _inputs(100 * seed + r, tokens + 100 * seed, hidden, top_k, experts) for r in range(rank.size)
        ]
        every = [tuple(t[: tokens - r] for t in inputs) for r, inputs in enumerate(every)]
        for mine, new in zip((x, idx, weights), every[rank.rank], strict=True):
            mine.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        routes = [inputs[1] for inputs in every]
        want = oracle.ht_dispatch(routes, experts, rank.rank)
        rows = want.take([inputs[0] for inputs in every])
        assert torch.equal(recv_x[: rows.size(0)].cpu(), rows)
        assert torch.equal(recv_idx[: rows.size(0)].cpu(), want.topk_idx)
        assert int((recv_idx[rows.size(0) :] != -1).sum()) == 0
        copies = oracle.layout(every[rank.rank][1], experts, rank.size)[2].sum(1, keepdim=True)
        assert torch.equal(combined.cpu(), (every[rank.rank][0].float() * copies).bfloat16())


@pytest.mark.one_gpu
def test_a_captured_graph_replays_with_new_routes() -> None:
    for num_ranks in rank_counts():
        run_on_gpus(num_ranks, _check_graph)


def _check_capture_of_counts(rank: Rank) -> None:
    buffer = weft.Buffer(rank.group, num_nvl_bytes=16 << 20)
    x, idx, weights = (tensor.cuda() for tensor in _inputs(rank.rank, 16, 256, 2, 2 * rank.size))
    layout = _dispatch_args(buffer, idx, 2 * rank.size)
    torch.cuda.synchronize()
    with (
        pytest.raises(weft.Error, match=r"while a CUDA graph is captured.*num_worst_tokens"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **layout)
    received, *_ = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **layout)
    assert received.size(1) == x.size(1)


def test_a_dispatch_that_waits_for_counts_is_refused_in_a_graph() -> None:
    run_on_gpus(2, _check_capture_of_counts)


def _check_lost_peer(rank: Rank) -> str:
    buffer = weft.Buffer(rank.group, num_nvl_bytes=1 << 20, timeout_s=2.0)
    x, idx, weights = (tensor.cuda() for tensor in _inputs(rank.rank, 16, 256, 2, 2 * rank.size))
    layout = _dispatch_args(buffer, idx, 2 * rank.size)
    if rank.rank == rank.size - 1:
        torch.cuda.synchronize()
        torch.distributed.barrier(rank.group)
        return "stayed away"
    try:
        buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **layout)
        return "no error"
    except weft.PeerLost as error:
        return str(error)
    finally:
        torch.distributed.barrier(rank.group)


def test_a_rank_that_stays_away_is_named() -> None:
    messages = run_on_gpus(2, _check_lost_peer)
    assert "for rank 1" in messages[0] and "dispatch.counts" in messages[0], messages
