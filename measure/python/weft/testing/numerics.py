# SPDX-License-Identifier: Apache-2.0
"""Small numeric helpers of expert-parallel tests: differences, FP8 casts, hashes, routing tables.

Tensors may be on any device; results are on the same one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from weft.moe.config import align, ceil_div
from weft.testing.oracle import SCALE_GROUP, dequantize_fp8, quantize_fp8

__all__ = [
    "align",
    "calc_diff",
    "ceil_div",
    "count_bytes",
    "create_grouped_scores",
    "hash_tensor",
    "hash_tensors",
    "inplace_unique",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "safe_div",
]


def calc_diff(x: Tensor, y: Tensor) -> float:
    """Return 1 - the similarity of x + 1 and y + 1 in float64: 0 for equal tensors, always below 2."""
    if x.numel() == 0:
        return 0.0
    a, b = x.double() + 1, y.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def safe_div(a: float, b: float) -> float:
    """Return a / b, and 0 for 0 / 0."""
    return 0 if a == 0 and b == 0 else a / b


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (float8_e4m3fn like x [tokens, hidden], float32 scales [tokens, ceil(hidden / 128)])."""
    padding = align(x.size(1), SCALE_GROUP) - x.size(1)
    quantized, scales = quantize_fp8(torch.nn.functional.pad(x.float(), (0, padding)))
    return quantized[:, : x.size(1)].contiguous(), scales


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """Return bf16 x_fp8 * scale; scales are float32 per 128 channels, or int32 of packed exponents per 512.

    Scales of the same elements in rows of another length, as a client's view() makes them, are taken, too.
    """
    hidden = x_fp8.size(1)
    if x_scales.size(0) != x_fp8.size(0):
        x_scales = x_scales.reshape(x_fp8.size(0), -1)
    groups = x_scales.size(1) * (4 if x_scales.dtype == torch.int32 else 1)
    padded = torch.nn.functional.pad(x_fp8.float(), (0, groups * SCALE_GROUP - hidden))
    return dequantize_fp8(padded, x_scales)[:, :hidden].bfloat16()


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Replace each row of int x [rows, n] by its distinct ids of [0, num_slots), descending, -1 after them."""
    seen = torch.zeros((x.size(0), num_slots + 1), dtype=torch.bool, device=x.device)
    seen.scatter_(1, torch.where(x < 0, num_slots, x).long(), True)
    ids = torch.arange(num_slots, device=x.device).expand(x.size(0), -1)
    found = torch.where(seen[:, :num_slots], ids, -1).sort(dim=1, descending=True).values[:, : x.size(1)]
    x.fill_(-1)
    x[:, : found.size(1)] = found.to(x.dtype)


def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """Return scores [tokens, experts], zeroed outside the groups of experts in group_idx [tokens, n]."""
    chosen = torch.zeros((scores.size(0), num_groups), dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, group_idx.long(), True)
    per_group = scores.unflatten(1, (num_groups, -1))
    return torch.where(chosen.unsqueeze(2), per_group, torch.zeros_like(per_group)).flatten(1)


def hash_tensor(t: Tensor) -> int:
    """Return the sum of the tensor's bytes read as int32, zero-padded at the end."""
    raw = t.contiguous().flatten().view(torch.uint8)
    padded = torch.nn.functional.pad(raw, (0, -raw.numel() % 4))
    return int(padded.view(torch.int32).sum().item())


def hash_tensors(*nested: Any) -> int:
    """Return the exclusive or of the hashes of all tensors in nested lists and tuples; None counts nothing."""
    return reduce(lambda value, tensor: value ^ hash_tensor(tensor), _tensors_in(nested), 0)


def count_bytes(*nested: Any) -> int:
    """Return the bytes of all tensors in nested lists and tuples; None counts nothing."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors_in(nested))


def _tensors_in(nested: Any) -> Iterator[Tensor]:
    for item in nested:
        if isinstance(item, (list, tuple)):
            yield from _tensors_in(item)
        elif item is not None:
            yield item
