# SPDX-License-Identifier: Apache-2.0
"""The oracle against loops over single tokens and single bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.testing import oracle

ROUTES = [
    torch.tensor([[0, 3], [-1, -1], [4, 4]]),
    torch.zeros((0, 2), dtype=torch.int64),
    torch.tensor([[2, -1], [1, 0]]),
]
NUM_EXPERTS = 5  # of 3 ranks: 2, 2, 1


def test_the_last_ranks_own_fewer_experts() -> None:
    assert [list(oracle.local_experts(5, 3, r)) for r in range(3)] == [[0, 1], [2, 3], [4]]
    assert [len(oracle.local_experts(2, 5, r)) for r in range(5)] == [1, 1, 0, 0, 0]


def test_layout_counts_a_token_once_per_rank_and_each_slot_per_expert() -> None:
    per_rank, per_expert, in_rank = oracle.layout(ROUTES[0], NUM_EXPERTS, 3)
    assert per_rank.tolist() == [1, 1, 1]
    assert per_expert.tolist() == [1, 0, 0, 1, 2]
    assert in_rank.tolist() == [[True, True, False], [False] * 3, [False, False, True]]


def test_ht_rows_come_source_rank_major_then_token() -> None:
    rows = oracle.ht_dispatch(ROUTES, NUM_EXPERTS, rank=0)
    assert rows.src_rank.tolist() == [0, 2]
    assert rows.src_token.tolist() == [0, 1]
    assert rows.topk_idx.tolist() == [[0, -1], [1, 0]]
    assert rows.per_expert == [2, 1]
    assert rows.per_source.tolist() == [1, 0, 1]
    inputs = [torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros((0, 1)), torch.tensor([[4.0], [5.0]])]
    assert rows.take(inputs).flatten().tolist() == [1.0, 5.0]
    weights = [x.expand(-1, 2) for x in inputs]
    assert rows.take_weights(weights).tolist() == [[1.0, 0.0], [5.0, 5.0]]


def test_ht_combine_adds_ranks_in_order_and_rounds_once() -> None:
    sent_back = []
    for rank in range(3):
        rows = oracle.ht_dispatch(ROUTES, NUM_EXPERTS, rank)
        sent_back.append(torch.full((len(rows.src_rank), 2), 2.0 ** (-8 * rank)).bfloat16())
    combined = oracle.ht_combine(sent_back, ROUTES, NUM_EXPERTS, rank=0)
    assert combined[:, 0].tolist() == [1.0, 0.0, 2.0**-16]  # 1 + 2^-8 rounds to even
    bias = torch.full((3, 2), 2.0**-8).bfloat16()
    combined = oracle.ht_combine(sent_back, ROUTES, NUM_EXPERTS, 0, biases=(bias,))
    assert combined[:, 0].tolist() == [
        1 + 2.0**-7,
        2.0**-8,
        float(torch.tensor(2.0**-8 + 2.0**-16).bfloat16()),
    ]


def test_ll_rows_repeat_for_an_expert_named_twice() -> None:
    tokens = oracle.ll_dispatch(ROUTES, NUM_EXPERTS, rank=2)
    assert [[t.tolist() for t in expert] for expert in tokens] == [[[2, 2], [], []]]


def test_ll_combine_skips_empty_slots() -> None:
    slot_rows = torch.tensor([[[1.0], [float("nan")], [3.0]]]).bfloat16()
    out = oracle.ll_combine(slot_rows, torch.tensor([[7, -1, 2]]), torch.tensor([[0.5, 9.0, 2.0]]))
    assert out.tolist() == [[6.5]]


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=128), st.booleans())
def test_fp8_stays_within_half_a_step(values: list[float], round_scale: bool) -> None:
    x = torch.zeros(1, 128)
    x[0, : len(values)] = torch.tensor(values)
    quantized, scales = oracle.quantize_fp8(x, round_scale)
    back = oracle.dequantize_fp8(quantized, scales)
    if round_scale:
        assert math.frexp(float(scales[0, 0]))[0] == 0.5
        assert float(scales[0, 0]) * 448 >= float(x.abs().max())
    tolerance = x.abs() * 2.0**-4 + scales[0, 0] * 2.0**-10 + 1e-30
    assert bool(((back - x).abs() <= tolerance * 1.001).all())


def test_ue8m0_packs_the_first_group_into_the_lowest_byte() -> None:
    scales = torch.tensor([[1.0, 2.0, 0.5, 2.0**127]])
    words = oracle.pack_ue8m0(scales)
    assert words.dtype == torch.int32
    assert int(words[0, 0]) & 0xFFFFFFFF == 127 | 128 << 8 | 126 << 16 | 254 << 24
    assert torch.equal(oracle.unpack_ue8m0(words), scales)


@pytest.mark.parametrize("hidden", [512, 1024, 1536])
def test_logfmt_error_is_within_one_step_of_the_logarithm(hidden: int) -> None:
    torch.manual_seed(0)
    x = (torch.rand(4, hidden) * 0.9 + 0.05).bfloat16()
    back = oracle.logfmt10(x)
    ratio = (back / x.float()).log2().abs().max()
    assert 0 < float(ratio) < math.log2(0.95 / 0.05) / 510
    assert torch.equal(oracle.logfmt10(-x), -back)


def test_logfmt_blocks_with_a_large_value_travel_as_bf16() -> None:
    x = (torch.rand(1, 2048) * 0.9).bfloat16()
    x[0, 5] = 3.0
    back = oracle.logfmt10(x)
    assert torch.equal(back[:, :1024], x[:, :1024].float())
    assert not torch.equal(back[:, 1024:], x[:, 1024:].float())
