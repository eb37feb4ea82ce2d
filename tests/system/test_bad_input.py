# SPDX-License-Identifier: Apache-2.0
"""Every argument of every public call, given all kinds of things: nothing but weft.Error comes of it, and the
buffer goes on working.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from moe_checks import dispatch

import weft
from weft.errors import shortened
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, run_ranks

CASE = MoeCase((6,), 512, 3, 8, empty_share=0)
MOST_TOKENS = 24
BF16 = torch.bfloat16
Call = tuple[Callable[..., Any], dict[str, Any]]


def values() -> list[Any]:
    """Return things that some argument does not expect; every one is expected by another."""
    rows = torch.zeros(6, 512, dtype=BF16)
    return [
        None,
        "text",
        -1,
        0,
        7,
        3.5,
        float("nan"),
        True,
        1 << 40,
        1 << 70,
        object(),
        [],
        {},
        (1, 2),
        (None, None),
        ("a", "b", "c"),
        weft.Config(),
        torch.float32,
        torch.Size((1 << 40,)),
        numpy.zeros((6, 512)),
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(6, 3),
        torch.zeros(6, 3, dtype=torch.int64),
        torch.full((6, 3), 99),
        torch.full((6, 3), -2),
        torch.zeros(6, 1, dtype=torch.bool),
        rows,
        rows[:5],
        rows.float(),
        rows.unsqueeze(0),
        rows.T,
        rows.to("meta"),
        rows.to_sparse(),
        rows[:, :7].contiguous(),
        rows[:1].expand(6, 512),
        (rows, torch.zeros(6, 4)),
        (rows, "x"),
        torch.zeros(6, 64, dtype=torch.complex64).conj(),
        torch.quantize_per_tensor(torch.zeros(6, 512), 1.0, 0, torch.quint8),
    ]


def wrong_answers(calls: dict[str, Call]) -> list[str]:
    """Give every argument of every call every value; return what came of it besides a result or weft.Error."""
    wrong = []
    for name, (call, good) in calls.items():
        for parameter in inspect.signature(call).parameters:
            for value in values():
                try:
                    call(**{**good, parameter: value})
                except weft.PeerLost as error:
                    wrong.append(f"{name}({parameter}={shortened(value)}): {error}")
                except weft.Error:
                    continue
                except Exception as error:
                    wrong.append(f"{name}({parameter}={shortened(value)}): {type(error).__name__} {error}")
    return wrong


def received(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a low-latency call that runs its hook, if it returns one: later calls wait for it."""

    @functools.wraps(call)
    def run(**arguments: Any) -> Any:
        results = call(**arguments)
        if results[-1] is not None:
            results[-1]()
        return results

    return run


def high_throughput(rank: Rank) -> list[str]:
    buffer = weft.Buffer(rank.group, 1 << 24, explicitly_destroy=True)
    x, ids, weights = CASE.x(0), CASE.topk_idx(0), CASE.topk_weights(0)
    rows, _, row_weights, _, handle, _ = dispatch(buffer, CASE, 0)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, CASE.num_experts)
    fresh = {
        "x": x,
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": ids,
        "topk_weights": weights,
    }
    hint = {"num_max_dispatch_tokens_per_rank": 4, "hidden": 64, "num_ranks": 2, "num_experts": 8}
    sms = weft.Buffer.num_sms
    wrong = wrong_answers(
        {
            "layout": (buffer.get_dispatch_layout, {"topk_idx": ids, "num_experts": CASE.num_experts}),
            "dispatch": (buffer.dispatch, fresh),
            "internode_dispatch": (buffer.internode_dispatch, {**fresh, "config": weft.Config()}),
            "dispatch again": (buffer.dispatch, {"x": x, "handle": handle}),
            "combine": (buffer.combine, {"x": rows, "handle": handle, "topk_weights": row_weights}),
            "local buffer": (buffer.get_local_buffer_tensor, {"dtype": torch.int8}),
            "set_num_sms": (weft.Buffer.set_num_sms, {}),
            "size hint": (weft.Buffer.get_low_latency_rdma_size_hint, hint),
            "dispatch config": (weft.Buffer.get_dispatch_config, {}),
            "config": (weft.Config, {}),
            "config size": (weft.Config().get_nvl_buffer_size_hint, {"hidden_bytes": 10, "num_ranks": 2}),
            "masks": (buffer.low_latency_update_mask_buffer, {"rank_to_mask": 0}),
        }
    )
    weft.Buffer.set_num_sms(sms)
    combined, _, _ = buffer.combine(rows, handle)
    assert torch.equal(combined, x)
    buffer.destroy()
    for call in (lambda: buffer.dispatch(**fresh), lambda: buffer.combine(rows, handle), buffer.destroy):
        with pytest.raises(weft.Error, match="destroy"):
            call()
    return wrong


