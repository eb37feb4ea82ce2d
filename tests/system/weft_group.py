# SPDX-License-Identifier: Apache-2.0
"""The default process group of a test's ranks, on backend weft."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from weft.testing.ranks import Rank


def join(rank: Rank, limit_s: float = 60, device_id: torch.device | None = None) -> None:
    """Make the group; limit_s is its timeout."""
    import weft  # noqa: F401 - registers the backend

    dist.init_process_group(
        "weft",
        init_method=f"file://{rank.folder}/.weft",
        rank=rank.rank,
        world_size=rank.size,
        timeout=timedelta(seconds=limit_s),
        device_id=device_id,
    )
