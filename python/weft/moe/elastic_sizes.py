# SPDX-License-Identifier: Apache-2.0
"""How many bytes an ElasticBuffer asks for. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence

from weft import _core
from weft.errors import invalid
from weft.moe.config import MAX_BYTES, align, ceil_div, check_flags, check_integer

BUFFER_ALIGNMENT_BYTES = 2 << 20
MAX_HIDDEN = 1 << 28  # rows stay below 2 GiB, whatever their type
_HINTED_TOP_K = 32


def elastic_size_hint(
    num_ranks: int,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int = 0,
    use_fp8_dispatch: bool = False,
    allow_multiple_reduction: bool = True,
) -> int:
    """Return num_bytes for this shape on one node, by DeepEP's formula: callers compare the figures.

    num_topk 0 counts as 32.
    """
    check_flags(use_fp8_dispatch=use_fp8_dispatch, allow_multiple_reduction=allow_multiple_reduction)
    num_ranks = check_integer("num_ranks", num_ranks, 1)
    tokens = check_integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 0)
    hidden = check_integer("hidden", hidden, 0)
    top_k = check_integer("num_topk", num_topk, 0) or _HINTED_TOP_K
    scales = ceil_div(hidden, 32) if use_fp8_dispatch else 0
    element_bytes = 1 if use_fp8_dispatch else 2
    dispatch_row = align(hidden * element_bytes, 32) + align(4 * scales, 32) + align(12 * top_k + 4, 32)
    combine_row = align(2 * hidden, 32) + align(8 * top_k, 32)
    copies = min(num_ranks, top_k) if allow_multiple_reduction else top_k
    return align(
        max(dispatch_row * tokens * num_ranks, combine_row * tokens * copies), BUFFER_ALIGNMENT_BYTES
    )


def elastic_heap_bytes(
    ranks_of_nodes: Sequence[int],
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int = 0,
    use_fp8_dispatch: bool = False,
    allow_multiple_reduction: bool = True,
) -> int:
    """Return room for rows with which a first dispatch that waits for no counts need not grow the window.

    Such a call may be captured in a graph, where nothing can grow. num_topk 0 counts as 32. Where nodes differ, a rank
    of a small one adds up rows for several ranks of a large one.
    """
    num_ranks = sum(ranks_of_nodes)
    shape = (num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_multiple_reduction)
    wanted = elastic_size_hint(num_ranks, *shape)
    if wanted > MAX_BYTES:
        raise invalid(
            "num_max_tokens_per_rank", f"sizes that take {wanted} bytes", f"up to {MAX_BYTES} bytes"
        )
    top_k = num_topk or _HINTED_TOP_K
    row_format = _core.RowFormat(
        row_bytes=align(hidden * (1 if use_fp8_dispatch else 2), 16),
        scale_words=ceil_div(hidden, 32) if use_fp8_dispatch else 0,
        top_k=top_k,
        id_bytes=8,
        element=1 if use_fp8_dispatch else 2,
        combine_row_bytes=align(2 * hidden, 16) * (1 if allow_multiple_reduction else top_k),
    )
    served = max(
        sum(ceil_div(other, own) for other in ranks_of_nodes) for own in ranks_of_nodes
    )  # itself included
    staging_ranks = max(num_ranks, (max(ranks_of_nodes) - 1) * served)
    rows = num_ranks * num_max_tokens_per_rank
    return int(_core.worst_case_bytes(row_format, rows, staging_ranks * num_max_tokens_per_rank))