def low_latency(rank: Rank) -> list[str]:
    size = weft.Buffer.get_low_latency_rdma_size_hint(MOST_TOKENS, CASE.hidden, 1, CASE.num_experts)
    buffer = weft.Buffer(
        rank.group,
        1 << 20,
        size,
        low_latency_mode=True,
        enable_shrink=True,
        explicitly_destroy=True,
        timeout_s=20,
    )
    x, ids, weights = CASE.x(0), CASE.topk_idx(0), CASE.topk_weights(0)
    sent = {
        "x": x,
        "topk_idx": ids,
        "num_max_dispatch_tokens_per_rank": MOST_TOKENS,
        "num_experts": CASE.num_experts,
    }
    rows, counts, handle, _, _ = buffer.low_latency_dispatch(**sent, use_fp8=False)
    back = {"x": rows, "topk_idx": ids, "topk_weights": weights, "handle": handle}
    # What signals have to reach is not among the arguments tried: whoever waits for too much waits.
    overlapped = {**back, "overlap": True, "src_signals": torch.ones_like(counts)}
    wrong = wrong_answers(
        {
            "dispatch": (received(buffer.low_latency_dispatch), sent),
            "dispatch bf16": (received(buffer.low_latency_dispatch), {**sent, "use_fp8": False}),
            "combine": (received(buffer.low_latency_combine), back),
            "combine overlapped": (
                lambda num_sms, comp_signal, block_m, packed_recv_count: buffer.low_latency_combine(
                    **overlapped,
                    num_sms=num_sms,
                    comp_signal=comp_signal,
                    block_m=block_m,
                    packed_recv_count=packed_recv_count,
                ),
                {"num_sms": None, "comp_signal": None, "block_m": 64, "packed_recv_count": None},
            ),
            "next buffer": (buffer.get_next_low_latency_combine_buffer, {"handle": handle}),
            "clean": (
                buffer.clean_low_latency_buffer,
                {"num_max_dispatch_tokens_per_rank": 8, "hidden": 64, "num_experts": 8},
            ),
            "query masks": (
                buffer.low_latency_query_mask_buffer,
                {"mask_status": torch.zeros(1, dtype=torch.int32)},
            ),
        }
    )
    rows, _, handle, _, _ = buffer.low_latency_dispatch(**sent, use_fp8=False)
    combined, _, _ = buffer.low_latency_combine(rows, ids, weights, handle)
    assert torch.allclose(combined.float(), x.float() * weights.sum(1, keepdim=True), atol=0.1)
    buffer.destroy()
    with pytest.raises(weft.Error, match="destroy"):
        buffer.low_latency_dispatch(**sent)
    with pytest.raises(weft.Error, match="destroy"):
        buffer.low_latency_combine(**back)
    return wrong


