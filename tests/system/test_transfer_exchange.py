# SPDX-License-Identifier: Apache-2.0
"""weft.transfer.exchange(): two engines meet through a torch store, files, or stdin and stdout."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from weft.errors import Error, PeerLost
from weft.transfer import TransferEngine, exchange

TIMEOUT_S = 60.0


class Side(threading.Thread):
    """One of two engines of this process, which meet and write to each other."""

    def __init__(self, through: Any, me: str, other: str) -> None:
        super().__init__()
        self.through, self.me, self.other = through, me, other
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._meet()
        except BaseException as failure:
            self.failure = failure

    def _meet(self) -> None:
        with TransferEngine("fabric:tcp", name=self.me, timeout_s=TIMEOUT_S) as engine:
            own, inbox = bytearray(self.me.encode().ljust(16)), [bytearray(16), bytearray(16)]
            memories = [engine.register(one, remote_write=True) for one in inbox]
            peer, remotes = exchange(engine, self.through, self.me, self.other, memories)
            assert peer.name == self.other and [one.nbytes for one in remotes] == [16, 16]
            engine.write(engine.register(own), remotes[1], imm=4).wait()
            engine.imm(peer, 4).wait(1)
            assert inbox == [bytearray(16), bytearray(self.other.encode().ljust(16))]
            engine.barrier([peer], 1)


def _meet(*throughs: Any) -> None:
    sides = [Side(throughs[0], "prefill", "decode"), Side(throughs[-1], "decode", "prefill")]
    for side in sides:
        side.start()
    for side in sides:
        side.join()
        if side.failure is not None:
            raise side.failure


def test_two_meet_through_a_store_and_again(tmp_path: Path) -> None:
    for store in (dist.HashStore(), dist.FileStore(str(tmp_path / "store"), 2)):
        for _ in range(2):  # what the first pair left there leads nowhere
            _meet(store)


def test_two_meet_through_files_that_are_gone_afterwards(tmp_path: Path) -> None:
    (tmp_path / "job.decode").write_text('weft.transfer {"name": "decode", "address": "", "memory": []}\n')
    _meet(tmp_path / "job", str(tmp_path / "job"))
    assert list(tmp_path.iterdir()) == []


def test_two_meet_through_pipes() -> None:
    (a_in, b_out), (b_in, a_out) = os.pipe(), os.pipe()
    with open(a_in, "rb") as a_reader, open(a_out, "wb") as a_writer, open(b_in) as b_reader:
        a_writer.write(b"a line of a log before it\n")
        with open(b_out, "w") as b_writer:
            _meet((a_reader, a_writer), [b_reader, b_writer])


CHILD = """
from weft.transfer import TransferEngine, exchange
with TransferEngine("fabric:tcp", name="child") as engine:
    inbox = bytearray(8)
    print("a line of the child's own")
    peer, _ = exchange(engine, "-", "child", "parent", [engine.register(inbox, remote_write=True)])
    engine.imm(peer, 9).wait(1)
    print("arrived:", bytes(inbox).decode())
"""


def test_a_process_and_its_child_meet_through_stdin_and_stdout() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as child:
        assert child.stdout is not None
        with TransferEngine("fabric:tcp", name="parent", timeout_s=TIMEOUT_S) as engine:
            pipes = (child.stdout, child.stdin)
            _, (inbox,) = exchange(engine, pipes, "parent", "child")
            engine.write(engine.register(bytearray(b"12345678")), inbox, imm=9).wait()
            assert child.stdout.read().endswith(b"arrived: 12345678\n")
    assert child.returncode == 0


def test_what_is_written_to_a_file_is_for_its_user_alone(tmp_path: Path) -> None:
    with (
        TransferEngine("fabric:tcp", name="a") as engine,
        pytest.raises(
            PeerLost, match=r"'a' waited 0\.05 s for 'b' through .*job\.b: expected its address, saw nothing"
        ),
    ):
        exchange(engine, tmp_path / "job", "a", "b", timeout_s=0.05)
    assert stat.S_IMODE((tmp_path / "job.a").stat().st_mode) == 0o600


def test_mistakes_are_named(tmp_path: Path) -> None:
    with TransferEngine("fabric:tcp", name="a") as engine:
        for through, me, other, message in (
            (3, "a", "b", r"through: got 3, allowed: a torch store, the path .*'-' for stdin and stdout"),
            (tmp_path / "x", "a", "a", "other: got 'a', allowed: another name"),
            (tmp_path / "x", "a/b", "c", "me: got 'a/b', allowed: a name"),
            (tmp_path / "none" / "x", "a", "b", "through: got .*allowed: a path in a folder that exists"),
            ((1, 2), "a", "b", r"through: got .*allowed: open files with a fileno"),
        ):
            with pytest.raises(Error, match=message):
                exchange(engine, through, me, other)
        with pytest.raises(Error, match="memory for local use"):
            exchange(engine, tmp_path / "x", "a", "b", [engine.register(bytearray(4))])
        (tmp_path / "x.b").write_text("something else")
        with pytest.raises(
            Error,
            match=r"x\.b: got 'something else' .*allowed: what weft.transfer.exchange\(\) of 'b' writes",
        ):
            exchange(engine, tmp_path / "x", "a", "b")
        (tmp_path / "x.b").write_text('weft.transfer {"name": "c", "address": "", "memory": []}')
        with pytest.raises(Error, match=r"other: got 'b', allowed: 'c', which came through"):
            exchange(engine, tmp_path / "x", "a", "b")
        reader, writer = os.pipe()
        os.close(writer)
        with (
            open(reader, "rb") as empty,
            open(os.devnull, "wb") as sink,
            pytest.raises(PeerLost, match="ended before 'b' gave its address"),
        ):
            exchange(engine, (empty, sink), "a", "b")
