# SPDX-License-Identifier: Apache-2.0
"""NaN and infinities through every form that a low-latency row has: NaN stays NaN, an infinity keeps its sign."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from special_values import FORMATS, REPLIES, check_replies, check_rows
from test_moe_ll import ll_buffer, wire

from weft.testing.ranks import Rank, RankPool


@pytest.fixture(scope="module", params=("lines", "words"))
def pair(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with wire(request.param), RankPool(2, with_gpus=False) as ranks:
        yield ranks


def _rows(rank: Rank, options: dict[str, Any]) -> None:
    check_rows(ll_buffer(rank), rank, options)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_keep_nan_and_the_sign_of_infinities(pair: RankPool, name: str) -> None:
    pair.run(_rows, FORMATS[name])


def _replies(rank: Rank, options: dict[str, Any]) -> None:
    check_replies(ll_buffer(rank), rank, options)


@pytest.mark.parametrize("name", REPLIES)
def test_replies_keep_nan_and_the_sign_of_infinities(pair: RankPool, name: str) -> None:
    pair.run(_replies, REPLIES[name])


def test_the_casts_for_tests_keep_them() -> None:
    from weft.testing.numerics import per_token_cast_back, per_token_cast_to_fp8

    x = torch.full((1, 256), 0.5)
    x[0, 3], x[0, 4], x[0, 200] = float("inf"), -float("inf"), float("nan")
    back = per_token_cast_back(*per_token_cast_to_fp8(x)).float()
    assert back[0, 3] == float("inf") and back[0, 4] == -float("inf")
    assert back.isnan().nonzero().tolist() == [[0, 200]]
    assert (back[0, 130] - 0.5).abs() < 0.01
