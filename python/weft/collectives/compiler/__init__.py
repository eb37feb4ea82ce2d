# SPDX-License-Identifier: Apache-2.0
"""The compiler: a program's trace becomes a verified Algorithm in small passes over one graph.

trace -> graph -> fusion -> channels + schedule -> blocks -> waits, IR -> instances -> verifier
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from weft.collectives.compiler.blocks import assign_blocks
from weft.collectives.compiler.fusion import absorb_copies, fuse_forwards, send_originals
from weft.collectives.compiler.graph import Graph
from weft.collectives.compiler.instances import replicate
from weft.collectives.compiler.lower import lower
from weft.collectives.compiler.schedule import schedule
from weft.collectives.ir import MAX_COUNT, Algorithm, fifo_units
from weft.collectives.language import Program
from weft.collectives.program_lines import ProgramError
from weft.collectives.structure import VerificationError
from weft.collectives.verifier import Report, verify

__all__ = ["collector_paused", "compile_in_order", "compile_program", "compile_proven", "replicate"]


def compile_program(program: Program) -> Algorithm:
    """Compile ``program`` and verify the result. Raises: ProgramError, VerificationError."""
    return compile_proven(program)[0]


def compile_proven(program: Program) -> tuple[Algorithm, Report]:
    """Compile ``program``; return it and what was proven. Raises: ProgramError, VerificationError."""
    with collector_paused():
        return _compile_proven(program)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Let Python not look for unused cycles: it would walk the growing graph again and again, and find none."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _compile_proven(program: Program) -> tuple[Algorithm, Report]:
    problem = program.collective.problem(program.state())
    if problem is not None:
        rank, buffer, index, what = problem
        place = f"rank {rank} {buffer}[{index}]: " if rank >= 0 else ""
        raise ProgramError(
            f"{program.where}: program {program.name!r} does not do {program.collective!r}: {place}{what}"
        )
    algorithm = _lowered(program, MAX_COUNT)
    report = _fits(algorithm, fifo_units(program.protocol))
    if report is None:
        # Steps of several chunks overran a connection of MSCCL's, which the XML may be for; small steps can be
        # scheduled to fit it.
        algorithm = _lowered(program, max(1, fifo_units(program.protocol) // 2))
        report = verify(algorithm)
    return algorithm, report


def _fits(algorithm: Algorithm, slots: int) -> Report | None:
    """Verify an algorithm on connections of ``slots`` messages; return None where it hangs there at some size.

    What runs on few places runs on more, so that the report holds for connections of ours as well.
    """
    try:
        report = verify(algorithm, slots)
    except VerificationError as error:
        if error.kind != "deadlock":
            raise
        return None
    return report if report.limit is None else None


def compile_in_order(program: Program) -> Algorithm:
    """Lower ``program`` as it is written, in the blocks and on the channels that it names, and verify the result.

    Raises: ProgramError, VerificationError.
    """
    graph = Graph(program)
    for node in graph.nodes:
        node.channel = max(node.channel_hint, 0)
    algorithm = lower(graph, graph.nodes, assign_blocks(graph.nodes, len(graph.ranks)))
    verify(algorithm)
    return algorithm


def _lowered(program: Program, step_chunks: int) -> Algorithm:
    graph = Graph(program, step_chunks)
    if program.fuse:
        absorb_copies(graph)
        send_originals(graph)
        fuse_forwards(graph)
    order = schedule(graph)
    algorithm = lower(graph, order, assign_blocks(order, len(graph.ranks)))
    return replicate(algorithm, program.instances, program.interleaved)