def elastic(rank: Rank) -> list[str]:
    buffer = weft.ElasticBuffer(
        rank.group, num_bytes=1 << 22, num_max_tokens_per_rank=MOST_TOKENS, explicitly_destroy=True
    )
    x, ids, weights = CASE.x(0), CASE.topk_idx(0), CASE.topk_weights(0)
    fresh = {"x": x, "topk_idx": ids, "topk_weights": weights, "num_experts": CASE.num_experts}
    rows, _, row_weights, handle, _ = buffer.dispatch(**fresh)
    spread, _, _, expanded, _ = buffer.dispatch(**fresh, do_expand=True)
    buffer.engram_write(torch.zeros(5, 64, dtype=BF16))
    group = rank.group
    wrong = wrong_answers(
        {
            "dispatch": (buffer.dispatch, fresh),
            "dispatch expanded": (buffer.dispatch, {**fresh, "do_expand": True}),
            "dispatch again": (buffer.dispatch, {"x": x, "handle": handle}),
            "combine": (buffer.combine, {"x": rows, "handle": handle, "topk_weights": row_weights}),
            "combine expanded": (buffer.combine, {"x": spread, "handle": expanded}),
            "barrier": (buffer.barrier, {}),
            "size hint": (
                buffer.get_buffer_size_hint,
                {"group": group, "num_max_tokens_per_rank": 8, "hidden": 64},
            ),
            "SMs": (buffer.get_theoretical_num_sms, {"num_experts": 8, "num_topk": 2}),
            "queues": (buffer.get_theoretical_num_qps, {"num_sms": 8}),
            "engram_write": (buffer.engram_write, {"storage": torch.zeros(5, 64, dtype=BF16)}),
            "engram_fetch": (buffer.engram_fetch, {"indices": torch.zeros(2, 2, dtype=torch.int32)}),
            "engram hint": (
                buffer.get_engram_storage_size_hint,
                {"num_entries": 8, "hidden": 64, "num_max_tokens_per_rank": 3},
            ),
            "ring hint": (
                buffer.get_pp_buffer_size_hint,
                {"num_max_tensor_bytes": 8, "num_max_inflight_tensors": 2},
            ),
            "session bytes": (
                buffer.get_agrs_num_max_session_bytes,
                {"group": group, "shapes": (3, 4), "dtype": torch.float32},
            ),
            "session hint": (
                buffer.get_agrs_buffer_size_hint,
                {"group": group, "num_max_session_bytes": 9},
            ),
            "session config": (
                buffer.agrs_set_config,
                {"num_max_session_bytes": 1 << 12, "num_max_all_gathers_per_session": 3},
            ),
        }
    )
    buffer.agrs_set_config(1 << 16, 32)
    buffer.create_agrs_session()
    wrong += wrong_answers(
        {
            "gather": (buffer.all_gather, {}),
            "gather in place": (buffer.agrs_get_inplace_tensor, {"shapes": (2, 3), "dtype": BF16}),
        }
    )
    buffer.destroy_agrs_session()
    assert torch.equal(buffer.combine(rows, handle)[0], x)
    buffer.destroy()
    for call in (lambda: buffer.dispatch(**fresh), buffer.barrier, buffer.create_agrs_session):
        with pytest.raises(weft.Error, match="destroy"):
            call()
    return wrong


def construction(rank: Rank) -> list[str]:
    sized = {"group": rank.group, "num_max_tokens_per_rank": 8, "hidden": 64, "num_topk": 2}
    return wrong_answers(
        {
            "Buffer": (weft.Buffer, {"group": rank.group, "num_nvl_bytes": 1 << 20}),
            "ElasticBuffer": (weft.ElasticBuffer, {"group": rank.group, "num_bytes": 1 << 21}),
            "ElasticBuffer for sizes": (weft.ElasticBuffer, sized),
        }
    )


@pytest.mark.parametrize(
    "sweep", [high_throughput, low_latency, elastic, construction], ids=lambda f: f.__name__
)
def test_whatever_an_argument_is_given_only_weft_errors_come(sweep: Callable[[Rank], list[str]]) -> None:
    assert run_ranks(1, sweep, with_gpus=False)[0] == []
