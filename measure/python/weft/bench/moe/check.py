# SPDX-License-Identifier: Apache-2.0
"""Whether what a call returned is right: compared with the oracle, which indexes every rank's input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.testing import oracle

FP8_RELATIVE = 2.0**-3  # e4m3 keeps 3 bits: half a step up is 2^-4 of a value, and scales round once more


_ROWS_AT_ONCE = 256  # whose numbers in double all ranks of a host hold together


class Mismatch(AssertionError):
    """A result differs from the oracle's; the message says which and where."""


def make_rows(rank: int, tokens: int, hidden: int, seed: int) -> Tensor:
    """Return bf16[tokens, hidden] of ``rank``; any rank can make any other's."""
    generator = torch.Generator().manual_seed(seed * 4099 + rank)
    return torch.randn(tokens, hidden, generator=generator).bfloat16()


def make_weights(rank: int, tokens: int, top_k: int, seed: int) -> Tensor:
    """Return float32[tokens, top_k] of ``rank``, each row summing to 1."""
    generator = torch.Generator().manual_seed(seed * 8209 + rank)
    return torch.rand(tokens, top_k, generator=generator).softmax(dim=1)


def rank_factor(rank: int) -> float:
    """Return the power of two by which a rank scales the rows it sends back, so that sums tell ranks apart.

    Powers of two spread over 2^4 times bf16's 8 bits, over at most 64 ranks, sum exactly in float32 in any
    order.
    """
    return 2.0 ** (rank % 5 - 2)


def check_ht_dispatch(
    received: Any, inputs: list[Tensor], weights: list[Tensor], routes: list[Tensor], experts: int, rank: int
) -> None:
    """Check rows (bf16, or fp8 with scales), local experts, weights and counts. Raises: Mismatch."""
    rows, topk_idx, topk_weights, counts = received[:4]
    wanted = oracle.ht_dispatch(routes, experts, rank)
    count = wanted.topk_idx.shape[0]
    _equal("recv_topk_idx", topk_idx[:count].cpu(), wanted.topk_idx)
    _equal("recv_topk_weights", topk_weights[:count].cpu(), wanted.take_weights(weights))
    if counts:
        _equal("counts", torch.tensor(counts), torch.tensor(wanted.per_expert))
    if isinstance(rows, tuple):
        quantized = [oracle.quantize_fp8(x) for x in inputs]
        q = wanted.take([q.view(torch.uint8) for q, _ in quantized])
        _equal("recv_x", rows[0][:count].view(torch.uint8).cpu(), q)
        _equal("recv scales", rows[1][:count].cpu(), wanted.take([scales for _, scales in quantized]))
    else:
        _equal("recv_x", rows[:count].cpu(), wanted.take(inputs))


def check_ht_combine(
    combined: Tensor, x: Tensor, topk_idx: Tensor, experts: int, num_ranks: int, ranks_per_node: int
) -> None:
    """Check the sum of rows that each rank scaled by its ``rank_factor``, each node's rounded. Raises: Mismatch."""
    in_rank = oracle.layout(topk_idx, experts, num_ranks)[2]
    factors = in_rank.float() * torch.tensor([rank_factor(rank) for rank in range(num_ranks)])
    of_nodes = [part.sum(dim=1, keepdim=True) for part in factors.split(ranks_per_node, dim=1)]
    total = sum(
        ((x.float() * of_node).bfloat16().float() for of_node in of_nodes), torch.zeros_like(x.float())
    )
    _equal("combined_x", combined.cpu(), total.bfloat16())


