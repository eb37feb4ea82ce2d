# SPDX-License-Identifier: Apache-2.0
"""References for the bitwise contract of elastic dispatch and combine, over torch's default group.

Slots are k = 0..top_k-1 of a token; "rounded" means float32 to bf16, nearest even.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from weft.moe.high_throughput import Payload
from weft.testing.launch import get_global_seed
from weft.testing.oracle import layout


def dispatch(
    x: Payload, topk_idx: Tensor, topk_weights: Tensor, num_max_tokens_per_rank: int, num_experts: int
) -> tuple[Payload, Tensor, Tensor, Tensor, Tensor]:
    """Return what this rank receives, one row per token of each source rank that names a local expert.

    Args: x [tokens, hidden], or (rows of FP8 or bytes, scales [tokens, n]); topk_idx int [tokens, top_k]; topk_weights
        float32 [tokens, top_k].
    Returns: (rows of x, or (rows, scales), local expert ids with -1 elsewhere, unmasked weights, source ids
        ``src_rank * num_max_tokens_per_rank + src_token`` int64, rows per source rank int64[ranks]).
    Collective.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    data = x[0] if isinstance(x, tuple) else x
    _, _, in_rank = layout(topk_idx.cpu(), num_experts, num_ranks)
    tokens = in_rank.to(data.device).T.nonzero()[:, 1]  # destination rank major, token minor
    sent = in_rank.sum(dim=0).to(data.device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)

    def exchange(rows: Tensor) -> Tensor:
        if rows.element_size() == 1:  # FP8 types go as bytes, which every backend has
            return exchange_plain(rows.view(torch.uint8)).view(rows.dtype)
        return exchange_plain(rows)

    def exchange_plain(rows: Tensor) -> Tensor:
        result = rows.new_empty((int(received.sum()), *rows.shape[1:]))
        dist.all_to_all_single(result, rows[tokens].contiguous(), received.tolist(), sent.tolist())
        return result

    per_rank = num_experts // num_ranks
    global_idx = exchange(topk_idx)
    is_local = (global_idx >= rank * per_rank) & (global_idx < (rank + 1) * per_rank)
    local_idx = torch.where(is_local, global_idx - rank * per_rank, -1)
    src_token_global_idx = rank * num_max_tokens_per_rank + torch.arange(data.size(0), device=data.device)
    rows = (exchange(x[0]), exchange(x[1])) if isinstance(x, tuple) else exchange(x)
    return rows, local_idx, exchange(topk_weights), exchange(src_token_global_idx), received


def generate_pre_combine_data(
    src_token_global_idx: Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> Tensor:
    """Return bf16 [rows, top_k, hidden] computable on any rank from ids and the global seed."""
    num_slots = dist.get_world_size() * num_max_tokens_per_rank * num_topk
    slots = torch.arange(num_topk, device=src_token_global_idx.device)
    slot_ids = src_token_global_idx.long().unsqueeze(1) * num_topk + slots
    phase = ((slot_ids * 131071 % num_slots) + 1).float() / num_slots
    channels = torch.arange(1, hidden + 1, device=src_token_global_idx.device, dtype=torch.float32)
    return torch.sin(phase.unsqueeze(2) * channels + math.sin(get_global_seed())).bfloat16()


def ordered_accumulate(data: Tensor, initial_value: Tensor | None = None) -> Tensor:
    """Return bf16 [tokens, hidden]: initial_value plus data [tokens, n, hidden], added in ascending n in float32."""
    total = (
        torch.zeros_like(data[:, 0], dtype=torch.float32) if initial_value is None else initial_value.float()
    )
    for slot in range(data.size(1)):
        total = total + data[:, slot].float()
    return total.bfloat16()


def combine(
    y: Tensor,
    topk_idx: Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Tensor | tuple[Tensor, Tensor] | None = None,
    reduce_in_local: bool = True,
    reduce_in_scaleup: bool = True,
) -> Tensor:
    """Return bf16 [tokens, hidden] of contributions y [tokens, top_k, hidden], rounded as the contract says.

    Args:
        topk_idx: int [tokens, top_k] expert ids, -1 for an empty slot.
        bias: None, a bf16 [tokens, hidden] tensor or two; the final sum starts from them.
        reduce_in_local: first add and round the slots of each rank, at its right-most slot.
        reduce_in_scaleup: then add and round the results of each node, at its right-most slot.
    """
    per_rank = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    rank_of_slot = torch.where(topk_idx < 0, -1, topk_idx // per_rank)
    data = y.masked_fill((topk_idx < 0).unsqueeze(2), 0.0)
    if reduce_in_local:
        data = reduce_equal_slots(data, rank_of_slot)
    if reduce_in_scaleup and num_scaleout_ranks > 1:
        data = reduce_equal_slots(data, torch.where(rank_of_slot < 0, -1, rank_of_slot // num_scaleup_ranks))
    if isinstance(bias, tuple):
        return ordered_accumulate(data, bias[0].float() + bias[1].float())
    return ordered_accumulate(data, bias)


def reduce_equal_slots(data: Tensor, owner: Tensor) -> Tensor:
    """Return data with each owner's slots summed in ascending order, rounded, at its right-most slot."""
    result = torch.zeros_like(data)
    for slot in range(owner.size(1)):
        same = (owner == owner[:, slot : slot + 1]) & (owner >= 0)
        is_last = same[:, slot] & ~same[:, slot + 1 :].any(dim=1)
        total = ordered_accumulate(data.masked_fill(~same.unsqueeze(2), 0.0))
        result[:, slot] = torch.where(is_last.unsqueeze(1), total, result[:, slot])
    return result
