# SPDX-License-Identifier: Apache-2.0
"""Point-to-point transfers over any network: what moves KV caches and weights between processes.

    engine = TransferEngine("fabric:tcp")
    memory = engine.register(tensor, remote_write=True)
    peer, (remote,) = exchange(engine, store, "prefill", "decode", [memory])  # addresses and descriptors: plain bytes
    engine.write(memory, remote, imm=7).wait()                                # there: engine.imm(peer, 7).wait(1)

Writes are one-sided; nothing orders two transfers; the immediate of a write is counted after all its bytes.
``docs/transfer.md`` has the whole of it. ``Layout``, ``plan`` and ``verify`` say which bytes go where between two
shardings (``docs/resharding.md``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from weft.errors import NotInstalled
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

if TYPE_CHECKING:
    from weft.transfer.reshard import (
        Arrivals,
        Box,
        Layout,
        Links,
        Plan,
        Push,
        Rule,
        Split,
        TensorMeta,
        Update,
        layout_by_rules,
        layout_of,
        plan,
        verify,
    )

__all__ = [
    "Arrivals",
    "Box",
    "Counter",
    "FaultPlan",
    "ImmCounter",
    "Layout",
    "Links",
    "LoopbackNetwork",
    "Memory",
    "Nic",
    "Pages",
    "Peer",
    "Plan",
    "Push",
    "Remote",
    "Rule",
    "Source",
    "Span",
    "Split",
    "Target",
    "TensorMeta",
    "Transfer",
    "TransferEngine",
    "Update",
    "Watch",
    "exchange",
    "layout_by_rules",
    "layout_of",
    "nics",
    "plan",
    "provider_names",
    "verify",
]


# Names of resharding are imported at first use: they need numpy, which the engine does without.
def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'weft.transfer' has no attribute {name!r}")
    try:
        value: object = getattr(import_module("weft.transfer.reshard"), name)
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise NotInstalled(f"weft.transfer.{name}", "numpy") from None
    globals()[name] = value
    return value
