# SPDX-License-Identifier: Apache-2.0
"""Algorithms that come with Weft, all in the language of this package and all verified by the tests."""

from __future__ import annotations

from weft.collectives.library import allgather, allreduce, alltoall, hierarchical, rooted, two_level
from weft.collectives.library.registry import Entry, algorithm, build, entries

__all__ = [
    "Entry",
    "algorithm",
    "allgather",
    "allreduce",
    "alltoall",
    "build",
    "entries",
    "hierarchical",
    "rooted",
    "two_level",
]
