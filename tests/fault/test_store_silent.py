# SPDX-License-Identifier: Apache-2.0
"""A store of torch that answers no more ends no wait: who died is named, and the deadline holds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

import weft
from weft import _core
from weft.runtime.roll_call import Gathering, RollCall
from weft.testing.ranks import Rank, run_ranks

_HALF = struct.pack("<q", 20) + b"half of"  # how torch's FileStore begins a key of 20 bytes


def die_while_writing(rank: Rank, timeout_s: float, says_who: bool) -> tuple[str, float]:
    """Rank 0 dies in the middle of a record; whoever reads the file then loops in it for ever, and locks it."""
    path = rank.folder / "rendezvous"
    store = distributed.FileStore(str(path), rank.size)
    if rank.rank == 0:
        if says_who:
            RollCall(store, 0)
        rank.meet()
        time.sleep(1.0)  # the others learn who this rank is, and wait
        with path.open("ab") as file:
            file.write(_HALF)
        os.kill(os.getpid(), signal.SIGKILL)
    ranks = Gathering(store, RollCall(store, rank.rank), rank.rank, rank.size)
    rank.meet()
    began = time.monotonic()
    with pytest.raises(weft.PeerLost) as raised:
        ranks.all_gather(b"mine", timeout_s)
    return str(raised.value), time.monotonic() - began


@pytest.mark.parametrize(
    ("says_who", "timeout_s", "soon_s", "words"),
    [(True, 60.0, 30.0, "was killed by signal 9"), (False, 3.0, 30.0, "waited 3 s for rank 0")],
)
def test_a_rank_that_dies_while_it_writes_into_a_file_store(
    says_who: bool, timeout_s: float, soon_s: float, words: str
) -> None:
    args = timeout_s, says_who
    results = run_ranks(3, die_while_writing, *args, lost={0}, deadline_s=60, with_group=False)
    for rank in (1, 2):
        message, waited_s = results[rank]
        assert words in message and "rank 0" in message, message
        assert message.endswith("the store of the process group does not answer")
        assert waited_s < soon_s


def _serve(port: Any) -> None:
    server = distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    port.send(server.port)
    time.sleep(600)


def test_a_server_that_is_stopped_ends_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    try:
        store = distributed.TCPStore("127.0.0.1", ours.recv(), 2, is_master=False)
        ranks = Gathering(store, RollCall(store, 1), 1, 2)
        os.kill(server.pid or 0, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(weft.PeerLost, match=r"waited 1 s for rank 0: the store .* does not answer"):
            ranks.all_gather(b"mine", 1.0)
        monkeypatch.setenv("WEFT_TIMEOUT_S", "1")
        _core.config_reload()
        with pytest.raises(
            weft.Error, match=r"torch's store does not take what this rank gives .no answer in 1 s"
        ):
            RollCall(store, 1)
        assert time.monotonic() - began < 30
    finally:
        server.kill()
        monkeypatch.undo()
        _core.config_reload()
