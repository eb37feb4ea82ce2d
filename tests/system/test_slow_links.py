# SPDX-License-Identifier: Apache-2.0
"""Links that are delayed for a test: results stay right, and nothing arrives before it is due."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from weft import cli
from weft.bench.collective.slow_links import measure
from weft.collectives.library import build
from weft.errors import Error
from weft.runtime.communicator import Communicator
from weft.testing.links import delay_links
from weft.testing.ranks import Rank, run_ranks


def _chain_over_slow_links(rank: Rank) -> tuple[float, float]:
    collectives = Communicator(rank.group, device="cpu").collectives
    chain = build("broadcast_chain", 3, inplace=True).compile()
    tensor = torch.full((1000,), float(rank.rank))
    links = {(0, 1): (100e3, 0.0), (1, 2): (100e3, 25.0)}  # the second takes 100 ms for 4000 bytes besides
    delay_links(collectives, links)
    torch.distributed.barrier(group=rank.group)
    start = time.perf_counter()
    collectives.run(chain, tensor)
    slow_s = time.perf_counter() - start
    assert (tensor == 0).all()
    lines = build("broadcast_chain", 3, inplace=True, protocol="LL").compile()
    with pytest.raises(Error, match="allowed: Simple, while links are delayed"):
        collectives.run(lines, tensor)
    delay_links(collectives, {})
    collectives.run(lines, tensor)
    with pytest.raises(Error, match="links: got"):
        delay_links(collectives, {(0, 3): (1.0, 0.0)})
    return slow_s, float(tensor.sum())


def test_messages_arrive_when_their_links_have_carried_them() -> None:
    found = run_ranks(3, _chain_over_slow_links, deadline_s=120)
    assert [total for _, total in found] == [0.0, 0.0, 0.0]
    assert found[1][0] > 0.09 and found[2][0] > 0.29


def test_messages_of_one_link_take_turns() -> None:
    # Both ranks send 4 chunks of 4 KiB over links of 10 us a byte: 40 ms each, one after another.
    algorithm = build("allgather_allpairs", 2, instances=4).compile()
    links = {(0, 1): (0.0, 10.0), (1, 0): (0.0, 10.0)}
    (samples,) = measure([algorithm], links, 32 << 10, 2)
    assert min(samples) > 160e3


def test_command_measures_what_it_found_beside_the_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"ranks": 3, "links": [{"src": a, "dst": a + 1, "gbs": 0.1, "both": True} for a in range(2)]}
    (tmp_path / "line.json").write_text(json.dumps(line))
    command = ["synthesise", "--topology", str(tmp_path / "line.json"), "--collective", "all_reduce"]
    out = tmp_path / "measured.json"
    assert cli.main([*command, "--bytes", "12K", "--measure", "2", "--json", str(out)]) == 0
    assert "needs a link that is not there" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    assert (
        rows[0]["algorithm"].startswith("synthesised") and rows[0]["us_min"] > 0.5 * rows[0]["predicted_us"]
    )
