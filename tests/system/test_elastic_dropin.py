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
