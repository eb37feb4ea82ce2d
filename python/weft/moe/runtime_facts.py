# SPDX-License-Identifier: Apache-2.0
"""What callers of DeepEP ask a buffer's ``runtime``: how its ranks are grouped, as its formulas count them."""

from __future__ import annotations

import functools
from typing import Any

import torch

RANKS_PER_RDMA_GROUP = 8  # what num_tokens_per_rdma_rank counts by where all ranks map each other


class RuntimeFacts:
    """The part of ``Buffer.runtime`` that only answers questions. Nothing here is collective."""

    communicator: Any
    islands: tuple[int, ...]
    device: torch.device

    def is_available(self) -> bool:
        """Return True: whoever has the object can call it."""
        return True

    def is_internode_available(self) -> bool:
        """Return whether the ranks make more than one group."""
        return self.get_num_rdma_ranks() > 1

    @functools.cached_property
    def rdma_groups(self) -> tuple[int, ...]:
        """The group of each rank: where not all map each other, those that do; else eight ranks each."""
        size = int(self.communicator.size)
        return self.islands or tuple(rank // RANKS_PER_RDMA_GROUP for rank in range(size))

    def get_num_rdma_ranks(self) -> int:
        """Return how many groups there are."""
        return max(self.rdma_groups) + 1

    def get_rdma_rank(self) -> int:
        """Return the group that this rank is in."""
        return self.rdma_groups[int(self.communicator.rank)]

    def get_root_rdma_rank(self, global_root: bool) -> int:
        """Return this rank's place in its group where ``global_root``, else 0."""
        rank = int(self.communicator.rank)
        return self.rdma_groups[:rank].count(self.rdma_groups[rank]) if global_root else 0

    def get_local_device_id(self) -> int:
        """Return the index of the CUDA device; 0 on the CPU."""
        return self.device.index or 0
