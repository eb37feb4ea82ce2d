# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group are spread over machines."""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """Return (nodes, most ranks on one node) of a torch process group. Collective."""
    names = [""] * group.size()
    torch.distributed.all_gather_object(names, _machine_name(), group=group)
    ranks_per_node = Counter(names)
    return len(ranks_per_node), max(ranks_per_node.values())


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Return (scale-out ranks, scale-up ranks): the physical sizes, or (1, ranks) unless hybrid. Collective.

    Nodes with unequal numbers of ranks count as one flat domain.
    """
    nodes, local = get_physical_domain_size(group)
    return (nodes, local) if allow_hybrid_mode and nodes * local == group.size() else (1, group.size())


def _machine_name() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot_id.read_text() if boot_id.exists() else "")
