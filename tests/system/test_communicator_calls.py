# SPDX-License-Identifier: Apache-2.0
"""Collectives as methods of weft.Communicator: results, and sentences for wrong arguments before anything moves."""

from __future__ import annotations

import pytest
import torch

from weft import Communicator
from weft.errors import Error
from weft.testing.ranks import Rank, run_ranks


def _every_call(rank: Rank) -> None:
    comm = Communicator(rank.group, timeout_s=60)
    n, me = rank.size, rank.rank
    own = torch.arange(4.0 * n) + 100 * me
    everyone = torch.stack([torch.arange(4.0 * n) + 100 * r for r in range(n)])
    assert torch.equal(comm.all_reduce(own.clone()), everyone.sum(0))
    assert torch.equal(comm.all_reduce(own, "max", out=torch.empty_like(own)), everyone[-1])
    assert torch.equal(comm.all_gather(own), everyone)
    assert torch.equal(comm.reduce_scatter(own), everyone.sum(0).view(n, 4)[me])
    assert torch.equal(comm.all_to_all(own.view(n, 4)), everyone.view(n, n, 4)[:, me])
    assert torch.equal(comm.broadcast(own.clone(), n - 1), everyone[-1])
    reduced = comm.reduce(own.clone(), 1, "average")
    assert torch.equal(reduced, everyone.mean(0) if me == 1 else own)
    gathered = comm.gather(own, 1)
    assert (gathered is None) == (me != 1) and (gathered is None or torch.equal(gathered, everyone))
    part = comm.scatter(own if me == 0 else None, torch.empty(4))
    assert torch.equal(part, everyone[0].view(n, 4)[me])
    assert torch.equal(comm.send_recv(own), everyone[me - 1])
    if me == 0:
        comm.send(own, 1)
    elif me == 1:
        assert torch.equal(comm.recv(torch.empty_like(own), 0), everyone[0])
    rows = comm.all_to_all(own[:n], input_splits=[1] * n, output_splits=[1] * n)
    assert torch.equal(rows, everyone[:, me])


def test_every_call() -> None:
    run_ranks(3, _every_call)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda c: c.all_reduce([1.0]), "tensor: got list, allowed: a torch.Tensor"),
        (
            lambda c: c.all_reduce(torch.ones(2), "mean"),
            "op: got mean, allowed: sum, product, min, max, average",
        ),
        (lambda c: c.all_reduce(torch.ones(2, 3).t()), "tensor: got strides"),
        (lambda c: c.all_reduce(torch.ones(2), out=torch.ones(3)), "out: got torch.float32[3]"),
        (lambda c: c.all_reduce(torch.ones(2, dtype=torch.complex64)), "tensor.dtype: got torch.complex64"),
        (
            lambda c: c.all_gather(torch.ones(2), out=torch.ones(2, dtype=torch.int32).int()),
            "out: got torch.int32",
        ),
        (lambda c: c.broadcast(torch.ones(2), 1), "root: got 1, allowed: 0 to 0"),
        (lambda c: c.scatter(None, torch.ones(2)), "tensor: got None, allowed: a tensor on rank 0"),
        (lambda c: c.send(torch.ones(2), 0), "peer: got 0"),
    ],
)
def test_wrong_arguments_are_named(call: object, sentence: str) -> None:
    assert callable(call)
    with pytest.raises(Error) as caught:
        call(Communicator())
    assert sentence in str(caught.value)


def test_one_rank_needs_nobody() -> None:
    comm = Communicator()
    t = torch.arange(3.0)
    assert torch.equal(comm.all_reduce(t.clone(), "average"), t)
    assert torch.equal(comm.all_gather(t), t[None])
