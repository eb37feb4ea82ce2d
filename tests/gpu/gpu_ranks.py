# SPDX-License-Identifier: Apache-2.0
"""Ranks for GPU tests: one forked process per GPU, with a gloo group and the GPU as its current device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.testing.ranks import Rank, run_ranks


def num_gpus() -> int:
    """Return how many GPUs there are, without initialising CUDA: ranks fork afterwards."""
    return int(torch.cuda.device_count())


def _on_its_gpu(rank: Rank, function: Callable[..., Any], *args: Any) -> Any:
    torch.cuda.set_device(rank.rank)
    result = function(rank, *args)
    torch.cuda.synchronize()
    return result


def run_on_gpus(
    num_ranks: int, function: Callable[..., Any], *args: Any, deadline_s: float = 240.0
) -> list[Any]:
    """Run ``function(rank, *args)`` on ``num_ranks`` GPUs; return the results in rank order."""
    return run_ranks(num_ranks, _on_its_gpu, function, *args, deadline_s=deadline_s)
