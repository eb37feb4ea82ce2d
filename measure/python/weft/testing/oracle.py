# SPDX-License-Identifier: Apache-2.0
"""What dispatch and combine must return, computed the obvious way: hold every rank's input and index it.

    rows = ht_dispatch(routes, num_experts, rank=2)           # who sends what to rank 2, in order
    assert torch.equal(recv_x, rows.take(all_x))
    combined = ht_combine(all_y, routes, num_experts, rank=2)

``routes`` is a list over ranks of int [tokens, top_k] expert ids, -1 for an empty slot; other lists are over
ranks too. Experts are owned in blocks of ceil(experts / ranks); the last ranks own fewer, or none.
Everything is on the CPU and independent of the rest of Weft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_MAX = 448.0
SCALE_GROUP = 128  # channels that share an FP8 scale or a LogFMT range


def local_experts(num_experts: int, num_ranks: int, rank: int) -> range:
    """Return the ids of the experts that ``rank`` owns."""
    block = -(-num_experts // num_ranks)
    return range(min(rank * block, num_experts), min((rank + 1) * block, num_experts))


def layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens per rank i32[ranks], slots per expert i32[experts], in rank bool[tokens, ranks])."""
    in_rank = torch.zeros((topk_idx.size(0), num_ranks), dtype=torch.bool)
    for rank in range(num_ranks):
        in_rank[:, rank] = _is_local(topk_idx, num_experts, num_ranks, rank).any(dim=1)
    chosen = topk_idx[topk_idx >= 0].long()
    per_expert = torch.bincount(chosen, minlength=num_experts).to(torch.int32)
    return in_rank.sum(dim=0, dtype=torch.int32), per_expert, in_rank


def _is_local(topk_idx: Tensor, num_experts: int, num_ranks: int, rank: int) -> Tensor:
    experts = local_experts(num_experts, num_ranks, rank)
    return (topk_idx >= experts.start) & (topk_idx < experts.stop)


@dataclass(frozen=True)
class Rows:
    """What one rank receives in high-throughput mode, in order: source rank major, source token minor.

    src_rank, src_token: int64[received].
    topk_idx: int64[received, top_k], local expert ids, -1 elsewhere; is_local is where it is not -1.
    per_expert: slots per local expert.
    per_source: int64[ranks], rows from each rank.
    """

    src_rank: Tensor
    src_token: Tensor
    topk_idx: Tensor
    per_expert: list[int]
    per_source: Tensor

    def take(self, inputs: list[Tensor]) -> Tensor:
        """Return the received rows of ``inputs``, one [tokens, ...] tensor per source rank."""
        starts = torch.tensor([0] + [x.size(0) for x in inputs[:-1]]).cumsum(0)
        return torch.cat(inputs)[starts[self.src_rank] + self.src_token]

    def take_weights(self, topk_weights: list[Tensor]) -> Tensor:
        """Return the received routing weights: float32[received, top_k], 0 where the expert is elsewhere."""
        return self.take(topk_weights).masked_fill(self.topk_idx < 0, 0.0)


def ht_dispatch(routes: list[Tensor], num_experts: int, rank: int) -> Rows:
    """Return what ``rank`` receives: one row per token that chose at least one of its experts."""
    src_rank, src_token, idx = [], [], []
    for source, topk_idx in enumerate(routes):
        local = _is_local(topk_idx, num_experts, len(routes), rank)
        tokens = local.any(dim=1).nonzero().flatten()
        first = local_experts(num_experts, len(routes), rank).start
        src_rank.append(torch.full_like(tokens, source))
        src_token.append(tokens)
        idx.append(torch.where(local, topk_idx.long() - first, -1)[tokens])
    topk = torch.cat(idx)
    experts = local_experts(num_experts, len(routes), rank)
    return Rows(
        torch.cat(src_rank),
        torch.cat(src_token),
        topk,
        [int((topk == e).sum()) for e in range(len(experts))],
        torch.tensor([len(tokens) for tokens in src_token]),
    )