def check_ll_dispatch(
    result: Any, inputs: list[Tensor], routes: list[Tensor], experts: int, rank: int
) -> None:
    """Check counts, sources and rows of every (expert, source rank) segment. Raises: Mismatch."""
    rows, counts, handle = result
    source, layout = handle[0].cpu(), handle[1].cpu()
    values = dequantized(rows).cpu()
    is_fp8 = isinstance(rows, tuple)
    for expert, by_source in enumerate(oracle.ll_dispatch(routes, experts, rank)):
        _equal(f"recv_count[{expert}]", counts[expert].cpu().long(), torch.tensor(sum(map(len, by_source))))
        for peer, tokens in enumerate(by_source):
            packed = int(layout[expert, peer])
            count, begin = packed & 0xFFFFFFFF, packed >> 32
            segment = source[expert, begin : begin + count].long()
            _equal(f"sources[{expert}, {peer}]", segment.sort().values, tokens.sort().values)
            got, wanted = values[expert, begin : begin + count], inputs[peer][segment].float()
            _rows_match(f"recv_x[{expert}, {peer}]", got, wanted, is_fp8)


def check_p2p_dispatch(
    rows: Any, inputs: list[Tensor], routes: list[Tensor], experts: int, rank: int
) -> None:
    """Check counts, sources and packed rows of every expert. Raises: Mismatch."""
    begin = 0
    for expert, by_source in enumerate(oracle.ll_dispatch(routes, experts, rank)):
        count = sum(map(len, by_source))
        _equal(f"num_tokens[{expert}]", rows.num_tokens[expert].cpu().long(), torch.tensor(count))
        place = slice(begin, begin + count)
        begin += count
        sources = torch.repeat_interleave(torch.tensor([len(tokens) for tokens in by_source]))
        _equal(f"src_rank[{expert}]", rows.src_rank[place].cpu().long(), sources)
        tokens = torch.cat([*by_source, torch.zeros(0, dtype=torch.int64)])
        _equal(f"src_token[{expert}]", rows.src_token[place].cpu().long(), tokens)
        held = rows.x[place] if rows.x_scale is None else (rows.x[place], rows.x_scale[place])
        values = [inputs[peer][of_peer].float() for peer, of_peer in enumerate(by_source)]
        _rows_match(f"x[{expert}]", dequantized(held).cpu(), torch.cat(values), rows.x_scale is not None)


def check_ll_combine(
    combined: Tensor, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, is_fp8: bool
) -> None:
    """Check the weighted sum of rows that came back as they arrived. Raises: Mismatch."""
    total = topk_weights.masked_fill(topk_idx < 0, 0.0).sum(dim=1, keepdim=True)
    limit = 1e-2 if is_fp8 else 1e-5
    product, squares = 0.0, 1e-30
    for got, row, weight in zip(*(rows.split(_ROWS_AT_ONCE) for rows in (combined, x, total)), strict=True):
        a, b = got.cpu().double() + 1, (row.float() * weight).double() + 1
        product += (a * b).sum().item()
        squares += (a * a + b * b).sum().item()
    difference = 1 - 2 * product / squares
    if combined.numel() and not difference <= limit:
        raise Mismatch(f"combined_x: differs by {difference:.2e}, allowed {limit:.0e}")


def dequantized(rows: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Return float32 of bf16 rows, or of fp8 rows and their scales."""
    return oracle.dequantize_fp8(*rows) if isinstance(rows, tuple) else rows.float()


def _rows_match(name: str, got: Tensor, wanted: Tensor, is_fp8: bool) -> None:
    if not is_fp8:
        return _equal(name, got, wanted)
    group_max = wanted.abs().unflatten(-1, (-1, 128)).amax(-1).repeat_interleave(128, dim=-1)
    allowed = wanted.abs() * FP8_RELATIVE + group_max * 2.0**-9
    wrong = (got - wanted).abs() > allowed
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise Mismatch(f"{name}: {int(wrong.sum())} values off, first at {at}")
    return None


def _equal(name: str, got: Tensor, wanted: Tensor) -> None:
    if got.shape != wanted.shape:
        raise Mismatch(f"{name}: shape {list(got.shape)}, expected {list(wanted.shape)}")
    if not torch.equal(got, wanted):
        wrong = (got != wanted).nonzero()
        at = tuple(wrong[0].tolist()) if wrong.numel() else ()
        raise Mismatch(f"{name}{list(at)}: {got[at]}, expected {wanted[at]}; {len(wrong)} values differ")
