# SPDX-License-Identifier: Apache-2.0
"""A rank that dies while ranks make a communicator or a buffer is named at once, as in every other call."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

import weft
from weft import _core
from weft.runtime.bootstrap import TorchGroup
from weft.testing.ranks import Rank, run_ranks

RANKS, LOST = 3, 1
FAR_TIMEOUT_S = 120.0
SOON_S = 30.0  # far below that; test machines are busy


@pytest.fixture(params=["mapped", "nodes"], autouse=True)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Once as ranks of one node, once as nodes of one rank each on this host."""
    if request.param == "nodes":
        monkeypatch.setenv("WEFT_PROXY_PROVIDER", "fabric:tcp")
        monkeypatch.setenv("WEFT_RANKS_PER_NODE", "1")
        monkeypatch.setenv("WEFT_PEER_DEAD_S", "100")
        _core.config_reload()
    yield request.param
    monkeypatch.undo()
    _core.config_reload()


def die(how: str) -> None:
    if how == "status":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def make_until_lost(rank: Rank, how: str, after_s: float) -> tuple[str, float]:
    """Make communicators for ever; LOST dies in the middle of it, or, after 0 s, when it has only said who it is."""
    if rank.rank == LOST:
        if after_s == 0:
            TorchGroup(rank.group)
            die(how)
        threading.Timer(after_s, die, (how,)).start()
    began, kept = time.monotonic(), []
    with pytest.raises(weft.PeerLost) as raised:
        while True:
            began = time.monotonic()
            comm = weft.Communicator(rank.group, timeout_s=FAR_TIMEOUT_S)
            kept[:] = [comm, comm.all_reduce(torch.ones(10))]
    return str(raised.value), time.monotonic() - began


@pytest.mark.parametrize(
    ("how", "after_s", "words"),
    [
        ("killed", 0, "was killed by signal 9"),
        ("status", 0, "exited with status 3"),
        ("killed", 0.3, ""),
        ("killed", 0.35, ""),
    ],
)
def test_a_death_while_ranks_meet_is_noticed_at_once(how: str, after_s: float, words: str) -> None:
    results = run_ranks(RANKS, make_until_lost, how, after_s, lost={LOST}, deadline_s=90, with_gpus=False)
    for rank in (0, 2):
        message, waited_s = results[rank]
        assert f"rank {LOST} " in message, message
        assert words in message and f"waited {FAR_TIMEOUT_S:g} s" not in message
        assert waited_s < SOON_S


def stay_away(rank: Rank) -> str:
    if rank.rank == LOST:
        TorchGroup(rank.group)
        rank.meet()
        return ""
    rank.meet()
    with pytest.raises(weft.PeerLost) as raised:
        weft.Communicator(rank.group, timeout_s=4)
    return str(raised.value)


def test_one_that_lives_and_does_not_come_keeps_the_deadline() -> None:
    results = run_ranks(RANKS, stay_away, deadline_s=90, with_gpus=False)
    for rank in (0, 2):
        assert "waited 4 s for rank 1: rank 1 (pid " in results[rank]
        assert results[rank].endswith("is running")


def leave_early(rank: Rank) -> None:
    """What a rank gave before it ended well is heard."""
    for _ in range(3):
        bootstrap = TorchGroup(rank.group)
        bootstrap.all_gather(bytes([rank.rank]), FAR_TIMEOUT_S)
    if rank.rank != LOST:
        time.sleep(0.6)
    assert bootstrap.all_gather(b"last", FAR_TIMEOUT_S) == [b"last"] * rank.size


def test_who_leaves_after_the_last_exchange_is_not_missed() -> None:
    run_ranks(RANKS, leave_early, deadline_s=90, with_gpus=False)
