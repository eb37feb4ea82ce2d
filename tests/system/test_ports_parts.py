# SPDX-License-Identifier: Apache-2.0
"""In which part of a window each write lands, where windows have a host part.

Mapped peers cannot write to a host part: it is mapped read-only for them. Threads of the host refuse words and small
puts that are for the other part. What remains is the payload of ports, which is counted here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from moe_checks import check_round_trip
from port_nodes import _settings, network_bytes, tokens_of, use_ports  # noqa: F401
from test_elastic_engram import read_back
from test_elastic_ring import pass_around
from test_moe_ll import MOST_TOKENS, check_ll_round_trip

import weft
from weft import _core
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, run_ranks
from weft.testing.round_trips import BF16


def _put_bytes(rank: Rank, operation: str = "proxy.put") -> tuple[int, int]:
    """Return the bytes of this rank's puts, or gets, and of those with an end in a host part."""
    network_bytes()  # all puts are counted
    moved = {counted["operation"]: int(counted["bytes"]) for counted in _core.tally()["operations"]}
    rank.meet()
    return moved[operation], moved[operation + ".host"]


def _experts(rank: Rank) -> tuple[int, int]:
    case = MoeCase(tokens_of(rank.size, 9, 14, 1), hidden=512, top_k=3, num_experts=8)
    for _ in range(3):
        check_ll_round_trip(rank, case, BF16, MOST_TOKENS)
        check_round_trip(rank, case)
    return _put_bytes(rank)


def _collectives(rank: Rank) -> tuple[int, int]:
    comm = weft.Communicator(rank.group, timeout_s=60)
    for elems in (1, 4099, 300_001):
        own = torch.arange(elems) % 13 + rank.rank
        every = torch.stack([torch.arange(elems) % 13 + r for r in range(rank.size)])
        assert torch.equal(comm.all_reduce(own.clone()), every.sum(0))
        assert torch.equal(comm.all_gather(own), every)
    return _put_bytes(rank)


def _messages(rank: Rank) -> tuple[int, int]:
    for num_bytes, offset in ((1, 0), (4097, 1), (65536, 0)):
        pass_around(rank, num_bytes, offset)
    return _put_bytes(rank)


def _reads(rank: Rank) -> tuple[int, int]:
    for entries, hidden in ((7, 5), (33, 2049), (5000, 256)):
        read_back(rank, entries, hidden, torch.bfloat16, torch.int64)
    return _put_bytes(rank, "proxy.get")


# Rings of the last place have neighbours of both kinds. Shared memory takes no registrations, which are in no window.
@pytest.mark.parametrize(
    ("calls", "place"),
    [
        (_experts, (4, 2, "fabric:tcp")),
        (_experts, (5, 3, "fabric:shm")),
        (_experts, (3, 1, "fabric:tcp")),
        (_collectives, (4, 2, "fabric:shm")),
        (_collectives, (3, 1, "fabric:shm")),
        (_messages, (2, 1, "fabric:tcp")),
        (_messages, (5, 3, "fabric:shm")),
        (_reads, (3, 1, "fabric:shm")),
        (_reads, (4, 2, "fabric:tcp")),
    ],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
@pytest.mark.parametrize("windows", ["auto", "device"])
def test_payload_of_ports_lands_in_one_part(
    calls: Callable[[Rank], tuple[int, int]],
    place: tuple[int, int, str],
    windows: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_ranks, ranks_per_node, provider = place
    monkeypatch.setenv("WEFT_PORT_WINDOWS", windows)
    use_ports(monkeypatch, ranks_per_node, provider)
    moved = run_ranks(num_ranks, calls, with_gpus=False)
    assert sum(puts for puts, _ in moved) > 0  # one that has a token may put nothing large
    for puts, with_host in moved:
        assert with_host == (puts if windows == "auto" else 0)
