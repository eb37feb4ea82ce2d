# SPDX-License-Identifier: Apache-2.0
"""The selector: files and tables join, bad ones are named and left out, and the log says why candidates lost."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from weft.collectives import book
from weft.collectives.average import ended_sums
from weft.collectives.book import Part, write_book
from weft.collectives.cost import CPU, NVLINK, estimate, predict_us
from weft.collectives.direct import direct_messages
from weft.collectives.exchanges import LINES, PLACES
from weft.collectives.library import build
from weft.collectives.rows import program_rows
from weft.collectives.selector import Selector, read_algorithms
from weft.collectives.tune import table_rows
from weft.collectives.tuned_tables import other_rows, read_table, table_name, write_table
from weft.collectives.verifier import verify
from weft.collectives.xml_write import to_xml
from weft.errors import Error


def test_folders_and_files_join_and_bad_ones_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = tmp_path / "ring.xml"
    good.write_text(to_xml(build("allreduce_a100_ring", 3, inplace=True).compile()))
    (tmp_path / "bad.xml").write_text("<algo")
    (tmp_path / "bytes.xml").write_bytes(bytes(range(128, 256)))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    caplog.set_level(logging.INFO, "weft.collectives")
    found = read_algorithms(f"{tmp_path}:{good}:/nowhere", 3)
    assert [algorithm.num_ranks for algorithm in found] == [3, 3]
    for file in ("bad.xml", "bytes.xml", "deep.json"):
        assert f"{file} is not used" in caplog.text
    assert "/nowhere does not exist" in caplog.text
    assert read_algorithms(str(good), 4) == [] and "for 3 ranks, not 4" in caplog.text
    choice = Selector(3, "cpu", algorithm_dir=str(good)).choose("allreduce", 3 << 10, inplace=True)
    assert "ring" in choice.algorithm.name


@pytest.mark.parametrize(
    "field",
    [
        {"collective": ["all_reduce"]},
        {"max_bytes": float("inf")},
        {"max_bytes": -1},
        {"ranks": "many"},
        {"options": {"a": [1]}},
        {"options": 7},
        {"algorithm": {}},
    ],
    ids=str,
)
def test_a_table_with_odd_fields_is_not_used(
    field: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"collective": "all_reduce", "ranks": 2, "max_bytes": 1024, "algorithm": "allreduce_1step"}
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"version": 1, "key": "", "rows": [row]}))
    assert len(read_table(table, "")) == 1
    table.write_text(json.dumps({"version": 1, "key": "", "rows": [row | field]}))
    assert read_table(table, "") == [] == other_rows(table, "", ["all_reduce"], 2)
    assert "is not used" in caplog.text


def test_a_list_of_files_says_their_sizes_and_protocols(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = build("allreduce_a100_ring", 3, inplace=True, min_bytes=1 << 20).compile()
    (tmp_path / "ring.xml").write_text(to_xml(ring))
    listed = tmp_path / "list.xml"
    load = '<load path="ring.xml" minbytes="1024" maxbytes="4096" proto="LL"/>'
    listed.write_text(f"<msccl_algos>\n  {load}\n</msccl_algos>\n")
    (found,) = read_algorithms(str(listed), 3)
    assert (found.min_bytes, found.max_bytes, found.protocol) == (1024, 4095, "LL")
    listed.write_text(f"<msccl_algos>\n  {load.replace('LL', 'XX')}\n</msccl_algos>\n")
    assert read_algorithms(str(listed), 3) == [] and "list.xml:2: load: proto: got 'XX'" in caplog.text
    listed.write_text('<msccl_algos><load path="none.xml"/></msccl_algos>')
    assert (
        read_algorithms(str(listed), 3) == []
        and "list.xml is not used: none.xml: cannot be read: No such file" in caplog.text
    )


def test_a_file_with_a_root_serves_that_root_only(tmp_path: Path) -> None:
    chain = tmp_path / "chain.xml"
    chain.write_text(to_xml(build("broadcast_chain", 3, inplace=True).compile()))
    selector = Selector(3, "cpu", algorithm_dir=str(chain))
    assert "chain" in selector.choose("broadcast", 1024, inplace=True).algorithm.name
    other = selector.choose("broadcast", 1024, inplace=True, root=2).algorithm
    assert other.contract is not None and other.contract.root == 2


def test_a_file_for_in_place_calls_serves_the_others_where_the_caller_may_copy(tmp_path: Path) -> None:
    for name in ("allgather_ring", "reducescatter_ring", "gather_flat"):
        (tmp_path / f"{name}.xml").write_text(to_xml(build(name, 3, inplace=True).compile()))
    assert 'inplace="1" outofplace="0"' in (tmp_path / "allgather_ring.xml").read_text()
    for collective, may_copy, serves in (
        *(("allgather", True, True), ("reducescatter", True, True), ("allgather", False, False)),
        ("gather", True, False),  # the root's input is in the output, and the other ranks have none
    ):
        selector = Selector(3, "cpu", algorithm_dir=str(tmp_path), may_copy=may_copy)
        assert selector.choose(collective, 3 << 20).algorithm.inplace == serves, collective


def test_msccls_own_variables_name_algorithms() -> None:
    show = "import weft._core as c; print(c.config().algorithm_dir)"

    def value(**variables: str) -> str:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
        return subprocess.run(
            [sys.executable, "-c", show], env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert value(MSCCL_ALGO_DIR="/a") == "/a"
    assert value(MSCCL_XML_FILES="/a.xml:/b.xml") == "/a.xml:/b.xml"
    assert value(MSCCL_CONFIG="/list.xml") == "/list.xml"
    assert value(MSCCL_ALGO_DIR="/a", NCCL_MSCCL_ENABLE="0") == ""
    assert value(MSCCL_ALGO_DIR="/a", WEFT_ALGORITHM_DIR="/w") == "/w"


def _measured() -> list[dict[str, object]]:
    variant = {"algorithm": "allreduce_1step", "protocol": "LL", "instances": 1, "slice_bytes": 0}
    times = {"allreduce_1step LL x1": 5.0, "allreduce_allpairs LL x1": 9.0}
    row = {"call": "all_reduce", "bytes": 1024, "us": 5.0, "label": "allreduce_1step LL x1"}
    return [{**row, "variant": variant, "measured_us": times}]


def test_a_tuned_table_decides_and_the_log_has_what_the_others_took(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_table(tmp_path / table_name("cpu", "here", 4), "here", table_rows(_measured(), 4))
    caplog.set_level(logging.DEBUG, "weft.collectives")
    choice = Selector(4, "cpu", "here", tmp_path).choose("allreduce", 64 << 20, inplace=True)
    assert choice.algorithm.name == "allreduce_1step"
    assert "allreduce_allpairs LL x1: slower, measured 9.0 us" in caplog.text


def test_a_table_keeps_what_is_not_measured_again(tmp_path: Path) -> None:
    rows = [*table_rows(_measured(), 4), *table_rows(_measured(), 2)]
    write_table(tmp_path / "t.json", "here", rows)
    assert other_rows(tmp_path / "t.json", "here", ["allgather"], 4) == rows
    assert other_rows(tmp_path / "t.json", "here", ["allgather", "allreduce"], 4) == rows[1:]
    assert other_rows(tmp_path / "t.json", "elsewhere", ["allgather"], 4) == []


def test_a_tuned_table_of_others_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = tmp_path / "t.json"
    write_table(table, "here", table_rows(_measured(), 4))
    table.chmod(0o600)
    tmp_path.chmod(0o700)
    named = read_table(table, "here")
    assert named and read_table(table, "here", is_private=True) == named
    for path, mode in ((table, 0o666), (tmp_path, 0o777)):
        before = path.stat().st_mode
        path.chmod(mode)
        caplog.clear()
        assert read_table(table, "here", is_private=True) == []
        assert f"chmod go-w {path}" in caplog.text
        assert read_table(table, "here") == named  # somebody has named it
        path.chmod(before)


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"version": 1, "key": "here", "rows": [{}]})])
def test_a_bad_table_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / table_name("cpu", "here", 4)).write_text(text)
    assert Selector(4, "cpu", "here", tmp_path).choose("allreduce", 1024, inplace=True).algorithm


def test_a_book_is_written_from_a_table(tmp_path: Path) -> None:
    write_table(tmp_path / table_name("cpu", "here", 2), "here", table_rows(_measured(), 2))
    assert write_book(tmp_path / "b.book", [Part("cpu", 2, "here", tmp_path)]) >= 7
    assert (tmp_path / "b.book").read_bytes().startswith(b"weftbook")


def test_sends_and_receives_of_other_sizes_have_blocks_of_their_own() -> None:
    algorithm = build("alltoallv_allpairs", 3, instances=2).compile()
    verify(algorithm)
    for rank in algorithm.ranks:
        ends = [(block.send >= 0, block.recv >= 0) for block in rank.blocks]
        assert sorted(ends) == [(False, False)] * 2 + [(False, True)] * 4 + [(True, False)] * 4


def test_a_book_leaves_what_ranks_have_for_themselves_to_its_caller() -> None:
    whole = build("alltoallv_allpairs", 3, instances=2).compile()
    served = book._between_ranks(whole)
    verify(served)
    assert [len(rank.blocks) for rank in served.ranks] == [8, 8, 8]
    with pytest.raises(Error, match=r"holds nothing, should hold C\(0,0\)"):
        verify(dataclasses.replace(served, contract=whole.contract))


def test_a_block_grants_the_buffer_that_its_sender_may_store_into() -> None:
    algorithm = build("alltoall_allpairs", 3).compile()
    blocks, _, _ = program_rows(ended_sums(algorithm), 0, direct_messages(algorithm))
    output = 1 << 1
    assert [grants for *_, grants in blocks] == [output if recv >= 0 else 0 for _, recv, *_ in blocks]


def test_the_model_knows_which_messages_are_referred_to() -> None:
    exchange = build("alltoall_allpairs", 4).compile()
    through_slots = dataclasses.replace(CPU, refer_bytes=0)
    assert (
        estimate(exchange, 1 << 20, CPU).total_us < 0.7 * estimate(exchange, 1 << 20, through_slots).total_us
    )
    # Too small to be referred to; and every message of this one is overwritten too early.
    one_step = build("allreduce_1step", 4, inplace=True).compile()
    for algorithm, num_bytes in ((exchange, 4096), (one_step, 1 << 20)):
        assert estimate(algorithm, num_bytes, CPU) == estimate(algorithm, num_bytes, through_slots)


def test_a_prediction_is_the_estimate_of_every_size() -> None:
    for algorithm in (build("alltoall_allpairs", 4).compile(), build("allreduce_a100_ring", 3).compile()):
        for num_bytes in (1, 1 << 10, 3 << 20, 5 << 24):
            for machine in (CPU, NVLINK):
                assert (
                    predict_us(algorithm, num_bytes, machine)
                    == estimate(algorithm, num_bytes, machine).total_us
                )


_MEASURED = Path(__file__).parents[2] / "bench" / "results" / "h200-x4-exchanges.json"


@pytest.mark.parametrize("call", ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"])
def test_over_nvlink_the_choice_is_near_the_best_that_was_measured(call: str) -> None:
    """The least of three runs counts, as the machine adds noise and takes none away; so does what it adds to these."""
    selector = Selector(4, "nvlink")
    rows = [row for row in json.loads(_MEASURED.read_text())["results"] if row["call"] == call]
    assert [row["bytes"] for row in rows][::9] == [1 << 10, 64 << 20]
    for row in rows:
        label = selector.choose(call.replace("_", ""), row["bytes"], inplace=call == "all_reduce").label()
        best = min(row["us"], key=lambda one: min(row["us"][one]))
        assert min(row["us"][label]) <= 1.2 * min(row["us"][best]), (row["bytes"], label, best)


def test_a_book_has_the_exchanges_that_the_selector_chooses(tmp_path: Path) -> None:
    """Rows: machine, ranks, collective, mode, program, slice, SMs, limit. Two ranks: programs for messages alone."""
    write_book(tmp_path / "b", [Part("nvlink", 2)])
    words = memoryview((tmp_path / "b").read_bytes()[8:]).cast("I")
    rows = [tuple(words[at : at + 9]) for at in range(len(words) - 9 * words[5], len(words), 9)]
    selector = Selector(2, "nvlink")
    modes = {"allreduce_1step LL": 1, "allreduce_allpairs LL": 2, "allgather_allpairs LL": 2}
    rooted = {"broadcast": 4, "reduce": 5, "gather": 7, "scatter": 8}
    modes |= {f"{collective}_flat LL": 2 for collective in rooted}
    for collective, number in {"allreduce": 0, "allgather": 1, **rooted}.items():
        for num_bytes in (1 << 10, 40 << 10, 300 << 10, 1 << 20, 16 << 20):
            choice = selector.choose(collective, num_bytes, inplace=collective not in ("gather", "scatter"))
            row = next(row for row in rows if row[2] == number and num_bytes <= row[7] | row[8] << 32)
            assert row[3] == modes.get(f"{choice.algorithm.name} {choice.algorithm.protocol}", 3), num_bytes
    assert all(row[4] == 0xFFFFFFFF for row in rows if row[2] != 6)


def test_a_book_of_cpus_leaves_gather_and_scatter_to_messages(tmp_path: Path) -> None:
    write_book(tmp_path / "b", [Part("cpu", 2)])
    words = memoryview((tmp_path / "b").read_bytes()[8:]).cast("I")
    collectives = [words[at + 2] for at in range(len(words) - 9 * words[5], len(words), 9)]
    assert {0, 4, 5, 6} <= {*collectives} and not {7, 8} & {*collectives}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("collective", ["broadcast", "reduce", "gather", "scatter"])
def test_over_nvlink_calls_with_a_root_are_exchanges(collective: str, ranks: int) -> None:
    selector = Selector(ranks, "nvlink")
    sizes = [1 << exponent for exponent in range(4, 27)]
    chosen = [
        selector.choose(collective, size, inplace=collective in ("broadcast", "reduce")) for size in sizes
    ]
    assert {choice.mode for choice in chosen} == {"exchange"}
    ways = [choice.way for choice in chosen]
    assert ways == sorted(ways) and {*ways} == {LINES, PLACES}
    assert (
        Selector(ranks, "cpu").choose(collective, 4096, collective in ("broadcast", "reduce")).mode
        == "program"
    )


def test_programs_are_written_drawn_and_put_into_books_without_the_extension(tmp_path: Path) -> None:
    script = (
        "import sys; sys.modules['weft._core'] = None\n"
        "from pathlib import Path\n"
        "from weft.cli import main\n"
        "from weft.collectives.book import Part, write_book\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "assert main(['compile', 'allgather_ring', '--ranks', '3', '-o', str(folder / 'ring.xml')]) == 0\n"
        "assert main(['show', str(folder / 'ring.xml'), '--html', str(folder / 'ring.html')]) == 0\n"
        "assert write_book(folder / 'book', [Part('cpu', 2)]) > 0\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


TWO_LEVEL_SHAPES = [(4, 2), (6, 2), (6, 3), (8, 2), (8, 4)]


@pytest.mark.parametrize(("ranks", "per_node"), TWO_LEVEL_SHAPES)
@pytest.mark.parametrize("name", ["allreduce_two_level", "allgather_two_level", "reducescatter_two_level"])
def test_a_byte_crosses_once_to_every_other_node(name: str, ranks: int, per_node: int) -> None:
    algorithm = build(name, ranks, per_node=per_node, inplace=True).compile()
    verify(algorithm)
    across = Counter(
        (rank // per_node, block.send // per_node)
        for rank, _, block in algorithm.blocks()
        for step in block.steps
        for _ in range(step.count)
        if step.op.sends and rank // per_node != block.send // per_node
    )
    nodes = ranks // per_node
    # In chunks: of all_reduce a rail's share of a part there, and the sum of another back; else what a node has for
    # one other, once for every place in it.
    once = 2 * per_node if name == "allreduce_two_level" else per_node
    assert across == {(a, b): once for a in range(nodes) for b in range(nodes) if a != b}


def test_two_level_programs_of_other_shapes_are_refused_by_name() -> None:
    for name, ranks, per_node in (("allreduce_two_level", 6, 4), ("allgather_two_level", 4, 4)):
        with pytest.raises(Error, match=f"per_node: got {per_node}"):
            build(name, ranks, per_node=per_node)
    with pytest.raises(Error, match="per_node: got 2, allowed: 4, for two nodes"):
        build("allreduce_two_level_once", 8, per_node=2)


def test_the_choice_knows_which_links_cross_the_network() -> None:
    flat, nodes = Selector(4, "cpu"), Selector(4, "cpu", per_node=2)
    assert flat.fingerprint() != nodes.fingerprint()
    for collective in ("allreduce", "allgather", "reducescatter"):
        for num_bytes in (1 << 20, 64 << 20):
            assert "two_level" not in flat.choose(collective, num_bytes, True).algorithm.name
            assert "two_level" in nodes.choose(collective, num_bytes, True).algorithm.name
    alone = Selector(4, "cpu", per_node=1).choose("allreduce", 1 << 20, True)
    assert "two_level" not in alone.algorithm.name and alone.algorithm.protocol == "Simple"
    pairs = build("alltoall_allpairs", 4).compile()
    assert predict_us(pairs, 1 << 20, dataclasses.replace(CPU, per_node=2)) > 2 * predict_us(
        pairs, 1 << 20, CPU
    )


@pytest.mark.parametrize("num_bytes", [64 << 10, 1 << 20, 4 << 20, 16 << 20])
def test_all_to_all_between_nodes_of_cpu_ranks_is_not_cut_into_instances(num_bytes: int) -> None:
    choice = Selector(4, "cpu", per_node=2).choose("alltoall", num_bytes, inplace=False)
    assert choice.algorithm.chunks == 4, choice.label()
