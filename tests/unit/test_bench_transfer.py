# SPDX-License-Identifier: Apache-2.0
"""The line between the two sides of ``weft bench transfer``."""

from __future__ import annotations

import socket

import pytest

from weft.bench.transfer_line import Line
from weft.errors import PeerLost


def test_a_line_carries_json_and_bytes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Line(ours).send({"do": "fill", "with": 7, "bytes": b"\0\xff"})
        assert Line(theirs).recv() == {"do": "fill", "with": 7, "bytes": b"\0\xff"}


def test_a_broken_line_is_a_lost_other_side() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        line = Line(ours)
        line.send({"do": "quit"})
        theirs.close()  # with words unread: the system answers with a reset
        with pytest.raises(PeerLost, match=r"the other side is lost: .*reset"):
            line.recv()
        with pytest.raises(PeerLost, match=r"the other side is lost: .*pipe"):
            line.send({"do": "quit"})


def test_a_closed_line_is_told_as_such() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        with pytest.raises(PeerLost, match="the other side closed its connection"):
            Line(ours).recv()
