# SPDX-License-Identifier: Apache-2.0
"""What a ``weft.P2PAllToAll`` is made for, checked, and what follows: experts, rows, bytes of its window.

sizes = P2PSizes(max_num_tokens=128, num_experts=256, hidden_dim=7168, num_experts_per_token=8, ...)
sizes.rows_of(num_dp_groups=8, dp_rank=0)      # rows of packed outputs that are always enough

Arithmetic and the ranks of data-parallel groups; no device. Any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft import _core
from weft.errors import invalid
from weft.moe.arguments import MAX_ROWS, MAX_TOP_K, ROW_ALIGNMENT_BYTES
from weft.moe.config import (
    MAX_ALIGNMENT,
    MAX_LOW_LATENCY_TOKENS,
    MAX_SMS,
    align,
    ceil_div,
    check_whole,
    local_experts,
)
from weft.runtime.bootstrap import Bootstrap

SUMMED = {
    torch.bfloat16: int(_core.ELEMENT_BF16),
    torch.float32: int(_core.ELEMENT_FP32),
    torch.float16: int(_core.ELEMENT_FP16),
}
SCALES = (torch.float32, torch.int32)
_MAX_IN_FLIGHT = 32


@dataclass(frozen=True)
class P2PSizes:
    """The sizes and types of a P2PAllToAll; the same on all ranks. See there. Raises: weft.Error naming one."""

    max_num_tokens: int
    num_experts: int
    hidden_dim: int
    num_experts_per_token: int
    in_dtype: torch.dtype
    out_dtype: torch.dtype
    hidden_dim_scale: int | None
    scale_dtype: torch.dtype | None
    expert_padding: int
    max_recv_tokens: int | None
    max_tokens_per_expert: int | None
    max_private_tokens: int | None
    max_in_flight: int
    dp_size: int
    num_sms: int = 0

    def __post_init__(self) -> None:
        check_whole("max_num_tokens", self.max_num_tokens, 1, MAX_LOW_LATENCY_TOKENS)
        check_whole("num_experts", self.num_experts, 1)
        check_whole("num_experts_per_token", self.num_experts_per_token, 1, MAX_TOP_K)
        check_whole("expert_padding", self.expert_padding, 1, MAX_ALIGNMENT)
        check_whole("max_in_flight", self.max_in_flight, 1, _MAX_IN_FLIGHT)
        check_whole("dp_size", self.dp_size, 1)
        check_whole("num_sms", self.num_sms, 0, MAX_SMS)
        for name in ("max_recv_tokens", "max_tokens_per_expert"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1, MAX_ROWS)
        if self.max_private_tokens is not None:
            check_whole("max_private_tokens", self.max_private_tokens, self.max_num_tokens)
        if self.max_recv_tokens is not None and self.max_tokens_per_expert is not None:
            raise invalid("max_recv_tokens", "both it and max_tokens_per_expert", "one of the two")
        self._check_types()

    def _check_types(self) -> None:
        if not isinstance(self.in_dtype, torch.dtype) or self.in_dtype.is_complex:
            raise invalid("in_dtype", self.in_dtype, "a torch.dtype of real numbers")
        if self.out_dtype not in SUMMED:
            raise invalid("out_dtype", self.out_dtype, "torch.bfloat16, torch.float16 or torch.float32")
        check_whole("hidden_dim", self.hidden_dim, 1, 1 << 26)
        for name, dtype in (("in_dtype", self.in_dtype), ("out_dtype", self.out_dtype)):
            if self.hidden_dim * dtype.itemsize % ROW_ALIGNMENT_BYTES:
                raise invalid("hidden_dim", self.hidden_dim, f"rows of {name} of a multiple of 16 bytes")
        if (self.hidden_dim_scale is None) != (self.scale_dtype is None):
            given = f"{self.hidden_dim_scale} with scale_dtype {self.scale_dtype}"
            raise invalid("hidden_dim_scale", given, "both or neither")
        if self.hidden_dim_scale is not None:
            check_whole("hidden_dim_scale", self.hidden_dim_scale, 1, 1 << 20)
            if self.scale_dtype not in SCALES:
                raise invalid("scale_dtype", self.scale_dtype, "torch.float32 or torch.int32")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of x."""
        return self.hidden_dim * self.in_dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of its scales."""
        return (self.hidden_dim_scale or 0) * 4

    def local_experts(self, num_dp_groups: int, dp_rank: int) -> int:
        """Return how many experts a data-parallel group has: the last ones fewer where it does not come out even."""
        return local_experts(self.num_experts, num_dp_groups, dp_rank)

    def rows_of(self, num_dp_groups: int, dp_rank: int) -> int:
        """Return rows of packed outputs: max_recv_tokens, or as many as can ever come, with padding.

        Tokens that name an expert more than once count as often.
        """
        if self.max_recv_tokens is not None:
            return self.max_recv_tokens
        experts = self.local_experts(num_dp_groups, dp_rank)
        rows = self.max_num_tokens * num_dp_groups * min(self.num_experts_per_token, max(experts, 1))
        return align(max(rows + experts * (self.expert_padding - 1), 1), self.expert_padding)

    def window_bytes(self, num_dp_groups: int) -> int:
        """Return low-latency bytes of the window of one exchange: a dispatch and its combine."""
        replies = self.hidden_dim * self.out_dtype.itemsize
        widest = max(self.row_bytes + self.scale_bytes, replies)
        hidden = align(ceil_div(widest, 2), 16)  # bf16 channels of as many bytes
        top_k, experts = self.num_experts_per_token, self.num_experts
        return int(_core.low_latency_hint_bytes(num_dp_groups, self.max_num_tokens, top_k, experts, hidden))


class DpColumn:
    """The ranks at the same place of each data-parallel group, as a bootstrap: one rank of every group.

    All ranks of a group hold the same tokens and the same experts, so the exchange within a column is complete.
    """

    def __init__(self, everyone: Bootstrap, dp_size: int) -> None:
        if everyone.size % dp_size:
            raise invalid("dp_size", dp_size, f"a divisor of the {everyone.size} ranks")
        self._everyone, self._dp_size = everyone, dp_size
        self.rank = everyone.rank // dp_size
        self.size = everyone.size // dp_size

    def all_gather(self, data: bytes, timeout_s: float) -> list[bytes]:
        """Give ``data`` to the ranks of this column; every rank of all columns calls it."""
        gathered = self._everyone.all_gather(data, timeout_s)
        return gathered[self._everyone.rank % self._dp_size :: self._dp_size]
