# SPDX-License-Identifier: Apache-2.0
"""Where bytes are: spans of memory behind Python objects, and lists of pages."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.errors import invalid

HOST = -1


@dataclass(frozen=True)
class Span:
    """Contiguous memory: ``bytes`` bytes at ``address``, on CUDA device ``device`` or the host (-1).

    ``owner`` is kept alive as long as the span is in use.
    """

    address: int
    bytes: int
    device: int = HOST
    owner: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Pages:
    """Equal pages of a registered memory: page i begins at ``offset + stride * indices[i]`` bytes.

    Args:
        indices: page numbers, paired in order with the other side's; or how many, for 0, 1, 2, ...
        stride: bytes from one page number to the next.
        offset: bytes before page number 0.
    """

    indices: Sequence[int] | int
    stride: int
    offset: int = 0

    def to_core(self) -> tuple[int, int, list[int], int]:
        """Return (offset, stride, indices, count) as the extension takes them."""
        if isinstance(self.indices, int):
            return (self.offset, self.stride, [], self.indices)
        return (self.offset, self.stride, [int(i) for i in self.indices], 0)


def span_of(source: Any) -> Span:
    """Return the memory behind a torch tensor, an array or any writable buffer.

    Args:
        source: a ``Span``; a contiguous torch tensor on the host or a CUDA device; an object with
            ``__cuda_array_interface__``; or anything with a writable, contiguous Python buffer (numpy arrays,
            ``bytearray``, ``memoryview``, ``mmap``).
    Raises: weft.Error naming what is wrong with it.
    """
    if isinstance(source, Span):
        return source
    if hasattr(source, "data_ptr") and hasattr(source, "is_contiguous"):
        return _span_of_tensor(source)
    if hasattr(source, "__cuda_array_interface__"):
        return _span_of_cuda_array(source)
    try:
        view = memoryview(source)
    except TypeError:
        raise invalid(
            "source", type(source).__name__, "a tensor, a writable buffer, or weft.transfer.Span"
        ) from None
    if view.readonly or not view.c_contiguous:
        raise invalid("source", "a read-only or strided buffer", "a writable, contiguous one")
    if view.nbytes == 0:
        raise invalid("source", "0 bytes", "1 or more")
    address = ctypes.addressof(ctypes.c_char.from_buffer(view.cast("B")))
    return Span(address, view.nbytes, HOST, (source, view))


def _span_of_tensor(tensor: Any) -> Span:
    if not tensor.is_contiguous():
        raise invalid("source", f"a tensor with strides {tuple(tensor.stride())}", "a contiguous one")
    kind = tensor.device.type
    if kind not in ("cpu", "cuda"):
        raise invalid("source", f"a tensor on {tensor.device}", "cpu or cuda")
    device = HOST if kind == "cpu" else int(tensor.device.index or 0)
    return Span(tensor.data_ptr(), tensor.numel() * tensor.element_size(), device, tensor)


def _span_of_cuda_array(array: Any) -> Span:
    described = array.__cuda_array_interface__
    if described.get("strides") is not None:
        raise invalid("source", "a strided CUDA array", "a contiguous one")
    elements = 1
    for extent in described["shape"]:
        elements *= extent
    item_bytes = int(described["typestr"][2:])
    device = int(getattr(getattr(array, "device", None), "id", 0))
    return Span(described["data"][0], elements * item_bytes, device, array)
