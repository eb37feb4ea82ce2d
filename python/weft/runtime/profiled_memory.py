# SPDX-License-Identifier: Apache-2.0
"""Tells torch's profiler (profile_memory=True) of tensors' memory in a window, which no allocator of torch gave.

    told = profiled_memory.tell(address, num_bytes, device)      # False where nobody profiles
    if told:
        profiled_memory.tell(address, -num_bytes, device)        # as the memory goes back

Torch's allocators call c10::reportMemoryUsageToProfiler() for theirs. A torch that has no function of this form is told
nothing. Threads: any; torch notes it for the thread that calls.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd import profiler

_SYMBOL = (
    "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"  # (void*, int64_t, size_t, size_t, c10::Device)
)
_TYPES = {"cpu": 0, "cuda": 1}  # c10::DeviceType
_held: dict[torch.device, int] = {}  # bytes in windows that torch was told of


@functools.cache
def _report() -> Callable[..., None] | None:
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        report = getattr(ctypes.CDLL(str(library)), _SYMBOL)
    except (OSError, AttributeError):
        return None
    word = ctypes.c_size_t
    report.argtypes = (ctypes.c_void_p, ctypes.c_int64, word, word, ctypes.c_uint16)
    report.restype = None
    told: Callable[..., None] = report
    return told


def tell(address: int, num_bytes: int, device: torch.device) -> bool:
    """Tell of bytes that a tensor got at an address, or, negative, gave back; return whether torch was told."""
    if not profiler._is_profiler_enabled and num_bytes > 0:
        return False
    report, kind = _report(), _TYPES.get(device.type)
    if report is None or kind is None:
        return False
    held = _held[device] = _held.get(device, 0) + num_bytes
    if device.type == "cuda":
        held += torch.cuda.memory_allocated(device)
    index = 0xFF if device.index is None else device.index  # c10::Device: two bytes, -1 for none
    report(address, num_bytes, held, held, kind | index << 8)
    return True


__all__ = ["tell"]
