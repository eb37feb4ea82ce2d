# SPDX-License-Identifier: Apache-2.0
"""Tensors at addresses, streams and events at addresses: what UCCL-EP's extension is given.

memory = Memory(torch.device("cuda:0"))
with memory.in_order(stream_ptr, previous_event):
    memory.fill(out_ptr, memory.at(x_ptr, torch.bfloat16, tokens, hidden) * 2)
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from weft.errors import invalid
from weft.moe import events


class EventHandle(events.EventHandle):
    """``weft.EventHandle`` that takes streams as addresses, too."""

    def __init__(self, stream_ptr: int | torch.cuda.Stream | None = None) -> None:
        super().__init__(_stream(stream_ptr) if isinstance(stream_ptr, int) else stream_ptr)

    def current_stream_wait(self, stream_ptr: int | None = None) -> None:
        """Make the stream at that address, or the current one, wait for the event; the host goes on at once."""
        stream = None if stream_ptr is None else _stream(stream_ptr)
        if stream is None:
            super().current_stream_wait()
        else:
            self.stream_wait(stream)


def _stream(address: int) -> torch.cuda.Stream | None:
    return torch.cuda.ExternalStream(address) if torch.cuda.is_initialized() else None


class _Span:
    """Bytes on a CUDA device, for torch.as_tensor()."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Memory:
    """The memory of one device. Addresses are of contiguous tensors that the caller keeps alive."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def at(self, address: int, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return the tensor of that type and shape at an address. Raises: Error for null where there are elements."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(shape, dtype=dtype, device=self._device)
        if not address:
            raise invalid("address", "null", f"that of a {dtype} tensor of shape {list(shape)}")
        if self._device.type == "cuda":
            flat = torch.as_tensor(_Span(address, num_bytes), device=self._device)
        else:
            flat = torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)
        return flat.view(dtype).view(shape)

    def fill(self, address: int, made: Tensor) -> None:
        """Copy a tensor to an address, its elements in order."""
        if made.numel():
            self.at(address, made.dtype, *made.shape).copy_(made)

    @contextlib.contextmanager
    def in_order(self, stream: int, previous: events.EventHandle | None) -> Iterator[None]:
        """Work on the stream of that address, after an event if there is one. The CPU has no streams."""
        on: Any = contextlib.nullcontext()
        if self._device.type == "cuda" and stream != torch.cuda.current_stream().cuda_stream:
            on = torch.cuda.stream(_stream(stream))
        with on:
            if previous is not None:
                previous.current_stream_wait()
            yield
