# SPDX-License-Identifier: Apache-2.0
"""Programs compiled into kernels of their own give the interpreter's results, bit for bit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from program_modes import Case, chain, check_modes

from weft import _core
from weft.collectives.executor import Call, Executor
from weft.collectives.ir import Op
from weft.collectives.library import build
from weft.errors import Error
from weft.runtime.communicator import Communicator, Window
from weft.testing.ranks import Rank, run_ranks

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler (c++)")

# The compiler takes some seconds for every rank of every case.
CASES = [
    (2, Case("chain", "Simple", "float16", "average")),
    (3, Case("chain", "LL", "bfloat16", "average")),
    (2, Case("reducescatter_allpairs_fused", "LL128", "int32", "max")),
    (2, Case("alltoall_allpairs", "Simple", "float8_e4m3fn")),
]


def _both_modes(rank: Rank, case: Case) -> None:
    comm = Communicator(rank.group, timeout_s=60)
    window = Window(comm, 16 << 20)
    at = [0]

    def in_window(tensor: torch.Tensor) -> torch.Tensor:
        first, at[0] = at[0], at[0] + -(-tensor.nbytes // 256) * 256
        return window.tensor(rank.rank, tuple(tensor.shape), tensor.dtype, first).copy_(tensor)

    check_modes(comm, [torch.Tensor.clone, in_window], case)


@needs_compiler
@pytest.mark.parametrize(("ranks", "case"), CASES, ids=str)
def test_compiled_and_interpreted_programs_are_exact_and_agree(ranks: int, case: Case) -> None:
    run_ranks(ranks, _both_modes, case, deadline_s=200)


def _compile(rank: Rank, cache: Path) -> int:
    prelude = """
namespace weft {
struct ValueArgs { int64_t* out; };
struct ValueMesh {};
template <class Mesh, class Shape>
WEFT_KERNEL void write_value(const ValueArgs& a, const Mesh&, const Shape&) { *a.out = Shape::value; }
}
"""
    key = _core.KernelKey(
        file="kernels/target/target.h",
        name="write_value",
        args_type="ValueArgs",
        mesh_type="ValueMesh",
        shape=[("value", 7)],
        threads_per_block=32,
        prelude=prelude,
    )
    _core.compile_host_kernel(key, str(cache))
    return len(list(cache.glob("write_value-*.so")))


@needs_compiler
def test_ranks_that_want_one_kernel_start_one_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, compiler = tmp_path / "calls", tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\necho called >>{calls}\nsleep 1\nexec {shutil.which("c++")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    cache = tmp_path / "cache"
    assert run_ranks(3, _compile, cache, with_group=False) == [1, 1, 1]
    assert calls.read_text().split() == ["called"]
    assert len(list(cache.iterdir())) == 1, "nothing written aside is left behind"


def test_a_chain_has_nearly_every_operation_that_sends_or_receives() -> None:
    used = {step.op for *_, step in chain(4, "LL").steps()}
    assert used == {op for op in Op if op.sends or op.receives} - {Op.RECV_REDUCE_COPY}


def _too_long(rank: Rank) -> None:
    executor = Executor(Communicator(rank.group, timeout_s=60).core)
    program = executor.load(build("allreduce_a100_allpairs", rank.size, instances=4, protocol="LL").compile())
    tensor = torch.ones(64)
    with pytest.raises(Error, match="more than the 48 steps"):
        executor.run(program, Call(tensor.data_ptr(), tensor.data_ptr(), 64, 0, compiled=True))


def test_a_long_program_says_that_it_is_not_compiled() -> None:
    run_ranks(4, _too_long)
