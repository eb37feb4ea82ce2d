# SPDX-License-Identifier: Apache-2.0
"""MSCCL XML, both dialects, in and out.

    algorithm = from_xml(text, "ring.xml")          # Error: file, line, what is wrong and what is allowed
    text = to_xml(algorithm)                        # every attribute that either reader requires
    text = to_xml(algorithm, "microsoft")           # for readers that take maxBytes as microsoft/msccl does
    files = read_list(text, "algorithms.xml")       # what MSCCL_CONFIG names

A file with ``outofplace`` is Azure's dialect (maxBytes is inclusive, 0 is none), else microsoft's (exclusive). The IR
has no nops: reading folds a chain of nops into the waits of the step that follows, writing makes them again.
Reading checks the form; ``weft.collectives.verify`` checks what the algorithm does.

The contract of a custom collective travels in an element ``contract``, which other readers ignore:
``<slot rank="1" buf="o" off="0" sum="0.2 1.2"/>`` is a chunk that holds (buf i) or must hold (buf o) the sum of chunk 2
of ranks 0 and 1; ``same="i 3"`` names the slot that is the same memory in place. A root that is not rank 0 is the
attribute ``root``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from xml.parsers import expat

from weft.collectives.contract import Buffer, Collective, Slots, Stated, standard
from weft.collectives.ir import (
    MAX_CHUNKS,
    MAX_COUNT,
    PROTOCOLS,
    Algorithm,
    Block,
    Op,
    RankProgram,
    Span,
    Step,
)
from weft.collectives.values import Value
from weft.errors import Error

_COLLECTIVES = (
    *("allreduce", "allgather", "reducescatter", "reduce_scatter", "alltoall", "alltoallv"),
    *("reduce", "broadcast", "gather", "scatter", "send", "recv", "sendrecv", "custom"),
)
DIALECTS = ("azure", "microsoft")
_PARENTS = {
    **{"algo": None, "gpu": "algo", "tb": "gpu", "step": "tb"},
    **{"contract": "algo", "slot": "contract"},
}
ROOTED = ("broadcast", "reduce", "gather", "scatter")
MOST_TEXT = 240  # characters of an attribute that all readers take
NO_END = 1 << 62  # microsoft's maxBytes of algorithms without a limit
MAX_WAIT_BLOCK = 127  # the format's readers keep depid in a signed byte


class XmlError(Error):
    """The file is not an algorithm; the message starts with the file and the line."""


@dataclasses.dataclass
class _Element:
    name: str
    line: int
    file: str
    attributes: dict[str, str]
    children: list[_Element] = dataclasses.field(default_factory=list)

    def error(self, message: str) -> XmlError:
        return XmlError(f"{self.file}:{self.line}: {self.name}: {message}")

    def text(self, key: str, allowed: tuple[str, ...] = (), default: str | None = None) -> str:
        value = self.attributes.get(key, default)
        if value is None:
            raise self.error(f"attribute {key} is missing")
        if allowed and value not in allowed:
            raise self.error(f"{key}: got {value!r}, allowed: {', '.join(allowed)}")
        return value

    def number(self, key: str, default: int | None = None, low: int = 0, high: int = 1 << 62) -> int:
        text = self.attributes.get(key)
        if text is None:
            if default is None:
                raise self.error(f"attribute {key} is missing")
            return default
        try:
            value = int(text)
        except ValueError:
            raise self.error(f"{key}: got {text!r}, allowed: a whole number") from None
        if not low <= value <= high:
            raise self.error(f"{key}: got {value}, allowed: {low} to {high}")
        return value


def _parse(text: str, file: str, parents: Mapping[str, str | None] = _PARENTS) -> _Element:
    parser = expat.ParserCreate()
    root: list[_Element] = []
    open_elements: list[_Element] = []

    def start(name: str, attributes: dict[str, str]) -> None:
        element = _Element(name, parser.CurrentLineNumber, file, attributes)
        parent = open_elements[-1].name if open_elements else None
        if name not in parents:
            raise element.error(f"unknown element, allowed: {', '.join(parents)}")
        if parents[name] != parent:
            raise element.error(
                f"stands in {parent or 'the file'}, allowed: in {parents[name] or 'the file'}"
            )
        if open_elements:
            open_elements[-1].children.append(element)
        else:
            root.append(element)
        open_elements.append(element)

    def refuse_types(name: str, *_: object) -> None:
        raise XmlError(
            f"{file}:{parser.CurrentLineNumber}: a document type ({name}), allowed: none, and so no entities"
        )

    parser.StartDoctypeDeclHandler = refuse_types
    parser.StartElementHandler = start
    parser.EndElementHandler = lambda name: open_elements.pop()
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise XmlError(f"{file}:{error.lineno}: not XML: {expat.errors.messages[error.code]}") from None
    return root[0]


@dataclasses.dataclass(frozen=True)
class Listed:
    """A line of microsoft/msccl's list: a file, and sizes and protocol that stand instead of the file's own.

    ``max_bytes`` is inclusive, None for no limit; ``protocol`` None: the file's.
    """

    path: str
    min_bytes: int
    max_bytes: int | None
    protocol: str | None


def is_list(text: str) -> bool:
    """Return whether this is a list of algorithms (MSCCL_CONFIG) and not an algorithm."""
    return "<msccl_algos" in text


def read_list(text: str, file: str) -> list[Listed]:
    """Read microsoft/msccl's list of files. Raises: XmlError, naming file and line."""
    root = _parse(text, file, {"msccl_algos": None, "load": "msccl_algos"})
    listed = []
    for load in root.children:
        end = load.number("maxbytes", -1, -1)
        protocol = load.text("proto", PROTOCOLS) if "proto" in load.attributes else None
        most = None if end < 0 else end - 1
        listed.append(Listed(load.text("path"), load.number("minbytes", 0), most, protocol))
    return listed


