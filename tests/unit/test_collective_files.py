# SPDX-License-Identifier: Apache-2.0
"""weft.collectives.load(): every form of file, and what is said of a file that is none."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from test_collective_samples import REFUSED, SAMPLES, SERVED

import weft.collectives
from weft import cli
from weft.collectives import Algorithm, VerificationError, load
from weft.collectives.plan_write import to_plan
from weft.collectives.xml import DIALECTS
from weft.collectives.xml_write import to_xml
from weft.errors import Error

RING = """
from weft.collectives import AllGather, Buffer, Program, chunk

def program(ranks, instances=1):
    with Program("ring", AllGather(ranks), instances=instances) as ring:
        for rank in range(ranks):
            c = chunk(rank, Buffer.input, 0).copy(rank, Buffer.output, rank)
            for step in range(1, ranks):
                c = c.copy((rank + step) % ranks)
    return ring
"""


@pytest.mark.parametrize(("name", "arguments", "says"), SERVED, ids=lambda value: str(value)[:32])
def test_a_sample_is_loaded(name: str, arguments: str, says: str) -> None:
    several = int(name == "two_programs.py")
    assert isinstance(load(SAMPLES / name, program=several, arguments=shlex.split(arguments)), Algorithm)


@pytest.mark.parametrize(("name", "arguments", "says"), REFUSED, ids=lambda value: str(value)[:32])
def test_a_wrong_sample_is_refused_by_file_and_place(name: str, arguments: str, says: str) -> None:
    with pytest.raises(Error, match=re.escape(says)) as told:
        load(str(SAMPLES / name), arguments=shlex.split(arguments))
    assert name in str(told.value)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_weft_writes_is_loaded(dialect: str, tmp_path: Path) -> None:
    (tmp_path / "ring.py").write_text(RING)
    ring = load(tmp_path / "ring.py", 4, instances=2)
    assert ring.num_ranks == 4 and ring.collective == "allgather"
    (tmp_path / "ring.xml").write_text(to_xml(ring, dialect))
    (tmp_path / "ring.json").write_text(to_plan(ring))
    assert to_xml(load(tmp_path / "ring.xml"), dialect) == to_xml(ring, dialect)
    assert load(tmp_path / "ring.xml", 4, protocol="LL").protocol == "LL"
    assert load(tmp_path / "ring.json").num_ranks == 4
    assert load(tmp_path / "ring.json", reschedule=True).num_ranks == 4


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for path, found in ((3, "path: got int 3"), (tmp_path / "a.xml", "a.xml"), (tmp_path, "path: got")):
        with pytest.raises(Error, match=rf"{re.escape(found)}.*allowed: .*ends in \.xml .*\.json .*\.py"):
            load(path)  # type: ignore[arg-type]
    cases = {
        "a.txt": ("", r"a\.txt, allowed: a name that ends in \.xml .*\.json .*or \.py"),
        "b.xml": ("<algo", r"b\.xml:1: not XML"),
        "c.xml": ("<algo>\n<gpux/></algo>", r"c\.xml:2: .*unknown element, allowed: .*gpu"),
        "d.json": ('{\n"gpus": [}', r"d\.json: not JSON: .*line 2"),
        "e.json": ("{}", r"e\.json: gpus is missing"),
        "f.py": ("x = 1\nnothing()", r"f\.py:2: NameError"),
        "g.py": ("x = 1", r"g\.py: got program without a number, allowed: .*none"),
        "h.py": (RING, r"ranks: got 0, allowed: how many ranks, since h\.py defines program"),
        "i.xml": (
            '<msccl_algos>\n<load path="x.xml"/>\n</msccl_algos>',
            r"i\.xml: got a list of algorithms, allowed: one of the files that it names: x\.xml",
        ),
    }
    for name, (text, says) in cases.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(Error, match=says):
            load(tmp_path / name)
    (tmp_path / "j.xml").write_bytes(b"\xff\xfe")
    with pytest.raises(Error, match=r"j\.xml: not text"):
        load(tmp_path / "j.xml")
    with pytest.raises(Error, match=r"options: got depth, allowed: instances"):
        load(tmp_path / "h.py", 2, depth=3)
    (tmp_path / "k.xml").write_text(to_xml(load(tmp_path / "h.py", 2)))
    with pytest.raises(Error, match=r"ranks: got 3, allowed: 2, as k\.xml says"):
        load(tmp_path / "k.xml", 3)
    with pytest.raises(Error, match=r"options: got depth, allowed: protocol, for k\.xml"):
        load(tmp_path / "k.xml", depth=3)
    with pytest.raises(Error, match=r"protocol: got LL3, allowed: Simple, LL, LL128"):
        load(tmp_path / "k.xml", protocol="LL3")


def test_a_file_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ring.py").write_text(RING)
    text = to_xml(load(tmp_path / "ring.py", 2))
    (tmp_path / "wrong.xml").write_text(text.replace('coll="allgather"', 'coll="alltoall"'))
    with pytest.raises(VerificationError, match=r"wrong\.xml") as told:
        load(tmp_path / "wrong.xml")
    assert told.value.kind in ("result", "structure")


def test_xml_is_printed_by_a_name_that_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with weft.collectives.Program("copy", weft.collectives.Broadcast(2)):
        weft.collectives.chunk(0, weft.collectives.Buffer.input, 0).copy(1, weft.collectives.Buffer.output, 0)
        weft.collectives.chunk(0, weft.collectives.Buffer.input, 0).copy(0, weft.collectives.Buffer.output, 0)
        weft.collectives.print_xml()
    (tmp_path / "copy.xml").write_text(capsys.readouterr().out)
    assert load(tmp_path / "copy.xml").collective == "broadcast"
    assert not hasattr(weft.collectives, "XML")
    assert cli.main(["compile", str(SAMPLES / "two_programs.py"), "-o", str(tmp_path / "x.xml")]) == 0
