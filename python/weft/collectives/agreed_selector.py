# SPDX-License-Identifier: Apache-2.0
"""What all ranks of a communicator agree on before they choose algorithms: the machine, its nodes, tables and files."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from weft import _core
from weft.collectives.selector import Selector, read_algorithms
from weft.runtime.logs import follow

log = logging.getLogger("weft.collectives")


def agreed_selector(core: Any, machine: str) -> Selector:
    """Return a selector that chooses as every other rank's does. Collective."""
    config = _core.config()
    follow(config.log)
    cache = Path(config.cache_dir).expanduser()
    ranks = int(core.size)
    key = machine_key(str(core.device))
    places, is_first = config.algorithm_dir, int(core.rank) == 0
    per_node = ranks_per_node(core)
    if per_node:
        key = f"{key}, {per_node} a node"
    selector = Selector(
        *(ranks, machine, key, cache, places), may_copy=True, tells=is_first, per_node=per_node
    )
    prints = core.all_gather_text(selector.fingerprint()) if ranks > 1 else []
    others = [rank for rank, theirs in enumerate(prints) if theirs != prints[0]]
    if not others:
        return selector
    log.warning(
        "ranks %s read other tables or algorithms than rank 0 (WEFT_CACHE_DIR, WEFT_ALGORITHM_DIR): "
        "no rank uses any",
        others,
    )
    if int(core.rank) in others:
        read_algorithms(places, ranks)  # rank 0 told of its own files only
    return Selector(ranks, machine, per_node=per_node)


def ranks_per_node(core: Any) -> int:
    """Return how many ranks each node of a communicator has, one node after the other; 0: one node, or they differ."""
    nodes = [facts["node"] for facts in core.facts]
    per_node = nodes.count(nodes[0])
    cut = [rank // per_node for rank in range(len(nodes))]
    return per_node if per_node < len(nodes) and nodes == [nodes[0] + at for at in cut] else 0


def machine_key(device: str) -> str:
    """Name the machine for tables: the GPU's name, or the number of cores."""
    if device == "cpu":
        return f"cpu {os.cpu_count()} cores"
    return str(torch.cuda.get_device_name(device))
