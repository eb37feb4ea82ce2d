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

_PRECISION = 0.02
_MAX_STEPS = 50


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> Tensor:
    """Return float32 scores [tokens, experts] on torch's default device.

    Args:
        num_experts: a multiple of num_ranks.
        ratio: rank 0's traffic over the mean of the other ranks', 1 or more.
        precise: move single tokens until the ratio is within 10 %, where any routing can reach it.
    """
    if ratio < 1:
        raise invalid("ratio", ratio, "1 or more")
    if num_experts % num_ranks:
        raise invalid("num_experts", num_experts, f"a multiple of num_ranks, {num_ranks}")
    per_rank = num_experts // num_ranks
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32)
    if num_ranks == 1:
        return scores
    scores = _favour_rank_0(scores, per_rank, num_topk, ratio)
    return _move_tokens(scores, per_rank, num_topk, ratio) if precise else scores


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


def _move_tokens(scores: Tensor, per_rank: int, num_topk: int, ratio: float) -> Tensor:
    """Take single tokens to or from rank 0 until the ratio is right or no token is left to move."""
    scores = scores.clone()
    for _ in range(_MAX_STEPS):
        hits = _hits(scores, per_rank, num_topk)
        error = _ratio(hits) / ratio - 1
        if abs(error) < _PRECISION:
            break
        counts = hits.sum(dim=0).double()
        wanted = float(counts[1:].mean()) * ratio - float(counts[0])
        movable = (hits[:, 0] if wanted < 0 else ~hits[:, 0]).nonzero().flatten()
        num_moved = min(max(int(abs(wanted) / 2), 1), len(movable))
        if num_moved == 0:
            break
        moved = movable[torch.randperm(len(movable), device=movable.device)[:num_moved]]
        if wanted < 0:
            scores[moved, :per_rank] = -1.0
        else:
            scores[moved, 0] = scores[moved].amax(dim=1) + 1.0
    return scores
