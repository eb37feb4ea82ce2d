# SPDX-License-Identifier: Apache-2.0
"""The extension module's name before DeepEP 2."""

from deep_ep._C import Config, EventHandle, get_low_latency_rdma_size_hint, is_sm90_compiled, topk_idx_t

__all__ = ["Config", "EventHandle", "get_low_latency_rdma_size_hint", "is_sm90_compiled", "topk_idx_t"]