def ht_combine(
    sent_back: list[Tensor],
    routes: list[Tensor],
    num_experts: int,
    rank: int,
    biases: tuple[Tensor, ...] = (),
    ranks_per_node: int | None = None,
) -> Tensor:
    """Return [tokens, hidden] for ``rank``: float32 sums over ranks in ascending order, rounded once.

    Args:
        sent_back: per rank, a tensor in the order of the rows that it received.
        biases: up to two [tokens, hidden] tensors, summed before the first row.
        ranks_per_node: where set, each node's sum is first rounded to the rows' type.
    """
    num_tokens, hidden = routes[rank].size(0), sent_back[0].size(1)
    dtype = sent_back[0].dtype
    total = torch.zeros((num_tokens, hidden), dtype=torch.float32)
    for bias in biases:
        total += bias.float()
    per_node = ranks_per_node or len(routes)
    for node in range(0, len(routes), per_node):
        partial = total if ranks_per_node is None else torch.zeros_like(total)
        for peer in range(node, min(node + per_node, len(routes))):
            rows = ht_dispatch(routes, num_experts, peer)
            mine = rows.src_rank == rank
            partial[rows.src_token[mine]] += sent_back[peer][: len(mine)][mine].float()
        if ranks_per_node is not None:
            total += partial.to(dtype).float()
    return total.to(dtype)


def ht_combine_weights(sent_back: list[Tensor], routes: list[Tensor], num_experts: int, rank: int) -> Tensor:
    """Return float32[tokens, top_k] for ``rank``: per slot, the sum over ranks of the weights sent back."""
    return ht_combine(sent_back, routes, num_experts, rank)


def ll_dispatch(routes: list[Tensor], num_experts: int, rank: int) -> list[list[Tensor]]:
    """Return, per local expert and source rank, the int64 source tokens whose rows ``rank`` receives.

    A token that names an expert twice is received twice. The order of rows inside a segment is free.
    """
    return [
        [(topk_idx == expert).nonzero()[:, 0] for topk_idx in routes]
        for expert in local_experts(num_experts, len(routes), rank)
    ]


