# SPDX-License-Identifier: Apache-2.0
"""What a high-throughput dispatch leaves for its combine and for cached dispatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from weft import _core


@dataclass(frozen=True)
class DispatchState:
    """The routes of one dispatch. R ranks, T tokens sent from here, N rows received here.

    send_row i32[T, R]: a token's place among the rows for a rank, or -1. slot_base i32[T]: its first place in
    the staging of combine. prefix i32[R, R]: rows that rank j gets from ranks 0..i. slot i32[N]: a received
    row's place in its owner's staging. token i32[N]: its row at its source. sum_place i32[T, R]: when combine
    adds a rank's row; None: ranks ascending.
    """

    engine_id: object
    rank: int
    handle_id: int
    num_experts: int
    top_k: int  # 0 where no expert ids travelled
    num_tokens: int
    num_rows: int
    staging_rows: int
    counts_unknown: bool
    is_token_in_rank: torch.Tensor
    send_row: torch.Tensor
    slot_base: torch.Tensor
    prefix: torch.Tensor
    slot: torch.Tensor
    token: torch.Tensor
    sum_place: torch.Tensor | None = None

    def memory(self) -> Any:
        """Return the addresses for the core."""
        sum_place = 0 if self.sum_place is None else self.sum_place.data_ptr()
        return _core.HandleMemory(
            self.send_row.data_ptr(), self.slot_base.data_ptr(), self.prefix.data_ptr(), sum_place
        )


class DispatchHandle(Sequence[torch.Tensor]):
    """The handle of ``Buffer.dispatch``: opaque, but a sequence of six tensors as DeepEP's is in a node.

    (rank_prefix_matrix i32[R, R], channel_prefix_matrix i32[R, 1], recv_channel_prefix_matrix i32[R, 1],
    recv_src_idx i32[N], is_token_in_rank bool[T, R], send_head i32[T, R]). Weft has one channel per rank
    pair. The first entry, at [i][rank], counts the rows that this rank got from ranks 0..i.
    Entries are made when they are asked for, on the current stream: writing to one changes no routes.
    """

    def __init__(self, state: DispatchState) -> None:
        self.state = state

    def __len__(self) -> int:
        return 6

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        chosen = range(len(self))[index]
        return [self._entry(i) for i in chosen] if isinstance(chosen, range) else self._entry(chosen)

    def _entry(self, index: int) -> torch.Tensor:
        state, rank = self.state, self.state.rank
        if index == 1:
            sent_up_to = state.prefix[rank].view(-1, 1)
            return sent_up_to - state.prefix[rank - 1].view(-1, 1) if rank else sent_up_to.clone()
        if index == 2:
            return state.prefix[:, rank].clone().view(-1, 1)
        plain = {0: state.prefix, 3: state.token, 4: state.is_token_in_rank, 5: state.send_row}
        return plain[index].clone()
