# SPDX-License-Identifier: Apache-2.0
"""Ranks for GPU tests: forked processes, each with a gloo group and a GPU as its current device.

One rank per GPU. RANKS_PER_GPU=2 has two share each: the driver gives the GPU to one process at a time, so
waits of one last until the other's turn, but on a machine of one GPU all that ranks do together can be tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from weft.testing.cases import MoeCase
    from weft.testing.ranks import Rank


def num_ranks_here() -> int:
    """Return how many ranks this machine's GPUs take, without initialising CUDA: ranks fork afterwards."""
    return int(torch.cuda.device_count()) * int(os.environ.get("RANKS_PER_GPU", "1"))


def rank_counts() -> list[int]:
    """Return with how many ranks a test is to run: two, where there are GPUs for them, and all that there are."""
    return sorted({min(2, num_ranks_here()), num_ranks_here()})


def replay(graph: torch.cuda.CUDAGraph, case: MoeCase, rank: int, *captured: torch.Tensor) -> None:
    """Replay a graph with a case's x, ids and weights in place of the ones that it was captured with, and wait."""
    for tensor, new in zip(captured, (case.x, case.topk_idx, case.topk_weights), strict=True):
        tensor.copy_(new(rank))
    graph.replay()
    torch.cuda.synchronize()


@cache
def why_no_ports(transport: str) -> str:
    """Return why a library's transport has no ports on a GPU here; asked of another process, since ranks are forked."""
    code = f"""
import torch
from weft import _core
(row,) = [row for row in _core.transports("cuda:0") if row["name"] == {transport!r}]
print("WHY", row["unusable_because"] or ("no ports" in row["details"] and row["details"]) or "")"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return ran.stdout.split("WHY", 1)[1].strip()


def _on_its_gpu(rank: Rank, function: Callable[..., Any], *args: Any) -> Any:
    torch.cuda.set_device(rank.rank % torch.cuda.device_count())
    result = function(rank, *args)
    torch.cuda.synchronize()
    return result


def run_on_gpus(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    deadline_s: float = 240.0,
    lost: Collection[int] = (),
) -> list[Any]:
    """Run ``function(rank, *args)`` on ``num_ranks`` ranks, of which ``lost`` die; return the results in rank order."""
    from weft.testing.ranks import run_ranks  # which a build without measure/ has not

    return run_ranks(num_ranks, _on_its_gpu, function, *args, deadline_s=deadline_s, lost=lost)
