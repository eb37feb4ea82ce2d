# SPDX-License-Identifier: Apache-2.0
"""Collectives that are given hostile tensors and scalars: a result or weft.Error, never signal 11, on any rank.

Every rank is a process, and draws the same calls, so that all refuse a call or none does.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode  # here, so that ranks need not import it

from weft import Communicator
from weft.errors import Error
from weft.testing import hostile
from weft.testing.ranks import Rank, run_ranks

SHAPE = (4, 2)  # divides by one and by two ranks
ODD = {**hostile.tensors(SHAPE), **hostile.scalars()}
RIGHT = "right"
# Arguments by name, as callables of the number of ranks.
Argument = Callable[[int], Any]


def _tensor(*shape: int) -> Argument:
    return lambda size: torch.ones(shape or SHAPE)


_OUT = {"out": _tensor(), "op": lambda size: "sum"}
_SPLITS = {"input_splits": lambda size: [4 // size] * size, "output_splits": lambda size: [4 // size] * size}
# What all ranks refuse or make alike; then what only some have to check, which is tried with one rank.
CALLS: dict[str, dict[str, Argument]] = {
    "all_reduce": {"tensor": _tensor(), **_OUT},
    "all_gather": {"tensor": _tensor(), "out": lambda size: torch.ones(size, *SHAPE)},
    "reduce_scatter": {
        "tensor": _tensor(),
        "op": lambda size: "max",
        "out": lambda size: torch.ones(4 // size, 2),
    },
    "all_to_all": {"tensor": _tensor(), "out": _tensor(), **_SPLITS},
    "broadcast": {"tensor": _tensor(), "root": lambda size: size - 1},
    "reduce": {"tensor": _tensor(), "root": lambda size: size - 1, "op": lambda size: "sum"},
    "send_recv": {"tensor": _tensor(), "out": _tensor()},
}
ONE_RANK: dict[str, dict[str, Argument]] = {
    "gather": {
        "tensor": _tensor(),
        "root": lambda size: 0,
        "out": lambda size: torch.ones(size, *SHAPE),
    },
    "scatter": {"tensor": _tensor(), "out": _tensor(), "root": lambda size: 0},
    "send": {"tensor": _tensor(), "dst": lambda size: 1},
    "recv": {"tensor": _tensor(), "src": lambda size: 1},
    "transport_to": {"peer": lambda size: 0},
}


def _fuzz(rank: Rank, examples: int) -> None:
    warnings.simplefilter("ignore")
    comm = Communicator(rank.group, timeout_s=60)
    calls = CALLS if rank.size > 1 else {**CALLS, **ONE_RANK}

    @hostile.examples(examples)
    @given(st.data())
    def feed(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(calls)))
        arguments = {}
        for argument, right in calls[name].items():
            given_name = data.draw(st.one_of(st.just(RIGHT), st.sampled_from(list(ODD))))
            arguments[argument] = right(rank.size) if given_name == RIGHT else ODD[given_name]()
        hostile.refused_or_done(lambda: getattr(comm, name)(**arguments))

    feed()
    assert comm.all_reduce(torch.ones(4)).tolist() == [rank.size] * 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_public_calls_take_or_refuse_anything(ranks: int) -> None:
    run_ranks(ranks, _fuzz, 250, with_gpus=False)


def _each(rank: Rank) -> None:
    comm = Communicator(rank.group, timeout_s=60)
    no_memory = (
        "freed",
        "freed behind an offset",
        "shrunk",
        "fake",
        "a wrapper",
        "meta",
        "freed and strided",
    )
    for name, arguments in CALLS.items():
        for argument in ("tensor", "out"):
            for kind in no_memory if argument in arguments else ():
                given_all = {key: right(rank.size) for key, right in arguments.items()}
                given_all[argument] = hostile.tensors(tuple(given_all[argument].shape))[kind]()
                answer = hostile.refused_or_done(lambda n=name, a=given_all: getattr(comm, n)(**a))
                assert isinstance(answer, Error) and argument in str(answer), (name, argument, kind, answer)


def test_tensors_without_memory_are_refused_by_name() -> None:
    run_ranks(2, _each, with_gpus=False)


def _in_modes(rank: Rank) -> None:
    """Results made under a mode or a transform have no memory either."""
    comm = Communicator(rank.group, timeout_s=60)
    own = torch.ones(SHAPE)
    with FakeTensorMode():
        for name in ("all_gather", "reduce_scatter", "send_recv"):
            assert isinstance(hostile.refused_or_done(lambda n=name: getattr(comm, n)(own)), Error)
    with pytest.raises(Error):
        torch.func.vmap(comm.all_reduce)(torch.ones(3, 4))
    with pytest.raises(Error):
        torch.func.grad(lambda x: comm.all_reduce(x).sum())(torch.ones(4))
    assert comm.all_reduce(torch.ones(4)).tolist() == [rank.size] * 4


def test_modes_and_transforms_are_refused() -> None:
    run_ranks(2, _in_modes, with_gpus=False)


def _backend(rank: Rank) -> None:
    import weft  # noqa: F401 - registers the backend

    dist.init_process_group(
        "weft",
        init_method=f"file://{rank.folder}/.weft",
        rank=rank.rank,
        world_size=rank.size,
        timeout=timedelta(seconds=60),
    )
    warnings.simplefilter("ignore")
    for make in hostile.tensors(SHAPE).values():
        for act in (
            lambda t: dist.all_reduce(t),
            lambda t: dist.all_reduce(torch.ones(1), group=None) and dist.broadcast(t, 0),
            lambda t: dist.all_gather([torch.ones(SHAPE) for _ in range(rank.size)], t),
            lambda t: dist.all_gather_into_tensor(torch.ones(rank.size * 8), t),
            lambda t: dist.all_gather_into_tensor(t, torch.ones(4)),
            lambda t: dist.reduce_scatter_tensor(t, torch.ones(rank.size * 8)),
            lambda t: dist.reduce_scatter(torch.ones(SHAPE), [t] * rank.size),
            lambda t: dist.all_to_all([torch.ones(SHAPE) for _ in range(rank.size)], [t] * rank.size),
            lambda t: dist.all_to_all_single(torch.ones(SHAPE), t),
        ):
            with contextlib.suppress(Exception):  # torch's own checks come first, and raise what they like
                act(make())
    dist.all_reduce(ones := torch.ones(4))
    assert ones.tolist() == [rank.size] * 4


def test_torch_backend_survives_hostile_tensors() -> None:
    run_ranks(2, _backend, with_group=False, with_gpus=False)
