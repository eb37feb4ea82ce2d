# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import weft
from weft.moe.config import (
    Config,
    align,
    low_latency_size_hint,
    recommended_combine_config,
    recommended_dispatch_config,
)


def test_config_takes_positions_and_keywords() -> None:
    assert Config(24, 8, 256, 6, 128) == Config(
        num_sms=24,
        num_max_nvl_chunked_send_tokens=8,
        num_max_nvl_chunked_recv_tokens=256,
        num_max_rdma_chunked_send_tokens=6,
        num_max_rdma_chunked_recv_tokens=128,
    )


def test_rdma_receive_tokens_round_up_to_a_multiple_of_send() -> None:
    assert Config(20, 6, 256, 6, 128).num_max_rdma_chunked_recv_tokens == 132


@pytest.mark.parametrize("field", range(5))
@pytest.mark.parametrize("value", [0, -1, 2.5, "8", True, torch.zeros(2), torch.zeros(2, dtype=torch.int32)])
def test_a_field_that_is_not_a_whole_number_above_zero_is_named(field: int, value: object) -> None:
    values: list[object] = [20, 6, 256, 6, 256]
    values[field] = value
    with pytest.raises(weft.Error, match="num_"):
        Config(*values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((20, 256, 256), "num_max_nvl_chunked_send"),
        ((20, 6, 256, 65, 64), "num_max_rdma_chunked_send"),
    ],
)
def test_send_tokens_must_fit_receive_tokens(values: tuple[int, ...], named: str) -> None:
    with pytest.raises(weft.Error, match=named):
        Config(*values)


@pytest.mark.parametrize(
    ("num_ranks", "dispatch", "combine"),
    [
        (2, (24, 256, 6, 132), (10, 256, 6, 132)),
        (4, (6, 256, 6, 132), (9, 256, 6, 132)),
        (8, (6, 256, 6, 132), (4, 256, 6, 132)),
        (16, (36, 288, 20, 140), (4, 288, 12, 132)),
        (48, (32, 288, 8, 128), (1, 288, 8, 128)),
        (128, (20, 560, 12, 132), (1, 560, 8, 128)),
        (144, (32, 720, 12, 132), (2, 720, 8, 128)),
        (160, (28, 720, 12, 132), (2, 720, 8, 128)),
    ],
)
def test_recommended_configs_match_the_contract(
    num_ranks: int, dispatch: tuple[int, ...], combine: tuple[int, ...]
) -> None:
    assert recommended_dispatch_config(num_ranks) == Config(20, *dispatch)
    assert recommended_combine_config(num_ranks) == Config(20, *combine)


@given(st.integers(1, 1000))
def test_every_rank_count_has_a_recommended_config(num_ranks: int) -> None:
    assert recommended_dispatch_config(num_ranks, 24).num_sms == 24
    assert recommended_combine_config(num_ranks, 24).num_sms == 24


def test_recommended_config_of_no_ranks_is_refused() -> None:
    with pytest.raises(weft.Error, match="num_ranks"):
        recommended_dispatch_config(0)


def test_size_hints_match_the_formulas_of_the_contract() -> None:
    config = Config(20, 6, 256, 6, 128)
    row_bytes = 14336 + 8 + 128 * 8 + 512 + 512
    assert config.get_nvl_buffer_size_hint(14336, 8) == align(10 * 8 * (4 * 5 + 256 * row_bytes), 128)
    assert config.get_rdma_buffer_size_hint(14336, 8) == 0
    assert config.get_rdma_buffer_size_hint(14336, 16) == align(
        10 * 2 * (144 + 2 * 132 * (row_bytes + 16)), 128
    )


def test_low_latency_hint_is_far_below_what_deepep_asks_for() -> None:
    row_bytes = 4 * 56 + 2 * 7168
    deepep_bytes = 2 * 256 * 128 * row_bytes + 2 * 256 * 128 * row_bytes + 2 * 1024
    assert low_latency_size_hint(128, 7168, 8, 256) < deepep_bytes / 6


@given(st.integers(0, 1 << 16), st.integers(1, 300), st.integers(0, 4096), st.integers(0, 40))
def test_size_hints_grow_with_their_arguments(
    hidden_bytes: int, num_ranks: int, more_bytes: int, more_ranks: int
) -> None:
    config = Config()
    for hint in (config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint):
        small = hint(hidden_bytes, num_ranks)
        assert small % 128 == 0
        assert small <= hint(hidden_bytes + more_bytes, num_ranks + more_ranks)


@example(116, 1, 13, 1, 13)  # batches of three tokens, of which there are fewer than of two
@given(
    st.integers(0, 4096), st.integers(1, 8192), st.integers(1, 64), st.integers(1, 900), st.integers(0, 99)
)
def test_low_latency_hint_grows_with_each_argument(
    tokens: int, hidden: int, num_ranks: int, num_experts: int, more: int
) -> None:
    small = low_latency_size_hint(tokens, hidden, num_ranks, num_experts)
    assert small > 0
    assert small % 128 == 0
    assert small <= low_latency_size_hint(tokens + more, hidden, num_ranks, num_experts)
    assert small <= low_latency_size_hint(tokens, hidden + more, num_ranks, num_experts)
    assert small <= low_latency_size_hint(tokens, hidden, num_ranks, num_experts + more)
