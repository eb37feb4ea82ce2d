# SPDX-License-Identifier: Apache-2.0
"""The part of ``weft doctor`` that looks at what stands between RDMA NICs and GPUs: drivers, limits, PCIe.

Every check is a function of the system's files below a root folder, and of the GPUs as the core lists them. Each says
what was found, what that means for Weft, and one fix. A check that has nothing to look at says nothing: without a GPU
none of GPUs, without an RDMA device none of NICs. docs/gpu-clusters.md explains each for people.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.runtime import pci
from weft.runtime.findings import Finding
from weft.runtime.pci import Nearness, PciDevice, RdmaDevice


@dataclass(frozen=True)
class Machine:
    """What the checks look at.

    Args:
        root: the folder with sys, proc and dev.
        nics: the RDMA devices.
        gpus: of each its name, such as cuda:0, the core's facts, and its place on PCI where the system lists it.
    """

    root: Path
    nics: list[RdmaDevice]
    gpus: list[tuple[str, dict[str, Any], PciDevice | None]]


@dataclass(frozen=True)
class _Outcome:
    """What a check says of one device; devices with the same outcome share a line."""

    state: str
    why: str = ""
    remedy: str = ""


_OK = _Outcome("ok")


def examine(root: Path, gpus: list[dict[str, Any]]) -> Iterator[Finding]:
    """Yield what every check found."""
    named = [(f"cuda:{gpu['ordinal']}", gpu, pci.pci_device(root, gpu["pci_address"])) for gpu in gpus]
    machine = Machine(root, pci.rdma_devices(root), named)
    checks: list[Callable[[Machine], Iterator[Finding]]] = [
        _kernel_drivers,
        _device_files,
        _port_states,
        _locked_memory,
        _gpu_memory,
        _write_order,
        _distances,
        _iommu,
        _access_control,
        _relaxed_ordering,
    ]
    for check in checks:
        yield from check(machine)


def _findings(what: str, serves: str, outcomes: Iterable[tuple[str, _Outcome]]) -> Iterator[Finding]:
    """Yield one finding for all names of one outcome."""
    names_of: dict[_Outcome, list[str]] = {}
    for name, outcome in outcomes:
        names_of.setdefault(outcome, []).append(name)
    for outcome, names in names_of.items():
        yield Finding(outcome.state, f"{what} ({', '.join(names)})", serves, outcome.why, outcome.remedy)


# ---- drivers and what a process may do


@dataclass(frozen=True)
class Family:
    """NICs of one kernel driver: how sysfs spells them, and the module that makes RDMA devices of them."""

    name: str
    vendor: str
    models: str  # how their numbers begin
    drivers: tuple[str, ...]  # what may be bound to the card on PCI, "" for nothing
    module: str


FAMILIES = [
    Family("NVIDIA ConnectX", "0x15b3", "0x", ("mlx5_core", ""), "mlx5_ib"),
    Family("Broadcom NetXtreme", "0x14e4", "0x", ("bnxt_en",), "bnxt_re"),
    Family("AMD Pensando", "0x1dd8", "0x", ("ionic", ""), "ionic_rdma"),
    Family("AWS EFA", "0x1d0f", "0xefa", ("efa", ""), "efa"),
]


def _kernel_drivers(machine: Machine) -> Iterator[Finding]:
    used = {nic.pci.address for nic in machine.nics}
    idle = [card for card in pci.network_cards(machine.root) if card.address not in used]
    outcomes = ((card.address, _without_driver(machine.root, card)) for card in idle)
    serves = "a network that reads and writes memory by itself; without, its cards carry TCP alone"
    yield from _findings("RDMA device", serves, ((name, found) for name, found in outcomes if found))


def _without_driver(root: Path, card: PciDevice) -> _Outcome | None:
    for family in FAMILIES:
        is_model = card.vendor == family.vendor and card.model.startswith(family.models)
        if not is_model or card.driver not in family.drivers:
            continue
        if (root / "sys/module" / family.module).exists():
            why = f"{family.name}: the kernel module {family.module} is loaded, and made no RDMA device of it"
            return _Outcome("missing", why, f"sudo dmesg | grep -i -e {family.module} -e {card.address}")
        why = f"{family.name}: the kernel module {family.module} is not loaded"
        return _Outcome("missing", why, f"sudo modprobe {family.module}")
    return None


def _device_files(machine: Machine) -> Iterator[Finding]:
    outcomes = ((nic.name, _file_of(machine.root, nic)) for nic in machine.nics)
    yield from _findings("RDMA device file", "providers verbs and fabric:efa open it", outcomes)


def _file_of(root: Path, nic: RdmaDevice) -> _Outcome:
    if not nic.node:
        return _Outcome("missing", "the kernel module ib_uverbs is not loaded", "sudo modprobe ib_uverbs")
    path = root / "dev/infiniband" / nic.node
    if not path.exists():
        why = "there is none below /dev/infiniband, as in a container that was given no NIC"
        return _Outcome(
            "missing", why, "start the container with --device /dev/infiniband, or ask its device plugin"
        )
    if os.access(path, os.R_OK | os.W_OK):
        return _OK
    remedy = "install rdma-core: its udev rules open /dev/infiniband/uverbs* to all users"
    return _Outcome("missing", "this user may not open it", remedy)


def _port_states(machine: Machine) -> Iterator[Finding]:
    outcomes = ((nic.name, _ports_of(nic)) for nic in machine.nics)
    yield from _findings("RDMA port", "the cable to other machines", outcomes)


def _ports_of(nic: RdmaDevice) -> _Outcome:
    if "ACTIVE" in nic.port_states:
        return _OK
    why = f"no port is active ({', '.join(nic.port_states) or 'it has none'}): Weft passes this NIC over"
    return _Outcome(
        "missing", why, "Ethernet: ip link set the interface up; InfiniBand: start a subnet manager"
    )


_CAP_IPC_LOCK = 14


def _locked_memory(machine: Machine) -> Iterator[Finding]:
    """NICs need pages that stay where they are; the kernel counts those of the host against a limit of the process."""
    if not machine.nics:
        return
    limit = _lock_limit(machine.root)
    outcome = _OK
    if limit is not None and not _may_lock_all(machine.root) and limit < _host_memory(machine.root):
        why = f"the limit (ulimit -l) is {limit // 1024} KiB: windows and staging beyond it cannot be registered"
        outcome = _Outcome(
            "wrong",
            why,
            "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/weft.conf; log in anew",
        )
    yield Finding(
        outcome.state, "locked memory", "windows that NICs read and write", outcome.why, outcome.remedy
    )


def _lock_limit(root: Path) -> int | None:
    """Return the soft limit in bytes; None for none."""
    found = re.search(r"^Max locked memory +(\d+)", _text(root / "proc/self/limits"), re.MULTILINE)
    return int(found[1]) if found else None


def _may_lock_all(root: Path) -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", _text(root / "proc/self/status"), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> _CAP_IPC_LOCK & 1)


def _host_memory(root: Path) -> int:
    found = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return 1024 * int(found[1]) if found else 1 << 62


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# ---- GPUs


def _gpu_memory(machine: Machine) -> Iterator[Finding]:
    outcomes = ((name, _way_into(machine.root, facts)) for name, facts, _ in machine.gpus)
    serves = "payload of ranks of other machines, without a copy through memory of the host"
    yield from _findings("GPU memory for NICs", serves, outcomes)


def _way_into(root: Path, facts: dict[str, Any]) -> _Outcome:
    if facts["exports_dmabuf"]:
        return _Outcome("ok", "by DMA-BUF")
    modules = (root / "sys/module" / name for name in ("nvidia_peermem", "nv_peer_mem"))
    if any(module.exists() for module in modules):
        return _Outcome("ok", "by peer memory (nvidia_peermem); the driver exports no DMA-BUF")
    if "Open Kernel Module" in _text(root / "proc/driver/nvidia/version"):
        why = "the driver's open kernel modules export no DMA-BUF here, and nvidia_peermem is not loaded"
        return _Outcome("missing", why, "sudo modprobe nvidia_peermem (it needs NVIDIA's DOCA-OFED)")
    why = "the driver exports no DMA-BUF, and nvidia_peermem is not loaded: payload takes pinned host memory"
    return _Outcome("missing", why, "install the NVIDIA driver's open kernel modules, which export DMA-BUF")


_ALL_GPUS = 200  # of CUDA's GPUDirectRDMAWritesOrdering: 0 nobody, 100 the GPU itself, 200 all GPUs


def _write_order(machine: Machine) -> Iterator[Finding]:
    outcomes = ((name, _order_of(facts["nic_write_order"])) for name, facts, _ in machine.gpus)
    yield from _findings("order of a NIC's writes", "payload in GPU memory under the proxy", outcomes)


def _order_of(order: int) -> _Outcome:
    if order >= _ALL_GPUS:
        return _OK
    seen = "the GPU itself alone sees" if order else "no GPU sees"
    why = f"{seen} a NIC's writes in order (GPUDirectRDMAWritesOrdering {order}): payload takes pinned host memory"
    return _Outcome(
        "slow", why, "none on this machine: the platform decides; NVIDIA's H200 orders them for all"
    )


def _nearest(machine: Machine, gpu: PciDevice) -> tuple[Nearness, list[RdmaDevice]]:
    """Return the NICs that are nearest to a GPU, of those with an active port where there are such."""
    live = [nic for nic in machine.nics if "ACTIVE" in nic.port_states] or machine.nics
    best = min((pci.nearness(gpu, nic.pci) for nic in live), key=lambda near: near.value)
    return best, [nic for nic in live if pci.nearness(gpu, nic.pci) is best]


def _distances(machine: Machine) -> Iterator[Finding]:
    if machine.nics:
        outcomes = ((name, _distance(machine, place)) for name, _, place in machine.gpus if place)
        yield from _findings("NIC near the GPU", "bytes that cross as little of PCIe as can be", outcomes)


def _distance(machine: Machine, gpu: PciDevice) -> _Outcome:
    near, nics = _nearest(machine, gpu)
    names = ", ".join(nic.name for nic in nics)
    if near is Nearness.SAME_SWITCH:
        return _Outcome("ok", f"{names}: below one PCIe switch")
    if near is Nearness.SAME_NODE:
        return _Outcome("ok", f"{names}: at the same processor, not below one PCIe switch")
    if near is Nearness.UNKNOWN:
        return _Outcome("ok", f"{names}: the system does not say how near, as in virtual machines")
    why = f"the nearest, {names}, is at another processor: every byte crosses the link between processors"
    return _Outcome(
        "slow", why, "give the job GPUs that have a NIC at their processor (CUDA_VISIBLE_DEVICES)"
    )


# ---- PCIe

_AS_ROOT = "sudo $(command -v weft) doctor"


def _iommu(machine: Machine) -> Iterator[Finding]:
    """Devices that reach each other need addresses that the IOMMU leaves as they are."""
    gpus = [(name, place) for name, _, place in machine.gpus if place]
    if not gpus or not machine.nics:
        return
    devices = [(nic.name, nic.pci) for nic in machine.nics] + gpus
    outcomes = ((name, _translation(pci.iommu_type(machine.root, place.address))) for name, place in devices)
    yield from _findings("IOMMU", "writes from a NIC into a GPU", outcomes)


def _translation(kind: str) -> _Outcome:
    if not kind.startswith("DMA"):
        return _Outcome("ok", "passes addresses through" if kind == "identity" else "none is in the way")
    why = f"it translates addresses ({kind}): NICs reach GPU memory slowly, or with peer memory not at all"
    return _Outcome("slow", why, "add iommu=pt to the kernel's command line, and start the machine anew")


def _access_control(machine: Machine) -> Iterator[Finding]:
    """Look at the bridges below a switch that a GPU shares with its NICs."""
    if not machine.nics:
        return
    bridges: dict[str, None] = {}  # each once, in order
    for _, _, gpu in machine.gpus:
        near, nics = _nearest(machine, gpu) if gpu else (Nearness.UNKNOWN, [])
        if gpu and near is Nearness.SAME_SWITCH:
            bridges.update((bridge, None) for nic in nics for bridge in pci.bridges_between(gpu, nic.pci))
    places = [place for bridge in bridges if (place := pci.pci_device(machine.root, bridge))]
    outcomes = ((place.address, _detour(place)) for place in places)
    yield from _findings(
        "access control (ACS) of bridges", "writes from a NIC into a GPU below its switch", outcomes
    )


def _detour(bridge: PciDevice) -> _Outcome:
    redirects = pci.redirects_peers(bridge)
    if redirects is None:
        return _Outcome("missing", "only root can read it", _AS_ROOT)
    if not redirects:
        return _OK
    why = "it sends each write up to the processor and back down, at a part of the speed"
    remedy = "switch ACS off in the BIOS; until then, as root, for each: setpci -s BRIDGE ECAP_ACS+6.w=0"
    return _Outcome("slow", why, remedy)


def _relaxed_ordering(machine: Machine) -> Iterator[Finding]:
    outcomes = ((nic.name, _ordering_of(nic.pci)) for nic in machine.nics)
    yield from _findings("relaxed ordering of PCIe", "fast NICs that write to memory of the host", outcomes)


def _ordering_of(nic: PciDevice) -> _Outcome:
    allows = pci.allows_relaxed_ordering(nic)
    if allows is None:
        return _Outcome("missing", "only root can read it", _AS_ROOT)
    if allows:
        return _OK
    why = (
        "it is off: memory that Weft registers with relaxed ordering is written in strict order all the same"
    )
    return _Outcome("slow", why, "switch PCIe relaxed ordering on in the BIOS")