def from_xml(text: str, file: str = "algorithm.xml") -> Algorithm:
    """Read an algorithm. Raises: XmlError, naming file, line, rank, block and step."""
    algo = _parse(text, file)
    if algo.name != "algo":
        raise algo.error("the outermost element must be algo")
    gpus = [child for child in algo.children if child.name == "gpu"]
    ranks = algo.number("ngpus", len(gpus), 1)
    if ranks != len(gpus):
        raise algo.error(f"ngpus: got {ranks}, but there are {len(gpus)} gpu elements")
    collective = algo.text("coll", _COLLECTIVES)
    collective = "reducescatter" if collective == "reduce_scatter" else collective
    chunks = algo.number("nchunksperloop", low=1, high=MAX_CHUNKS)
    inplace = bool(algo.number("inplace", 0, 0, 1))
    outofplace = bool(algo.number("outofplace", int(not inplace), 0, 1))
    min_bytes, max_bytes, notes = _size_range(algo)
    programs = [_read_rank(gpu, ranks, chunks, collective) for gpu in gpus]
    programs.sort(key=lambda program: program.rank)
    if [program.rank for program in programs] != list(range(ranks)):
        raise algo.error(f"gpu ids are {[p.rank for p in programs]}, allowed: 0 to {ranks - 1}, each once")
    algorithm = Algorithm(
        name=algo.text("name", default=PurePath(file).stem),
        collective=collective,
        protocol=algo.text("proto", PROTOCOLS),
        chunks=chunks,
        inplace=inplace,
        outofplace=outofplace,
        ranks=programs,
        contract=_contract(algo, collective, programs, chunks, inplace),
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        threads=algo.number("nthreads", 0, 0, 1024),
        notes=notes,
    )
    channels = algo.number("nchannels", algorithm.channels, 1)
    if algorithm.channels > channels:
        raise algo.error(f"nchannels: got {channels}, but a tb has chan {algorithm.channels - 1}")
    return algorithm


def _contract(
    algo: _Element, collective: str, programs: list[RankProgram], chunks: int, inplace: bool
) -> Collective | None:
    stated = [child for child in algo.children if child.name == "contract"]
    if stated:
        return _read_contract(stated[0], programs, chunks, inplace)
    options = {"root": algo.number("root", 0, 0, len(programs) - 1)} if collective in ROOTED else {}
    try:
        return standard(collective, len(programs), chunks, inplace, **options)
    except Error as error:
        raise algo.error(str(error)) from None


