# SPDX-License-Identifier: Apache-2.0
"""Large results on the CPU lie where earlier ones lay that are gone.

    rows = HostMemory().empty((4096, 7168), torch.bfloat16)

The system clears fresh memory when it is first written, which takes as long as writing a result into it, and the C
library gives large pieces back to the system as soon as they are free.
Threads: any; tensors may die in any thread.
"""

from __future__ import annotations

import math
import weakref

import torch

_LARGE_BYTES = 2 << 20  # smaller pieces the C library keeps itself
_MOST_SPARE = 3  # pieces: a call's results, and those of the call before it
_MOST_WASTE = 1.25


class HostMemory:
    """Allocates results on the CPU, and keeps up to three pieces that were given back, for the next results."""

    def __init__(self) -> None:
        self._spare: dict[int, torch.Tensor] = {}  # by address, oldest first; who pops one has it

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor; like that of received rows its storage can't be resized.

        The memory is spare again when the last tensor that shares it is gone.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LARGE_BYTES:
            return torch.empty(shape, dtype=dtype)
        piece = self._take(num_bytes)
        if piece is None:
            piece = torch.empty(num_bytes, dtype=torch.uint8)
        lent = piece.numpy().data[:num_bytes]
        weakref.finalize(lent, self._give, piece).atexit = False
        storage = torch.frombuffer(lent, dtype=torch.uint8).untyped_storage()  # which keeps `lent`
        return torch.empty(0, dtype=dtype).set_(storage).resize_(shape)

    def _take(self, num_bytes: int) -> torch.Tensor | None:
        for address, piece in list(self._spare.items()):
            if (
                num_bytes <= piece.numel() <= num_bytes * _MOST_WASTE
                and self._spare.pop(address, None) is not None
            ):
                return piece
        return None

    def _give(self, piece: torch.Tensor) -> None:
        self._spare[piece.data_ptr()] = piece
        for address in list(self._spare)[:-_MOST_SPARE]:
            self._spare.pop(address, None)
