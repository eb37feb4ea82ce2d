# SPDX-License-Identifier: Apache-2.0
"""``weft bench floor`` as users start it, and the exchange that it times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from programs import WEFT, run_program

from weft.bench.exchange_floor import Floor, Load
from weft.bench.report import check_document
from weft.errors import Error
from weft.runtime.communicator import Communicator
from weft.testing.ranks import Rank, run_ranks


def test_every_way_is_measured_and_its_bytes_are_compared(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--ranks", "3", "--bytes", "16,2032,64K", "--samples", "1"]
    ran = run_program([*WEFT, "bench", "floor", *options, "--json", "out.json"], tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert check_document(document) == []
    found = {(row["call"], row["way"], row["bytes"]) for row in document["rows"]}
    ways = {("exchange", "stores"), ("exchange", "lines"), ("copy", "stores")}
    assert found == {(*way, nbytes) for way in ways for nbytes in (16, 2032, 65536)}
    assert all(row["checked"] and row["us"] > 0 and row["peers"] == 2 for row in document["rows"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bytes", "17"], "bytes: got 17"),
        (["--ways", "pull"], "ways: got ['pull']"),
    ],
)
def test_a_wrong_option_is_one_line(options: list[str], message: str, tmp_path: Path) -> None:
    ran = run_program([*WEFT, "bench", "floor", *options], tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"weft: {message}") and len(ran.stderr.splitlines()) == 1


def exchange_in_many_ways(me: Rank) -> list[str]:
    floor = Floor(Communicator(me.group), 100_000, me.group)
    # Blocks change from launch to launch, shares do not divide, some peers get nothing, some blocks have nothing.
    for way, waits, nbytes, peers, blocks in (
        ("stores", True, 100_000, 3, 2),
        ("bulk", True, 99_984, 3, 3),
        ("lines", True, 100_000, 3, 2),
        ("lines", True, 16, 3, 3),
        ("stores", True, 48, 1, 5),
        ("bulk", False, 24_592, 2, 1),
        ("stores", False, 16, 2, 2),
        ("lines", True, 2_000, 3, 1),
    ):
        floor.check(Load(way, waits, nbytes, peers, blocks))
    took = floor.exchange(Load("lines", True, 4096, 3, 1), samples=1)
    assert len(took.kernel_us) == 9 and min(took.kernel_us) > 0 and len(took.us) == 1
    assert floor.best_us(3 * 4096, samples=1) > 0
    lined_up: list[int] = []

    def line_up() -> None:
        lined_up.append(me.rank)
        dist.barrier(group=me.group)

    assert floor.best_alone_us(3 * 4096, line_up, samples=2) > 0
    assert len(lined_up) == 2 * 3  # two launches of each way
    refused = []
    for load in (
        Load("lines", True, 1024, 2, 1),
        Load("stores", True, 24, 1, 1),
        Load("stores", True, 1 << 30, 1, 1),
        Load("stores", True, 16, 4, 1),
        Load("stores", True, 16, 1, 0),
        Load("pull", True, 16, 1, 1),
    ):
        with pytest.raises(Error) as raised:
            floor.exchange(load)
        refused.append(str(raised.value).split(":")[0])
    return refused


def test_an_exchange_brings_all_bytes_whatever_the_sizes() -> None:
    refused = run_ranks(4, exchange_in_many_ways, with_gpus=False)
    assert refused == [["peers", "bytes", "bytes", "peers", "blocks", "way"]] * 4


def break_a_byte(me: Rank) -> str:
    floor = Floor(Communicator(me.group), 4096, me.group)
    load = Load("stores", False, 4096, 1, 1)
    launch = floor._launch

    def spoilt(of: Load) -> None:
        launch(of)
        if me.rank == 1:
            floor._sources[0, 77] += 1
            launch(of)

    floor._launch = spoilt  # type: ignore[method-assign]
    with pytest.raises(Error) as raised:
        floor.check(load)
    return str(raised.value)


def test_a_wrong_byte_is_found_by_all_ranks() -> None:
    reports = run_ranks(2, break_a_byte, with_gpus=False)
    assert reports[0] == reports[1] and "rank 0 got other bytes than ranks [1] sent" in reports[0]
