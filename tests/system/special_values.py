# SPDX-License-Identifier: Apache-2.0
"""Rows with NaN and infinities, there and back, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import weft
from weft.testing import oracle
from weft.testing.ranks import Rank

HIDDEN, TOKENS, MOST = 512, 4, 8
NAN, INF = float("nan"), float("inf")
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"use_fp8": False},
    "fp8": {},
    "rounded": {"round_scale": True},
    "ue8m0": {"round_scale": True, "use_ue8m0": True},
    "mxfp8": {"use_mxfp8": True},
    "nvfp4": {"use_nvfp4": True},
    "nvfp4 by exponents": {"use_nvfp4": True, "use_ue8m0_for_sf": True},
}
REPLIES: dict[str, dict[str, Any]] = {
    "default": {},
    "exact": {"exact": True},
    "logfmt": {"use_logfmt": True},
    "exact logfmt": {"use_logfmt": True, "exact": True},
}


def special_rows() -> Tensor:
    """Return bf16 [TOKENS, HIDDEN] below 1, whose first group has NaN, +inf, -inf, or all; the rest is plain."""
    x = (torch.arange(TOKENS * HIDDEN).view(TOKENS, HIDDEN) % 7 + 1).bfloat16() / 16
    x[0, 5] = NAN
    x[1, 6] = INF
    x[2, 7] = -INF
    x[3, 5], x[3, 40], x[3, 80] = NAN, INF, -INF
    return x


def _unpacked(recv: Any, options: dict[str, Any]) -> Tensor:
    """Return float32 [Le, rows, HIDDEN] of what came."""
    if isinstance(recv, Tensor):
        return recv.float().cpu()
    rows, scales = recv[0].cpu(), recv[1].cpu()
    if options.get("use_nvfp4"):
        local = rows.size(2)
        halves = rows.permute(2, 0, 1)
        values = oracle.fp4_values(torch.stack((halves & 15, halves >> 4), dim=-1).flatten(-2))
        flat = scales.contiguous().view(torch.uint8).permute(5, 2, 1, 0, 4, 3)
        flat = flat.reshape(local, -1, HIDDEN // 16)[:, : rows.size(0)].contiguous()
        if options.get("use_ue8m0_for_sf"):
            given = torch.where(flat == 255, NAN, (flat.int() << 23).view(torch.float32))
        else:
            given = flat.view(torch.float8_e4m3fn).float()
        return values * given.repeat_interleave(16, dim=-1)
    if options.get("use_mxfp8"):
        return rows.float() * oracle.unpack_ue8m0(scales).repeat_interleave(32, dim=-1)
    return oracle.dequantize_fp8(rows, scales)


def check_rows(buffer: weft.Buffer, rank: Rank, options: dict[str, Any], device: str = "cpu") -> None:
    """What arrives of special_rows(), in a format: NaN, infinities with their sign, groups beside as ever."""
    x, experts = special_rows(), rank.size
    ids = torch.full((TOKENS, 1), rank.rank)
    recv, _, handle, _, _ = buffer.low_latency_dispatch(
        x.to(device), ids.to(device), MOST, experts, **{"use_fp8": True, **options}
    )
    order = handle[0].cpu()[0, :TOKENS].long().argsort()
    came = _unpacked(recv, options)[0, :TOKENS][order]
    assert bool(came[x.isnan()].isnan().all()), options
    infinite = x.isinf()
    is_e4m3_block = bool(options.get("use_nvfp4")) and not options.get("use_ue8m0_for_sf")
    largest = 448 * 6.0 if is_e4m3_block else INF
    assert bool((came[infinite] == largest * x[infinite].float().sign()).all()), (options, came[infinite])
    beside = came[:, 128:], x[:, 128:].float()
    assert bool(((beside[0] - beside[1]).abs() <= beside[1] * 0.3).all())
    if options.get("use_fp8", True) or options.get("use_mxfp8"):
        alone = came[0, :32].isnan().nonzero().flatten().tolist()  # NaN alone spoils nothing beside it
        assert alone == [5] or options.get("use_nvfp4"), options


def check_replies(buffer: weft.Buffer, rank: Rank, options: dict[str, Any], device: str = "cpu") -> None:
    """What arrives of special_rows() as an expert's results, in a form of replies."""
    x, experts = special_rows(), rank.size
    ids = torch.full((TOKENS, 1), (rank.rank + 1) % rank.size)
    plain = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    recv, _, handle, _, _ = buffer.low_latency_dispatch(
        plain.to(device), ids.to(device), MOST, experts, use_fp8=False
    )
    y = torch.zeros_like(recv)
    y[0, :TOKENS] = x.to(device)[handle[0][0, :TOKENS].long()]
    weights = torch.ones(TOKENS, 1, device=device)
    combined, _, _ = buffer.low_latency_combine(y, ids.to(device), weights, handle, **options)
    came = combined.float().cpu()
    assert torch.equal(came.isnan(), x.isnan()), options
    assert torch.equal(came[x.isinf()], x[x.isinf()].float())
    finite = x.isfinite()
    assert bool(((came - x.float()).abs()[finite] <= x[finite].float() * 0.02).all())
