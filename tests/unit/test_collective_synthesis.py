# SPDX-License-Identifier: Apache-2.0
"""Synthesised algorithms: verified, and faster in the model than the library's where links are unequal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft import cli
from weft.collectives import verify
from weft.collectives.synthesis import (
    COLLECTIVES,
    Network,
    bound_us,
    library_us,
    network_us,
    read_network,
    synthesise,
)
from weft.errors import Error


def _topology(name: str) -> dict[str, Any]:
    def link(src: int, dst: int, gbs: float, us: float = 1.0) -> dict[str, Any]:
        return {"src": src, "dst": dst, "gbs": gbs, "us": us, "both": True}

    if (
        name == "two_boxes"
    ):  # full links in a box, two slow ones between the boxes, and slower paths elsewhere
        links = [
            link(a, b, 100) for box in (0, 4) for a in range(box, box + 4) for b in range(a + 1, box + 4)
        ]
        links += [link(a, b, 10 if a + 4 == b and a < 2 else 1, 5) for a in range(4) for b in range(4, 8)]
        return {"name": name, "ranks": 8, "links": links}
    if name == "uneven_ring":  # one link of the ring is a tenth; chords are slow
        links = [link(r, (r + 1) % 6, 2 if r == 2 else 20) for r in range(6)]
        links += [link(a, b, 5) for a in range(6) for b in range(a + 2, 6) if (a, b) != (0, 5)]
        return {"name": name, "ranks": 6, "links": links}
    links = [link(0, r, 50) for r in range(1, 5)]  # a hub; the others reach each other slowly
    links += [link(a, b, 2, 4) for a in range(1, 5) for b in range(a + 1, 5)]
    return {"name": "hub", "ranks": 5, "links": links}


def _network(name: str) -> Network:
    return read_network(json.dumps(_topology(name)), f"{name}.json")


@pytest.mark.parametrize("name", ["two_boxes", "uneven_ring", "hub"])
def test_synthesised_all_gather_beats_the_library_on_unequal_links(name: str) -> None:
    network = _network(name)
    for num_bytes in (4 << 10, 4 << 20):  # one step to all is the best for few bytes, and in the library
        made = synthesise(network, "all_gather", num_bytes)
        assert verify(made).result_checked
        best, _ = library_us(network, "all_gather", num_bytes)[0]
        ours = network_us(made, network, num_bytes)
        assert ours <= best
        if num_bytes == 4 << 20:
            assert ours < 0.9 * best and ours <= 1.25 * bound_us(network, "all_gather", num_bytes)


@pytest.mark.parametrize("collective", sorted(COLLECTIVES))
def test_nothing_is_below_the_bound(collective: str) -> None:
    network = _network("hub")
    for num_bytes in (64, 256 << 10):
        bound = bound_us(network, collective, num_bytes)
        assert 0 < bound <= network_us(synthesise(network, collective, num_bytes), network, num_bytes)
        assert all(us >= bound for us, _ in library_us(network, collective, num_bytes))


def test_the_bound_is_that_of_the_worst_cut() -> None:
    links = [{"src": a, "dst": b, "gbs": 1, "us": 0} for a in range(3) for b in range(3) if a != b]
    network = read_network(json.dumps({"ranks": 3, "links": links}), "three.json")
    # Two thirds come in over two links of 1 GB/s; of a sum the whole buffer crosses a cut of two links.
    assert bound_us(network, "all_gather", 3000) == pytest.approx(1.0)
    assert bound_us(network, "all_reduce", 3000) == pytest.approx(1.5)
    assert network_us(synthesise(network, "all_gather", 3000), network, 3000) == pytest.approx(1.0)


def test_few_bytes_are_summed_in_one_exchange() -> None:
    network = _network("hub")
    made = synthesise(network, "all_reduce", 64)
    assert made.chunks == 1 and verify(made).result_checked
    assert network_us(made, network, 64) <= library_us(network, "all_reduce", 64)[0][0]


@pytest.mark.parametrize("collective", sorted(COLLECTIVES))
def test_every_collective_is_synthesised_and_verified(collective: str) -> None:
    made = synthesise(_network("uneven_ring"), collective, 4 << 10)
    assert verify(made).result_checked and made.collective == COLLECTIVES[collective]


def test_links_that_are_missing_are_not_used() -> None:
    line = {"ranks": 3, "links": [{"src": a, "dst": a + 1, "gbs": 10, "both": True} for a in range(2)]}
    network = read_network(json.dumps(line), "line.json")
    made = synthesise(network, "all_reduce", 3 << 10)
    assert network_us(made, network, 3 << 10) < float("inf")
    pairs = {(rank, block.send) for rank, _, block in made.blocks() if block.send >= 0}
    assert pairs <= set(network.links)
    del line["links"][1]  # type: ignore[attr-defined]
    with pytest.raises(Error, match="no links lead from rank"):
        synthesise(read_network(json.dumps(line), "line.json"), "all_gather", 3 << 10)


def test_command_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hub.json").write_text(json.dumps(_topology("hub")))
    command = ["synthesise", "--topology", str(tmp_path / "hub.json"), "--collective", "all_gather"]
    assert cli.main([*command, "--ranks", "5", "-o", str(tmp_path / "ag.xml")]) == 0
    assert "verified" in capsys.readouterr().out
    assert cli.main(["compile", str(tmp_path / "ag.xml"), "-o", str(tmp_path / "again.xml")]) == 0
    assert cli.main([*command, "--ranks", "4"]) == 1
    (tmp_path / "hub.json").write_text('{"ranks": 2, "links": [{"src": 0}]}')
    assert cli.main(command) == 1
    assert "not a topology" in capsys.readouterr().err
