# SPDX-License-Identifier: Apache-2.0
"""MSCCL XML in both dialects: read, written, and refused with what and where."""

from __future__ import annotations

import pytest

from weft.collectives import VerificationError, verify
from weft.collectives.ir import Algorithm
from weft.collectives.library import build, entries
from weft.collectives.xml import XmlError, from_xml
from weft.collectives.xml_write import to_xml

GPU = """  <gpu id="{id}" i_chunks="1" o_chunks="0" s_chunks="2">
    <tb id="0" send="{next}" recv="{last}" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="1"/>
    </tb>
    <tb id="1" send="{last}" recv="{next}" chan="1">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="r" srcbuf="i" srcoff="0" dstbuf="s" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="1"/>
    </tb>
    <tb id="2" send="-1" recv="-1" chan="0">
      <step s="0" type="nop" srcbuf="i" srcoff="-1" dstbuf="o" dstoff="-1" cnt="0" depid="0" deps="1" hasdep="0"/>
      <step s="1" type="re" srcbuf="s" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="1" deps="1" hasdep="0"/>
      <step s="2" type="re" srcbuf="s" srcoff="1" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
"""
HEAD = (
    '<algo name="oneshot3" proto="LL" nchannels="2" nchunksperloop="1" ngpus="3" coll="allreduce" inplace="1" '
    'outofplace="0" minBytes="0" maxBytes="32768">\n'
)
EXAMPLE = HEAD + "".join(GPU.format(id=r, next=(r + 1) % 3, last=(r + 2) % 3) for r in range(3)) + "</algo>\n"


def _shape(algorithm: Algorithm) -> object:
    steps = [(r, b, s, t.op, t.src, t.dst, t.count, t.depends) for r, b, s, t in algorithm.steps()]
    blocks = [(r, n, b.send, b.recv, b.channel) for r, n, b in algorithm.blocks()]
    sizes = [(p.input_chunks, p.output_chunks, p.scratch_chunks) for p in algorithm.ranks]
    return steps, blocks, sizes, algorithm.chunks, algorithm.min_bytes, algorithm.max_bytes


def test_the_contracts_example_is_read_and_verified() -> None:
    algorithm = from_xml(EXAMPLE, "oneshot3.xml")
    assert verify(algorithm).result_checked
    assert algorithm.max_bytes == 32768 and not algorithm.outofplace
    reduce = algorithm.ranks[0].blocks[2].steps
    assert [step.depends for step in reduce] == [((0, 1), (1, 1)), ()]


@pytest.mark.parametrize("name", entries())
def test_library_algorithm_survives_the_round_trip(name: str) -> None:
    entry = entries()[name]
    n = next(n for n in range(3, 17) if entry.applies(n))
    algorithm = entry.program(n, inplace=entry.forms[-1], protocol="LL").compile()
    text = to_xml(algorithm)
    again = from_xml(text, "again.xml")
    assert _shape(again) == _shape(algorithm)
    assert to_xml(again) == text
    assert verify(again).steps == verify(algorithm).steps
    assert "\t" not in text and "  " not in text.replace("\n      ", "\n").replace("\n    ", "\n").replace(
        "\n  ", "\n"
    )


def test_microsofts_dialect_has_an_exclusive_limit_and_fewer_attributes() -> None:
    text = EXAMPLE.replace(' outofplace="0"', "")
    algorithm = from_xml(text, "m.xml")
    assert (algorithm.inplace, algorithm.outofplace, algorithm.max_bytes) == (True, False, 32767)
    spelled = to_xml(build("reducescatter_allpairs", 2).compile()).replace(
        "reducescatter", "reduce_scatter", 2
    )
    assert from_xml(spelled).collective == "reducescatter"


def test_missing_attributes_are_derived() -> None:
    text = EXAMPLE
    for gone in (
        ' hasdep="0"',
        ' hasdep="1"',
        ' nchannels="2"',
        ' ngpus="3"',
        ' i_chunks="1" o_chunks="0" s_chunks="2"',
    ):
        text = text.replace(gone, "")
    algorithm = from_xml(text)
    assert verify(algorithm).result_checked and algorithm.ranks[0].scratch_chunks == 2


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('proto="LL"', 'proto="XX"', "f.xml:1: algo: proto: got 'XX'"),
        (' coll="allreduce"', "", "attribute coll is missing"),
        ('type="re"', 'type="ra"', "type: got 'ra'"),
        ('ngpus="3"', 'ngpus="4"', "there are 3 gpu elements"),
        ('nchannels="2"', 'nchannels="1"', "a tb has chan 1"),
        ('<tb id="2"', '<tb id="5"', "without gaps"),
        ('depid="1" deps="1" hasdep="0"/>', 'depid="-1" deps="-1" hasdep="0"/>', "their waits would be lost"),
        ('depid="1" deps="1"', 'depid="1" deps="0"', "hasdep=0 and never tells"),
        ('depid="1" deps="1"', 'depid="7" deps="0"', "which does not exist"),
        ("</algo>", "", "not XML"),
        (
            'nchunksperloop="1"',
            'nchunksperloop="2000000000"',
            "nchunksperloop: got 2000000000, allowed: 1 to 65536",
        ),
        (' i_chunks="1"', ' i_chunks="2000000000"', "i_chunks: got 2000000000, allowed: 0 to 65536"),
        ('cnt="1"', 'cnt="72"', "cnt: got 72"),
        ('<step s="2"', '<step s="3"', "its place in the tb"),
    ],
)
def test_bad_file_is_refused_with_place_and_reason(old: str, new: str, says: str) -> None:
    assert old in EXAMPLE
    with pytest.raises(XmlError) as caught:
        from_xml(EXAMPLE.replace(old, new, 1), "f.xml")
    assert str(caught.value).startswith("f.xml:") and says in str(caught.value)


@pytest.mark.parametrize(
    "document_type",
    [
        '<!DOCTYPE algo SYSTEM "file:///etc/hostname">',
        '<!DOCTYPE algo [<!ENTITY a SYSTEM "file:///etc/hostname">]>',
        '<!DOCTYPE algo [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>',
    ],
)
def test_document_types_are_refused_and_with_them_entities(document_type: str) -> None:
    with pytest.raises(XmlError, match=r"f.xml:1: a document type \(algo\), allowed: none"):
        from_xml(document_type + EXAMPLE, "f.xml")


def test_file_whose_algorithm_is_wrong_is_read_but_not_verified() -> None:
    text = EXAMPLE.replace('srcbuf="s" srcoff="1" dstbuf="i"', 'srcbuf="s" srcoff="0" dstbuf="i"')
    with pytest.raises(VerificationError, match="result: in place, rank 0"):
        verify(from_xml(text))


def test_microsofts_dialect_says_limits_and_names_its_way() -> None:
    algorithm = build("reducescatter_allpairs", 3, min_bytes=64, max_bytes=4096).compile()
    text = to_xml(algorithm, "microsoft")
    assert 'coll="reduce_scatter"' in text and 'maxBytes="4097"' in text and "outofplace" not in text
    assert _shape(from_xml(text)) == _shape(algorithm)
    endless = to_xml(build("allreduce_1step", 3, inplace=True).compile(), "microsoft")
    assert from_xml(endless).max_bytes is None and from_xml(endless).inplace
    with pytest.raises(XmlError, match="alltoallv does not exist in microsoft's dialect"):
        to_xml(build("alltoallv_allpairs", 3).compile(), "microsoft")
