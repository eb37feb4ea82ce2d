# SPDX-License-Identifier: Apache-2.0
"""A program as numbers, in the order of the structs of kernels/collective/program_args.h.

    sums = ended_sums(algorithm)
    direct = direct_messages(sums.algorithm)
    blocks, steps, waits = program_rows(sums, rank, direct)

What the executor hands to the core, and what a program book holds. Needs no core, so that books can be written where
none is built yet.
"""

from __future__ import annotations

from weft.collectives.average import EndedSums
from weft.collectives.contract import Buffer
from weft.collectives.direct import DirectMessages, Send
from weft.collectives.ir import Algorithm, Block, Op, Step

# The numbers of kernels/collective/program_args.h.
ELEMENTS = {
    "float32": 0,
    "float16": 1,
    "bfloat16": 2,
    "float8_e4m3fn": 3,
    "float8_e5m2": 4,
    "float64": 5,
    "int8": 6,
    "uint8": 7,
    "int32": 8,
    "uint32": 9,
    "int64": 10,
    "uint64": 11,
    "int16": 12,
    "uint16": 13,
    "bool": 7,
}
# Types that are moved as bytes, and not reduced.
MOVED_ELEMENTS = dict.fromkeys(
    ("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"), 7
)
ELEMENT_BYTES = (4, 2, 2, 1, 1, 8, 1, 1, 4, 4, 8, 8, 2, 2)  # by that number
REDUCTIONS = {"sum": 0, "product": 1, "min": 2, "max": 3, "average": 4, "band": 5, "bor": 6, "bxor": 7}
BITWISE = ("band", "bor", "bxor")  # of integers and bool
_PROTOCOLS = {"Simple": 0, "LL": 1, "LL128": 2}
_BUFFERS = {Buffer.input: 0, Buffer.output: 1, Buffer.scratch: 2}
_OPS = {op: number for number, op in enumerate(Op)}
_MAX_SOURCES = 16  # of one pass over a sum
_WAITS, _FUSED = 7, 12  # columns of a step
_MAY_REFER, _MAY_STORE, _MAY_BE_STORED = 1, 2, 4


def chunks_of_part(algorithm: Algorithm) -> int:
    """Return the chunks of one rank's part; of the whole buffer where the collective has no parts."""
    if algorithm.collective in ("allgather", "reducescatter", "reduce_scatter", "alltoall", "alltoallv"):
        return algorithm.chunks // algorithm.num_ranks
    return algorithm.chunks


def protocol_number(algorithm: Algorithm) -> int:
    """Return the algorithm's protocol as a number of kernels/collective/program_args.h."""
    return _PROTOCOLS[algorithm.protocol]


def program_rows(
    sums: EndedSums, rank: int, direct: DirectMessages
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Return blocks, steps and waits of a rank of ``sums.algorithm``, which ``direct`` is of, as rows of numbers."""
    algorithm = sums.algorithm
    program = algorithm.ranks[rank]
    needed = {wait for block in program.blocks for step in block.steps for wait in step.depends}
    blocks: list[list[int]] = []
    steps: list[list[int]] = []
    waits: list[list[int]] = []
    for number, block in enumerate(program.blocks):
        places = [(program.rank, number, at) for at in range(len(block.steps))]
        stored = {
            _BUFFERS[step.dst.buffer]
            for place, step in zip(places, block.steps, strict=True)
            if place in direct.stored_receives
        }
        grants = sum(1 << buffer for buffer in stored)
        blocks.append([block.send, block.recv, block.channel, len(steps), len(block.steps), grants])
        for at, step in enumerate(block.steps):
            src, dst = step.src, step.dst
            row = [
                _OPS[step.op],
                _BUFFERS[src.buffer],
                max(src.index, 0),
                _BUFFERS[dst.buffer],
                max(dst.index, 0),
            ]
            row += [step.count, len(waits), len(step.depends), int((number, at) in needed)]
            steps.append([*row, *_direct_row(direct, places[at]), 0, int(places[at] in sums.ends)])
            waits += [list(wait) for wait in step.depends]
        _fuse_sums(
            algorithm,
            block,
            steps[len(steps) - len(block.steps) :],
            {at for owner, at in needed if owner == number},
        )
    return blocks, steps, waits


def _fuse_sums(algorithm: Algorithm, block: Block, rows: list[list[int]], needed: set[int]) -> None:
    """Merge consecutive local sums into the same chunks into one pass, which waits for the dependencies of all of them.

    Other steps wait only for the last of them, so these dependencies cannot depend on the sums; and no source is
    changed.
    """
    at = 0
    while at < len(rows):
        first, count = block.steps[at], 0
        while count + 1 < _MAX_SOURCES and at + count + 1 < len(rows) and at + count not in needed:
            later = block.steps[at + count + 1]
            pair = (block.steps[at + count], later)
            if any(step.op is not Op.REDUCE or _may_overlap(algorithm, step) for step in pair):
                break
            if (later.dst, later.count) != (first.dst, first.count):
                break
            count += 1
        rows[at][_FUSED] = count
        rows[at][_WAITS] = sum(row[_WAITS] for row in rows[at : at + count + 1])  # they stand in a row
        at += count + 1


def _may_overlap(algorithm: Algorithm, step: Step) -> bool:
    src, dst = step.src, step.dst
    if src.buffer == dst.buffer:
        return abs(src.index - dst.index) < step.count
    return algorithm.inplace and Buffer.scratch not in (src.buffer, dst.buffer)


def _direct_row(direct: DirectMessages, place: tuple[int, int, int]) -> list[int]:
    send = direct.sends.get(place, Send(False, False, None))
    bits = _MAY_REFER * send.may_refer + _MAY_STORE * send.may_store
    bits += _MAY_BE_STORED * (place in direct.stored_receives)
    if send.remote is None:
        return [bits, 0, 0]
    return [bits, _BUFFERS[send.remote.buffer], send.remote.index]
