# SPDX-License-Identifier: Apache-2.0
"""The line between the two sides of ``weft bench transfer``."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from weft.bench.transfer_line import Line
from weft.errors import PeerLost
from weft.runtime.bootstrap import TcpAddress


@contextlib.contextmanager
def two_lines() -> Iterator[tuple[Line, Line]]:
    """Yield the two sides of a line, each of which is to be used by a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    both = [TcpAddress(place, rank, 2, b"secret") for rank in range(2)]
    try:
        yield Line(both[0], "127.0.0.1"), Line(both[1], "127.0.0.1")
    finally:
        for one in both:
            one.close()


def test_a_line_carries_json_and_bytes() -> None:
    with two_lines() as (ours, theirs), ThreadPoolExecutor(1) as other:
        for shown in (b"\0\xff", bytes(range(256)) * (9 << 12)):  # the second in several parts
            message = {"do": "fill", "with": 7, "bytes": shown}
            came = other.submit(theirs.recv)
            ours.send(message)
            assert came.result(60) == message


def test_both_sides_may_send_at_once() -> None:
    def talk(line: Line, number: int) -> list[dict[str, int]]:
        heard = []
        for turn in range(3):
            line.send({"turn": turn, "by": number})
            heard.append(line.recv())
        line.send({"by": number})
        return [*heard, line.recv()]

    with two_lines() as (ours, theirs), ThreadPoolExecutor(1) as other:
        heard = other.submit(talk, theirs, 1)
        assert talk(ours, 0) == [*({"turn": turn, "by": 1} for turn in range(3)), {"by": 1}]
        assert heard.result(20) == [*({"turn": turn, "by": 0} for turn in range(3)), {"by": 0}]


def test_a_side_that_leaves_is_told_as_lost() -> None:
    with two_lines() as (ours, theirs), ThreadPoolExecutor(1) as other:
        gone = other.submit(lambda: (theirs.recv(), theirs._ranks.close()))
        ours.send({"do": "quit"})
        gone.result(20)
        with pytest.raises(PeerLost, match=r"bench transfer: the other side is lost: .*rank 1"):
            ours.recv()
