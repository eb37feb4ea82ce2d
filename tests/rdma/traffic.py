# SPDX-License-Identifier: Apache-2.0
"""Traffic between two guests, which a test disturbs: an owner of memory, and a writer that writes to it.

    python traffic.py owner PROVIDER [OPTIONS]           # in guest 1
    python traffic.py writer PROVIDER 10.9.0.1 [OPTIONS] # in guest 2

The writer writes a block with an immediate, reads it back, and sends its number as a message, time after time, until
--seconds have passed; then it sends the number of its blocks. The owner checks that as many immediates came, no more,
and that all messages came in order. Each prints lines that begin with a word ("ready", "block", "done", "lost"), and
ends with 0 if all was right, with 4 if what came was wrong, with 3 if it lost the other, which it then names.
"""

from __future__ import annotations

import argparse
import pickle
import socket
import struct
import sys
import time
from typing import Any

from warm import SECRET, configure

from weft.errors import Error, PeerLost
from weft.transfer import TransferEngine

PORT = 7000
BLOCK = 20_000  # bytes: some packets each
WORD = struct.Struct(
    "<QQQ"
)  # of a message: whether it is the last, blocks until now, those that were done again
LOST, WRONG = 3, 4
POISON = b"\xfd"  # where a read's bytes are to come; no block has it
MEET_SECONDS = 120.0


class WrongError(Exception):
    """What came is not what was sent."""


def exchange(line: socket.socket, mine: Any) -> Any:
    """Send one thing to the other side, and return its own."""
    data = pickle.dumps(mine)
    line.sendall(struct.pack("<Q", len(data)) + data)
    (length,) = struct.unpack("<Q", line.recv(8, socket.MSG_WAITALL))
    return pickle.loads(line.recv(length, socket.MSG_WAITALL))


def meet(host: str | None) -> socket.socket:
    """Return a line to the other side: the owner listens, the writer calls until it is there."""
    if host is None:
        with socket.create_server(("", PORT)) as server:
            server.settimeout(MEET_SECONDS)
            return server.accept()[0]
    end = time.monotonic() + MEET_SECONDS
    while True:
        try:
            return socket.create_connection((host, PORT), timeout=5)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def say(*words: object) -> None:
    """Print at once."""
    print(*words, flush=True)


class Side:
    """An engine, and its memory."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Open them, and meet the other side."""
        self.options = options
        more = {"nics": options.nics.split(",")} if options.nics else {}
        self.engine = TransferEngine(
            options.provider,
            name=options.role,
            timeout_s=options.timeout,
            heartbeat_s=0.2,
            peer_dead_s=options.dead,
            **more,
        )
        self.buffer = bytearray(2 * BLOCK)
        self.memory = self.engine.register(self.buffer, remote_read=True, remote_write=True)
        with meet(options.host) as line:
            line.settimeout(MEET_SECONDS)
            address, descriptor = exchange(line, (self.engine.address, self.memory.descriptor))
            self.peer = self.engine.connect(address, timeout_s=options.connect)
            self.remote = self.engine.attach(descriptor, timeout_s=60)
            exchange(line, "ready")
        say("ready", [nic.name for nic in self.engine.nics])

    def own(self) -> None:
        """Count what comes, and compare with what the writer says at the end."""
        word = bytearray(WORD.size)
        inbox = self.engine.register(word)
        count = 0
        while True:
            self.engine.recv(self.peer, inbox, timeout_s=self.options.timeout).wait()
            is_last, number, again = WORD.unpack(word)
            if is_last:
                break
            count += 1
            if number != count:
                raise WrongError(f"message {number} came as the {count}th")
        if number != count:
            raise WrongError(f"{number} messages were sent, {count} came")
        counter = self.engine.imm(self.peer, 5)
        counter.wait(count)
        time.sleep(0.5)
        if not count <= counter.value <= count + again:
            raise WrongError(f"{count} immediates were sent, {again} of them again, {counter.value} came")
        if (wrong := difference(block_of(count), self.buffer[:BLOCK])) is not None:
            raise WrongError(f"the last block is not in place, {wrong}")
        say("done", count)

    def write(self) -> None:
        """Write, read and send until the time is over."""
        words = self.engine.register(word := bytearray(WORD.size))
        end, count, again, longest = time.monotonic() + self.options.seconds, 0, 0, 0.0
        while time.monotonic() < end:
            began = time.monotonic()
            count += 1
            self.buffer[:BLOCK] = block_of(count)
            while not self.write_block(count):
                again += 1
            word[:] = WORD.pack(0, count, again)
            self.engine.send(self.peer, words).wait()
            longest = max(longest, time.monotonic() - began)
            say("block", count, round(time.monotonic() - began, 3))
            time.sleep(self.options.pause)
        word[:] = WORD.pack(1, count, again)
        self.engine.send(self.peer, words).wait()
        say("done", count, "longest", round(longest, 2))
        time.sleep(1)  # the owner may still ask

    def write_block(self, count: int) -> bool:
        """Write a block, and read it back. False: a NIC was given up meanwhile, and it is to be done again."""
        try:
            self.engine.write(self.memory, self.remote, BLOCK, imm=5).wait()
            if not self.options.no_reads:
                self.read_back(count)
        except PeerLost:
            raise
        except Error as error:
            if not self.options.again:
                raise
            say("again", error)
            return False
        return True

    def read_back(self, count: int) -> None:
        """Read the block that was written, over poison."""
        self.buffer[BLOCK:] = POISON * BLOCK
        self.engine.read(self.memory, self.remote, BLOCK, dst_offset=BLOCK).wait()
        if (wrong := difference(self.buffer[:BLOCK], self.buffer[BLOCK:])) is not None:
            raise WrongError(f"block {count} reads otherwise than it was written, {wrong}")


def block_of(number: int) -> bytes:
    """Return the bytes of a block."""
    pattern = bytes((number * 7 + i) % 251 for i in range(251))
    return (pattern * (BLOCK // 251 + 1))[:BLOCK]


def difference(expected: bytes, seen: bytes) -> str | None:
    """Return where two blocks differ; None where they do not."""
    wrong = [] if expected == seen else [i for i in range(BLOCK) if expected[i] != seen[i]]
    if not wrong:
        return None
    at = wrong[0]
    return (
        f"{len(wrong)} bytes from {at} to {wrong[-1]}: {seen[at : at + 4]!r}, not {expected[at : at + 4]!r}"
    )


def main() -> int:
    """Play one side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("owner", "writer"))
    parser.add_argument("provider")
    parser.add_argument("host", nargs="?")
    parser.add_argument("--seconds", type=float, default=5, help="how long the writer goes on")
    parser.add_argument("--pause", type=float, default=0.0, help="between two blocks")
    parser.add_argument("--dead", type=float, default=10, help="peer_dead_s")
    parser.add_argument("--timeout", type=float, default=90, help="timeout_s")
    parser.add_argument("--connect", type=float, default=60, help="timeout_s of connect()")
    parser.add_argument("--nics", default="")
    parser.add_argument("--again", action="store_true", help="the writer repeats a block that failed")
    parser.add_argument("--no-reads", action="store_true", help="the writer does not read back what it wrote")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable")
    options = parser.parse_args()
    configure({"WEFT_JOB_SECRET": SECRET} | dict(pair.split("=", 1) for pair in options.set))
    try:
        side = Side(options)
        side.own() if options.role == "owner" else side.write()
    except PeerLost as error:
        say("lost", error)
        return LOST
    except WrongError as error:
        say("wrong", error)
        return WRONG
    except Error as error:
        say("error", error)
        return 1
    side.engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
