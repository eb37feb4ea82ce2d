# SPDX-License-Identifier: Apache-2.0
"""The names that programs import from DeepEP's extension module."""

import torch

from weft.moe.buffer import Buffer
from weft.moe.config import Config
from weft.moe.config import low_latency_size_hint as get_low_latency_rdma_size_hint
from weft.moe.events import EventHandle

topk_idx_t = torch.int64
is_sm90_compiled = Buffer.is_sm90_compiled

__all__ = ["Config", "EventHandle", "get_low_latency_rdma_size_hint", "is_sm90_compiled", "topk_idx_t"]
