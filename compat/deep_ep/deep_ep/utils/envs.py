# SPDX-License-Identifier: Apache-2.0
"""Start-up and machine facts."""

from weft.moe.domains import get_logical_domain_size, get_physical_domain_size
from weft.testing.launch import (
    check_fast_rdma_atomic_support,
    check_nvlink_connections,
    check_torch_deterministic,
    dist_print,
    get_global_seed,
    get_local_seed,
    get_nvlink_gbs,
    get_rdma_gbs,
    init_dist,
    init_seed,
)

__all__ = [
    "check_fast_rdma_atomic_support",
    "check_nvlink_connections",
    "check_torch_deterministic",
    "dist_print",
    "get_global_seed",
    "get_local_seed",
    "get_logical_domain_size",
    "get_nvlink_gbs",
    "get_physical_domain_size",
    "get_rdma_gbs",
    "init_dist",
    "init_seed",
]
