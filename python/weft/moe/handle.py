# SPDX-License-Identifier: Apache-2.0
"""What a high-throughput dispatch leaves for its combine and for cached dispatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from weft import _core


@dataclass(frozen=True)
class DispatchState:
    """The routes of one dispatch. R ranks, T tokens sent from here, N rows received here.

    send_row i32[T, R]: a token's place among the rows for a rank, or -1. slot_base i32[T]: its first place in the
    staging of combine. prefix i32[R, R]: rows that rank j gets from ranks 0..i. slot i32[N]: a received row's
    place in its owner's staging.
    """

    buffer: Any
    handle_id: int
    num_experts: int
    num_tokens: int
    num_rows: int
    staging_rows: int
    counts_unknown: bool
    send_row: torch.Tensor
    slot_base: torch.Tensor
    prefix: torch.Tensor
    slot: torch.Tensor

    def memory(self) -> Any:
        """Return the addresses for the core."""
        return _core.HandleMemory(self.send_row.data_ptr(), self.slot_base.data_ptr(), self.prefix.data_ptr())


class DispatchHandle(tuple):  # type: ignore[type-arg]
    """The handle of ``Buffer.dispatch``: opaque, but a tuple of six tensors as DeepEP's intranode handle.

    (rank_prefix_matrix i32[R, R], channel_prefix_matrix i32[R, 1], recv_channel_prefix_matrix i32[R, 1],
    recv_src_idx i32[N], is_token_in_rank bool[T, R], send_head i32[T, R]). Weft has one channel per rank pair.
    """

    state: DispatchState

    def __new__(cls, state: DispatchState, tensors: tuple[torch.Tensor, ...]) -> DispatchHandle:
        """Return the handle with its state beside the tensors."""
        handle = super().__new__(cls, tensors)
        handle.state = state
        return handle
