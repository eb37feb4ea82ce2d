# SPDX-License-Identifier: Apache-2.0
"""What the compiler makes of library algorithms, as MSCCL XML: a refactor leaves it identical."""

from __future__ import annotations

from typing import Any

import pytest

from golden import check_golden
from weft.collectives.library import build
from weft.collectives.verifier import verify
from weft.collectives.xml import from_xml
from weft.collectives.xml_write import to_xml

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "allgather_ring_4": ("allgather_ring", 4, {}),
    "allgather_recursive_doubling_4_inplace": ("allgather_recursive_doubling", 4, {"inplace": True}),
    "allreduce_1step_3_ll": ("allreduce_1step", 3, {"protocol": "LL", "max_bytes": 32768}),
    "allreduce_allpairs_4_x2": ("allreduce_allpairs", 4, {"instances": 2, "protocol": "LL128"}),
    "allreduce_a100_ring_3": ("allreduce_a100_ring", 3, {"inplace": True}),
    "reducescatter_allpairs_3": ("reducescatter_allpairs", 3, {}),
    "alltoall_a100_two_step_4": ("alltoall_a100_two_step", 4, {}),
    "broadcast_chain_3": ("broadcast_chain", 3, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_program_compiles_to_the_same_xml(request: pytest.FixtureRequest, name: str) -> None:
    algorithm, ranks, options = CASES[name]
    made = to_xml(build(algorithm, ranks, **options).compile())
    check_golden(request, f"collective_{name}.xml", made)
    assert verify(from_xml(made, name)).steps > 0
