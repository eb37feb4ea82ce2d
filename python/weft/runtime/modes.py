# SPDX-License-Identifier: Apache-2.0
"""Public calls without the caller's torch function modes, which would see every size() and data_ptr() of Weft's own.

    @outside_modes
    def dispatch(self, x): ...

``torch.set_default_device`` is such a mode, and DeepEP's tests set it: each torch function then costs a call of Python
more, some 30 of them in a low-latency pair. Calls of Weft name the device of all that they make, so nothing else
changes. Without a mode the decorator costs one look. Nothing here is about subclasses: they are refused before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _no_modes() -> bool:
    return False


# Of torch 2.4 to 2.11; a torch without it has its modes called.
are_modes_on: Callable[[], bool] = getattr(torch._C, "_is_torch_function_mode_enabled", _no_modes)


def outside_modes(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a public call. Threads: any; modes belong to a thread."""

    @functools.wraps(call)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not are_modes_on():
            return call(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return call(*args, **kwargs)

    return run
