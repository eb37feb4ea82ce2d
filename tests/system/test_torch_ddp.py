# SPDX-License-Identifier: Apache-2.0
"""What DDP asks of backend "weft" beside its sums: uneven inputs, whose works C++ code alone holds, and torch.compile.

torch's own tests of these need CUDA devices.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from weft_group import join

from weft.testing.ranks import Rank, run_ranks

DDP = nn.parallel.DistributedDataParallel
RANKS = 3


def _uneven(rank: Rank, by_initial_size: bool) -> None:
    """Rank 0 has fewer inputs: later gradients are means over all ranks, or over those that still have some."""
    join(rank)
    model = nn.Linear(3, 2, bias=False)
    ddp = DDP(model)
    with ddp.join(divide_by_initial_world_size=by_initial_size):
        for step in range(3 + 2 * rank.rank):
            ddp(torch.full((1, 3), float(rank.rank + 1))).sum().backward()
            present = [q + 1 for q in range(rank.size) if step < 3 + 2 * q]
            want = sum(present) / (rank.size if by_initial_size else len(present))
            assert model.weight.grad is not None
            assert torch.allclose(model.weight.grad, torch.full((2, 3), want)), (step, model.weight.grad)
            model.zero_grad()
    dist.destroy_process_group()


@pytest.mark.parametrize("by_initial_size", [False, True])
def test_uneven_inputs(by_initial_size: bool) -> None:
    run_ranks(RANKS, _uneven, by_initial_size, with_group=False)


def _left_behind(rank: Rank) -> None:
    """Works that nobody waits for do not keep what they made for long, and those waited for not at all."""
    join(rank)

    def is_kept(end: Callable[[dist.Work], object]) -> bool:
        t = torch.ones(3)
        found = weakref.ref(t)
        end(dist.all_reduce(t, async_op=True))
        del t
        dist.barrier()
        gc.collect()
        return found() is not None

    assert not is_kept(lambda work: work.wait())
    assert not is_kept(lambda work: work.get_future().wait())
    kept = [is_kept(lambda work: None) for _ in range(3)]
    assert kept == [True] * 3
    group = dist.group.WORLD
    for _ in range(20):
        dist.all_reduce(torch.ones(3), async_op=True)
    dist.barrier()
    assert len(group._left) == 8
    dist.destroy_process_group()


def test_works_that_nobody_waits_for() -> None:
    run_ranks(2, _left_behind, with_group=False)


def _compiled(rank: Rank, static_graph: bool) -> None:
    join(rank)
    model = nn.Linear(3, 2, bias=False)
    ddp = torch.compile(DDP(model, static_graph=static_graph), backend="eager")
    for step in range(3):
        ddp(torch.full((1, 3), float(rank.rank + step))).sum().backward()
        assert model.weight.grad is not None
        assert torch.allclose(model.weight.grad, torch.full((2, 3), (rank.size - 1) / 2 + step))
        model.zero_grad()
    dist.destroy_process_group()


@pytest.mark.parametrize("static_graph", [False, True])
def test_compiled_modules(static_graph: bool) -> None:
    run_ranks(2, _compiled, static_graph, with_group=False)


def _compiled_messages(rank: Rank) -> None:
    join(rank)
    other = 1 - rank.rank

    @torch.compile(backend="eager")
    def exchange(t: torch.Tensor) -> torch.Tensor:
        got, first = torch.empty_like(t), torch.empty_like(t)
        if rank.rank == 0:
            dist.send(t + 1, other)
            dist.recv(first)
        else:
            dist.recv(first, other)
            dist.send(t + 1, other)
        for work in [dist.isend(t, other), dist.irecv(got, other)]:
            work.wait()
        dist.all_reduce(t)
        return got + 10 * first + 100 * t

    want = other + 10 * (other + 1) + 100
    assert (exchange(torch.full((2,), float(rank.rank))) == want).all()
    dist.destroy_process_group()


def test_compiled_functions_that_send() -> None:
    run_ranks(2, _compiled_messages, with_group=False)


def test_the_backend_imports_no_compiler() -> None:
    program = "import sys, weft.collectives.torch_backend; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
