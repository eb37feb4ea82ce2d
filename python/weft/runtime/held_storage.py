# SPDX-License-Identifier: Apache-2.0
"""Storages of torch tensors that peers reach by their address, and that must not be resized meanwhile.

    held = HeldStorage(tensor, "registered with a transfer engine")
    tensor.resize_(1 << 20)          # weft.Error; so does resize_() of the storage
    held.is_in_place()               # False where C++ code of torch moved it all the same (out=)
    held.let_go()

The storage is kept, so that ``Tensor.set_`` and ``Tensor.data`` leave its memory alone. Torch has no count that would
forbid to resize it, so functions in front of torch's ``resize_`` and ``resize_as_`` look here first. Threads: any.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import torch

from weft import _core
from weft.errors import invalid

_lock = threading.Lock()
_held: dict[int, list[HeldStorage]] = {}  # by torch's object of the storage


class HeldStorage:
    """A tensor's storage until let_go(). why: what its memory is used for."""

    def __init__(self, tensor: torch.Tensor, why: str) -> None:
        self.why = why
        self.owner = _core.OwnerProcess()
        self._storage = tensor.untyped_storage()
        self._place = self._storage.data_ptr(), self._storage.nbytes()
        self._key = self._storage._cdata
        _watch_torch()
        with _lock:
            _held.setdefault(self._key, []).append(self)

    def is_in_place(self) -> bool:
        """Return whether its memory is where it was, and as much."""
        try:
            return (self._storage.data_ptr(), self._storage.nbytes()) == self._place
        except RuntimeError:  # freed, and torch says so
            return False

    def let_go(self) -> None:
        """Let anybody resize it. Idempotent."""
        with _lock:
            left = [held for held in _held.pop(self._key, []) if held is not self]
            if left:
                _held[self._key] = left


def refuse_held(storage: torch.UntypedStorage) -> None:
    """Raises: weft.Error that says what holds the storage, if anything of this process does."""
    for held in _held.get(storage._cdata, ()):
        if held.owner.is_this:  # a forked child has a copy of the memory, which no peer reaches
            raise invalid("resize_", f"a tensor whose storage is {held.why}", "after that has ended")


def _watch_torch() -> None:
    """Have torch's functions that resize a storage ask here first, from now on. Once is enough."""
    if getattr(torch.Tensor.resize_, "knows_held", False):
        return
    torchs_resize = torch.UntypedStorage.resize_

    @functools.wraps(torchs_resize)
    def resize_storage(self: torch.UntypedStorage, size: int) -> Any:
        if _held:
            refuse_held(self)
        return torchs_resize(self, size)

    torch.UntypedStorage.resize_ = resize_storage  # type: ignore[method-assign, assignment]
    torch.Tensor.resize_as_ = _asking_first(  # type: ignore[method-assign]
        torch.Tensor.resize_as_, lambda like, *_: like.shape
    )
    torch.Tensor.resize_ = _asking_first(  # type: ignore[method-assign]
        torch.Tensor.resize_, lambda *sizes: sizes[0] if isinstance(sizes[0], (tuple, list)) else sizes
    )


def _asking_first(resize: Any, shape_of: Callable[..., Any]) -> Any:
    """Return a tensor's function that resizes as one that does not move a held storage to make room."""

    @functools.wraps(resize)
    def call(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        if _held and self.layout is torch.strided and args:
            elems = self.storage_offset() + math.prod(shape_of(*args))
            if elems * self.element_size() > self.untyped_storage().nbytes():
                refuse_held(self.untyped_storage())
        return resize(self, *args, **options)

    call.knows_held = True  # type: ignore[attr-defined]
    return call


__all__ = ["HeldStorage", "refuse_held"]
