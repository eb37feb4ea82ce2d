# SPDX-License-Identifier: Apache-2.0
"""What runs in processes that are killed. They are started anew, so this imports no torch, which takes 3 s of CPU."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

from weft.transfer import TransferEngine

TIMEOUT_S = 100.0
PEER_DEAD_S = 8.0  # who waits for a turn on a busy machine is not dead
BYTES = 1 << 20


def victim(provider: str, line: Connection) -> None:
    """Offer memory, then write into the parent's for ever."""
    engine = TransferEngine(
        provider, name="victim", timeout_s=TIMEOUT_S, heartbeat_s=0.1, peer_dead_s=PEER_DEAD_S
    )
    buffer = bytearray(BYTES)
    memory = engine.register(buffer, remote_read=True, remote_write=True)
    line.send((engine.address, memory.descriptor))
    address, descriptor = line.recv()
    peer = engine.connect(address)
    remote = engine.attach(descriptor)
    line.send("ready")
    while peer.is_alive:
        engine.write(memory, remote, 4096, imm=1).wait()
        time.sleep(0.001)
