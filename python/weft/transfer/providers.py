# SPDX-License-Identifier: Apache-2.0
"""Which networks this process can use, and the in-process one with faults on request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft import _core
from weft.errors import invalid


@dataclass(frozen=True)
class Nic:
    """One NIC (or software network interface) of a provider, and what it can do.

    ``unusable_because`` is empty when it can be opened. ``gbit_per_s`` is 0 where unknown, ``numa_node`` -1.
    ``imm_proof`` says what shows that an immediate comes from a peer:

    * ``token``: a number in the immediate that only the two engines know;
    * ``connection``: the connection it arrives on;
    * ``address key``: the key that the NIC demands of a sender;
    * ``message``: the engine sends no immediates, but messages with a MAC;
    * ``none``: with a secret the engine sends messages with a MAC; without one anybody can forge immediates.
    """

    provider: str
    name: str
    pci: str
    numa_node: int
    gbit_per_s: float
    ordered_writes: bool
    write_imm: bool
    imm_proof: str
    device_memory: bool
    manual_progress: bool
    packs_small_pages: bool
    write_bytes_max: int
    tx_depth: int
    unusable_because: str

    @property
    def is_usable(self) -> bool:
        """Whether an engine can open it."""
        return not self.unusable_because


def provider_names() -> list[str]:
    """Return the names that ``TransferEngine(provider=...)`` takes, best first; ``auto`` picks among them."""
    return list(_core.transfer_provider_names())


def nics(provider: str | None = None) -> list[Nic]:
    """Return the NICs of one provider, or of all; unusable ones say why."""
    names = provider_names() if provider is None else [provider]
    return [Nic(**nic) for name in names for nic in _core.transfer_find_provider(name).probe()]


def usable_nics(argument: str, provider: str, core_provider: Any) -> list[str]:
    """Return the names of a provider's NICs that can be opened. Raises: weft.Error that says why there is none."""
    probed = core_provider.probe()
    usable = [str(nic["name"]) for nic in probed if not nic["unusable_because"]]
    if not usable:
        whys = "; ".join(dict.fromkeys(nic["unusable_because"] for nic in probed))
        here = [name for name in provider_names() if any(nic.is_usable for nic in nics(name))]
        allowed = f"one that is usable here: {', '.join(here)}"
        raise invalid(argument, f"{provider} (unusable here: {whys})", allowed)
    return usable


@dataclass(frozen=True)
class FaultPlan:
    """The faults of a ``LoopbackNetwork``; all but ``seed`` and ``dies_after`` are chances, 0 to 1.

    Args:
        seed: the same seed and calls give the same faults.
        drop: lost without a trace.
        duplicate: arrives twice.
        reorder: overtakes up to 8 earlier packets.
        fail: not carried out; the sender gets an error.
        delay: held back for 50 polls of the receiver.
        dies_after: a rail falls silent after so many packets; 0: never.
        spare_messages: faults strike one-sided operations only.
    """

    seed: int = 1
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    fail: float = 0.0
    delay: float = 0.0
    dies_after: int = 0
    spare_messages: bool = False


class LoopbackNetwork:
    """A network inside this process, for tests: the ``provider`` of the engines that shall meet on it."""

    def __init__(self, plan: FaultPlan | None = None, nics: int = 4) -> None:
        """``nics``: how many rails an engine can have (``loop0``, ``loop1``, ...)."""
        self.core: Any = _core.TransferLoopback(nics)
        self.set_plan(plan or FaultPlan())

    def set_plan(self, plan: FaultPlan) -> None:
        """Apply ``plan`` from the next packet on."""
        self.core.set_plan(
            plan.seed,
            plan.drop,
            plan.duplicate,
            plan.reorder,
            plan.fail,
            plan.delay,
            plan.dies_after,
            plan.spare_messages,
        )
