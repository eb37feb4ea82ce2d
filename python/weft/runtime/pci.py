# SPDX-License-Identifier: Apache-2.0
"""What Linux says of PCI devices, RDMA devices and what joins them; nothing is asked of a driver's library.

    nics = rdma_devices(Path("/"))
    near = nearness(nics[0].pci, pci_device(Path("/"), "0000:1b:00.0"))

``root`` is the folder with ``sys``, ``proc`` and ``dev``: ``/``, and a made one in tests. What cannot be read is left
out or empty, never an error.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_DEVICES = "sys/bus/pci/devices"


@dataclass(frozen=True)
class PciDevice:
    """A device on PCI.

    Args:
        path: addresses from the processor's port down to this device, which is the last.
        numa_node: of the nearest CPUs; -1 where the system does not say.
        vendor, model, kind: numbers as sysfs spells them: 0x15b3, 0x1021, 0x020000.
        driver: the kernel's; empty where none is bound.
        config: the configuration space, as much of it as this process may read.
    """

    path: tuple[str, ...]
    numa_node: int
    vendor: str
    model: str
    kind: str
    driver: str
    config: bytes

    @property
    def address(self) -> str:
        """Return where it is: 0000:17:00.0."""
        return self.path[-1]

    @property
    def is_config_known(self) -> bool:
        """Return whether more than the header could be read: only root may."""
        return len(self.config) > 64


@dataclass(frozen=True)
class RdmaDevice:
    """An RDMA device on PCI: its name, the state of each port, and its file, such as uverbs0; empty without one."""

    name: str
    pci: PciDevice
    port_states: tuple[str, ...]
    node: str


class Nearness(Enum):
    """How near two devices are, as in ``src/topology/rdma_devices.h``; there UNKNOWN counts as FAR."""

    SAME_SWITCH = 0  # below one port of the processor, so there is a switch between
    SAME_NODE = 1
    FAR = 2
    UNKNOWN = 3


def first_line(path: Path) -> str:
    """Return a file's first line; empty if it cannot be read."""
    try:
        with path.open(errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""


def pci_device(root: Path, address: str) -> PciDevice | None:
    """Return the device at an address, or None where the system lists none."""
    folder = (root / _DEVICES / address).resolve()
    if not folder.is_dir():
        return None
    numa_node = first_line(folder / "numa_node")
    driver = folder / "driver"
    return PciDevice(
        tuple(part for part in folder.parts if _ADDRESS.fullmatch(part)),
        int(numa_node) if re.fullmatch(r"-?\d+", numa_node) else -1,
        first_line(folder / "vendor"),
        first_line(folder / "device"),
        first_line(folder / "class"),
        driver.resolve().name if driver.exists() else "",
        _bytes_of(folder / "config"),
    )


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def network_cards(root: Path) -> Iterator[PciDevice]:
    """Yield the devices of PCI's class for networks (02)."""
    for folder in sorted((root / _DEVICES).glob("*")):
        if first_line(folder / "class").startswith("0x02") and (found := pci_device(root, folder.name)):
            yield found


def rdma_devices(root: Path) -> list[RdmaDevice]:
    """Return the RDMA devices on PCI, by name; those in software are left out."""
    nodes = {
        first_line(folder / "ibdev"): folder.name
        for folder in (root / "sys/class/infiniband_verbs").glob("uverbs*")
    }
    found = []
    for folder in sorted((root / "sys/class/infiniband").glob("*")):
        pci = pci_device(root, (folder / "device").resolve().name)
        if pci is None:
            continue
        states = [first_line(port / "state").partition(": ")[2] for port in _by_number(folder / "ports")]
        found.append(RdmaDevice(folder.name, pci, tuple(states), nodes.get(folder.name, "")))
    return found


def _by_number(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*"), key=lambda path: int(path.name) if path.name.isdigit() else 0)


def nearness(a: PciDevice, b: PciDevice) -> Nearness:
    """Return how near two devices are on PCI."""
    if common(a, b):
        return Nearness.SAME_SWITCH
    if min(a.numa_node, b.numa_node) < 0:
        return Nearness.UNKNOWN
    return Nearness.SAME_NODE if a.numa_node == b.numa_node else Nearness.FAR


def common(a: PciDevice, b: PciDevice) -> tuple[str, ...]:
    """Return the bridges above both devices, from the processor down."""
    pairs = zip(a.path[:-1], b.path[:-1], strict=False)
    return tuple(bridge for bridge, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def bridges_between(a: PciDevice, b: PciDevice) -> tuple[str, ...]:
    """Return the bridges that a write from one device to the other passes below the switch that they share."""
    shared = len(common(a, b))
    return a.path[shared:-1] + b.path[shared:-1]


def iommu_type(root: Path, address: str) -> str:
    """Return how the IOMMU treats a device: "identity", "DMA", "DMA-FQ"; empty where none is in its way."""
    return first_line(root / _DEVICES / address / "iommu_group" / "type")


# PCI Express, of the PCI specifications: where a capability's words are, counted from its beginning.
_CAPABILITY_EXPRESS, _DEVICE_CONTROL, _RELAXED_ORDERING = 0x10, 0x08, 0x10
_EXTENDED_ACS, _ACS_CONTROL = 0x0D, 0x06
# Request redirect, completion redirect, upstream forwarding, egress control: each leads away from the direct way.
_ACS_DETOURS = 0x3C


def allows_relaxed_ordering(device: PciDevice) -> bool | None:
    """Return whether nothing keeps a device from marking its writes as free of order; None where that cannot be
    read."""
    if not device.is_config_known:
        return None
    at = _capability(device.config, _CAPABILITY_EXPRESS)
    return at is None or bool(_word(device.config, at + _DEVICE_CONTROL) & _RELAXED_ORDERING)


def redirects_peers(bridge: PciDevice) -> bool | None:
    """Return whether a bridge's access control sends writes between its devices up to the processor; None where that
    cannot be read."""
    if not bridge.is_config_known:
        return None
    at = _extended_capability(bridge.config, _EXTENDED_ACS)
    return at is not None and bool(_word(bridge.config, at + _ACS_CONTROL) & _ACS_DETOURS)


def _word(config: bytes, at: int) -> int:
    return int.from_bytes(config[at : at + 2], "little")


def _capability(config: bytes, wanted: int) -> int | None:
    at, seen = _word(config, 0x34) & 0xFC, set[int]()
    while at and at not in seen and at + 1 < len(config):
        seen.add(at)
        if config[at] == wanted:
            return at
        at = config[at + 1] & 0xFC
    return None


def _extended_capability(config: bytes, wanted: int) -> int | None:
    at, seen = 0x100, set[int]()
    while at >= 0x100 and at not in seen and at + 4 <= len(config):
        seen.add(at)
        head = int.from_bytes(config[at : at + 4], "little")
        if head & 0xFFFF == wanted:
            return at
        at = head >> 20 & 0xFFC
    return None
