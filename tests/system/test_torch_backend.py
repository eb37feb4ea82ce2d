# SPDX-License-Identifier: Apache-2.0
"""torch.distributed over backend "weft": the calls, DDP and FSDP2 against a single process."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from programs import PYTHON
from torch import nn
from weft_group import join

from weft.testing.ranks import Rank, run_ranks

RANKS = 3


def _calls(rank: Rank) -> None:
    join(rank)
    n, me = rank.size, rank.rank
    t = torch.full((5,), float(me + 1))
    dist.all_reduce(t)
    assert (t == 6).all()
    dist.all_reduce(t, dist.ReduceOp.AVG)
    assert (t == 6).all()
    strided = torch.zeros(4, 6)[:, ::2]
    strided += me
    dist.all_reduce(strided, dist.ReduceOp.MAX)
    assert (strided == n - 1).all()
    parts = [torch.empty(2, 2) for _ in range(n)]
    dist.all_gather(parts, torch.full((2, 2), float(me)))
    assert [int(p[0, 0]) for p in parts] == list(range(n))
    flat = torch.empty(n * 3)
    dist.all_gather_into_tensor(flat, torch.full((3,), float(me)))
    assert torch.equal(flat, torch.arange(float(n)).repeat_interleave(3))
    out = torch.empty(2)
    dist.reduce_scatter_tensor(out, torch.arange(2.0 * n))
    assert torch.equal(out, n * torch.arange(2.0 * n)[2 * me : 2 * me + 2])
    dist.reduce_scatter(out, [torch.full((2,), float(q)) for q in range(n)])
    assert (out == n * me).all()
    dist.broadcast(t := torch.full((3,), float(me)), 2)
    assert (t == 2).all()
    dist.reduce(t := torch.ones(3), 1)
    assert (t == (n if me == 1 else 1)).all()
    got = [torch.empty(2) for _ in range(n)] if me == 0 else None
    dist.gather(torch.full((2,), float(me)), got, 0)
    assert got is None or [int(g[0]) for g in got] == list(range(n))
    dist.scatter(out, [torch.full((2,), float(q)) for q in range(n)] if me == 1 else None, 1)
    assert (out == me).all()
    back = torch.empty(n)
    dist.all_to_all_single(back, torch.arange(float(n)) + 10 * me)
    assert torch.equal(back, 10 * torch.arange(float(n)) + me)
    outs = [torch.empty(q + 1) for q in range(n)]
    dist.all_to_all(outs, [torch.full((me + 1,), float(me * 10 + q)) for q in range(n)])
    assert [int(o[0]) for o in outs] == [q * 10 + me for q in range(n)]
    objects: list[object] = [None] * n
    dist.all_gather_object(objects, {"rank": me})
    assert objects == [{"rank": q} for q in range(n)]
    dist.barrier()
    large, taken = torch.full((3_000_000,), float(me)), torch.empty(3_000_000)
    ops = [dist.P2POp(dist.isend, large, (me + 1) % n), dist.P2POp(dist.irecv, taken, (me - 1) % n)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert (taken == (me - 1) % n).all()
    pair = dist.new_group([0, 2])
    if me != 1:
        dist.all_reduce(t := torch.ones(1), group=pair)
        assert t.item() == 2
    dist.destroy_process_group()


def test_every_call() -> None:
    run_ranks(RANKS, _calls, with_group=False)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 3))


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6 * RANKS, 12, generator=generator), torch.randn(6 * RANKS, 3, generator=generator)


def _train(model: nn.Module, rows: slice, steps: int = 8) -> list[float]:
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for step in range(steps):
        x, y = _batch(step)
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss))
    return losses


def _train_over_ranks(rank: Rank, kind: str) -> list[float]:
    join(rank)
    if kind == "ddp":
        model: nn.Module = nn.parallel.DistributedDataParallel(_model())
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = _model()
        mesh = init_device_mesh("cpu", (rank.size,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    own = _train(model, slice(rank.rank * 6, rank.rank * 6 + 6))
    total = torch.tensor(own)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return [value / rank.size for value in total.tolist()]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_training_gives_the_losses_of_one_process(kind: str) -> None:
    alone = _train(_model(), slice(None))
    for losses in run_ranks(RANKS, _train_over_ranks, kind, with_group=False):
        assert losses == pytest.approx(alone, rel=1e-4)


def _waits(rank: Rank) -> str:
    join(rank)
    limit = timedelta(seconds=60)
    dist.monitored_barrier(timeout=limit)
    dist.monitored_barrier(timeout=limit, wait_all_ranks=True)
    said = "-"
    if rank.rank != 1:
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
        except RuntimeError as error:
            said = str(error)
    group = dist.new_group(timeout=limit)
    if rank.rank == 0:
        with pytest.raises(RuntimeError, match=r"Timed out waiting 500ms.*rank 1, rank 2"):
            dist.barrier(group, timeout=timedelta(seconds=0.5))
    dist.monitored_barrier(timeout=limit)  # whoever was missing once is not missed again
    dist.destroy_process_group()
    return said


def test_barriers_say_who_stayed_away() -> None:
    words = run_ranks(RANKS, _waits, with_group=False)
    assert words[0] == "Ranks 1 failed to pass monitoredBarrier after 1000 ms"
    assert words[1] == "-"
    assert words[2].startswith("Rank 2 successfully reached monitoredBarrier, but received errors")


def _wrong_lists(rank: Rank) -> None:
    """Each call is refused before anything moves, so that a rank may make it alone."""
    join(rank)
    n, whole = rank.size, torch.zeros(2)
    short = [whole] * (n - 1)
    uneven = [torch.zeros(1), torch.zeros(3), whole]  # as many elements as n of whole
    not_mine = [whole] * rank.rank + [torch.zeros(1)] + [whole] * (n - 1 - rank.rank)
    own = rf"\[{rank.rank}\]: got torch.float32\[1\], allowed: .* 2 "
    few, first = (
        "got 2 tensors, allowed: 3, one for each rank",
        r"\[0\]: got torch.float32\[1\], allowed: .* 2 ",
    )
    with pytest.raises(RuntimeError, match=f"outputs: {few}"):
        dist.all_gather(short, whole)
    with pytest.raises(RuntimeError, match=f"outputs{own}"):
        dist.all_gather(not_mine, whole)
    with pytest.raises(RuntimeError, match=f"inputs: {few}"):
        dist.reduce_scatter(whole, short)
    with pytest.raises(RuntimeError, match=f"inputs{own}"):
        dist.reduce_scatter(whole, not_mine)
    if rank.rank == 0:
        with pytest.raises(RuntimeError, match=f"inputs: {few}"):
            dist.scatter(whole, short, 0)
        with pytest.raises(RuntimeError, match=f"inputs{first}"):
            dist.scatter(whole, uneven, 0)
        with pytest.raises(RuntimeError, match=f"outputs: {few}"):
            dist.gather(whole, short, 0)
        with pytest.raises(RuntimeError, match=f"outputs{first}"):
            dist.gather(whole, uneven, 0)
    with pytest.raises(
        RuntimeError, match=r"op: got band of torch.float32, allowed: band of integers and torch.bool"
    ):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
    dist.scatter(whole, [torch.full((2,), float(q)) for q in range(n)] if rank.rank == 0 else None, 0)
    assert (whole == rank.rank).all()
    dist.destroy_process_group()


def test_lists_that_do_not_fit_are_refused() -> None:
    run_ranks(RANKS, _wrong_lists, with_group=False)


def _bound(rank: Rank) -> None:
    join(rank, device_id=torch.device("cpu", 0))
    first_two = dist.new_group([0, 1])
    t = torch.full((3,), float(rank.rank + 1))
    if rank.rank < 2:
        dist.all_reduce(t, group=first_two)
        assert (t == 3).all()
    if hasattr(dist.distributed_c10d, "_get_split_source"):  # a torch that splits groups of every backend
        half = dist.split_group(split_ranks=[[0, 1], [2]])
        dist.all_reduce(u := torch.ones(3), group=half)
        assert (u == (2 if rank.rank < 2 else 1)).all()
    dist.all_reduce(t)
    assert (t == 9).all()
    dist.destroy_process_group()


def test_a_group_may_be_bound_to_its_device() -> None:
    run_ranks(RANKS, _bound, with_group=False)


def _again(rank: Rank) -> None:
    """A program destroys its groups and makes them anew over the store that they had, as under torchrun."""
    import weft  # noqa: F401 - registers the backend

    store, limit = dist.FileStore(f"{rank.folder}/.store", rank.size), timedelta(seconds=30)
    for life in range(3):
        dist.init_process_group("weft", store=store, rank=rank.rank, world_size=rank.size, timeout=limit)
        pair = dist.new_group([0, 1])
        t = torch.full((5,), float(life))
        for group in (None, pair) if rank.rank < 2 else (None,):
            dist.all_reduce(t, group=group)
        assert (t == life * rank.size * (2 if rank.rank < 2 else 1)).all()
        if rank.rank == 0:
            with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
                dist.monitored_barrier(timeout=timedelta(seconds=0.2))
        dist.barrier()
        dist.monitored_barrier(timeout=limit)
        dist.destroy_process_group()


def test_groups_made_anew_over_the_same_store() -> None:
    run_ranks(RANKS, _again, with_group=False)


def _any_source(rank: Rank) -> None:
    join(rank)
    if rank.rank == 0:
        t = torch.empty(3)
        seen = [dist.recv(t)]
        assert (t == seen[-1]).all()
        seen.append(dist.recv(t, 2))  # one that is named, among those from anybody
        assert (t == 2).all()
        for _ in range(3):
            seen.append(dist.recv(t))
            assert (t == seen[-1]).all()
        work = dist.irecv(t)
        work.wait()
        seen.append(work._source_rank())
        assert (t == seen[-1]).all()
        assert sorted(seen) == sorted(3 * list(range(1, rank.size)))
        with pytest.raises(RuntimeError, match="tensor: got no elements"):
            dist.recv(torch.empty(0))
    else:
        for _ in range(3):
            dist.send(torch.full((3,), float(rank.rank)), 0)
    total = torch.sparse_coo_tensor([[rank.rank, 3]], [[1.0], [2.0]], (5, 1))
    dist.all_reduce(total)
    assert total.to_dense().flatten().tolist() == [1, 1, 1, 6, 0]
    with pytest.raises(RuntimeError, match="same shape and sparse dimensions"):
        dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (5 + rank.rank,)))
    dist.destroy_process_group()


def test_receives_from_any_source_and_sums_of_sparse_tensors() -> None:
    run_ranks(RANKS, _any_source, with_group=False)


def _circle(rank: Rank) -> None:
    """Everybody sends to the next rank first, and receives from it first: nobody's first receive is of a first send."""
    join(rank)
    n, me = rank.size, rank.rank
    got = {peer % n: torch.empty(1 << 20) for peer in (me + 1, me + 2)}
    works = [dist.irecv(t, peer) for peer, t in got.items()]
    works += [dist.isend(torch.full((1 << 20,), float(me)), peer) for peer in got]
    for work in works:
        work.wait()
    for peer, t in got.items():
        assert (t == peer).all()
    parts = [torch.full((length,), float(me)) for length in (3, 4)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for part in parts:
            dist.all_reduce(part)
    manager.wait()
    assert all((part == n * (n - 1) / 2).all() for part in parts)
    weight = nn.Parameter(torch.full((2, 3, 4, 4), float(me)).to(memory_format=torch.channels_last))
    dist.broadcast(weight, 1)  # which writes beside autograd, whatever the strides
    assert (weight == 1).all()
    t = torch.full((3,), float(me))
    if me == 0:
        dist.send(t, 1, tag=7)
        dist.send(t, 1, tag=1)
    elif me == 1:
        dist.recv(t, 0, tag=7)
        assert (t == 0).all()
        with pytest.raises(
            RuntimeError, match="rank 0 called send of 3 float32 with tag 1; rank 1 called recv of"
        ):
            dist.recv(t, 0, tag=2)
    dist.destroy_process_group()


def test_messages_of_several_peers_do_not_wait_for_each_other() -> None:
    run_ranks(RANKS, _circle, with_group=False)


def test_a_sample_of_torchs_own_tests() -> None:
    """tools/torch-tests runs all of them."""
    done = subprocess.run(
        [*PYTHON, "-c", "import sys, torch_own_tests; sys.exit(torch_own_tests.main())", "--sample"],
        cwd=Path(__file__).parent,
        env={**os.environ, "WORLD_SIZE": "3", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
