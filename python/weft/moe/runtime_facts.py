# SPDX-License-Identifier: Apache-2.0
"""What callers of DeepEP ask a buffer's ``runtime``: how its ranks are grouped, as its formulas count them."""

from __future__ import annotations

from typing import Any

import torch

RANKS_PER_RDMA_GROUP = 8  # what num_tokens_per_rdma_rank counts by


class RuntimeFacts:
    """The part of ``Buffer.runtime`` that only answers questions. Nothing here is collective."""

    communicator: Any
    device: torch.device

    def is_available(self) -> bool:
        """Return True: whoever has the object can call it."""
        return True

    def is_internode_available(self) -> bool:
        """Return whether the ranks make more than one group of eight."""
        return self.get_num_rdma_ranks() > 1

    def get_num_rdma_ranks(self) -> int:
        """Return how many groups of eight ranks there are; the last may be smaller."""
        return -(-int(self.communicator.size) // RANKS_PER_RDMA_GROUP)

    def get_rdma_rank(self) -> int:
        """Return the group of eight that this rank is in."""
        return int(self.communicator.rank) // RANKS_PER_RDMA_GROUP

    def get_root_rdma_rank(self, global_root: bool) -> int:
        """Return this rank's place in its group where ``global_root``, else 0."""
        return int(self.communicator.rank) % RANKS_PER_RDMA_GROUP if global_root else 0

    def get_local_device_id(self) -> int:
        """Return the index of the CUDA device; 0 on the CPU."""
        return self.device.index or 0
