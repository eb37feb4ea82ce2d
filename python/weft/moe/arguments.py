# SPDX-License-Identifier: Apache-2.0
"""Checks of a buffer's arguments; each raises weft.Error with the argument, its value and what is allowed.

    x = check_tensor("x", x, (num_tokens, "hidden"), (torch.bfloat16,), device)

Checks read shapes, types and addresses, and on the CPU also expert ids; they write nothing and never wait for
a GPU. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft import _core
from weft.errors import Error, invalid, shortened
from weft.moe.config import Config, ceil_div, check_flags, check_integer
from weft.runtime.tensors import unlike_memory

ROW_ALIGNMENT_BYTES = 16
IDS = (torch.int64, torch.int32)
SCALES = (torch.float32, torch.int32)
SUMMABLE = (torch.bfloat16, torch.float32)
MAX_TOP_K = 4096
MAX_EXPERTS_PER_RANK = 4096  # kMaxExpertsPerRank
MAX_ROWS = (1 << 31) - 1

Shape = tuple[int | str, ...]  # a name stands for any length


def describe(value: object) -> str:
    """Return what a caller gave, short enough for a message: type, shape and device of a tensor."""
    if isinstance(value, Tensor):
        if value.is_nested:  # it has no shape
            return f"a nested {_name(value.dtype)} tensor on {value.device}"
        text = f"{_name(value.dtype)}{list(value.shape)} on {value.device}"
        if value.layout != torch.strided:
            return f"{text}, {value.layout}"
        return text if value.is_contiguous() else f"{text} with strides {tuple(value.stride())}"
    return "None" if value is None else shortened(value)


def check_num_experts(value: object, num_ranks: int) -> int:
    """Return how many experts all ranks have together."""
    return check_integer("num_experts", value, 1, MAX_EXPERTS_PER_RANK * num_ranks)


def check_tensor(
    argument: str,
    value: object,
    shape: Shape,
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    contiguous: bool = True,
) -> Tensor:
    """Return value, a tensor of this shape, one of these types (none: any type) and this device."""
    good = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested
    if good:
        assert isinstance(value, Tensor)
        good = (
            value.dim() == len(shape)
            and all(isinstance(n, str) or n == size for n, size in zip(shape, value.shape, strict=True))
            and (not dtypes or value.dtype in dtypes)
            and value.device == device
            and (not contiguous or value.is_contiguous())
        )
    why = unlike_memory(value) if good and isinstance(value, Tensor) else ""
    if not good or why:
        types = " or ".join(_name(dtype) for dtype in dtypes)
        kind = "contiguous " if contiguous else ""
        sizes = ", ".join(str(n) for n in shape)
        allowed = f"{kind}{types}[{sizes}]" if types else f"a {kind}tensor [{sizes}]"
        given = f"{describe(value)}: {why}" if why else describe(value)
        raise invalid(argument, given, f"{allowed} on {device}")
    assert isinstance(value, Tensor)
    return value


def check_optional(
    argument: str, value: object, shape: Shape, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return value: None, or a contiguous tensor of this shape, type and device."""
    return None if value is None else check_tensor(argument, value, shape, (dtype,), device)


def check_rows(
    argument: str, value: object, num_rows: int | str, dtypes: Sequence[torch.dtype], device: torch.device
) -> Tensor:
    """Return value, rows that kernels can move: contiguous, whole 16-byte words, 16-byte aligned."""
    return check_row_bytes(argument, check_tensor(argument, value, (num_rows, "hidden"), dtypes, device))


def check_row_bytes(argument: str, rows: Tensor) -> Tensor:
    """Return rows, whose last dimension is of whole 16-byte words, and which begin at one."""
    row_bytes = rows.size(-1) * rows.element_size()
    if row_bytes == 0 or row_bytes % ROW_ALIGNMENT_BYTES or row_bytes >= 1 << 31:
        raise invalid(
            argument, f"rows of {row_bytes} bytes", "a multiple of 16 bytes, above 0 and below 2 GiB"
        )
    return check_alignment(argument, rows)


def check_alignment(argument: str, value: Tensor) -> Tensor:
    """Return value, which starts at an address that kernels can move 16 bytes from."""
    if value.data_ptr() % ROW_ALIGNMENT_BYTES:
        raise invalid(argument, f"address {value.data_ptr():#x}", "a 16-byte aligned address")
    return value


