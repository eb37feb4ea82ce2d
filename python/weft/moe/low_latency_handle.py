# SPDX-License-Identifier: Apache-2.0
"""What a low-latency dispatch leaves for its combine."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class LowLatencyState:
    """What a dispatch leaves for its combine."""

    engine_id: object
    max_tokens: int
    num_tokens: int
    top_k: int
    hidden: int
    num_experts: int
    rows_shape: tuple[int, int, int]  # of the received rows: Le, R * M, hidden
    had_weights: bool
    routes: Tensor
    is_received: bool = False  # else routes hold nothing yet: the hook is still to be run
    combine_rows: Tensor | None = None  # what get_next_low_latency_combine_buffer() gave

    def receive(self) -> None:
        """Note that the dispatch has received, or will before anything that is launched later."""
        self.is_received = True


class LowLatencyHandle(tuple):  # type: ignore[type-arg]
    """The handle of a low-latency dispatch: (src_info, layout_range, M, hidden, E).

    src_info i32[Le, R * M]: each row's token at its source. layout_range i64[Le, R]: count (low 32 bits) and
    first row (high 32 bits) of the rows from each source.
    """

    state: LowLatencyState

    def __new__(cls, state: LowLatencyState, src_info: Tensor, layout_range: Tensor) -> LowLatencyHandle:
        """Return the handle with its state beside the tensors."""
        entries = (src_info, layout_range, state.max_tokens, state.hidden, state.num_experts)
        handle = super().__new__(cls, entries)
        handle.state = state
        return handle
