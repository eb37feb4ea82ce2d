# SPDX-License-Identifier: Apache-2.0
"""The compiler: a program's trace becomes a verified Algorithm in small passes over one graph.

trace -> graph -> fusion -> channels + schedule -> blocks -> waits, IR -> instances -> verifier
"""

from __future__ import annotations

from weft.collectives.compiler.blocks import assign_blocks
from weft.collectives.compiler.fusion import absorb_copies, fuse_forwards
from weft.collectives.compiler.graph import Graph
from weft.collectives.compiler.instances import replicate
from weft.collectives.compiler.lower import lower
from weft.collectives.compiler.schedule import schedule
from weft.collectives.ir import Algorithm
from weft.collectives.language import Program, ProgramError
from weft.collectives.verifier import verify

__all__ = ["compile_program", "replicate"]


def compile_program(program: Program) -> Algorithm:
    """Compile ``program`` and verify the result. Raises: ProgramError, VerificationError."""
    problem = program.collective.problem(program.state())
    if problem is not None:
        rank, buffer, index, what = problem
        place = f"rank {rank} {buffer}[{index}]: " if rank >= 0 else ""
        raise ProgramError(
            f"{program.where}: program {program.name!r} does not do {program.collective!r}: {place}{what}"
        )
    graph = Graph(program)
    if program.fuse:
        absorb_copies(graph)
        fuse_forwards(graph)
    order = schedule(graph)
    algorithm = lower(graph, order, assign_blocks(order, program.num_ranks))
    algorithm = replicate(algorithm, program.instances, program.interleaved)
    verify(algorithm)
    return algorithm
