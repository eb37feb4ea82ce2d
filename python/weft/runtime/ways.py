# SPDX-License-Identifier: Apache-2.0
"""``weft info --plan``: which way each rank of a job reaches each other one. Started like the job itself:

    torchrun --nnodes 2 --nproc-per-node 8 ... -m weft info --plan

Ranks find each other as those of a communicator do, and choose each peer's transport as it does. The first rank prints.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from weft import _core
from weft.runtime.communicator import Communicator
from weft.runtime.tables import Column, Table


def ways(communicator: Communicator) -> list[dict[str, Any]]:
    """Return of each rank: rank, node, host, device, and ``peers``: transport and reach by peer. Collective.

    Raises: PeerLost naming ranks that stayed away.
    """
    reach = {row["name"]: row["reach"] for row in _core.transports(communicator.device)}
    peers = {}
    for peer in range(communicator.size):
        name = communicator.transport_to(peer)
        if name is not None:
            peers[str(peer)] = {"transport": name, "reach": reach[name]}
    facts = communicator.core.facts[communicator.rank]
    mine = {name: facts[name] for name in ("rank", "node", "host", "device")} | {"peers": peers}
    answers = communicator.bootstrap.all_gather(json.dumps(mine).encode(), communicator.timeout_s)
    return [json.loads(bytes(one)) for one in answers]


def ways_table(of_ranks: list[dict[str, Any]]) -> Table:
    """Return a row for each rank: the peers that it maps, and those behind each kind of port."""
    table = Table(
        "Ways of each rank to its peers: mapped memory, or a port",
        [
            *(Column(head, is_number=True, is_key=True) for head in ("rank", "node")),
            Column("device", never_folds=True),
            Column("mapped"),
            Column("by port"),
        ],
    )
    for one in of_ranks:
        by_way: dict[tuple[str, str], list[int]] = {}
        for peer, way in one["peers"].items():
            by_way.setdefault((way["reach"], way["transport"]), []).append(int(peer))
        cells = {
            is_mapped: "; ".join(
                f"{_spans(peers)} ({name})"
                for (reach, name), peers in by_way.items()
                if (reach == "mapped") == is_mapped
            )
            for is_mapped in (True, False)
        }
        table.add(str(one["rank"]), str(one["node"]), one["device"], cells[True], cells[False])
    return table


def _spans(numbers: Iterable[int]) -> str:
    """Return "0-3, 5" of 0, 1, 2, 3, 5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
