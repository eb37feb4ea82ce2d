# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer on GPUs: both layouts against the oracle, and combine's rounding."""

from __future__ import annotations

import pytest
import torch
from gpu_ranks import num_ranks_here, replay, run_on_gpus

import weft
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.elastic_refs import combine as combine_reference
from weft.testing.ranks import Rank

ALIGNMENT = 16


def check_layouts(rank: Rank, case: MoeCase, sync: bool) -> None:
    me = rank.rank
    buffer = weft.ElasticBuffer(
        rank.group, num_bytes=256 << 20, num_gpu_timeout_secs=30, num_cpu_timeout_secs=30
    )
    rows = oracle.ht_dispatch(case.routes(), case.num_experts, me)
    x, ids, weights = case.x(me).cuda(), case.topk_idx(me).cuda(), case.topk_weights(me).cuda()
    for do_expand in (False, True):
        recv, idx, recv_weights, handle, _ = buffer.dispatch(
            x,
            ids,
            weights,
            num_experts=case.num_experts,
            num_max_tokens_per_rank=max(case.tokens),
            expert_alignment=ALIGNMENT,
            do_expand=do_expand,
            do_zero_padding=do_expand,
            do_cpu_sync=sync,
        )
        n = len(rows.src_rank)
        if not do_expand:
            assert torch.equal(recv[:n].cpu(), rows.take(case.all_x()))
            assert torch.equal(idx[:n].cpu(), rows.topk_idx)
        else:
            begin = 0
            for expert, count in enumerate(rows.per_expert):
                row = (rows.topk_idx == expert).nonzero()[:, 0]
                assert torch.equal(recv[begin : begin + count].cpu(), rows.take(case.all_x())[row])
                begin += -(-count // ALIGNMENT) * ALIGNMENT
        combined, back, _ = buffer.combine(recv, handle, topk_weights=recv_weights)
        if do_expand:
            y = case.x(me).unsqueeze(1).repeat(1, case.top_k, 1)
            expected = combine_reference(y, case.topk_idx(me), 1, rank.size, case.num_experts)
            assert torch.equal(combined.cpu(), expected)
        assert torch.equal(back.cpu(), case.topk_weights(me).masked_fill(case.topk_idx(me) < 0, 0))
        again = buffer.dispatch(x, handle=handle, do_expand=do_expand, do_zero_padding=do_expand)[0]
        assert torch.equal(again[: n if not do_expand else None], recv[: n if not do_expand else None])
    buffer.barrier(with_cpu_sync=True)
    buffer.agrs_set_config(1 << 20, 1)
    with buffer.agrs_new_session():
        gathered, wait = buffer.all_gather(torch.full((33,), me, device="cuda"))
        wait()
        assert gathered[:, 0].tolist() == list(range(rank.size))


@pytest.mark.one_gpu
@pytest.mark.parametrize("sync", [True, False])
def test_layouts_and_rounding(sync: bool) -> None:
    ranks = num_ranks_here()
    case = MoeCase(tuple(500 + 7 * r for r in range(ranks)), 7168, 8, 32 * ranks)
    run_on_gpus(ranks, check_layouts, case, sync)


def check_late_fields(rank: Rank) -> None:
    """Fields of a handle that are asked for late, or on another stream; in a graph each replay makes them anew."""
    me, experts, top_k = rank.rank, 8 * rank.size, 4
    cases = [MoeCase((300,) * rank.size, 1024, top_k, experts, seed=seed) for seed in range(3)]
    buffer = weft.ElasticBuffer(rank.group, num_bytes=64 << 20)
    x, ids, weights = (t.cuda() for t in (cases[0].x(me), cases[0].topk_idx(me), cases[0].topk_weights(me)))
    sizes = {"num_experts": experts, "num_max_tokens_per_rank": 300, "expert_alignment": ALIGNMENT}

    def check(handle: weft.EPHandle, case: MoeCase) -> None:
        rows = oracle.ht_dispatch(case.routes(), experts, me)
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == rows.per_expert
        aligned = [-(-count // ALIGNMENT) * ALIGNMENT for count in rows.per_expert]
        ends = torch.tensor(aligned).cumsum(0).tolist()
        assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
        origin = handle.recv_src_metadata[: len(rows.src_rank), 0].cpu().long()
        assert torch.equal(origin, rows.src_rank * 300 + rows.src_token)

    for is_async in (False, True):
        torch.cuda._sleep(50_000_000)
        handle, event = buffer.dispatch(
            x, ids, weights, async_with_compute_stream=is_async, do_cpu_sync=False, **sizes
        )[3:]
        with torch.cuda.stream(torch.cuda.Stream()):
            check(handle, cases[0])
        if is_async:
            event.current_stream_wait()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        handle = buffer.dispatch(x, ids, weights, do_cpu_sync=False, **sizes)[3]
    for case in cases:
        replay(graph, case, me, x, ids, weights)
        check(handle, case)


@pytest.mark.one_gpu
def test_fields_that_are_asked_for_late() -> None:
    run_on_gpus(num_ranks_here(), check_late_fields)


def check_sessions(rank: Rank) -> None:
    """Sessions of a buffer that has room for one, while the results of all before are still held."""
    mine = torch.arange(1 << 22, device="cuda", dtype=torch.int32)
    num_bytes = weft.ElasticBuffer.get_agrs_num_max_session_bytes(rank.group, mine.shape, mine.dtype)
    room = weft.ElasticBuffer.get_agrs_buffer_size_hint(rank.group, num_bytes)
    buffer = weft.ElasticBuffer(rank.group, num_bytes=room)
    buffer.agrs_set_config(num_bytes, 2)
    held = []
    for session in range(6):
        with buffer.agrs_new_session():
            for half in mine.chunk(2) if session % 2 else (mine,):
                gathered, wait = buffer.all_gather(half + rank.rank + session)
                wait()
                held.append((session, half, gathered))
    for session, half, gathered in held:
        for source in range(rank.size):
            assert torch.equal(gathered[source], half + source + session), (session, source)


def test_a_session_fits_whatever_is_held() -> None:
    run_on_gpus(num_ranks_here(), check_sessions)


def check_ring(rank: Rank) -> None:
    """Messages of many sizes to both neighbours, more under way than one; offsets off any alignment."""
    buffer = weft.ElasticBuffer(
        rank.group, num_bytes=2 << 20, num_gpu_timeout_secs=30, num_cpu_timeout_secs=30
    )
    buffer.pp_set_config(64 << 20, 3)
    ahead, behind = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    for num_bytes in (1, 17, 4096, (1 << 20) + 3, 64 << 20):
        for offset in (0, 3):
            size = num_bytes - offset if num_bytes > offset else num_bytes
            for step in range(3):
                fill = torch.arange(size + offset, device="cuda").add(rank.rank + step).byte()
                buffer.pp_send(fill[offset:], ahead)
                buffer.pp_send(fill[offset:], behind)
                for peer in (behind, ahead):
                    got = torch.zeros(size + offset, dtype=torch.uint8, device="cuda")
                    buffer.pp_recv(got[offset:], peer)
                    expected = torch.arange(size + offset, device="cuda").add(peer + step).byte()
                    assert torch.equal(got[offset:], expected[offset:])


def test_messages_between_neighbours() -> None:
    run_on_gpus(num_ranks_here(), check_ring)


def check_engram(rank: Rank) -> None:
    buffer = weft.ElasticBuffer(
        rank.group, num_bytes=2 << 20, num_gpu_timeout_secs=30, num_cpu_timeout_secs=30
    )
    for num_entries, hidden in ((1000, 256), (33, 7)):
        whole = torch.randn(
            rank.size * num_entries, hidden, generator=torch.Generator().manual_seed(hidden)
        ).bfloat16()
        mine = whole[rank.rank * num_entries : (rank.rank + 1) * num_entries].cuda()
        buffer.engram_write(mine)
        indices = torch.randint(0, len(whole), (512, 8), dtype=torch.int32)
        data, _ = buffer.engram_fetch(indices.cuda())()
        assert torch.equal(data.cpu(), whole[indices.view(-1)].view(512, -1))


def test_reads_of_a_spread_table() -> None:
    run_on_gpus(num_ranks_here(), check_engram)