def check_apart(outputs: Mapping[str, Tensor | None], others: Mapping[str, Tensor | None]) -> None:
    """Refuse contiguous outputs that share memory with one another or with what the same call uses besides."""
    spans = {
        name: range(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        for name, tensor in {**others, **outputs}.items()
        if tensor is not None
    }
    for output in outputs:
        mine = spans.pop(output, range(0))
        for name, theirs in spans.items():
            if max(mine.start, theirs.start) < min(mine.stop, theirs.stop):
                raise invalid(output, f"memory that {name} uses too", "memory of its own")


def check_rows_with_scales(
    value: object, num_rows: int | str, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return (rows, scales or None) of x: a tensor, or a pair of rows and 4-byte scales in any strides."""
    if not isinstance(value, (tuple, list)):
        return check_rows("x", value, num_rows, (), device), None
    if len(value) != 2:
        raise invalid("x", f"a tuple of {len(value)}", "a tensor, or a tuple of rows and scales")
    rows = check_rows("x", value[0], num_rows, (), device)
    scales = check_tensor("x (scales)", value[1], (rows.size(0), "words"), SCALES, device, contiguous=False)
    if scales.size(1) == 0:
        raise invalid("x (scales)", describe(scales), "at least one scale per row")
    return rows, scales


def check_nvfp4_rows(
    value: Sequence[object], num_rows: int | str, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return (rows, scales) of x, a triple of NVFP4 rows: the global scale becomes the last scale of every row.

    value: (int32 [T, hidden / 8]: eight 4-bit channels each; int32 [T, hidden / 64]: four E4M3 scales each, of 16
    channels; float32 of one element, or one for each row, [T] or [T, 1]).
    """
    packed, scales, global_scale = value
    rows = check_rows("x", packed, num_rows, (torch.int32,), device)
    words = (rows.size(0), ceil_div(rows.size(1), 8))
    if rows.size(1) % 8:
        raise invalid(
            "x", describe(rows), "int32 rows of a multiple of 8 elements: 64 channels, one word of scales"
        )
    i32 = (torch.int32,)
    blocks = check_tensor("x (scales)", scales, words, i32, device, contiguous=False)
    if not isinstance(global_scale, Tensor) or global_scale.numel() not in (1, rows.size(0)):
        raise invalid("x (global scale)", describe(global_scale), f"float32 of 1 or {rows.size(0)} elements")
    check_tensor("x (global scale)", global_scale, tuple(global_scale.shape), (torch.float32,), device)
    column = global_scale.view(torch.int32).view(-1, 1).expand(rows.size(0), 1)
    return rows, torch.cat((blocks, column), dim=1)


def check_topk_idx(value: object, num_tokens: int | str, device: torch.device) -> Tensor:
    """Return value, expert ids [tokens, top_k] of 1 to MAX_TOP_K slots."""
    topk_idx = check_tensor("topk_idx", value, (num_tokens, "top_k"), IDS, device)
    if not 1 <= topk_idx.size(1) <= MAX_TOP_K:
        raise invalid("topk_idx", describe(topk_idx), f"1 to {MAX_TOP_K} slots per token")
    return topk_idx


def check_expert_ids(topk_idx: Tensor, num_experts: int) -> None:
    """Refuse ids outside [-1, num_experts). On CUDA kernels ignore them: a look would stall the stream."""
    if topk_idx.is_cpu and topk_idx.numel() > 0:
        _core.check_expert_ids(topk_idx.data_ptr(), topk_idx.element_size(), topk_idx.numel(), num_experts)


def check_distinct_experts(topk_idx: Tensor) -> None:
    """Refuse a token that names an expert twice. On CUDA that is not looked at: it would stall the stream."""
    if topk_idx.device.type == "cuda" or topk_idx.numel() == 0:
        return
    ids = topk_idx.sort(dim=1).values
    twice = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
    if twice.any():
        token = int(twice.any(dim=1).nonzero()[0])
        raise invalid("topk_idx", f"token {token} with an expert twice", "different experts, with do_expand")


def check_dtype(argument: str, value: object) -> torch.dtype:
    """Return value, a torch.dtype."""
    if not isinstance(value, torch.dtype):
        raise invalid(argument, describe(value), "a torch.dtype")
    return value


def check_shape(argument: str, value: Any) -> torch.Size:
    """Return value, a sequence of sizes of 0 or more."""
    try:
        return torch.Size([check_integer(argument, size, 0, MAX_ROWS) for size in value])
    except TypeError:
        raise invalid(argument, describe(value), "a sequence of sizes") from None


def group_size(group: Any) -> int:
    """Return how many ranks a torch process group has."""
    try:
        return int(group.size())
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise invalid("group", describe(group), "a torch.distributed process group") from None


def check_config(value: object) -> Config | None:
    """Return value, a Config or None."""
    if value is None or isinstance(value, Config):
        return value
    raise invalid("config", describe(value), "a Config or None")


def check_bias(
    value: object, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Return the tensors of combine's bias: none, one or two of the output's shape and type."""
    if value is None:
        return ()
    biases: Sequence[Any] = value if isinstance(value, (tuple, list)) else (value,)
    if len(biases) > 2:
        raise invalid("bias", f"{len(biases)} tensors", "None, a tensor or a tuple of two")
    return tuple(check_tensor("bias", bias, shape, (dtype,), device) for bias in biases if bias is not None)


def check_not_both(first: str, is_first: bool, second: str, is_second: bool) -> None:
    """Refuse two options that exclude each other, or are no options at all."""
    check_flags(**{first: is_first, second: is_second})
    if is_first and is_second:
        raise Error(f"{first}: got True together with {second}, allowed: one of the two")


def check_allocation(allocate_on_comm_stream: bool, previous_event: object, async_finish: bool) -> None:
    """Refuse outputs of the communication stream that nothing orders with the caller's."""
    if allocate_on_comm_stream is False and (async_finish is False or async_finish is True):
        return
    check_flags(allocate_on_comm_stream=allocate_on_comm_stream, async_finish=async_finish)
    if allocate_on_comm_stream and not (previous_event is not None and async_finish):
        raise invalid(
            "allocate_on_comm_stream",
            f"True with previous_event={describe(previous_event)}, async_finish={async_finish}",
            "True only together with a previous_event and async_finish",
        )


# () -> bool, without the function of Python in front of it
is_deterministic = getattr(
    torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)


def check_deterministic_fill(device: torch.device) -> None:
    """Refuse torch's filling of new tensors, which on CUDA overwrites what the communication stream wrote."""
    if device.type != "cuda" or not torch.are_deterministic_algorithms_enabled():
        return
    if torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
        raise invalid(
            "torch.utils.deterministic.fill_uninitialized_memory",
            "True with deterministic algorithms",
            "False",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
