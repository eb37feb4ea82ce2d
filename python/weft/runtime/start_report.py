# SPDX-License-Identifier: Apache-2.0
"""What WEFT_LOG=info says when a communicator is made: version, device, transports and why, NICs, settings."""

from __future__ import annotations

import logging
import os
import platform
import sys
from pathlib import Path
from typing import Any

import weft
from weft import _core

_log = logging.getLogger("weft.start")


def log(comm: Any) -> None:
    """Log the start of a core communicator, on every rank; what is the same on a host, from its first rank."""
    if not _log.isEnabledFor(logging.INFO):
        return
    who = f"rank {comm.rank}"
    nodes = [facts["node"] for facts in comm.facts]
    is_first_here = nodes.index(nodes[comm.rank]) == comm.rank
    _log.info(
        f"{who} of {comm.size}, {len(set(nodes))} nodes: weft {weft.__version__} on {_device(str(comm.device))}, "
        f"{platform.node()}, process {os.getpid()}"
    )
    for name, ranks in _by_transport(comm).items():
        _log.info(f"{who}: reaches {_ranks(ranks)} by {name}{_why(comm, name)}")
    changed = [row for row in _core.config_table() if row[4] != "default"]
    settings = ", ".join(f"{row[0]}={row[3]}" for row in changed)
    _log.info(f"{who}: settings that differ from their defaults: {settings or 'none'}")
    if is_first_here:
        for line in _host_lines():
            _log.info(f"{who}: {line}")


def _device(name: str) -> str:
    if name == "cpu":
        return f"cpu ({os.cpu_count()} cores)"
    gpu = _core.gpus()[int(name.partition(":")[2])]
    return f"{name} ({gpu['name']}, sm_{gpu['compute_capability'].replace('.', '')}, {gpu['pci_address']})"


def _by_transport(comm: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for peer in range(comm.size):
        name = comm.transport_to(peer)
        if name is not None:
            found.setdefault(str(name), []).append(peer)
    return found


def _why(comm: Any, chosen: str) -> str:
    """Return what carries a transport, and why those before it in the list do not."""
    words = ""
    for transport in _core.transports(str(comm.device)):
        if transport["name"] == chosen:
            return f" ({transport['carried_by']}{words})"
        reason = transport["unusable_because"] or f"it does not reach them: {transport['reach']}"
        words += f"; not {transport['name']}: {reason}"
    return ""


def _ranks(ranks: list[int]) -> str:
    if ranks == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _host_lines() -> list[str]:
    from weft.runtime import nvrtc
    from weft.runtime.info import rdma_nics

    torch = sys.modules.get("torch")
    nics = [f"{nic['name']} ({nic['state']}, {nic['rate']})" for nic in rdma_nics()]
    network = [path.name for path in sorted(Path("/sys/class/net").glob("*")) if path.name != "lo"]
    return [
        f"python {platform.python_version()}, torch {torch.__version__ if torch else 'not loaded'}, "
        f"nvrtc {nvrtc.find().nvrtc or 'not found'}, kernels cached in {_core.config().cache_dir}",
        f"NICs: RDMA {', '.join(nics) or 'none'}; network {', '.join(network) or 'none'}",
    ]
