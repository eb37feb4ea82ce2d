# SPDX-License-Identifier: Apache-2.0
"""Where bytes are: spans of memory behind Python objects, and lists of pages."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weft import _core
from weft.errors import invalid, quoted
from weft.runtime.tensors import PLAIN, index_of, unlike_memory

HOST = -1


@dataclass(frozen=True)
class Span:
    """Contiguous memory: ``bytes`` bytes at ``address``, on CUDA device ``device`` or the host (-1).

    ``owner`` is kept alive as long as the span is in use. ``is_read_only``: nothing may write there, so that it is a
    source alone.
    """

    address: int
    bytes: int
    device: int = HOST
    owner: Any = field(default=None, compare=False, repr=False)
    is_read_only: bool = False


class HeldSpan:
    """The owner of a span of registered memory, which stays where it is until let_go()."""

    def __init__(self, span: Span) -> None:
        self.span = span
        source = span.owner[0] if isinstance(span.owner, tuple) else span.owner
        # Others, such as bytearray and mmap, refuse to be resized while there is a view of them.
        self._array = source if type(source).__module__ == "numpy" else None
        self._storage: Any = None
        if hasattr(source, "untyped_storage"):
            from weft.runtime.held_storage import HeldStorage

            self._storage = HeldStorage(source, "registered with a transfer engine")

    def is_in_place(self) -> bool:
        """Return whether the memory is still in place: torch and numpy can move it without asking."""
        if self._array is not None:
            return bool(
                self._array.ctypes.data == self.span.address and self._array.nbytes == self.span.bytes
            )
        return self._storage is None or bool(self._storage.is_in_place())

    def let_go(self) -> None:
        """Release the memory: its owner may move or free it. Idempotent."""
        if self._storage is not None:
            self._storage.let_go()


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
        """Return (offset, stride, indices, count) as the extension takes them.

        Raises: weft.Error for negative numbers and for indices that are no whole numbers below 2**32.
        """
        offset, stride = whole("offset", self.offset), whole("stride", self.stride)
        if isinstance(self.indices, int):
            return (offset, stride, [], whole("indices", self.indices, 1 << 32))
        try:
            indices = list(map(operator.index, self.indices))
        except TypeError:
            raise invalid("indices", "something else", "whole numbers") from None
        if indices and not 0 <= min(indices) <= max(indices) < 1 << 32:
            raise invalid("indices", f"{min(indices)} to {max(indices)}", "0 to 4294967295")
        return (offset, stride, indices, 0)


def whole(argument: str, value: object, largest: int = (1 << 63) - 1) -> int:
    """Return ``value`` as an integer from 0 to ``largest``. Raises: weft.Error for anything else."""
    number = index_of(value)
    if number is None:
        raise invalid(argument, quoted(value), "a whole number")
    if not 0 <= number <= largest:
        raise invalid(argument, number, f"0 to {largest}")
    return number


def span_of(source: Any) -> Span:
    """Return the memory behind a torch tensor, an array or any buffer.

    Args:
        source: a ``Span``; a contiguous torch tensor on the host or a CUDA device; an object with
            ``__cuda_array_interface__``; or anything with a contiguous Python buffer (numpy arrays, ``bytearray``,
            ``bytes``, ``memoryview``, ``mmap``), which may be read-only.
    Raises: weft.Error naming what is wrong with it.
    """
    span = _span_of_any(source)
    whole("address", span.address)
    if index_of(span.device) != HOST:
        whole("device", span.device, 1 << 16)
    if whole("bytes", span.bytes) == 0:
        raise invalid("source", "0 bytes", "1 or more")
    return span


def _span_of_any(source: Any) -> Span:
    if isinstance(source, Span):
        return source
    if hasattr(source, "data_ptr") and hasattr(source, "is_contiguous"):
        return _span_of_tensor(source)
    if hasattr(source, "__cuda_array_interface__"):
        return _span_of_cuda_array(source)
    try:
        view = memoryview(source)
    except TypeError:
        raise invalid("source", type(source).__name__, "a tensor, a buffer, or weft.transfer.Span") from None
    if not view.c_contiguous:
        raise invalid("source", "a strided buffer", "a contiguous one")
    return Span(_core.buffer_address(view), view.nbytes, HOST, (source, view), view.readonly)


def _span_of_tensor(tensor: Any) -> Span:
    kind = tensor.device.type
    if kind not in ("cpu", "cuda"):
        raise invalid("source", f"a tensor on {tensor.device}", "cpu or cuda")
    if why := unlike_memory(tensor):
        raise invalid("source", why, PLAIN)
    if not tensor.is_contiguous():
        raise invalid("source", f"a tensor with strides {tuple(tensor.stride())}", "a contiguous one")
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
    address, is_read_only = described["data"]
    return Span(address, elements * item_bytes, device, array, bool(is_read_only))
