# SPDX-License-Identifier: Apache-2.0
"""How rows travel in a low-latency dispatch, and the tensors in which they arrive. Shapes only; any thread.

    payload = find_format(hidden, use_fp8=True, round_scale=False, use_ue8m0=False)
    scales = payload.scale_memory((local_experts, rows_per_expert))

hidden channels H; L local experts, N rows of one of them at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft import _core
from weft.errors import invalid
from weft.moe import arguments
from weft.moe.config import ceil_div
from weft.moe.device_context import DeviceContext
from weft.runtime.allocation import TensorSpec, not_a_view, tensor_spec

SCALE_GROUP = 128  # channels that share an FP8 scale or a LogFMT range
_TILE_ROWS = 128  # of scales for matrix units
_BYTES_PER_WORD = 4


@dataclass(frozen=True)
class Format:
    """A payload of the core: bytes of a row and of its scales, and the types in which both arrive."""

    payload: int
    hidden: int
    row_bytes: int
    row_type: torch.dtype
    scale_bytes: int = 0
    scale_type: torch.dtype | None = None  # None: the rows have no scales
    is_tiled: bool = False

    @property
    def columns(self) -> int:
        """Elements of a row as it arrives."""
        return self.row_bytes // self.row_type.itemsize

    def scale_memory(self, shape: tuple[int, int]) -> TensorSpec | None:
        """Return the spec of the memory that scales of rows [L, N, ...] lie in; None where there are none.

        Words [L, N, n], column-major; or uint8 [L, tiles, n, 32, 4, 4] as matrix units take scales.
        """
        if self.scale_type is None:
            return None
        words = self.scale_bytes // _BYTES_PER_WORD
        if self.is_tiled:
            tiles = ceil_div(shape[1], _TILE_ROWS)
            return tensor_spec((shape[0], tiles, words, 32, 4, 4), torch.uint8)
        return tensor_spec((*shape, words), self.scale_type, self.scale_strides(shape))

    def scale_strides(self, shape: tuple[int, int]) -> tuple[int, int, int]:
        """Return words between experts, rows and words of that memory; 0 for rows and words of tiles."""
        words = self.scale_bytes // _BYTES_PER_WORD
        if self.is_tiled:
            return ceil_div(shape[1], _TILE_ROWS) * words * _TILE_ROWS, 0, 0
        return words * shape[1], 1, shape[1]

    def seen(self, rows: Tensor, scale_memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return rows and scales as the caller sees them."""
        if not self.is_tiled or scale_memory is None or self.scale_type is None:
            return rows, scale_memory
        scales = scale_memory.view(self.scale_type).permute(3, 4, 1, 5, 2, 0)
        return not_a_view(rows.permute(1, 2, 0)), not_a_view(scales)


def find_format(
    hidden: int,
    *,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    use_mxfp8: bool = False,
    use_nvfp4: bool = False,
    use_ue8m0_for_sf: bool = False,
) -> Format:
    """Return what low_latency_dispatch()'s options ask for. Raises: weft.Error where they don't go together.

    round_scale and use_ue8m0 are for FP8 alone: callers give them for a machine, whichever format a layer has.
    """
    if use_mxfp8 and use_nvfp4:
        raise invalid("use_mxfp8", "True with use_nvfp4", "one of the two")
    if use_ue8m0_for_sf and not use_nvfp4:
        raise invalid("use_ue8m0_for_sf", "True without use_nvfp4", "True with it")
    if use_nvfp4:
        return _format("nvfp4_exponent" if use_ue8m0_for_sf else "nvfp4", hidden)
    if use_mxfp8:
        return _format("mxfp8", hidden)
    if not use_fp8:
        return _format("copy", hidden)
    if use_ue8m0 and not round_scale:
        raise invalid("use_ue8m0", "True without round_scale", "True with it")
    return _format("fp8_exponent" if use_ue8m0 else "fp8_rounded" if round_scale else "fp8", hidden)


def _format(name: str, hidden: int) -> Format:
    """Return a format of kernels/moe/payload.h for rows of so many channels."""
    of: Any = _core.PAYLOADS[name]
    row_bytes = hidden * torch.bfloat16.itemsize // of["shrinks_by"]
    row_type = getattr(torch, of["row_type"])
    if not of["scale_type"]:
        return Format(of["number"], hidden, row_bytes, row_type)
    per_scale, scale_bytes = of["channels_per_scale"], of["bytes_of_scale"]
    if hidden % (per_word := per_scale * (_BYTES_PER_WORD // scale_bytes)):
        raise invalid("x", f"hidden {hidden}", f"a multiple of {per_word}, one word of scales")
    scale_type = getattr(torch, of["scale_type"])
    return Format(
        of["number"],
        hidden,
        row_bytes,
        row_type,
        hidden // per_scale * scale_bytes,
        scale_type,
        of["tiled_scales"],
    )


def check_output(
    context: DeviceContext, argument: str, given: object, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor | None:
    """Return the tensor that the caller wants filled, or None for a new one."""
    if given is None:
        return None
    return arguments.check_alignment(
        argument, arguments.check_tensor(argument, given, shape, (dtype,), context.device)
    )
