# SPDX-License-Identifier: Apache-2.0
"""Algorithms as MSCCL XML, in the dialects of azure and microsoft. What reads them is in xml.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.collectives.contract import Buffer, Collective
from weft.collectives.ir import (
    Algorithm,
    RankProgram,
)
from weft.collectives.values import Value
from weft.collectives.verifier import promised
from weft.collectives.xml import MAX_WAIT_BLOCK, MOST_TEXT, NO_END, ROOTED, XmlError
from weft.collectives.xml_numbers import Numbers, rotated_texts


def to_xml(algorithm: Algorithm, dialect: str = "azure") -> str:
    """Return the algorithm as XML that every reader takes: all attributes, no prolog, single spaces.

    ``dialect``: "azure", or "microsoft", which has one form, another spelling of reducescatter, exclusive limits and
    neither gather, scatter nor alltoallv.
    Raises: XmlError where the format cannot say it (a wait on a block above 127).
    """
    attributes: dict[str, object] = {
        "name": algorithm.name,
        "proto": algorithm.protocol,
        "nchannels": algorithm.channels,
        "nchunksperloop": algorithm.chunks,
        "ngpus": algorithm.num_ranks,
        "coll": algorithm.collective,
        "inplace": int(algorithm.inplace),
        "outofplace": int(algorithm.outofplace),
        "minBytes": algorithm.min_bytes,
        "maxBytes": algorithm.max_bytes or 0,
    }
    if algorithm.contract is not None and algorithm.collective in ROOTED and algorithm.contract.root:
        attributes["root"] = algorithm.contract.root
    if algorithm.threads:
        attributes["nthreads"] = algorithm.threads
    if dialect == "microsoft":
        attributes |= _microsoft(algorithm)
        del attributes["outofplace"]
    lines = [_tag("algo", attributes)]
    needed = algorithm.needed_steps()
    if algorithm.rotation is not None:
        lines += rotated_texts(
            algorithm.rotation, lambda n: "\n".join(_rank_lines(algorithm.ranks[0], needed, n))
        )
    else:
        for program in algorithm.ranks:
            lines += _rank_lines(program, needed, Numbers())
    if algorithm.contract is not None and algorithm.collective == "custom":
        lines += _contract_lines(algorithm, algorithm.contract)
    return "\n".join([*lines, "</algo>", ""])


def _rank_lines(program: RankProgram, needed: set[tuple[int, int, int]], numbers: Numbers) -> Iterator[str]:
    sizes = (program.input_chunks, program.output_chunks, program.scratch_chunks)
    keys = ("i_chunks", "o_chunks", "s_chunks")
    name = {"id": numbers.rank(program.rank)}
    yield "  " + _tag("gpu", {**name, **dict(zip(keys, sizes, strict=True))})
    numbering = _xml_numbers(program)
    for number, block in enumerate(program.blocks):
        peers = {"send": numbers.rank(block.send), "recv": numbers.rank(block.recv)}
        yield "    " + _tag("tb", {"id": number, **peers, "chan": block.channel})
        for line in _step_lines(program, number, numbering, needed, numbers):
            yield "      " + line
        yield "    </tb>"
    yield "  </gpu>"


def _contract_lines(algorithm: Algorithm, contract: Collective) -> Iterator[str]:
    yield "  <contract>"
    outputs = promised(algorithm, contract)
    own = contract.in_form(True)
    for rank, before in enumerate(contract.init_buffers()):
        for buffer, slots in ((Buffer.input, before.get(Buffer.input, [])), (Buffer.output, outputs[rank])):
            for index, value in enumerate(slots):
                place = {"rank": rank, "buf": buffer, "off": index}
                stands = own.alias(rank, buffer, index)
                if algorithm.inplace and stands not in ((buffer, index), (Buffer.input, index)):
                    yield "    " + _tag("slot", {**place, "same": f"{stands[0]} {stands[1]}"}, "/>")
                for text in _sum_texts(value):
                    yield "    " + _tag("slot", {**place, "sum": text}, "/>")
    yield "  </contract>"


def _sum_texts(value: Value | None) -> Iterator[str]:
    """Yield a sum in texts that fit an attribute."""
    text = ""
    for rank, index in value.parts if value else ():
        word = f"{rank}.{index}"
        if len(text) + len(word) >= MOST_TEXT:
            yield text
            text = ""
        text = f"{text} {word}".strip()
    if text:
        yield text


def _microsoft(algorithm: Algorithm) -> dict[str, object]:
    """Return what microsoft/msccl's reader wants otherwise."""
    if algorithm.collective in ("gather", "scatter", "alltoallv"):
        raise XmlError(f"{algorithm.name}: {algorithm.collective} does not exist in microsoft's dialect")
    renamed = {"reducescatter": "reduce_scatter", "sendrecv": "custom"}
    end = NO_END if algorithm.max_bytes is None else algorithm.max_bytes + 1
    return {"coll": renamed.get(algorithm.collective, algorithm.collective), "maxBytes": end}


def _xml_numbers(program: RankProgram) -> dict[tuple[int, int], int]:
    """Return the file's number of every step, counting the nops before it."""
    numbers = {}
    for number, block in enumerate(program.blocks):
        at = 0
        for position, step in enumerate(block.steps):
            at += max(0, len(step.depends) - 1)
            numbers[number, position] = at
            at += 1
    return numbers


def _step_lines(
    program: RankProgram,
    number: int,
    numbering: dict[tuple[int, int], int],
    needed: set[tuple[int, int, int]],
    numbers: Numbers,
) -> Iterator[str]:
    for position, step in enumerate(program.blocks[number].steps):
        first = numbering[number, position] - max(0, len(step.depends) - 1)
        for extra, wait in enumerate(step.depends[:-1]):
            place = 'srcbuf="i" srcoff="-1" dstbuf="o" dstoff="-1" cnt="0"'
            yield f'<step s="{first + extra}" type="nop" {place} {_wait(wait, numbering)} hasdep="0"/>'
        wait_text = _wait(step.depends[-1], numbering) if step.depends else 'depid="-1" deps="-1"'
        src, dst = step.src, step.dst
        srcoff, dstoff = numbers.index(src), numbers.index(dst)
        yield (
            f'<step s="{numbering[number, position]}" type="{step.op.value}" '
            f'srcbuf="{src.buffer}" srcoff="{srcoff}" dstbuf="{dst.buffer}" dstoff="{dstoff}" '
            f'cnt="{step.count}" {wait_text} hasdep="{int((program.rank, number, position) in needed)}"/>'
        )


def _wait(wait: tuple[int, int], numbering: dict[tuple[int, int], int]) -> str:
    if wait[0] > MAX_WAIT_BLOCK:
        raise XmlError(
            f"a step waits for block {wait[0]}; MSCCL XML names blocks up to {MAX_WAIT_BLOCK} only"
        )
    return f'depid="{wait[0]}" deps="{numbering[wait]}"'


def _tag(name: str, attributes: Mapping[str, object], end: str = ">") -> str:
    return f"<{name} " + " ".join(f'{key}="{_escape(str(value))}"' for key, value in attributes.items()) + end


def _escape(text: str) -> str:
    for plain, escaped in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ('"', "&quot;"),
        ("\n", " "),
        ("\t", " "),
    ):
        text = text.replace(plain, escaped)
    return text
