# SPDX-License-Identifier: Apache-2.0
"""The split all-to-all on the CPU where calls are so large that rows stand once, in their source's window."""

from __future__ import annotations

from typing import Any

from p2p_checks import Form, check_received, exchange, make

from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, run_ranks

# More than 8 MiB of rows, which are no lines: such rows stand once in their source's window.
MANY, WIDE = 90, 49152


def _large(rank: Rank) -> None:
    case, form = MoeCase((MANY, 0, MANY - 3)[: rank.size], WIDE, 2, 5), Form(padding=4)
    kept: list[tuple[MoeCase, Any]] = []
    with make(rank, case, form, MANY) as a2a:
        for seed in range(2):
            case = MoeCase(case.tokens, WIDE, 2, 5, seed=seed)
            exchange(rank, a2a, case, form, keep=kept)
        check_received(kept[0][0], form, rank.rank, rank.size, kept[0][1])


def test_rows_of_large_calls_come_from_their_source_and_stay() -> None:
    run_ranks(3, _large, with_gpus=False)
