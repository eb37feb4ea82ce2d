# SPDX-License-Identifier: Apache-2.0
"""What low-latency calls of one signature have in common: it is checked and planned by the first of them, and kept.

    signature = (x.dtype, x.shape, ..., num_experts, use_fp8, ...)
    plan = engines.plans.get(signature) or engines.keep(signature, DispatchPlan(engine, sizes, form, ids, has_weights))
    filled = plan.new_outputs()
    plan.calls.run(x.data_ptr(), ..., stream, after, joins)      # one trip into the core

A signature holds everything but addresses that a check looks at, so a call whose signature is known has nothing left to
be refused for but where its tensors are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft import _core
from weft.moe.engine import Engine
from weft.moe.low_latency_dispatch import Filled, Sizes
from weft.moe.low_latency_formats import Format


class DispatchPlan:
    """A dispatch's form: sizes, format, what it fills, and the core's calls of it.

    Raises: weft.Error where sizes do not fit the buffer.
    """

    def __init__(
        self, engine: Engine, sizes: Sizes, form: Format, topk_idx: Tensor, has_weights: bool
    ) -> None:
        self.engine, self.sizes, self.form = engine, sizes, form
        self.num_tokens, self.top_k = topk_idx.shape
        self.ids_shape = (self.num_tokens, self.top_k)
        self.has_weights = has_weights
        rows = (sizes.local_experts, sizes.rows)
        self.rows_shape = (*rows, form.hidden)
        scale_strides = form.scale_strides(rows)
        self.calls: Any = engine.low_latency.plan_dispatch(
            max_tokens=sizes.max_tokens,
            tokens=self.num_tokens,
            top_k=self.top_k,
            experts=sizes.num_experts,
            id_bytes=topk_idx.element_size(),
            payload=form.payload,
            row_bytes=form.row_bytes,
            scale_bytes=form.scale_bytes,
            has_weights=has_weights,
            scale_expert_stride=scale_strides[0],
            scale_row_stride=scale_strides[1],
            scale_word_stride=scale_strides[2],
            tiled_scales=form.is_tiled,
        )
        words = int(
            engine.low_latency.routes_words(sizes.max_tokens, self.top_k, sizes.num_experts, has_weights)
        )
        i32, extras = torch.int32, ((torch.float32, torch.int32) if has_weights else ())
        make = engine.allocator
        self._rows = make((*rows, form.columns), form.row_type)
        self._scales = form.scale_allocator(engine, rows)
        self._src_info = make(rows, i32)
        self._layout_range = make((rows[0], sizes.num_ranks), torch.int64)
        self._counts = make((rows[0],), i32)
        self._extras = [make(rows, dtype) for dtype in extras]
        self._routes = make((words,), i32)

    def new_outputs(self) -> Filled:
        """Return new tensors for everything that a dispatch fills, for the stream that is current."""
        memory, scale_memory = self._rows(), None if self._scales is None else self._scales()
        return self.filled(memory, scale_memory, self._src_info(), self._layout_range(), self._counts())

    def outputs(self, given: tuple[Tensor | None, ...]) -> Filled:
        """Return the caller's rows, src_info, layout_range and counts, checked, or new ones instead of None."""
        makers = (self._rows, self._src_info, self._layout_range, self._counts)
        rows, *meta = (make() if mine is None else mine for mine, make in zip(given, makers, strict=True))
        return self.filled(rows, None if self._scales is None else self._scales(), *meta)

    def filled(
        self,
        memory: Tensor,
        scale_memory: Tensor | None,
        src_info: Tensor,
        layout_range: Tensor,
        counts: Tensor,
    ) -> Filled:
        """Return them with what only Weft makes, and as the caller sees them."""
        rows, scales = self.form.seen(memory, scale_memory)
        extras = tuple(make() for make in self._extras)
        return Filled(
            *(memory, scale_memory, rows, scales), src_info, layout_range, counts, extras, self._routes()
        )


class CombinePlan:
    """A combine's form, and the core's calls of it. Raises: weft.Error where sizes do not fit the buffer."""

    def __init__(self, engine: Engine, form: dict[str, int], out_shape: tuple[int, int]) -> None:
        self.engine = engine
        self.calls: Any = engine.low_latency.plan_combine(**form)
        self.new_output = engine.allocator(out_shape, torch.bfloat16)


REPLIES = {
    # (exact, use_logfmt)
    (False, False): int(_core.REPLY_REDUCED),
    (True, False): int(_core.REPLY_EXACT),
    (False, True): int(_core.REPLY_EXACT_LOG),
    (True, True): int(_core.REPLY_EXACT_LOG),
}
