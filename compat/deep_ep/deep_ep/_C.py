# SPDX-License-Identifier: Apache-2.0
"""The names that programs import from DeepEP's extension module."""

import torch

from weft.moe.buffer import Buffer
from weft.moe.config import Config
from weft.moe.config import low_latency_size_hint as get_low_latency_rdma_size_hint
from weft.moe.elastic_sizes import BUFFER_ALIGNMENT_BYTES, elastic_size_hint
from weft.moe.events import EventHandle

topk_idx_t = torch.int64
is_sm90_compiled = Buffer.is_sm90_compiled


def get_elastic_buffer_alignment() -> int:
    """Return what an ElasticBuffer's num_bytes is a multiple of."""
    return BUFFER_ALIGNMENT_BYTES


def calculate_elastic_buffer_size(
    nccl_comm: int,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int,
    use_fp8_dispatch: bool,
    allow_hybrid_mode: bool,
    allow_multiple_reduction: bool,
) -> int:
    """Return what ElasticBuffer.get_buffer_size_hint() returns for the ranks of ``nccl_comm``.

    nccl_comm: what deep_ep.utils.comm.get_nccl_comm_handle(group).get() returned.
    """
    from deep_ep.utils.comm import num_ranks_of  # which imports this module's package

    shape = (num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_multiple_reduction)
    return elastic_size_hint(num_ranks_of(nccl_comm), *shape)


__all__ = [
    "Config",
    "EventHandle",
    "calculate_elastic_buffer_size",
    "get_elastic_buffer_alignment",
    "get_low_latency_rdma_size_hint",
    "is_sm90_compiled",
    "topk_idx_t",
]
