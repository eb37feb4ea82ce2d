# SPDX-License-Identifier: Apache-2.0
"""WEFT_TLS=1: who stands between two ranks reads nothing, and who is set differently or knows no secret is refused.

Ranks are processes of their own; rank 1 reaches rank 0 through this process, which keeps what both say.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import environment

SECRET = "a secret of a job that has one"
PAYLOAD = b"what the ranks of this job tell each other, " * 50
# Rank, port and settings; prints what came, or the error.
RANK = f"""
import sys
from weft.errors import Error
from weft.runtime.bootstrap import TcpAddress
rank, port, limit_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
bootstrap = TcpAddress("127.0.0.1:" + port, rank, 2)
try:
    everyone = bootstrap.all_gather({PAYLOAD!r} + b"%d" % rank, limit_s)
    again = bootstrap.all_gather(b"%d" % rank, limit_s)
    print("right" if everyone == [{PAYLOAD!r} + b"%d" % r for r in range(2)] and again == [b"0", b"1"] else "wrong")
except Error as error:
    print(f"{{error.code}}: {{error}}")
"""


def start(
    rank: int, port: int, tls: str, secret: str = SECRET, limit_s: float = 60, **more: str
) -> subprocess.Popen[str]:
    variables = environment() | {"WEFT_TLS": tls, "WEFT_JOB_SECRET": secret, **more}
    command = [sys.executable, "-c", RANK, str(rank), str(port), str(limit_s)]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    return out.strip() or err


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Between:
    """Passes on what comes at ``port`` to ``to``, and keeps it: by connection, what its caller said and heard."""

    def __init__(self, to: int) -> None:
        self._to, self._over = to, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.heard: list[tuple[bytearray, bytearray]] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        self._listener.settimeout(0.1)
        while not self._over.is_set():
            with contextlib.suppress(OSError):
                caller, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._pass_on, args=(caller,)))
                self._threads[-1].start()

    def _pass_on(self, caller: socket.socket) -> None:
        kept = (bytearray(), bytearray())
        with (
            caller,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self._to)) as called,
        ):
            self.heard.append(kept)
            both = [caller, called]
            while not self._over.is_set():
                for one in select.select(both, [], [], 0.1)[0]:
                    data = one.recv(65536)
                    if not data:
                        return
                    kept[both.index(one)].extend(data)
                    both[1 - both.index(one)].sendall(data)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def all(self) -> bytes:
        return b"".join(bytes(part) for kept in self.heard for part in kept)


@contextlib.contextmanager
def between(to: int) -> Iterator[Between]:
    one = Between(to)
    try:
        yield one
    finally:
        one.close()


@pytest.mark.parametrize("tls", ["0", "1"])
def test_what_ranks_say_is_read_by_nobody_on_the_way(tls: str) -> None:
    port = free_port()
    with between(port) as wire:
        ranks = [start(0, port, tls), start(1, wire.port, tls)]
        assert [said(rank) for rank in ranks] == ["right", "right"]
        assert len(wire.all()) > 2 * len(PAYLOAD)
        assert (PAYLOAD in wire.all()) == (tls == "0")
        assert SECRET.encode() not in wire.all()


@pytest.mark.parametrize("tls", ["0", "1"])
def test_a_rank_that_is_set_differently_is_refused_by_name(tls: str) -> None:
    port = free_port()
    other = str(1 - int(tls))
    zero, one = start(0, port, tls, limit_s=8), start(1, port, other)
    assert (
        f"invalid: WEFT_TLS: got {other} here and {tls} on the other side, allowed: the same on all ranks"
        in said(one)
    )
    out, err = zero.communicate(timeout=120)
    assert "peer_lost: rank 0, bootstrap.all_gather, waited 8 s for rank 1; refused 1" in out, out
    assert f"WEFT_TLS: got {tls} here and {other} on the other side" in err


def test_another_secret_is_refused() -> None:
    port = free_port()
    zero, one = start(0, port, "1", limit_s=8), start(1, port, "1", secret=SECRET + "!")
    assert "invalid: secret: the one given differs from the other side's" in said(one)
    assert "waited 8 s for rank 1; refused 1 without the secret, from 127.0.0.1" in said(zero)


def test_a_recorded_connection_opens_nothing_again() -> None:
    port = free_port()
    with between(port) as wire:
        ranks = [start(0, port, "1"), start(1, wire.port, "1")]
        assert [said(rank) for rank in ranks] == ["right", "right"]
        (recorded, answer), *_ = [kept for kept in wire.heard if len(kept[0]) > len(PAYLOAD)]
    zero = start(0, port, "1")
    heard = bytearray()
    with connected(port) as again, contextlib.suppress(OSError):
        again.sendall(recorded)
        while data := again.recv(65536):
            heard += data
    assert len(heard) < len(answer) - len(PAYLOAD) and PAYLOAD not in heard
    one = start(1, port, "1")
    assert [said(zero), said(one)] == ["right", "right"]


def connected(port: int) -> socket.socket:
    for _ in range(600):
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), 20)
        threading.Event().wait(0.1)
    raise AssertionError("nobody listens")


def test_tls_without_a_secret_is_an_error() -> None:
    assert "invalid: WEFT_TLS: got 1 without a secret" in said(start(0, free_port(), "1", secret=""))
    made = "from weft.transfer import TransferEngine; TransferEngine('fabric:tcp')"
    ran = subprocess.run(
        [sys.executable, "-c", made],
        env=environment() | {"WEFT_TLS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "WEFT_TLS: got 1 without a secret" in ran.stderr or "fabric:tcp" in ran.stderr


WITHOUT = """
#include <dlfcn.h>
#include <string.h>
#define _GNU_SOURCE
void* dlopen(const char* name, int flags) {
  static void* (*real)(const char*, int);
  if (!real) real = (void* (*)(const char*, int))dlsym((void*)-1l, "dlopen");
  return name && strcmp(name, "libssl.so.3") == 0 ? 0 : real(name, flags);
}
"""


def test_tls_without_openssl_names_what_is_missing(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "without.c").write_text(WITHOUT)
    library = tmp_path / "without.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", str(tmp_path / "without.c"), "-o", str(library), "-ldl"], check=True
    )
    message = said(
        start(
            1,
            free_port(),
            "1",
            LD_PRELOAD=":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)])),
        )
    )
    assert "unsupported: WEFT_TLS: got 1, but libssl.so.3 of OpenSSL 3 cannot be opened" in message
    assert "package libssl3" in message
