# SPDX-License-Identifier: Apache-2.0
"""Routing scores whose traffic is unbalanced by a chosen ratio.

    scores = get_unbalanced_scores(4096, 256, 8, 8, ratio=2.0, precise=True)
    topk_idx = scores.topk(8, dim=1).indices        # rank 0 gets twice the tokens of the others' mean

Traffic of a rank is the number of tokens that choose at least one of its experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.errors import invalid
from weft.moe.config import ceil_div


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> Tensor:
    """Return float32 scores [tokens, experts] on torch's default device.

    Args:
        num_experts: a multiple of num_ranks.
        ratio: rank 0's traffic over the mean of the other ranks', 1 or more.
        precise: the ratio is met to a token, and other ranks get as many as one another, where any routing can do so.
    """
    if ratio < 1:
        raise invalid("ratio", ratio, "1 or more")
    if num_experts % num_ranks:
        raise invalid("num_experts", num_experts, f"a multiple of num_ranks, {num_ranks}")
    per_rank = num_experts // num_ranks
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32)
    if num_ranks == 1:
        return scores
    if precise:
        return scores + _planned(scores, per_rank, num_topk, ratio)
    return _favour_rank_0(scores, per_rank, num_topk, ratio)


def _hits(scores: Tensor, per_rank: int, num_topk: int) -> Tensor:
    """Return bool [tokens, ranks]: which ranks each token goes to."""
    ranks = scores.topk(num_topk, dim=1).indices // per_rank
    hits = torch.zeros(scores.size(0), scores.size(1) // per_rank, dtype=torch.bool, device=scores.device)
    return hits.scatter_(1, ranks, True)


def _ratio(hits: Tensor) -> float:
    counts = hits.sum(dim=0).double()
    return float(counts[0] / counts[1:].mean().clamp(min=1e-9))


def _favour_rank_0(scores: Tensor, per_rank: int, num_topk: int, ratio: float) -> Tensor:
    """Scale the scores of rank 0's experts by the factor, found by bisection, that gives the ratio."""
    low, high = 1.0, 100.0
    factors = torch.ones_like(scores)
    for _ in range(20):
        middle = (low + high) / 2
        factors[:, :per_rank] = middle
        if _ratio(_hits(scores * factors, per_rank, num_topk)) > ratio:
            high = middle
        else:
            low = middle
    factors[:, :per_rank] = low
    return scores * factors


def _planned(scores: Tensor, per_rank: int, num_topk: int, ratio: float) -> Tensor:
    """Return what to add to scores in [0, 1): 2 for an expert of each rank that a token shall go to, 1 for its others.

    Tokens go to as many ranks as these scores would send them to, or fewer where rank 0 could not get its share.
    """
    num_tokens, device = scores.size(0), scores.device
    num_ranks = scores.size(1) // per_rank
    least, most = ceil_div(num_topk, per_rank), min(num_topk, num_ranks, 1 + (num_ranks - 1) / ratio)
    of_token = min(max(float(_hits(scores, per_rank, num_topk).sum()) / num_tokens, least), most)
    total = round(num_tokens * of_token)  # of pairs of a token and a rank
    on_rank_0 = min(round(total * ratio / (ratio + num_ranks - 1)), num_tokens)
    each, longer = divmod(total, num_tokens)
    numbers = torch.arange(num_tokens, device=device)
    hits_0 = numbers < on_rank_0
    others = each + (numbers < longer).long() - hits_0.long()
    # Others in turn, each token going on where the one before it stopped.
    begins = others.cumsum(0) - others + int(torch.randint(num_ranks, ()))
    ranks = torch.arange(num_ranks - 1, device=device)
    turn = (ranks - begins.unsqueeze(1)) % (num_ranks - 1)
    hits = torch.cat((hits_0.unsqueeze(1), turn < others.unsqueeze(1)), dim=1)[torch.randperm(num_tokens)]
    by_rank = scores.unflatten(1, (num_ranks, per_rank))
    is_best = by_rank == by_rank.amax(dim=2, keepdim=True)
    added: Tensor = (1 + is_best.float()) * hits.unsqueeze(2)
    return added.flatten(1)
