# SPDX-License-Identifier: Apache-2.0
"""The compiler: a program's trace becomes a verified Algorithm in small passes over one graph.

trace -> graph -> fusion -> channels + schedule -> blocks -> waits, IR -> instances -> verifier
"""

from __future__ import annotations

from weft.collectives.compiler.blocks import assign_blocks
from weft.collectives.compiler.fusion import absorb_copies, fuse_forwards, send_originals
from weft.collectives.compiler.graph import Graph
from weft.collectives.compiler.instances import replicate
from weft.collectives.compiler.lower import lower
from weft.collectives.compiler.schedule import schedule
from weft.collectives.ir import MAX_COUNT, Algorithm, fifo_units
from weft.collectives.language import Program, ProgramError
from weft.collectives.verifier import VerificationError, verify

__all__ = ["compile_in_order", "compile_program", "replicate"]


def compile_program(program: Program) -> Algorithm:
    """Compile ``program`` and verify the result. Raises: ProgramError, VerificationError."""
    problem = program.collective.problem(program.state())
    if problem is not None:
        rank, buffer, index, what = problem
        place = f"rank {rank} {buffer}[{index}]: " if rank >= 0 else ""
        raise ProgramError(
            f"{program.where}: program {program.name!r} does not do {program.collective!r}: {place}{what}"
        )
    algorithm = _lowered(program, MAX_COUNT)
    if not _fits(algorithm, fifo_units(program.protocol)):
        # Steps of several chunks overran a connection of MSCCL's, which the XML may be for; small steps can be
        # scheduled to fit it.
        algorithm = _lowered(program, max(1, fifo_units(program.protocol) // 2))
        verify(algorithm)
    return algorithm


def _fits(algorithm: Algorithm, slots: int) -> bool:
    """Verify an algorithm on connections of ``slots`` messages; return whether it runs at every size there."""
    try:
        return verify(algorithm, slots).limit is None
    except VerificationError as error:
        if error.kind != "deadlock":
            raise
        return False


def compile_in_order(program: Program) -> Algorithm:
    """Lower ``program`` as it is written, in the blocks and on the channels that it names, and verify the result.

    Raises: ProgramError, VerificationError.
    """
    graph = Graph(program)
    for node in graph.nodes:
        node.channel = max(node.channel_hint, 0)
    algorithm = lower(graph, graph.nodes, assign_blocks(graph.nodes, program.num_ranks))
    verify(algorithm)
    return algorithm


def _lowered(program: Program, step_chunks: int) -> Algorithm:
    graph = Graph(program, step_chunks)
    if program.fuse:
        absorb_copies(graph)
        send_originals(graph)
        fuse_forwards(graph)
    order = schedule(graph)
    algorithm = lower(graph, order, assign_blocks(order, program.num_ranks))
    return replicate(algorithm, program.instances, program.interleaved)
