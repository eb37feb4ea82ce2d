# SPDX-License-Identifier: Apache-2.0
"""Collective algorithms: write one, check it, run it, pick the best."""

from __future__ import annotations

from weft.collectives.contract import (
    AllGather,
    AllReduce,
    AllToAll,
    AllToAllV,
    Broadcast,
    Buffer,
    Collective,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
    SendRecv,
)
from weft.collectives.files import load
from weft.collectives.ir import Algorithm
from weft.collectives.language import (
    Check,
    MSCCLProgram,
    Program,
    Ref,
    chunk,
    create_scratch,
    print_xml,
    rotations,
)
from weft.collectives.program_lines import ProgramError
from weft.collectives.structure import VerificationError
from weft.collectives.values import Chunk
from weft.collectives.verifier import Report, verify

__all__ = [
    "Algorithm",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "AllToAllV",
    "Broadcast",
    "Buffer",
    "Check",
    "Chunk",
    "Collective",
    "Gather",
    "MSCCLProgram",
    "Program",
    "ProgramError",
    "Reduce",
    "ReduceScatter",
    "Ref",
    "Report",
    "Scatter",
    "SendRecv",
    "VerificationError",
    "chunk",
    "create_scratch",
    "load",
    "print_xml",
    "rotations",
    "verify",
]
