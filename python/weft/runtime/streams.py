# SPDX-License-Identifier: Apache-2.0
"""torch's current CUDA stream as a number, for the core: without an object for it where torch has a way."""

from __future__ import annotations

from typing import Any

import torch

_raw: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _by_object(ordinal: int) -> int:
    return int(torch.cuda.current_stream(ordinal).cuda_stream)


# (ordinal of the device) -> the stream that is current there in this thread
current_stream: Any = _raw or _by_object

__all__ = ["current_stream"]
