# SPDX-License-Identifier: Apache-2.0
"""Point-to-point transfers over any network: what moves KV caches and weights between processes.

    engine = TransferEngine("fabric:tcp")
    memory = engine.register(tensor, remote_write=True)
    peer, (remote,) = exchange(engine, store, "prefill", "decode", [memory])  # addresses and descriptors: plain bytes
    engine.write(memory, remote, imm=7).wait()                                # there: engine.imm(peer, 7).wait(1)

Writes are one-sided; nothing orders two transfers; the immediate of a write is counted after all its bytes.
``docs/transfer.md`` has the whole of it.
"""

from __future__ import annotations

from weft.transfer.buffers import Pages, Span
from weft.transfer.engine import TransferEngine
from weft.transfer.exchange import exchange
from weft.transfer.handles import (
    Counter,
    ImmCounter,
    Memory,
    Peer,
    Remote,
    Source,
    Target,
    Transfer,
    Watch,
)
from weft.transfer.providers import FaultPlan, LoopbackNetwork, Nic, nics, provider_names

__all__ = [
    "Counter",
    "FaultPlan",
    "ImmCounter",
    "LoopbackNetwork",
    "Memory",
    "Nic",
    "Pages",
    "Peer",
    "Remote",
    "Source",
    "Span",
    "Target",
    "Transfer",
    "TransferEngine",
    "Watch",
    "exchange",
    "nics",
    "provider_names",
]
