# SPDX-License-Identifier: Apache-2.0
"""Large results on the CPU reuse the memory of earlier results that nobody has any more.

    rows = HostMemory().empty((4096, 7168), torch.bfloat16)

The system clears fresh memory when it is first written, which takes as long as writing a result into it, and the C
library gives large pieces back to the system as soon as they are free. So the storages of the last results are kept
here, beside whoever has the tensors, and used again once nobody else has them. A result is an ordinary tensor: torch
allocated its storage, which can be resized, and which it shares with no other result that is alive. A storage that was
moved to shared memory, as torch.multiprocessing does with what it sends, is not used again: others may have it.
Threads: any; tensors may die in any thread.
"""

from __future__ import annotations

import math
import sys
import threading

import torch

from weft.runtime.allocation import new_on_host, strides_in_order

LARGE_BYTES = 2 << 20  # smaller pieces the C library keeps itself
_MOST_REMEMBERED = 6  # storages that are remembered; older ones belong to their tensors alone
_MOST_SPARE = 3  # of these, that nobody else has: a call's results, and those of the call before it
_MOST_WASTE = 1.25

# How many C++ objects have a storage, its one Python object included; where torch does not tell, every result gets
# fresh memory. And how many references a list alone makes of that Python object.
_holders = getattr(torch._C, "_storage_Use_Count", None)
_one = [torch.UntypedStorage(0)]
_SOLE_HOLDER = sys.getrefcount(_one[0])


class HostMemory:
    """Allocates results on the CPU, and uses up to three storages that are free again for the next results."""

    def __init__(self) -> None:
        self._results: list[torch.UntypedStorage] = []  # oldest first
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor, whose storage may be larger by a quarter."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < LARGE_BYTES or _holders is None:
            return new_on_host(shape, strides_in_order(shape), dtype)
        storage = self._take(num_bytes)
        if storage is None:
            storage = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
        result = torch.empty(0, dtype=dtype, device="cpu").set_(storage).resize_(shape)
        with self._lock:
            self._results = [*self._results[1 - _MOST_REMEMBERED :], storage]
        return result

    def strided(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the same with strides, in elements, that leave no gaps."""
        if strides == strides_in_order(shape):
            return self.empty(shape, dtype)
        return self.empty((math.prod(shape),), dtype).as_strided(shape, strides)

    def _take(self, num_bytes: int) -> torch.UntypedStorage | None:
        """Return a spare storage that fits, which nobody else can find any more, or None."""
        with self._lock:
            self._results = [storage for storage in self._results if not storage.is_shared()]
            spare = [i for i in range(len(self._results)) if self._is_spare(i)]
            for i in reversed(spare[:-_MOST_SPARE]):
                del self._results[i]
            for i in range(len(self._results)):
                fits = num_bytes <= self._results[i].nbytes() <= num_bytes * _MOST_WASTE
                if fits and self._is_spare(i):
                    return self._results.pop(i)
        return None

    def _is_spare(self, i: int) -> bool:
        assert _holders is not None
        return _holders(self._results[i]._cdata) == 1 and sys.getrefcount(self._results[i]) == _SOLE_HOLDER