def _read_contract(element: _Element, programs: list[RankProgram], chunks: int, inplace: bool) -> Collective:
    lengths = {(p.rank, Buffer.input): p.input_chunks for p in programs}
    lengths |= {(p.rank, Buffer.output): p.output_chunks for p in programs}
    held: dict[tuple[int, str], Slots] = {place: [None] * length for place, length in lengths.items()}
    same = {}
    for slot in element.children:
        rank = slot.number("rank", None, 0, len(programs) - 1)
        buffer = slot.text("buf", (Buffer.input, Buffer.output))
        at = slot.number("off", None, 0, lengths[rank, buffer] - 1)
        parts = _pairs(slot)
        known = held[rank, buffer][at]
        if parts:
            held[rank, buffer][at] = known + Value(parts) if known else Value(parts)
        if "same" in slot.attributes:
            same[rank, buffer, at] = _same_slot(slot, rank, lengths)
    ranks = range(len(programs))
    before, after = ([held[rank, buffer] for rank in ranks] for buffer in (Buffer.input, Buffer.output))
    return Stated(chunks, before, after, inplace, same)


def _pairs(slot: _Element) -> tuple[tuple[int, int], ...]:
    words = slot.text("sum", default="").split()
    numbers = [word.split(".") for word in words]
    if not all(len(pair) == 2 and pair[0].isdigit() and pair[1].isdigit() for pair in numbers):
        raise slot.error(f"sum: got {slot.attributes['sum']!r}, allowed: RANK.CHUNK and blanks between")
    return tuple(sorted((int(rank), int(chunk)) for rank, chunk in numbers))


def _same_slot(slot: _Element, rank: int, lengths: Mapping[tuple[int, str], int]) -> tuple[str, int]:
    buffer, _, at = slot.text("same").partition(" ")
    is_place = at.isdigit() and int(at) < lengths.get((rank, buffer), 0)
    if not is_place:
        raise slot.error(f"same: got {slot.attributes['same']!r}, allowed: a chunk of the rank, as in 'i 3'")
    return buffer, int(at)


def _size_range(algo: _Element) -> tuple[int, int | None, list[str]]:
    low = algo.number("minBytes", 0)
    if "maxBytes" not in algo.attributes:
        return low, None, ["no maxBytes: serves every size"]
    high = algo.number("maxBytes")
    if "outofplace" in algo.attributes:
        return low, high or None, []
    if high == 0:
        raise algo.error(
            "maxBytes: got 0, allowed: 1 or more where outofplace is missing (the limit is exclusive there)"
        )
    return low, None if high >= NO_END else high - 1, []


def _read_rank(gpu: _Element, ranks: int, chunks: int, collective: str) -> RankProgram:
    rank = gpu.number("id", None, 0, ranks - 1)
    blocks: dict[int, Block] = {}
    steps: dict[int, list[_XmlStep]] = {}
    for tb in gpu.children:
        number = tb.number("id", None, 0, 1023)
        if number in blocks:
            raise tb.error(f"id: {number} is there twice")
        send, recv = (tb.number(key, -1, -1, ranks - 1) for key in ("send", "recv"))
        blocks[number] = Block(send, recv, tb.number("chan", 0, 0, 31))
        steps[number] = _read_steps(tb)
    if sorted(blocks) != list(range(len(blocks))):
        raise gpu.error(f"tb ids are {sorted(blocks)}, allowed: 0, 1, 2, ... without gaps")
    _check_waits(steps)
    _fold_nops(blocks, steps)
    return RankProgram(rank, *_sizes(gpu, blocks), [blocks[number] for number in sorted(blocks)])


def _sizes(gpu: _Element, blocks: dict[int, Block]) -> tuple[int, int, int]:
    used = {"i": 0, "o": 0, "s": 0}
    for block in blocks.values():
        for step in block.steps:
            for buffer, index in (*step.reads(), *step.writes()):
                used[buffer] = max(used[buffer], index + 1)
    return (
        gpu.number("i_chunks", used["i"], high=MAX_CHUNKS),
        gpu.number("o_chunks", used["o"], high=MAX_CHUNKS),
        gpu.number("s_chunks", used["s"], high=MAX_CHUNKS),
    )


