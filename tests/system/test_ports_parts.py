# SPDX-License-Identifier: Apache-2.0
"""In which part of a window each write lands, where windows have a host part.

Mapped peers cannot write to a host part: it is mapped read-only for them. Threads of the host refuse words and small
puts that are for the other part. What remains is the payload of ports, which is counted here.
"""

from __future__ import annotations

import pytest
from moe_checks import check_round_trip
from port_nodes import _settings, network_bytes, tokens_of, use_ports  # noqa: F401
from test_moe_ll import MOST_TOKENS, check_ll_round_trip

from weft import _core
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, run_ranks
from weft.testing.round_trips import BF16


def _put_bytes(rank: Rank, case: MoeCase) -> tuple[int, int]:
    """Run both modes; return the bytes of puts, and of those with an end in a host part."""
    for _ in range(3):
        check_ll_round_trip(rank, case, BF16, MOST_TOKENS)
        check_round_trip(rank, case)
    network_bytes()  # all puts are counted
    moved = {counted["operation"]: int(counted["bytes"]) for counted in _core.tally()["operations"]}
    rank.meet()
    return moved["proxy.put"], moved["proxy.put.host"]


@pytest.mark.parametrize("place", [(4, 2, "fabric:tcp"), (5, 3, "fabric:shm"), (3, 1, "fabric:tcp")], ids=str)
@pytest.mark.parametrize("windows", ["auto", "device"])
def test_payload_of_ports_lands_in_one_part(
    place: tuple[int, int, str], windows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_ranks, ranks_per_node, provider = place
    monkeypatch.setenv("WEFT_PORT_WINDOWS", windows)
    use_ports(monkeypatch, ranks_per_node, provider)
    case = MoeCase(tokens_of(num_ranks, 9, 14, 1), hidden=512, top_k=3, num_experts=8)
    moved = run_ranks(num_ranks, _put_bytes, case, with_gpus=False)
    assert sum(puts for puts, _ in moved) > 0  # one that has a token may put nothing large
    for puts, with_host in moved:
        assert with_host == (puts if windows == "auto" else 0)
