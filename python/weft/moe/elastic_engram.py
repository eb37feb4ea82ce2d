# SPDX-License-Identifier: Apache-2.0
"""Engram reads of an ElasticBuffer: entries of a table that is spread over the ranks, fetched by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft import _core
from weft.errors import Error, invalid
from weft.moe import arguments
from weft.moe.buffer_contexts import BufferContexts
from weft.moe.config import align, check_flags, check_integer
from weft.moe.device_context import address
from weft.moe.elastic_layout import column_major
from weft.moe.elastic_sizes import BUFFER_ALIGNMENT_BYTES
from weft.runtime import spans

Fetched = tuple[Tensor, Tensor | None]
_ENTRY_ALIGNMENT_BYTES = 32
_FP8 = torch.float8_e4m3fn


def table_bytes(
    num_entries: int, hidden: int, num_max_tokens_per_rank: int, dtype: torch.dtype
) -> tuple[int, int]:
    """Return what ElasticBuffer.get_engram_storage_size_hint() does."""
    arguments.check_dtype("dtype", dtype)
    entry_bytes = align(check_integer("hidden", hidden, 0) * dtype.itemsize, _ENTRY_ALIGNMENT_BYTES)
    fetched = entry_bytes * check_integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 0)
    stored = entry_bytes * check_integer("num_entries", num_entries, 0)
    return align(fetched, BUFFER_ALIGNMENT_BYTES), align(stored, BUFFER_ALIGNMENT_BYTES)


class EngramReads:
    """The table of one buffer. ElasticBuffer says what each call does."""

    def __init__(self, contexts: BufferContexts) -> None:
        self._contexts = contexts
        self._table: Any = None
        self._entry_type = torch.bfloat16
        self._entry_scales: Tensor | None = None

    def write(self, storage: Tensor, sf: Tensor | None) -> None:
        """Store this rank's entries."""
        context = self._contexts.alive()
        entries = arguments.check_tensor("storage", storage, ("entries", "hidden"), (), context.device)
        entry_bytes = entries.size(1) * entries.element_size()
        if entry_bytes == 0:
            raise invalid("storage", arguments.describe(storage), "entries of at least one element")
        if (sf is None) == (entries.dtype == _FP8):
            raise invalid("sf", arguments.describe(sf), "scales with float8_e4m3fn entries, None with others")
        if sf is not None:
            shape = (entries.size(0) * self._contexts.size, "words")
            arguments.check_tensor("sf", sf, shape, arguments.SCALES, context.device, contiguous=False)
        context.synchronize_current()
        table = self._table or _core.Engram.create(context.core)
        # All ranks have left the old entries alone when they meet here.
        table.resize(entries.size(0), entry_bytes, str(entries.dtype).removeprefix("torch."))
        if entries.size(0) > 0:
            torch.utils.dlpack.from_dlpack(table.local()).copy_(entries.view(torch.uint8).view(-1))
        context.synchronize_current()
        context.communicator.barrier()
        self._table, self._entry_type, self._entry_scales = table, entries.dtype, sf

    def fetch(
        self, indices: Tensor, num_qps: int, use_tma_aligned_col_major_sf: bool
    ) -> Callable[[], Fetched]:
        """Start to read entries; return the function that gives them."""
        context = self._contexts.alive()
        check_integer("num_qps", num_qps, 0)
        check_flags(use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf)
        if self._table is None:
            raise Error("engram_write: got no call yet, allowed: reads after it")
        ids = arguments.check_tensor("indices", indices, ("tokens", "entries"), arguments.IDS, context.device)
        table, total = self._table, int(self._table.entries_per_rank) * self._contexts.size
        if not context.is_cuda and ids.numel() > 0 and not (int(ids.min()) >= 0 and int(ids.max()) < total):
            worst = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            allowed = f"0 to {total - 1}" if total else "none: the table has no entries"
            raise invalid("indices", f"entry {worst}", allowed)
        context.begin(None)
        with context.on_comm_stream():
            hidden = int(table.row_bytes) // self._entry_type.itemsize
            data = context.empty(ids.size(0), ids.size(1) * hidden, dtype=self._entry_type)
            spans.run(
                "engram_fetch",
                table.fetch,
                indices=address(ids),
                id_bytes=ids.element_size(),
                count=ids.numel(),
                out=address(data),
                stream=context.stream,
            )
            scales = self._fetch_scales(ids, bool(use_tma_aligned_col_major_sf))
        event = context.finish(True, (ids,))
        context.hand_over([data, scales])

        def hook() -> Fetched:
            event.current_stream_wait()
            return data, scales

        return hook

    def drop(self) -> None:
        """Give the memory back."""
        self._table = self._entry_scales = None

    def _fetch_scales(self, ids: Tensor, is_column_major: bool) -> Tensor | None:
        if self._entry_scales is None:
            return None
        words = self._entry_scales.size(1)
        inside = ids.view(-1).clamp(0, max(self._entry_scales.size(0) - 1, 0))
        scales = self._entry_scales[inside].view(ids.size(0), ids.size(1) * words)
        return column_major(scales) if is_column_major else scales
