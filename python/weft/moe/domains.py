# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group are spread over machines."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed

from weft import _core


class Domains(NamedTuple):
    """How ranks are grouped: how many groups of how many ranks, and each rank's group and its place there."""

    groups: int
    local: int
    group_of: tuple[int, ...]
    place_of: tuple[int, ...]


def domains_of(numbers: Sequence[int]) -> Domains:
    """Return the grid of ranks by each one's group; groups that differ in size are one of all ranks."""
    groups = len(set(numbers))
    if groups * max(Counter(numbers).values()) != len(numbers):
        return domains_of([0] * len(numbers))
    places = tuple(list(numbers[:rank]).count(number) for rank, number in enumerate(numbers))
    return Domains(groups, len(numbers) // groups, tuple(numbers), places)


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """Return (nodes, most ranks on one node) of a torch process group. Collective.

    WEFT_RANKS_PER_NODE cuts machines into nodes.
    """
    names = [""] * group.size()
    torch.distributed.all_gather_object(names, _machine_name(), group=group)
    per_node = int(_core.config().ranks_per_node)
    places = [names[:rank].count(name) for rank, name in enumerate(names)]
    nodes = [(name, place // per_node if per_node else 0) for name, place in zip(names, places, strict=True)]
    ranks_per_node = Counter(nodes)
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
