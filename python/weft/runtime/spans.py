# SPDX-License-Identifier: Apache-2.0
"""Calls as spans: of torch's profiler while one runs, and as NVTX ranges where WEFT_NVTX=1 asks for them.

    spans.run("all_reduce", planned.run, source, target, stream)
    if profiler._is_profiler_enabled or spans.NVTX:          # the same where every 50 ns count
        run = spans.around("all_reduce", run)

A span lasts as long as the host is in the core: on the CPU the whole call, on a GPU until it is enqueued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler

from weft import _core
from weft.errors import Error


def _find_nvtx() -> Any:
    if not _core.config().nvtx:
        return None
    if not hasattr(torch._C, "_nvtx"):
        raise Error("WEFT_NVTX: got 1, allowed: with a torch that has NVTX, one for CUDA", "unsupported")
    return torch.cuda.nvtx


NVTX = _find_nvtx()


def around(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call`` in a span ``weft::name``."""
    label = f"weft::{name}"

    def spanned(*args: Any, **kwargs: Any) -> Any:
        if NVTX:
            NVTX.range_push(label)
        try:
            with profiler.record_function(label):
                return call(*args, **kwargs)
        finally:
            if NVTX:
                NVTX.range_pop()

    return spanned


def run(name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it, in a span if somebody watches."""
    if profiler._is_profiler_enabled or NVTX:
        call = around(name, call)
    return call(*args, **kwargs)