@dataclasses.dataclass
class _XmlStep:
    """A step as the file has it, nops included. ``wait``: (tb, step) of the file, or None."""

    element: _Element
    kind: str
    src: Span
    dst: Span
    count: int
    wait: tuple[int, int] | None
    has_dependent: bool | None


def _read_steps(tb: _Element) -> list[_XmlStep]:
    steps = []
    for position, element in enumerate(tb.children):
        if element.number("s", position) != position:
            raise element.error(f"s: got {element.attributes['s']}, allowed: {position}, its place in the tb")
        steps.append(_read_step(element))
    return steps


def _read_step(element: _Element) -> _XmlStep:
    kind = element.text("type", (*(op.value for op in Op), "nop"))
    spans = []
    for side in ("src", "dst"):
        buffer = element.text(f"{side}buf", ("i", "o", "s"))
        spans.append(Span(buffer, element.number(f"{side}off", None, -1, (1 << 15) - 1)))
    block, step = element.number("depid", -1, -1, MAX_WAIT_BLOCK), element.number("deps", -1, -1)
    if (block < 0) != (step < 0):
        raise element.error(f"depid {block} and deps {step}: allowed: both, or both -1")
    dependent = bool(element.number("hasdep", 0, 0, 1)) if "hasdep" in element.attributes else None
    count = element.number("cnt", 1, 0, MAX_COUNT)
    return _XmlStep(
        element, kind, spans[0], spans[1], count, (block, step) if block >= 0 else None, dependent
    )


def _check_waits(steps: dict[int, list[_XmlStep]]) -> None:
    for number, own in steps.items():
        for step in own:
            if step.wait is None:
                continue
            block, at = step.wait
            if block not in steps or at >= len(steps[block]):
                raise step.element.error(f"waits for step {at} of tb {block}, which does not exist")
            if block == number:
                raise step.element.error("waits for a step of its own tb")
            if steps[block][at].has_dependent is False:
                raise step.element.error(
                    f"waits for step {at} of tb {block}, which has hasdep=0 and never tells"
                )


def _fold_nops(blocks: dict[int, Block], steps: dict[int, list[_XmlStep]]) -> None:
    """Give every real step the waits of the nops before it, and renumber what waits name."""
    renumbered: dict[tuple[int, int], int] = {}
    for number, own in steps.items():
        real = 0
        for at, step in enumerate(own):
            renumbered[number, at] = real
            real += step.kind != "nop"
    for number, own in steps.items():
        waits: list[tuple[int, int]] = []
        nops = 0
        for step in own:
            if step.wait is not None:
                waits += _resolve(step.wait, steps, renumbered, set())
            if step.kind == "nop":
                nops += 1
                continue
            if nops and step.wait is None:
                raise step.element.error(
                    "follows nops but waits for nothing itself: their waits would be lost"
                )
            where = f"{step.element.file}:{step.element.line}"
            depends = tuple(sorted(set(waits)))
            blocks[number].steps.append(Step(Op(step.kind), step.src, step.dst, step.count, depends, where))
            waits, nops = [], 0
        if nops:
            raise own[-1].element.error("nops at the end of a tb delay nothing")


def _resolve(
    wait: tuple[int, int],
    steps: dict[int, list[_XmlStep]],
    renumbered: dict[tuple[int, int], int],
    seen: set[tuple[int, int]],
) -> Iterator[tuple[int, int]]:
    """Yield the real steps that a wait stands for; a nop stands for what it waits for and the step before it."""
    block, at = wait
    if wait in seen:
        return
    seen.add(wait)
    if steps[block][at].kind != "nop":
        yield block, renumbered[wait]
        return
    own = steps[block][at].wait
    if own is not None:
        yield from _resolve(own, steps, renumbered, seen)
    if at > 0:
        yield from _resolve((block, at - 1), steps, renumbered, seen)
