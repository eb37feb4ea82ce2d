# SPDX-License-Identifier: Apache-2.0
"""Other transfer engines beside ours in ``weft bench transfer``: NIXL and Mooncake, where they are installed.

    others, notes = open_others(address, nbytes, host)     # on both sides
    others["nixl"].meet(card_of_the_other_side)
    seconds = others["nixl"].seconds("write", offsets, nbytes, repeats)

They are driven through their public Python interfaces: a list of operations is one request, as they offer it, and a
repetition ends when they call it done. NIXL runs its UCX backend, Mooncake its tcp transport.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

from weft.errors import PeerLost

Pairs = Sequence[tuple[int, int]]  # (offset here, offset there)
TIMEOUT_S = 60.0


class Other(Protocol):
    """One engine on one side, with the side's buffer registered."""

    def descriptor(self) -> dict[str, Any]:
        """Return what the other side needs for ``meet``."""

    def meet(self, descriptor: dict[str, Any]) -> None:
        """Connect to the other side."""

    def seconds(self, kind: str, pairs: Pairs, nbytes: int, repeats: int) -> list[float]:
        """Do ``write`` or ``read`` of every pair as one request; return the seconds of each repetition."""


class Nixl:
    """A NIXL agent with its UCX backend."""

    def __init__(self, address: int, nbytes: int, host: str) -> None:
        """Register the buffer. Raises whatever NIXL raises where it cannot run."""
        api = importlib.import_module("nixl._api")
        self.address = address
        self.agent = api.nixl_agent(f"weft-{os.getpid()}", api.nixl_agent_config(backends=["UCX"]))
        self.memory = self.agent.register_memory([(address, nbytes, 0, "")], "DRAM")
        self.peer, self.there = "", 0

    def descriptor(self) -> dict[str, Any]:
        """Return the agent's metadata and the buffer's address."""
        return {"metadata": bytes(self.agent.get_agent_metadata()), "address": self.address}

    def meet(self, descriptor: dict[str, Any]) -> None:
        """Load the other agent."""
        self.peer, self.there = self.agent.add_remote_agent(descriptor["metadata"]), descriptor["address"]

    def seconds(self, kind: str, pairs: Pairs, nbytes: int, repeats: int) -> list[float]:
        """One request, made once and posted ``repeats`` times."""
        here = self.agent.get_xfer_descs([(self.address + a, nbytes, 0) for a, _ in pairs], "DRAM")
        there = self.agent.get_xfer_descs([(self.there + b, nbytes, 0) for _, b in pairs], "DRAM")
        request = self.agent.initialize_xfer(kind.upper(), here, there, self.peer)
        try:
            return [self._once(request) for _ in range(repeats)]
        finally:
            self.agent.release_xfer_handle(request)

    def _once(self, request: Any) -> float:
        began = time.perf_counter()
        state = self.agent.transfer(request)
        while state == "PROC":
            if time.perf_counter() - began > TIMEOUT_S:
                raise PeerLost(f"bench transfer: NIXL: no end of a request in {TIMEOUT_S:.0f} s")
            state = self.agent.check_xfer_state(request)
        if state != "DONE":
            raise PeerLost(f"bench transfer: NIXL: a request ended as {state}")
        return time.perf_counter() - began


class Mooncake:
    """Mooncake's transfer engine over tcp, without a metadata server."""

    def __init__(self, address: int, nbytes: int, host: str) -> None:
        """Register the buffer. Raises where Mooncake cannot run."""
        self.address, self.host = address, host
        self.engine = importlib.import_module("mooncake.engine").TransferEngine()
        if self.engine.initialize(f"{host}:0", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("initialize() failed")
        if self.engine.register_memory(address, nbytes):
            raise RuntimeError("register_memory() failed")
        self.peer, self.there = "", 0

    def descriptor(self) -> dict[str, Any]:
        """Return where the engine listens and the buffer's address."""
        return {"peer": f"{self.host}:{self.engine.get_rpc_port()}", "address": self.address}

    def meet(self, descriptor: dict[str, Any]) -> None:
        """Remember the other side; Mooncake connects with the first request."""
        self.peer, self.there = descriptor["peer"], descriptor["address"]

    def seconds(self, kind: str, pairs: Pairs, nbytes: int, repeats: int) -> list[float]:
        """One batch per repetition."""
        here, there = [self.address + a for a, _ in pairs], [self.there + b for _, b in pairs]
        move = getattr(self.engine, f"batch_transfer_sync_{kind}")
        taken = []
        for _ in range(repeats):
            began = time.perf_counter()
            if code := move(self.peer, here, there, [nbytes] * len(pairs)):
                raise PeerLost(f"bench transfer: Mooncake: a batch of {len(pairs)} ended with {code}")
            taken.append(time.perf_counter() - began)
        return taken


ENGINES: dict[str, tuple[str, type[Nixl] | type[Mooncake]]] = {
    "nixl": ("nixl", Nixl),
    "mooncake": ("mooncake", Mooncake),
}


def open_others(address: int, nbytes: int, host: str) -> tuple[dict[str, Other], dict[str, str]]:
    """Open every other engine that is installed and works here.

    Returns: the engines by name, and for the rest why they are not there.
    """
    opened: dict[str, Other] = {}
    absent: dict[str, str] = {}
    os.environ.setdefault("GLOG_minloglevel", "2")  # they log to the terminal otherwise
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    for name, (module, make) in ENGINES.items():
        if importlib.util.find_spec(module) is None:
            absent[name] = "not installed"
            continue
        try:
            opened[name] = make(address, nbytes, host)
        except Exception as error:  # whatever a foreign package raises: the benchmark goes on without it
            absent[name] = f"installed, but it does not work here: {error}"
    return opened, absent
