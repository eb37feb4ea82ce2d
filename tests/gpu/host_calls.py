# SPDX-License-Identifier: Apache-2.0
"""High-throughput calls of a buffer on a GPU that take and return tensors of the host, so that checks for CPU ranks run
on GPUs unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import weft


class HostCalls:
    """Calls of ``buffer``. What a call has returned, handles included, goes into the next one as it was."""

    def __init__(self, buffer: weft.Buffer) -> None:
        self._buffer = buffer
        self._returned: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of what the caller has

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._buffer, name)
        return self._with_host_tensors(value) if callable(value) else value

    def _with_host_tensors(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            result = call(*_mapped(args, self._to_device), **_mapped(options, self._to_device))
            return _mapped(result, self._to_host)

        return called

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._returned.get(id(tensor))
        return known[1] if known else tensor.to(self._buffer.device)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.cpu() if tensor.is_cuda else tensor.clone()
        self._returned[id(copy)] = (copy, tensor)  # both are kept, so no other tensor gets the number
        return copy


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(part, change) for name, part in value.items()}
    if isinstance(value, (list, tuple)):  # a handle is a tuple of tensors, too
        parts = [_mapped(part, change) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value
