# SPDX-License-Identifier: Apache-2.0
"""A program for DeepEP 2, unchanged: prefill expanded, decode without counts, against the drop-in's references."""

from __future__ import annotations

import pytest
import torch

from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, run_ranks


def serve(rank: Rank, case: MoeCase) -> None:
    import deep_ep
    from deep_ep.utils import refs

    x, topk_idx, topk_weights = (
        case.x(rank.rank),
        case.topk_idx(rank.rank).to(deep_ep.topk_idx_t),
        case.topk_weights(rank.rank),
    )
    most = max(case.tokens)
    size = deep_ep.ElasticBuffer.get_buffer_size_hint(rank.group, most, case.hidden, case.top_k)
    buffer = deep_ep.ElasticBuffer(
        rank.group,
        num_max_tokens_per_rank=most,
        hidden=case.hidden,
        num_topk=case.top_k,
        deterministic=True,
        explicitly_destroy=True,
    )
    assert buffer.num_bytes == size
    assert buffer.get_logical_domain_size() == deep_ep.get_logical_domain_size(rank.group)
    num_sms = buffer.get_theoretical_num_sms(case.num_experts, case.top_k)
    assert num_sms >= 4
    assert num_sms % 2 == 0

    ref_x, ref_idx, ref_weights, ref_ids, ref_counts = refs.dispatch(
        x, topk_idx, topk_weights, most, case.num_experts
    )
    recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_experts=case.num_experts,
        num_max_tokens_per_rank=most,
        num_sms=num_sms,
        previous_event=buffer.capture(),
        async_with_compute_stream=True,
        allocate_on_comm_stream=True,
    )
    event.current_stream_wait()
    assert isinstance(handle, deep_ep.EPHandle)
    assert torch.equal(recv_x, ref_x)
    assert torch.equal(recv_idx, ref_idx)
    assert torch.equal(recv_weights, ref_weights)
    assert torch.equal(handle.recv_src_metadata[:, 0].long(), ref_ids.long())
    assert torch.equal(handle.psum_num_recv_tokens_per_scaleup_rank.long(), ref_counts.long().cumsum(0))

    data = refs.generate_pre_combine_data(ref_ids, most, case.top_k, case.hidden)
    expanded = buffer.dispatch(
        x, topk_idx, topk_weights, num_experts=case.num_experts, expert_alignment=16, do_expand=True
    )
    rows = expanded[3].recv_src_metadata[:, 2:].long()
    y = torch.zeros_like(expanded[0])
    y[rows[rows >= 0]] = data[rows >= 0]
    combined, weights, _ = buffer.combine(y, expanded[3], topk_weights=expanded[2])
    mine = torch.arange(case.tokens[rank.rank]) + rank.rank * most
    own = refs.generate_pre_combine_data(mine, most, case.top_k, case.hidden)
    assert torch.equal(combined, refs.combine(own, topk_idx, 1, rank.size, case.num_experts))
    assert torch.equal(weights, topk_weights.masked_fill(topk_idx < 0, 0))

    decode = buffer.dispatch(x, topk_idx, topk_weights, num_experts=case.num_experts, do_cpu_sync=False)
    assert decode[0].size(0) == rank.size * most
    buffer.combine(decode[0], decode[3])
    buffer.barrier()
    buffer.destroy()
    assert buffer.runtime is None


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_program_for_deep_ep_2_runs_unchanged(num_ranks: int) -> None:
    case = MoeCase(tuple(9 + r for r in range(num_ranks)), 128, 4, 4 * num_ranks)
    run_ranks(num_ranks, serve, case, with_gpus=False)


def pipeline(rank: Rank, num_bytes: int, in_flight: int) -> None:
    import deep_ep

    size = deep_ep.ElasticBuffer.get_pp_buffer_size_hint(num_bytes, in_flight)
    assert size % (2 << 20) == 0
    buffer = deep_ep.ElasticBuffer(
        rank.group, explicitly_destroy=True, allow_hybrid_mode=False, num_bytes=size
    )
    buffer.pp_set_config(num_bytes, in_flight)
    ahead, behind = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    for step in range(4):
        buffer.pp_send(torch.full((num_bytes // 2,), rank.rank + step, dtype=torch.bfloat16), ahead)
        got = torch.empty(num_bytes // 2, dtype=torch.bfloat16)
        buffer.pp_recv(got, behind)
        assert (got == behind + step).all()
    buffer.destroy()


def look_up(rank: Rank, num_entries: int, hidden: int, per_token: int) -> None:
    import deep_ep
    from deep_ep.utils.math import per_token_cast_to_fp8

    gpu_bytes, cpu_bytes = deep_ep.ElasticBuffer.get_engram_storage_size_hint(
        num_entries, hidden, 12, torch.bfloat16
    )
    buffer = deep_ep.ElasticBuffer(
        rank.group, num_bytes=gpu_bytes + cpu_bytes, num_cpu_bytes=cpu_bytes, explicitly_destroy=True
    )
    torch.manual_seed(7)
    table = torch.randn(rank.size * num_entries, hidden).bfloat16()
    mine = slice(rank.rank * num_entries, (rank.rank + 1) * num_entries)
    indices = torch.randint(0, len(table), (3, per_token), dtype=torch.int32)
    buffer.engram_write(table[mine].contiguous())
    data, sf = buffer.engram_fetch(indices)()
    assert sf is None
    assert torch.equal(data, table[indices.view(-1)].view(3, -1))
    quantised, scales = per_token_cast_to_fp8(table)
    buffer.engram_write(quantised[mine].contiguous(), scales)
    data, sf = buffer.engram_fetch(indices, use_tma_aligned_col_major_sf=True)()
    assert torch.equal(data.view(torch.uint8), quantised.view(torch.uint8)[indices.view(-1)].view(3, -1))
    assert torch.equal(sf, scales[indices.view(-1)].view(3, -1))
    buffer.destroy()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_pipelines_and_tables_of_deep_ep_2_run_unchanged(num_ranks: int) -> None:
    run_ranks(num_ranks, pipeline, 2000, 2, with_gpus=False)
    run_ranks(num_ranks, look_up, 10, 256, 4, with_gpus=False)