def ll_combine(slot_rows: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
    """Return [tokens, hidden]: the float32 weighted sum over slots in ascending order, rounded once.

    Args: slot_rows: [tokens, top_k, hidden], what each slot's expert computed; slots of -1 are skipped.
    """
    total = torch.zeros((slot_rows.size(0), slot_rows.size(2)), dtype=torch.float32)
    for slot in range(slot_rows.size(1)):
        weighted = slot_rows[:, slot].float() * topk_weights[:, slot, None]
        total += weighted.masked_fill(topk_idx[:, slot, None] < 0, 0.0)
    return total.to(slot_rows.dtype)


def quantize_fp8(x: Tensor, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Return (float8_e4m3fn like x, float32 scales [..., hidden / 128]) so that x ~ q * scale.

    With ``round_scale`` scales are powers of two, rounded up. NaN counts for no scale; a group with an infinity has the
    largest power of two.
    """
    groups = x.float().unflatten(-1, (-1, SCALE_GROUP))
    amax = _largest_but_nan(groups).clamp(min=1e-4)
    scales = amax / FP8_MAX
    factors = torch.full_like(amax, FP8_MAX) / amax  # number / tensor would round twice
    if round_scale:
        scales = _power_of_two_above(scales)
        factors = 1.0 / scales
    scales = torch.where(amax.isinf(), _LARGEST_POWER, scales)
    factors = torch.where(amax.isinf(), 1.0 / _LARGEST_POWER, factors)
    quantized = (groups * factors).clamp(-FP8_MAX, FP8_MAX).flatten(-2)
    return quantized.to(torch.float8_e4m3fn), scales.squeeze(-1)


def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (float8_e4m3fn like x, float32 scales [..., hidden / 32], powers of two) so that x ~ q * scale."""
    groups = x.float().unflatten(-1, (-1, 32))
    amax = _largest_but_nan(groups)
    scales = torch.where(amax > 0, _power_of_two_above(amax / FP8_MAX), 0.0)
    scales = torch.where(amax.isinf(), _LARGEST_POWER, scales)
    factors = torch.where(amax > 0, 1.0 / scales, 0.0)
    codes = (groups * factors).clamp(-FP8_MAX, FP8_MAX).flatten(-2).to(torch.float8_e4m3fn)
    return codes, scales.squeeze(-1)


def quantize_nvfp4(x: Tensor, global_scale: float, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Return (codes uint8 like x, float32 scales [..., hidden / 16]).

    x ~ fp4_values(codes) * scales / global_scale. Scales are E4M3 numbers, to nearest, or powers of two, rounded
    up; NaN for a block with NaN.
    """
    groups = x.float().unflatten(-1, (-1, 16))
    amax = groups.abs().amax(dim=-1, keepdim=True)
    wanted = amax / 6 * torch.tensor(global_scale)
    scales = wanted.clamp(max=FP8_MAX).to(torch.float8_e4m3fn).float()
    if power_of_two:
        scales = torch.where(amax > 0, _power_of_two_above(wanted), 0.0)
    factors = torch.where(scales > 0, torch.tensor(global_scale) / scales, 0.0)
    scaled = (groups * factors).flatten(-2)
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    below, above = (torch.bucketize(scaled.abs(), middles, right=right) for right in (False, True))
    codes = torch.where(below % 2 == 0, below, above)  # they differ on ties, of which the even code is taken
    return (codes + 8 * torch.signbit(scaled)).to(torch.uint8), scales.squeeze(-1)


_LARGEST_POWER = 2.0**127


def _largest_but_nan(groups: Tensor) -> Tensor:
    return groups.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(dim=-1, keepdim=True)


def fp4_values(codes: Tensor) -> Tensor:
    """Return float32 of 4-bit codes: a sign, two bits of exponent, one of mantissa."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[codes.long() % 8]
    return torch.where(codes >= 8, -magnitudes, magnitudes)


def _power_of_two_above(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)  # mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def dequantize_fp8(quantized: Tensor, scales: Tensor) -> Tensor:
    """Return float32 q * scale; scales are float32 per 128 channels, or int32 of packed exponents per 512."""
    if scales.dtype == torch.int32:
        scales = unpack_ue8m0(scales)
    groups = quantized.float().unflatten(-1, (-1, SCALE_GROUP))
    scaled: Tensor = groups * scales.unsqueeze(-1)
    return scaled.flatten(-2)


def pack_ue8m0(scales: Tensor) -> Tensor:
    """Return int32 [..., n / 4]: byte j of word p is the biased exponent of power-of-two scale 4p + j."""
    exponents = (scales.contiguous().view(torch.int32) >> 23) & 0xFF
    shifts = torch.tensor([0, 8, 16, 24])
    words = (exponents.long().unflatten(-1, (-1, 4)) << shifts).sum(dim=-1)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return signed.to(torch.int32)


def unpack_ue8m0(words: Tensor) -> Tensor:
    """Return float32 [..., 4 n] of packed biased exponents; the inverse of pack_ue8m0."""
    shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int32, device=words.device)
    exponents = (words.unsqueeze(-1) >> shifts) & 0xFF
    return (exponents.flatten(-2) << 23).view(torch.float32)


def logfmt10(x: Tensor) -> Tensor:
    """Return what arrives of bf16 x [..., hidden] after a LogFMT-10 transfer, in float32.

    Per 128 channels: sign and a 9-bit logarithm between the group's least and greatest magnitude. A block of
    1024 channels (or the largest power of two that divides hidden) travels as bf16 unless all its groups do
    qualify.
    """
    hidden = x.size(-1)
    block = next(size for size in (1024, 512, 256, 128) if hidden % size == 0)
    groups = x.float().unflatten(-1, (-1, SCALE_GROUP))
    magnitude = groups.abs()
    log_max = magnitude.amax(-1, keepdim=True).log2()
    log_min = torch.maximum(magnitude.amin(-1, keepdim=True).log2(), log_max - 32)
    qualifies = ((log_max < 0) & (log_min < log_max)).unflatten(-2, (-1, block // SCALE_GROUP))
    step = (log_max - log_min) / 510
    rounding = 2 - torch.log2((1 + torch.exp2(step)) / 2) / step
    code = torch.floor(((magnitude.log2() - log_min) / step + rounding).clamp(min=0))
    decoded = torch.where(code == 0, 0.0, torch.exp2((code - 1) * step + log_min)).copysign(groups)
    use_code = qualifies.all(dim=-2, keepdim=True).expand_as(qualifies).flatten(-3, -2)
    return torch.where(use_code, decoded, groups).flatten(-2)
