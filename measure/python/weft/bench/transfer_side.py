# SPDX-License-Identifier: Apache-2.0
"""One side of ``weft bench transfer``: its buffer, engine and raw endpoint, and what the passive side does."""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
from dataclasses import dataclass, field
from typing import Any

from weft import _core
from weft.bench.transfer_line import TIMEOUT_S, Line
from weft.bench.transfer_loads import BUFFER_BYTES
from weft.bench.transfer_others import Other, open_others
from weft.transfer import Span, TransferEngine
from weft.transfer.providers import usable_nics

DIAL_S = 20.0
PROVIDERS = {"tcp": "fabric:tcp", "shm": "fabric:shm"}


@dataclass
class Side:
    """One process's buffer, engine and raw endpoint."""

    buffer: mmap.mmap
    span: Span
    engine: TransferEngine
    raw: Any
    memory: Any = field(init=False)
    peer: Any = field(init=False, default=None)
    remote: Any = field(init=False, default=None)
    others: dict[str, Other] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = self.engine.register(self.span, remote_read=True, remote_write=True)

    def descriptor(self) -> dict[str, Any]:
        """Return what the other side needs."""
        return {
            "address": self.engine.address,
            "descriptor": self.memory.descriptor,
            "raw": None if self.raw is None else self.raw.address,
        }

    def meet(self, descriptor: dict[str, Any]) -> None:
        """Connect to the side with that descriptor."""
        self.peer = self.engine.connect(descriptor["address"], DIAL_S)
        self.remote = self.engine.attach(descriptor["descriptor"], DIAL_S)
        if self.raw is not None and descriptor["raw"] is not None:
            self.raw.connect(descriptor["raw"])

    def open_others(self, host: str) -> dict[str, Any]:
        """Open other engines on the same buffer; return their descriptors, or why they are absent."""
        self.others, absent = open_others(self.span.address, BUFFER_BYTES, host)
        return {
            "descriptors": {name: other.descriptor() for name, other in self.others.items()},
            "absent": absent,
        }


def open_side(args: argparse.Namespace, name: str) -> Side:
    """Open engine, raw endpoint and a buffer that both use."""
    provider = PROVIDERS.get(args.provider, args.provider)
    nic_names = (
        args.nics.split(",") if args.nics else choose_nics(provider, args.command != "server" and args.local)
    )
    buffer = mmap.mmap(-1, BUFFER_BYTES)
    buffer[:] = bytes(BUFFER_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    span = Span(address, BUFFER_BYTES, owner=buffer)
    engine = TransferEngine(provider, nic_names, name=name, timeout_s=TIMEOUT_S)
    raw = None
    if provider.startswith("fabric:"):
        raw = _core.measure.transfer_raw_loop(
            _core.transfer_find_provider(provider), nic_names[0], address, BUFFER_BYTES
        )
    return Side(buffer, span, engine, raw)


def serve(line: Line, args: argparse.Namespace) -> None:
    """Be the passive side of one run: do what the client says until it says goodbye."""
    side = open_side(args, "server")
    if args.command == "server":
        print(describe_nics(side.engine), flush=True)
    line.send(side.descriptor())
    side.meet(line.recv())
    answered = _core.measure.TransferAnswered()
    while (order := line.recv())["do"] != "quit":
        if order["do"] == "serve raw":
            line.send({"ready": True})
            side.raw.serve(TIMEOUT_S)
        elif order["do"] == "serve engine":
            line.send({"ready": True})
            _core.measure.transfer_serve(
                side.engine.core,
                side.peer.core,
                side.memory.core,
                side.remote.core,
                answered,
                TIMEOUT_S,
            )
        elif order["do"] == "fill":
            side.buffer[:] = bytes([order["with"]]) * BUFFER_BYTES
            line.send({"filled": True})
        elif order["do"] == "open others":
            opened = side.open_others(line.host)
            line.send(opened)
            for name, descriptor in order["descriptors"].items():
                if name in side.others:
                    side.others[name].meet(descriptor)
        elif order["do"] == "show":
            line.send({"bytes": side.buffer[order["at"] : order["at"] + order["count"]]})
    side.engine.close()


def choose_nics(provider: str, local: bool) -> list[str]:
    """Return the NIC to use: on one machine the loopback interface, where there is a choice."""
    usable = usable_nics("--provider", provider, _core.transfer_find_provider(provider))
    local_ones = [name for name in usable if name.endswith("@127.0.0.1")]
    return local_ones[:1] if local and local_ones else usable[:1]


def describe_nics(engine: TransferEngine) -> str:
    """Return one line: the NICs in use, what they say of themselves, and what they carry together."""
    nics = engine.nics
    each = (
        f"{nic.name} (NUMA node {nic.numa_node if nic.numa_node >= 0 else '-'}, {nic.gbit_per_s or '?'} Gbit/s)"
        for nic in nics
    )
    total = sum(nic.gbit_per_s for nic in nics)
    return f"{nics[0].provider}, {len(nics)} rails: {', '.join(each)}; {total or '?'} Gbit/s in all"


def pin(cpu: int) -> set[int]:
    """Keep this process on one CPU; unpinned runs swing by hundreds of microseconds. Return those it had."""
    available = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(available)[cpu % len(available)]})
    return available
