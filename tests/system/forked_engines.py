# SPDX-License-Identifier: Apache-2.0
"""Two connected engines in one process, which forks children of every kind. Arguments: the provider."""

from __future__ import annotations

import sys
from typing import Any

import torch
from forked import WAYS, check_refused, fork

from weft.transfer import TransferEngine

TIMEOUT_S = 60.0


class Pair:
    """Engines a and b, and everything that a user may hold of them."""

    def __init__(self, provider: str) -> None:
        self.a = TransferEngine(provider, name="a", timeout_s=TIMEOUT_S)
        self.b = TransferEngine(provider, name="b", timeout_s=TIMEOUT_S)
        self.src, self.dst = torch.arange(1 << 16), torch.zeros(1 << 16, dtype=torch.int64)
        self.array = bytearray(64)
        self.at_a = self.a.register(self.src, remote_read=True, remote_write=True)
        self.at_b = self.b.register(self.dst, remote_read=True, remote_write=True)
        self.small = self.a.register(self.array)
        self.peer = self.a.connect(self.b.address)
        self.remote = self.a.attach(self.at_b.descriptor)
        (self.back,) = self.b.peers
        self.imm = self.b.imm(self.back, 7)
        self.counter = self.a.counter()
        self.watch = self.a.watch(lambda was, now: True)
        self.waiting = self.b.recv(self.back, self.at_b, 8, timeout_s=3600)  # ends after all forks
        self.done = self.a.write(self.at_a, self.remote, 8).wait()
        self.writes = 0

    def write(self) -> None:
        """Write all, in both directions, and check what arrived."""
        self.writes += 1
        self.src += 1
        self.dst.zero_()
        self.a.write(self.at_a, self.remote, imm=7).wait()
        self.imm.wait(self.writes)
        assert torch.equal(self.dst, self.src)
        self.dst.neg_()
        self.a.read(self.at_a, self.remote).wait()
        assert torch.equal(self.dst, self.src)
        self.src.neg_()

    def calls(self) -> dict[str, Any]:
        a = self.a
        return {
            "register": lambda: a.register(bytearray(8)),
            "unregister": self.at_a.unregister,
            "descriptor": lambda: self.at_a.descriptor,
            "address": lambda: a.address,
            "connect": lambda: a.connect(b"0" * 64),
            "disconnect": lambda: a.disconnect(self.peer),
            "peers": lambda: a.peers,
            "attach": lambda: a.attach(b"0" * 64),
            "write": lambda: a.write(self.at_a, self.remote),
            "read": lambda: a.read(self.at_a, self.remote),
            "send": lambda: a.send(self.peer, self.at_a, 8),
            "recv": lambda: a.recv(self.peer, self.at_a, 8),
            "notify": lambda: a.notify(self.peer, 3),
            "barrier": lambda: a.barrier([self.peer], 1),
            "imm": lambda: a.imm(self.peer, 3),
            "imm.value": lambda: self.imm.value,
            "imm.wait": lambda: self.imm.wait(100),
            "imm.on_reach": lambda: self.imm.on_reach(100, print),
            "counter.finished": lambda: self.counter.finished,
            "counter.wait": lambda: self.counter.wait(1),
            "watch": lambda: a.watch(lambda was, now: True),
            "watch.store": lambda: self.watch.store(1),
            "watch.release": self.watch.release,
            "peer.state": lambda: self.peer.state,
            "peer.is_alive": lambda: self.peer.is_alive,
            "peer.why": lambda: self.peer.why,
            "remote.is_revoked": lambda: self.remote.is_revoked,
            "transfer.wait": self.waiting.wait,
            "transfer.is_finished": lambda: self.waiting.is_finished,
            "transfer.phase": lambda: self.done.phase,
            "transfer.cancel": self.waiting.cancel,
            "transfer.on_done": lambda: self.waiting.on_done(print),
            "progress": a.progress,
            "dump": a.dump,
            "close": a.close,
        }


def main(provider: str) -> None:
    torch.set_num_threads(1)  # a fork inherits no OpenMP threads, for which torch would wait
    held = {"pair": Pair(provider)}
    held["pair"].write()
    for way in WAYS * 2:
        said = fork(way, lambda: held["pair"].calls(), held.clear)
        if way == "calls":
            check_refused(said)
            assert all(text.split(": ")[1] for text in said.values()), said
        held["pair"].write()
    pair = held["pair"]
    # A child has engines of its own, while its parent goes on.
    said = fork("calls", lambda: {"own": lambda: Pair(provider).write()}, held.clear)
    assert said == {"own": ""}, said
    pair.write()
    pair.a.send(pair.peer, pair.at_a, 8).wait()
    pair.waiting.wait()
    pair.at_a.unregister()
    pair.a.close()
    pair.b.close()
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
