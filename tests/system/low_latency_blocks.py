# SPDX-License-Identifier: Apache-2.0
"""Low-latency dispatch to MXFP8 and NVFP4 against the oracle, byte for byte, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import weft
from weft.testing import oracle
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank

BLOCK_TOKENS = 70  # of each rank at most: two ranks give more rows than one tile of scales has
BLOCK_CASES = [
    ("use_mxfp8", 128, False),
    ("use_mxfp8", 896, False),
    ("use_nvfp4", 64, False),
    ("use_nvfp4", 1024, False),
    ("use_nvfp4", 192, True),
]


def wide_x(case: MoeCase, rank: int) -> Tensor:
    """Return x with empty blocks, and with rows that are very large, very small and on the grid of FP4."""
    x = case.x(rank)
    for row, factor in enumerate((0.0, 1e20, 1e-20)):
        x[row : row + 1] *= factor
    x[:, :16] = 0
    grid = torch.tensor([0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5.0, 6.0]).bfloat16()
    x[3:4, 16:32] = grid.repeat(2)
    return x


def check_blocks(
    buffer: weft.Buffer,
    rank: Rank,
    case: MoeCase,
    form: str,
    exponents: bool,
    with_output: bool,
    device: str = "cpu",
) -> None:
    """Every byte that arrives is the oracle's, and combine takes what was dequantised."""
    me, hidden = rank.rank, case.hidden
    factor = 3.25
    everyone = [wide_x(case, r) for r in range(rank.size)]
    topk_idx, weights = case.topk_idx(me), case.topk_weights(me)
    options: dict[str, Any] = {form: True}
    if form == "use_nvfp4":
        options |= {"x_global_scale": torch.tensor([factor], device=device), "use_ue8m0_for_sf": exponents}
    local = len(oracle.local_experts(case.num_experts, rank.size, me))
    if with_output:
        columns, dtype = (hidden // 2, torch.uint8) if form == "use_nvfp4" else (hidden, torch.float8_e4m3fn)
        memory = torch.zeros((local, rank.size * BLOCK_TOKENS, columns), dtype=torch.uint8, device=device)
        memory = memory.view(dtype)
        options["out_packed_recv_x"] = memory
    (recv, scales), counts, handle, _, _ = buffer.low_latency_dispatch(
        everyone[me].to(device),
        topk_idx.to(device),
        BLOCK_TOKENS,
        case.num_experts,
        use_fp8=False,
        **options,
    )
    if with_output:
        assert recv.data_ptr() == memory.data_ptr()
    recv, counts = recv.cpu(), counts.cpu()
    src_info, ranges = handle[0].cpu(), handle[1].cpu()
    rows_per_expert = rank.size * BLOCK_TOKENS
    if form == "use_nvfp4":
        assert recv.shape == (rows_per_expert, hidden // 2, local)
        assert recv.dtype == torch.uint8
        tiles = -(-rows_per_expert // 128)
        assert scales.shape == (32, 4, tiles, 4, hidden // 64, local)
        assert scales.dtype == (torch.int8 if exponents else torch.float8_e4m3fn)
        recv = recv.permute(2, 0, 1)
        codes = torch.stack((recv & 15, recv >> 4), dim=-1).flatten(-2)
        flat = scales.contiguous().cpu().view(torch.uint8).permute(5, 2, 1, 0, 4, 3)
        flat = flat.reshape(local, tiles * 128, hidden // 16)[:, :rows_per_expert].contiguous()
        given = (
            (flat.int() << 23).view(torch.float32) if exponents else flat.view(torch.float8_e4m3fn).float()
        )
        quantised = [oracle.quantize_nvfp4(x, factor, exponents) for x in everyone]
        values = [oracle.fp4_values(q) for q, _ in quantised]
        block, unit = 16, 1 / factor
    else:
        assert recv.shape == (local, rows_per_expert, hidden)
        assert scales.stride()[1] == 1
        codes, given = recv.view(torch.uint8), oracle.unpack_ue8m0(scales.cpu())
        quantised = [oracle.quantize_mxfp8(x) for x in everyone]
        values = [q.float() for q, _ in quantised]
        quantised = [(q.view(torch.uint8), s) for q, s in quantised]
        block, unit = 32, 1.0
    restored = [
        v * s.repeat_interleave(block, dim=-1) * unit for v, (_, s) in zip(values, quantised, strict=True)
    ]
    y = torch.zeros((local, rows_per_expert, hidden), dtype=torch.bfloat16)
    segments = oracle.ll_dispatch(case.routes(), case.num_experts, me)
    for expert in range(local):
        assert counts[expert] == sum(len(tokens) for tokens in segments[expert])
        for source in range(rank.size):
            packed = int(ranges[expert, source])
            rows = slice(packed >> 32, (packed >> 32) + (packed & 0xFFFFFFFF))
            tokens = src_info[expert, rows].long()
            assert torch.equal(tokens.sort().values, segments[expert][source].sort().values)
            assert torch.equal(codes[expert, rows], quantised[source][0][tokens])
            assert torch.equal(given[expert, rows], quantised[source][1][tokens])
            y[expert, rows] = restored[source][tokens].bfloat16()
    combined, _, _ = buffer.low_latency_combine(y.to(device), topk_idx.to(device), weights.to(device), handle)
    slots = restored[me].bfloat16().unsqueeze(1).expand(-1, case.top_k, -1)
    expected = oracle.ll_combine(slots, topk_idx, weights)
    assert torch.allclose(combined.cpu().float(), expected.float(), rtol=0.02, atol=1e-30)
