# SPDX-License-Identifier: Apache-2.0
"""What an ElasticBuffer says about its ranks and about good sizes. Nothing here is collective."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from weft.moe.arguments import group_size
from weft.moe.buffer_contexts import BufferContexts
from weft.moe.config import MAX_SMS, align, check_number, check_whole
from weft.moe.elastic_sizes import elastic_size_hint

_NVLINK_GBS = 400.0  # of one GPU, where the caller does not say


class ElasticFacts:
    """The part of ElasticBuffer that only answers questions."""

    _contexts: BufferContexts
    allow_hybrid_mode: bool
    num_rdma_ranks: int
    num_nvlink_ranks: int
    num_scaleout_ranks: int
    num_scaleup_ranks: int
    scaleout_rank_idx: int
    scaleup_rank_idx: int
    num_allocated_qps: int
    prefer_overlap_with_compute: bool

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return (nodes, most ranks of one node)."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return (scale-out ranks, scale-up ranks): in hybrid mode groups of ranks that map each other, and their size.

        (1, ranks) where all map each other, without hybrid mode, and where groups differ in size.
        """
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def _find_domains(self) -> None:
        """Set what says how the ranks are spread."""
        context = self._contexts.alive()
        per_node = Counter(facts["node"] for facts in context.communicator.facts)
        self.num_rdma_ranks, self.num_nvlink_ranks = len(per_node), max(per_node.values())
        logical = context.logical
        self.num_scaleout_ranks, self.num_scaleup_ranks = logical.groups, logical.local
        self.scaleout_rank_idx = logical.group_of[self._contexts.rank]
        self.scaleup_rank_idx = logical.place_of[self._contexts.rank]

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Return num_bytes for this shape, a multiple of 2 MiB. Not collective."""
        return elastic_size_hint(
            group_size(group),
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            use_fp8_dispatch,
            allow_multiple_reduction,
        )

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Return how many SMs it takes to fill the links: even, at least 4, 64 unless overlap is preferred.

        The link of the node is the faster one, and counts alone. One SM writes ``sm_write_gbs``; ``nvlink_gbs`` 0
        counts as 400.
        """
        check_whole("num_experts", num_experts, 1)
        check_whole("num_topk", num_topk, 1)
        links = check_number("nvlink_gbs", nvlink_gbs, 0) or _NVLINK_GBS
        needed = align(math.ceil(links / check_number("sm_write_gbs", sm_write_gbs, 1)), 2)
        number = max(needed, 4 if self.prefer_overlap_with_compute else 64)
        return min(number, self._contexts.alive().num_sms)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return 0 to num_allocated_qps; Weft's proxies use none of them."""
        return min(self.num_allocated_qps, check_whole("num_sms", num_sms, 0, MAX_SMS))
