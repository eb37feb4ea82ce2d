# SPDX-License-Identifier: Apache-2.0
"""Programs compiled into kernels of their own give the interpreter's results, bit for bit."""

from __future__ import annotations

import shutil

import pytest
import torch

from weft.collectives.executor import Call, Executor
from weft.collectives.library import build
from weft.collectives.rows import ELEMENTS, REDUCTIONS
from weft.errors import Error
from weft.runtime.communicator import Communicator
from weft.testing.ranks import Rank, run_ranks

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler (c++)")

CASES = [
    ("allreduce_allpairs", 3, "Simple", "float32", "sum"),
    ("allreduce_a100_ring", 2, "LL128", "bfloat16", "sum"),
    ("reducescatter_allpairs_fused", 2, "LL", "float16", "max"),
    ("alltoall_allpairs", 3, "Simple", "int32", "sum"),
    ("allreduce_allpairs", 3, "LL", "float16", "average"),
    ("allreduce_a100_ring", 3, "LL128", "bfloat16", "average"),
    ("reducescatter_allpairs_fused", 3, "Simple", "int32", "average"),
]


def _both_ways(rank: Rank, name: str, protocol: str, dtype: str, op: str) -> None:
    executor = Executor(Communicator(rank.group, timeout_s=60).core, direct_bytes=4096)
    algorithm = build(name, rank.size, protocol=protocol).compile()
    program = executor.load(algorithm)
    generator = torch.Generator().manual_seed(rank.rank)
    kind: torch.dtype = getattr(torch, dtype)
    for elems in (1, 1003, 70_001):
        chunks = len(algorithm.contract.before(rank.rank)) if algorithm.contract else 0
        after = len(algorithm.contract.after(rank.rank)) if algorithm.contract else 0
        given = (torch.randn(chunks * elems, generator=generator) * 100).to(kind)
        outs = []
        for compiled in (False, True):
            out = torch.zeros(after * elems, dtype=kind)
            part = elems * program.per_part
            call = Call(
                given.data_ptr(), out.data_ptr(), part, ELEMENTS[dtype], REDUCTIONS[op], compiled=compiled
            )
            executor.run(program, call)
            outs.append(out.view(torch.uint8))
        assert torch.equal(*outs), (name, protocol, elems)
        assert outs[0].any()


@needs_compiler
@pytest.mark.parametrize(("name", "ranks", "protocol", "dtype", "op"), CASES)
def test_compiled_and_interpreted_agree(name: str, ranks: int, protocol: str, dtype: str, op: str) -> None:
    run_ranks(ranks, _both_ways, name, protocol, dtype, op, deadline_s=200)


def _too_long(rank: Rank) -> None:
    executor = Executor(Communicator(rank.group, timeout_s=60).core)
    program = executor.load(build("allreduce_a100_allpairs", rank.size, instances=4, protocol="LL").compile())
    tensor = torch.ones(64)
    with pytest.raises(Error, match="more than the 48 steps"):
        executor.run(program, Call(tensor.data_ptr(), tensor.data_ptr(), 64, 0, compiled=True))


def test_a_long_program_says_that_it_is_not_compiled() -> None:
    run_ranks(4, _too_long)
