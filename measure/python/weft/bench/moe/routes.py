# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a benchmark go: drawn at random, or read from a file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from weft.errors import invalid

ZIPF_EXPONENT = 1.0


def make_routes(
    kind: str, num_sets: int, num_ranks: int, tokens: int, top_k: int, experts: int, seed: int
) -> list[list[Tensor]]:
    """Return, per set and rank, int64[tokens, top_k <= experts] of distinct expert ids; the same on every
    rank.

    Args:
        kind: ``uniform``: every expert alike. ``zipf``: the n-th most popular expert has weight 1/n,
            popularity shuffled over the ids. Anything else: a .npy file of integers [ranks, tokens, top_k],
            or [sets, ranks, tokens, top_k]; -1 is an empty slot.
        num_sets: how many to draw; a file's sets are repeated as needed.
    Raises: weft.Error naming what does not fit.
    """
    if kind not in ("uniform", "zipf"):
        return _read(Path(kind), num_sets, num_ranks, tokens, top_k, experts)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.zeros(experts)
    if kind == "zipf":
        popularity = torch.randperm(experts, generator=generator) + 1
        weights = -ZIPF_EXPONENT * popularity.float().log()
    return [[_draw(weights, tokens, top_k, generator) for _ in range(num_ranks)] for _ in range(num_sets)]


def _draw(log_weights: Tensor, tokens: int, top_k: int, generator: torch.Generator) -> Tensor:
    """Draw without replacement: the largest of log weight plus Gumbel noise."""
    uniform = torch.rand(tokens, log_weights.numel(), generator=generator).clamp_min(1e-20)
    return (log_weights - (-uniform.log()).log()).topk(top_k, dim=1).indices


def _read(
    path: Path, num_sets: int, num_ranks: int, tokens: int, top_k: int, experts: int
) -> list[list[Tensor]]:
    import numpy

    if not path.is_file():
        raise invalid("routes", str(path), "uniform, zipf, or a .npy file")
    try:
        array = numpy.load(path, allow_pickle=False)
    except (ValueError, OSError) as error:
        raise invalid("routes", f"{path} ({error})", "a .npy file of integers") from error
    if array.ndim == 3:
        array = array[None]
    wanted = (num_ranks, tokens, top_k)
    if array.dtype.kind not in "iu" or array.ndim != 4 or array.shape[1:] != wanted or not array.shape[0]:
        raise invalid("routes", f"{path}: {array.dtype}{list(array.shape)}", f"integers [sets, {wanted}]")
    if array.size and (array.min() < -1 or array.max() >= experts):
        raise invalid("routes", f"{path}: {array.min()} to {array.max()}", f"-1 to {experts - 1}")
    sets = torch.from_numpy(array.astype("int64"))
    return [list(sets[index % sets.shape[0]]) for index in range(num_sets)]
