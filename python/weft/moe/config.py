# SPDX-License-Identifier: Apache-2.0
"""Tuning of a buffer's high-throughput calls, and how many bytes a buffer needs for a shape.

    config = recommended_dispatch_config(num_ranks=8)
    num_nvl_bytes = config.get_nvl_buffer_size_hint(hidden_bytes=7168 * 2, num_ranks=8)

Everything here is arithmetic: no device, no group, any thread. Sizes are bytes; a hint grows with each of its
arguments, so a buffer made for the larger of two shapes serves both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from weft import _core
from weft.errors import invalid, shortened
from weft.runtime.tensors import index_of, is_unreadable

MAX_BYTES = 1 << 48  # of any size that a caller gives: what a machine can address
MAX_SMS = 1 << 16
MAX_LOW_LATENCY_TOKENS = 1 << 20  # of a rank
MAX_ALIGNMENT = 1 << 20  # of the rows of an expert
TOPK_IDX_BYTES = 8  # torch.int64, the type that deep_ep.topk_idx_t names
_BUFFER_ALIGNMENT_BYTES = 128
_RANKS_PER_NODE = 8  # of the legacy hints, which know no topology
_MAX_TOP_K = 128
_HINTED_TOP_K = 32  # low-latency calls with more slots per token need more than the hint
_ROW_METADATA_BYTES = 8 + _MAX_TOP_K * TOPK_IDX_BYTES + _MAX_TOP_K * 4 + 512  # source, ids, weights, scales


def ceil_div(x: int, y: int) -> int:
    """Return x / y rounded up, for y > 0."""
    return -(-x // y)


def local_experts(num_experts: int, num_ranks: int, rank: int) -> int:
    """Return how many experts a rank owns: blocks of ceil(experts / ranks), the last ones shorter or empty."""
    block = ceil_div(num_experts, num_ranks)
    return max(min(block, num_experts - rank * block), 0)


def align(x: int, y: int) -> int:
    """Return the least multiple of y that is not below x, for y > 0."""
    return ceil_div(x, y) * y


def check_integer(argument: str, value: object, least: int, most: int | None = None) -> int:
    """Return ``value`` as an int; weft.Error unless it is a whole number in [least, most]."""
    if type(value) is int and value >= least and (most is None or value <= most):
        return value  # mostly
    allowed = f"a whole number, {least} or more" if most is None else f"a whole number from {least} to {most}"
    number = index_of(value)
    if number is None:
        raise invalid(argument, shortened(value), allowed)
    if isinstance(value, bool):
        raise invalid(argument, value, allowed)
    if number < least or (most is not None and number > most):
        raise invalid(argument, number, allowed)
    return number


def check_number(argument: str, value: object, least: float) -> float:
    """Return ``value`` as a float; weft.Error unless it is a finite number of ``least`` or more."""
    try:
        number = math.nan if is_unreadable(value) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if isinstance(value, (bool, str, bytes)) or not least <= number < math.inf:
        raise invalid(argument, shortened(value), f"a number, {least:g} or more")
    return number


def check_flags(**flags: object) -> None:
    """Refuse options that are neither True nor False (nor 1, 0 or None, which callers pass for them)."""
    for name, value in flags.items():
        if value is True or value is False:
            continue
        try:
            is_flag = not is_unreadable(value) and value in (None, False, True)
        except (TypeError, ValueError, RuntimeError):  # tensors and arrays of several elements
            is_flag = False
        if not is_flag:
            raise invalid(name, shortened(value), "True or False")


@dataclass(frozen=True)
class Config:
    """How many SMs a high-throughput call uses, and how many tokens it keeps in flight on each kind of link.

    Args:
        Positional or by keyword, all whole numbers from 1 to 65536.
        num_sms: SMs of the communication kernels; on the CPU a hint for the number of threads.
        num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens: tokens sent at a time, and room for
            tokens at the receiver, per channel over peer memory; send < recv.
        num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens: the same over the network; recv is
            rounded up to a multiple of send, and send <= recv / 2.
    Raises: weft.Error naming the argument.

    Weft sends rows straight to their final place, so the chunk sizes only steer hints and flow control; no
    value of them changes a result.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(
                self, field.name, check_integer(field.name, getattr(self, field.name), 1, MAX_SMS)
            )
        rdma_send = self.num_max_rdma_chunked_send_tokens
        rdma_recv = align(self.num_max_rdma_chunked_recv_tokens, rdma_send)
        object.__setattr__(self, "num_max_rdma_chunked_recv_tokens", rdma_recv)
        if self.num_max_nvl_chunked_send_tokens >= self.num_max_nvl_chunked_recv_tokens:
            raise invalid(
                "num_max_nvl_chunked_send_tokens",
                self.num_max_nvl_chunked_send_tokens,
                f"less than num_max_nvl_chunked_recv_tokens, {self.num_max_nvl_chunked_recv_tokens}",
            )
        if rdma_send > rdma_recv // 2:
            raise invalid(
                "num_max_rdma_chunked_send_tokens",
                rdma_send,
                f"at most half of num_max_rdma_chunked_recv_tokens, {rdma_recv}",
            )

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return ``num_nvl_bytes`` for rows of ``hidden_bytes`` among ``num_ranks`` >= 1 ranks."""
        hidden_bytes = check_integer("hidden_bytes", hidden_bytes, 0)
        num_ranks = check_integer("num_ranks", num_ranks, 1)
        num_local_ranks = min(num_ranks, _RANKS_PER_NODE)
        prefix_bytes = 4 * (2 * ceil_div(num_ranks, _RANKS_PER_NODE) + 3)
        row_bytes = hidden_bytes + _ROW_METADATA_BYTES
        queue_bytes = prefix_bytes + self.num_max_nvl_chunked_recv_tokens * row_bytes
        return align(self._num_channels() * num_local_ranks * queue_bytes, _BUFFER_ALIGNMENT_BYTES)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return ``num_rdma_bytes`` for rows of ``hidden_bytes``; 0 for up to 8 ranks: one node."""
        hidden_bytes = check_integer("hidden_bytes", hidden_bytes, 0)
        num_ranks = check_integer("num_ranks", num_ranks, 1)
        if num_ranks <= _RANKS_PER_NODE:
            return 0
        num_nodes = ceil_div(num_ranks, _RANKS_PER_NODE)
        row_bytes = hidden_bytes + _ROW_METADATA_BYTES + 16
        queue_bytes = 144 + 2 * self.num_max_rdma_chunked_recv_tokens * row_bytes
        return align(self._num_channels() * num_nodes * queue_bytes, _BUFFER_ALIGNMENT_BYTES)

    def _num_channels(self) -> int:
        return max(self.num_sms // 2, 1)


# (ranks up to, nvl send, nvl recv, rdma send, rdma recv); a rank count between two rows takes the larger.
_DISPATCH_TABLE = (
    (2, 24, 256, 6, 128),
    (4, 6, 256, 6, 128),
    (8, 6, 256, 6, 128),
    (16, 36, 288, 20, 128),
    (64, 32, 288, 8, 128),
    (96, 20, 480, 12, 128),
    (128, 20, 560, 12, 128),
    (144, 32, 720, 12, 128),
    (160, 28, 720, 12, 128),
)
_COMBINE_TABLE = (
    (2, 10, 256, 6, 128),
    (4, 9, 256, 6, 128),
    (8, 4, 256, 6, 128),
    (16, 4, 288, 12, 128),
    (64, 1, 288, 8, 128),
    (96, 1, 480, 8, 128),
    (128, 1, 560, 8, 128),
    (160, 2, 720, 8, 128),
)


def recommended_dispatch_config(num_ranks: int, num_sms: int = 20) -> Config:
    """Return the recommended dispatch configuration for any rank count of 1 or more."""
    return _recommended(_DISPATCH_TABLE, num_ranks, num_sms)


def recommended_combine_config(num_ranks: int, num_sms: int = 20) -> Config:
    """Return the recommended combine configuration for any rank count of 1 or more."""
    return _recommended(_COMBINE_TABLE, num_ranks, num_sms)


def _recommended(table: tuple[tuple[int, int, int, int, int], ...], num_ranks: int, num_sms: int) -> Config:
    num_ranks = check_integer("num_ranks", num_ranks, 1)
    row = next((row for row in table if num_ranks <= row[0]), table[-1])
    return Config(num_sms, *row[1:])


def low_latency_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """Return ``num_rdma_bytes`` of a buffer for low-latency calls of this shape.

    Args:
        num_max_dispatch_tokens_per_rank: most tokens that any rank dispatches in one call.
        hidden: elements of a row, counted as bf16.
        num_ranks, num_experts: of the whole group.
    Enough for up to 32 slots per token; for large shapes a small part of what DeepEP would ask for.
    """
    tokens = check_integer(
        "num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 0, MAX_LOW_LATENCY_TOKENS
    )
    hidden = check_integer("hidden", hidden, 1, 1 << 26)
    num_ranks = check_integer("num_ranks", num_ranks, 1, 1 << 14)
    experts = check_integer("num_experts", num_experts, 1, 1 << 26)
    need_bytes = _core.low_latency_hint_bytes(num_ranks, max(tokens, 1), _HINTED_TOP_K, experts, hidden)
    return align(int(need_bytes), _BUFFER_ALIGNMENT_BYTES)
