# SPDX-License-Identifier: Apache-2.0
"""Signals of the kernels that make the rows of a low-latency combine: with ``overlap`` a row leaves once its
signal has come.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft import _core
from weft.errors import invalid
from weft.moe import arguments
from weft.moe.config import MAX_SMS, ceil_div, check_integer
from weft.moe.device_context import DeviceContext


def waits_for_loading(context: DeviceContext) -> bool:
    """Return whether the first launch of another kernel can wait for a combine, which itself waits for that kernel."""
    return context.is_cuda and bool(_core.cuda_loads_lazily())


@dataclass(frozen=True)
class Signals:
    """When rows that a combine sends are there. tensor: int32 or uint32 [Le, per_expert], each for so many rows."""

    tensor: Tensor | None
    value: int
    per_expert: int
    rows: int
    num_sms: int

    @property
    def key(self) -> tuple[int, ...]:
        """Return what a plan goes by, for signatures; nothing where there are none."""
        return () if self.tensor is None else (self.value, self.per_expert, self.rows, self.num_sms)


NO_SIGNALS = Signals(None, 0, 0, 0, 0)
_SIGNALS = (torch.int32, torch.uint32)
_MOST_SIGNAL = (1 << 31) - 1
# SMs of a combine that waits for other kernels, where its caller names no number: with all of them in use those kernels
# would find no room, and it would wait for ever. As many as SGLang leaves for communication on the GPUs with each kind.
_OVERLAP_SMS = 3  # signals block by block: Hopper
_OVERLAP_SMS_BY_EXPERT = 32  # an expert at a time: Blackwell


def check_signals(
    device: torch.device,
    rows_shape: tuple[int, int, int],
    src_signals: Tensor | None,
    src_signal_expect_value: int,
    comp_signal: Tensor | None,
    block_m: int,
    threshold: int,
    num_sms: int | None,
) -> Signals:
    """Return what low_latency_combine() was given with overlap. Raises: weft.Error naming the argument."""
    if (src_signals is None) == (comp_signal is None):
        both = src_signals is not None
        raise invalid(
            "overlap",
            f"True with {'both' if both else 'neither'} of src_signals and comp_signal",
            "one of them",
        )
    local, rows = rows_shape[:2]
    if src_signals is not None:
        value = check_integer("src_signal_expect_value", src_signal_expect_value, 0, _MOST_SIGNAL)
        tensor = arguments.check_tensor("src_signals", src_signals, (local,), _SIGNALS, device)
        sms = check_integer("num_sms", _OVERLAP_SMS_BY_EXPERT if num_sms is None else num_sms, 0, MAX_SMS)
        return Signals(tensor, value, 1, rows, sms)
    block = check_integer("block_m", block_m, 1, _MOST_SIGNAL)
    value = check_integer("threshold", threshold, 0, _MOST_SIGNAL)
    per_expert = ceil_div(rows, block)
    sms = check_integer("num_sms", _OVERLAP_SMS if num_sms is None else num_sms, 0, MAX_SMS)
    flat = (
        comp_signal.view(-1)
        if isinstance(comp_signal, Tensor) and comp_signal.is_contiguous()
        else comp_signal
    )
    tensor = arguments.check_tensor("comp_signal", flat, (local * per_expert,), _SIGNALS, device)
    return Signals(tensor, value, per_expert, block, sms)
