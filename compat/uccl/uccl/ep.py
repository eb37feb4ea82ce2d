# SPDX-License-Identifier: Apache-2.0
"""The names of UCCL-EP. Its variables are understood where this is imported."""

from weft.moe.config import Config
from weft.moe.config import low_latency_size_hint as get_low_latency_rdma_size_hint
from weft.moe.events import EventOverlap
from weft.moe.uccl import (
    Buffer,
    Proxy,
    can_register_rdma_gpu_buffer,
    connect_atomic_buffer,
    destroy_uccl,
    get_num_proxy_threads,
    get_oob_ip,
    get_physical_gpu_rank,
    get_rdma_buffer,
    has_proxy,
    initialize_uccl,
    rdma_buffer_should_use_host_alloc,
    register_proxies,
    register_proxy,
    stop_all_registered_proxies,
    understand_variables,
    unregister_proxy,
)
from weft.moe.uccl_memory import EventHandle

UcclProxy = Proxy
is_sm90_compiled = Buffer.is_sm90_compiled
understand_variables()

__all__ = [
    "Buffer",
    "Config",
    "EventHandle",
    "EventOverlap",
    "Proxy",
    "UcclProxy",
    "can_register_rdma_gpu_buffer",
    "connect_atomic_buffer",
    "destroy_uccl",
    "get_low_latency_rdma_size_hint",
    "get_num_proxy_threads",
    "get_oob_ip",
    "get_physical_gpu_rank",
    "get_rdma_buffer",
    "has_proxy",
    "initialize_uccl",
    "is_sm90_compiled",
    "rdma_buffer_should_use_host_alloc",
    "register_proxies",
    "register_proxy",
    "stop_all_registered_proxies",
    "unregister_proxy",
]
