# SPDX-License-Identifier: Apache-2.0
"""How rows travel in a low-latency dispatch, and the tensors in which they arrive. Shapes only; any thread.

    payload = find_format(hidden, use_fp8=True, round_scale=False, use_ue8m0=False)
    scales = payload.scale_memory((local_experts, rows_per_expert))

hidden channels H; L local experts, N rows of one of them at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft import _core
from weft.errors import invalid
from weft.moe import arguments
from weft.moe.config import ceil_div
from weft.moe.device_context import DeviceContext
from weft.runtime.allocation import TensorSpec, not_a_view, tensor_spec

SCALE_GROUP = 128  # channels that share an FP8 scale or a LogFMT range
_MX_BLOCK = 32
_NV_BLOCK = 16
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
    if use_mxfp8:
        _check_hidden(hidden, _MX_BLOCK * _BYTES_PER_WORD)
        return _fp8(_core.PAYLOAD_MXFP8, hidden, hidden // _MX_BLOCK, torch.int32)
    if use_nvfp4:
        _check_hidden(hidden, _NV_BLOCK * _BYTES_PER_WORD)
        payload = _core.PAYLOAD_NVFP4_EXPONENT if use_ue8m0_for_sf else _core.PAYLOAD_NVFP4
        scale_type = torch.int8 if use_ue8m0_for_sf else torch.float8_e4m3fn
        return Format(
            int(payload), hidden, hidden // 2, torch.uint8, hidden // _NV_BLOCK, scale_type, is_tiled=True
        )
    if not use_fp8:
        return Format(int(_core.PAYLOAD_COPY), hidden, hidden * 2, torch.bfloat16)
    if use_ue8m0 and not round_scale:
        raise invalid("use_ue8m0", "True without round_scale", "True with it")
    groups = hidden // SCALE_GROUP
    if use_ue8m0:
        _check_hidden(hidden, SCALE_GROUP * _BYTES_PER_WORD)
        return _fp8(_core.PAYLOAD_FP8_EXPONENT, hidden, groups, torch.int32)
    _check_hidden(hidden, SCALE_GROUP)
    payload = _core.PAYLOAD_FP8_ROUNDED if round_scale else _core.PAYLOAD_FP8
    return _fp8(payload, hidden, groups * torch.float32.itemsize, torch.float32)


def check_output(
    context: DeviceContext, argument: str, given: object, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor | None:
    """Return the tensor that the caller wants filled, or None for a new one."""
    if given is None:
        return None
    return arguments.check_alignment(
        argument, arguments.check_tensor(argument, given, shape, (dtype,), context.device)
    )


def _fp8(payload: int, hidden: int, scale_bytes: int, scale_type: torch.dtype) -> Format:
    return Format(int(payload), hidden, hidden, torch.float8_e4m3fn, scale_bytes, scale_type)


def _check_hidden(hidden: int, multiple: int) -> None:
    if hidden % multiple:
        raise invalid("x", f"hidden {hidden}", f"a multiple of {multiple}, one word of scales")
