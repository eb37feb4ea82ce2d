# SPDX-License-Identifier: Apache-2.0
"""The first combine with overlap where kernels are loaded at their first launch, as CUDA does it: its hook sends, too.

On the CPU nothing is loaded so, and a send waits in the caller's thread: for ever, if the signals come only after it.
So a call that returns before them has not sent yet.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from combine_ids import EXPERTS, MOST_TOKENS, TOKENS, expected, given_ids, given_weights, results, rows_of
from test_moe_ll import ll_buffer

import weft
from weft.moe import low_latency
from weft.testing.ranks import Rank, RankPool


class _Layer:
    """A dispatch, and an expert layer that is yet to make its rows."""

    def __init__(self, rank: Rank, buffer: weft.Buffer) -> None:
        self.ids, self.x = given_ids(rank.rank), rows_of(rank.rank, TOKENS)
        self.weights = given_weights(self.ids)
        recv, _, self.handle, _, _ = buffer.low_latency_dispatch(
            self.x, self.ids, MOST_TOKENS, EXPERTS, use_fp8=False
        )
        self._made = results(recv, self.handle, rank, [given_ids(r) for r in range(rank.size)])
        self.rows = torch.full_like(recv, float("nan"))
        self.signals = torch.zeros(recv.size(0), dtype=torch.uint32)

    def run(self) -> None:
        self.rows.copy_(self._made)
        self.signals.view(torch.int32).fill_(1)

    def combine(self, buffer: weft.Buffer, **options: Any) -> Any:
        signals = {"src_signals": self.signals, "src_signal_expect_value": 1, "return_recv_hook": True}
        given = (self.rows, self.ids, self.weights, self.handle)
        return buffer.low_latency_combine(*given, overlap=True, **{**signals, **options})

    def check(self, combined: torch.Tensor) -> None:
        assert torch.equal(combined, expected(self.x, self.ids, self.weights, self.ids, self.weights))


def _first_uses(rank: Rank) -> None:
    buffer = ll_buffer(rank, timeout_s=20.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_latency, "waits_for_loading", lambda _: True)
        layer = _Layer(rank, buffer)
        with pytest.raises(
            weft.Error, match=r"^overlap: got True without return_recv_hook.*MODULE_LOADING=EAGER"
        ):
            layer.combine(buffer, return_recv_hook=False)
        combined, _, hook = layer.combine(buffer)  # before the layer has run: its kernels are not loaded yet
        layer.run()
        hook()
        layer.check(combined)
        layer = _Layer(rank, buffer)
        layer.run()
        combined, _, hook = layer.combine(buffer)  # sends at once now
        hook()
        layer.check(combined)
        # Another form; what is called before its hook comes after its send.
        layer = _Layer(rank, buffer)
        combined, _, hook = layer.combine(buffer, exact=True)
        layer.run()
        _recv, *_, receive = buffer.low_latency_dispatch(
            layer.x, layer.ids, MOST_TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
        )
        hook()
        receive()
        layer.check(combined)


@pytest.mark.parametrize("num_ranks", (1, 2, 3))
def test_the_first_combine_with_overlap_sends_in_its_hook(num_ranks: int) -> None:
    with RankPool(num_ranks, with_gpus=False) as ranks:
        ranks.run(_first_uses)
