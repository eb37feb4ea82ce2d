# SPDX-License-Identifier: Apache-2.0
"""What ``weft doctor`` says of NICs and GPUs, over made folders of /sys, /proc and /dev."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from weft.runtime import nic_checks, pci
from weft.runtime.findings import Finding

ROOT_PORT, SWITCH = "0000:15:01.0", "0000:16:00.0"
TO_GPU, TO_NIC = "0000:17:00.0", "0000:17:01.0"
GPU, NIC = "0000:18:00.0", "0000:19:00.0"
REDIRECTS, VALIDATES = 0x1D, 0x01
GIB = 1 << 30


def configuration(acs: int | None = None, relaxed: bool = True) -> bytes:
    """Return a device's configuration space: PCI Express behind another capability, ACS behind another extended one."""
    space = bytearray(4096)
    space[0x34] = 0x40
    space[0x40:0x42] = bytes([0x05, 0x60])
    space[0x60:0x62] = bytes([0x10, 0x00])
    struct.pack_into("<H", space, 0x68, 0x2900 | (0x10 if relaxed else 0))
    struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | (0x140 << 20 if acs is not None else 0))
    if acs is not None:
        struct.pack_into("<I", space, 0x140, 0x000D | 1 << 16)
        struct.pack_into("<H", space, 0x146, acs)
    return bytes(space)


class Made:
    """A machine as its files: a GPU and a NIC below one switch, unless a test says otherwise."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.put("sys/module/mlx5_ib/refcnt", "1")
        self.put("proc/meminfo", f"MemTotal: {64 * GIB // 1024} kB\n")
        self.put("proc/self/status", "Name:\tpython3\nCapEff:\t0000000000000000\n")
        self.lock_limit("unlimited")
        self.gpus: list[dict[str, Any]] = []

    def put(self, path: str, text: str | bytes) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())

    def lock_limit(self, limit: object) -> None:
        self.put("proc/self/limits", f"Max locked memory         {limit}            unlimited   bytes\n")

    def device(self, *path: str, driver: str = "", config: bytes | None = None, **facts: object) -> None:
        """Make a device of PCI below others, and each of those that is not there."""
        folder = "sys/devices/pci" + path[0][:7] + "/" + "/".join(path)
        given = {"vendor": "0x8086", "device": "0x1021", "class": "0x060400", "numa_node": 0} | facts
        for name, value in given.items():
            self.put(f"{folder}/{name}", f"{value}\n")
        self.put(f"{folder}/config", configuration() if config is None else config)
        if driver:
            (self.root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
            (self.root / folder / "driver").symlink_to(self.root / f"sys/bus/pci/drivers/{driver}")
        listed = self.root / "sys/bus/pci/devices" / path[-1]
        listed.parent.mkdir(parents=True, exist_ok=True)
        listed.symlink_to(self.root / folder)

    def nic(self, *path: str, name: str = "mlx5_0", state: str = "4: ACTIVE", **facts: object) -> None:
        number = name[-1]
        kinds = {"vendor": "0x15b3", "class": "0x020700", "driver": "mlx5_core"}
        self.device(*path, **(kinds | facts))  # type: ignore[arg-type]
        self.put(f"sys/class/infiniband/{name}/ports/1/state", state)
        (self.root / f"sys/class/infiniband/{name}/device").symlink_to(
            self.root / "sys/bus/pci/devices" / path[-1]
        )
        self.put(f"sys/class/infiniband_verbs/uverbs{number}/ibdev", name)
        self.put(f"dev/infiniband/uverbs{number}", "")

    def gpu(self, *path: str, order: int = 200, dmabuf: bool = True, **facts: object) -> None:
        self.device(*path, **({"vendor": "0x10de", "class": "0x030200"} | facts))  # type: ignore[arg-type]
        self.gpus.append(
            {
                "ordinal": len(self.gpus),
                "pci_address": path[-1],
                "exports_dmabuf": dmabuf,
                "nic_write_order": order,
            }
        )

    def usual(self, acs: int | None = VALIDATES, **nic: Any) -> Made:
        for bridge in (
            [ROOT_PORT],
            [ROOT_PORT, SWITCH],
            [ROOT_PORT, SWITCH, TO_GPU],
            [ROOT_PORT, SWITCH, TO_NIC],
        ):
            self.device(*bridge, config=configuration(acs))
        self.gpu(ROOT_PORT, SWITCH, TO_GPU, GPU)
        self.nic(ROOT_PORT, SWITCH, TO_NIC, NIC, **nic)
        return self

    def found(self, what: str) -> list[Finding]:
        findings = list(nic_checks.examine(self.root, self.gpus))
        return [finding for finding in findings if finding.what.startswith(what)]

    def only(self, what: str) -> Finding:
        (finding,) = self.found(what)
        return finding


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def test_a_machine_without_nics_and_gpus_says_nothing(made: Made) -> None:
    made.device(ROOT_PORT)
    made.device("0000:00:1f.6", vendor="0x8086", **{"class": "0x020000"})
    assert list(nic_checks.examine(made.root, [])) == []


def test_on_a_machine_in_order_every_line_is_ok(made: Made) -> None:
    findings = list(nic_checks.examine(made.usual().root, made.gpus))
    assert [finding for finding in findings if finding.state != "ok" or finding.remedy] == []
    assert [finding.what.partition(" (")[0] for finding in findings] == [
        "RDMA device file",
        "RDMA port",
        "locked memory",
        "GPU memory for NICs",
        "order of a NIC's writes",
        "NIC near the GPU",
        "IOMMU",
        "access control",
        "relaxed ordering of PCIe",
    ]


def test_what_is_not_ok_says_why_and_one_fix(made: Made) -> None:
    made.usual(REDIRECTS, state="1: DOWN", config=configuration(relaxed=False))
    made.gpus[0] |= {"exports_dmabuf": False, "nic_write_order": 0}
    made.lock_limit(8 << 20)
    os.remove(made.root / "dev/infiniband/uverbs0")
    for address in (GPU, NIC):
        made.put(f"sys/bus/pci/devices/{address}/iommu_group/type", "DMA-FQ\n")
    findings = list(nic_checks.examine(made.root, made.gpus))
    (ok,) = (finding for finding in findings if finding.state == "ok")
    assert len(findings) == 9 and ok.what.startswith("NIC near the GPU")
    assert all(finding is ok or (finding.why and finding.remedy) for finding in findings)


# ---- drivers and what a process may do


@pytest.mark.parametrize(
    ("facts", "module"),
    [
        ({"vendor": "0x15b3", "driver": "mlx5_core"}, "mlx5_ib"),
        ({"vendor": "0x15b3"}, "mlx5_ib"),
        ({"vendor": "0x14e4", "driver": "bnxt_en"}, "bnxt_re"),
        ({"vendor": "0x1dd8", "driver": "ionic"}, "ionic_rdma"),
        ({"vendor": "0x1d0f", "device": "0xefa2"}, "efa"),
    ],
)
def test_a_card_without_its_rdma_driver_names_the_module(
    made: Made, facts: dict[str, str], module: str
) -> None:
    (made.root / "sys/module/mlx5_ib/refcnt").unlink()
    (made.root / "sys/module/mlx5_ib").rmdir()
    made.device(ROOT_PORT, NIC, **({"class": "0x020000"} | facts))  # type: ignore[arg-type]
    finding = made.only("RDMA device (")
    assert finding.state == "missing" and NIC in finding.what
    assert finding.remedy == f"sudo modprobe {module}"


@pytest.mark.parametrize(
    "facts",
    [
        {"vendor": "0x1d0f", "device": "0xec20", "driver": "ena"},
        {"vendor": "0x14e4", "driver": "tg3"},
        {"vendor": "0x15b3", "driver": "vfio-pci"},
    ],
)
def test_cards_of_other_kinds_are_passed_over(made: Made, facts: dict[str, str]) -> None:
    made.device(ROOT_PORT, NIC, **({"class": "0x020000"} | facts))  # type: ignore[arg-type]
    assert made.found("RDMA device") == []


def test_a_driver_that_is_loaded_and_made_no_device_is_looked_for_in_the_log(made: Made) -> None:
    made.device(ROOT_PORT, NIC, vendor="0x15b3", driver="mlx5_core", **{"class": "0x020000"})
    finding = made.only("RDMA device (")
    assert "made no RDMA device" in finding.why and "dmesg" in finding.remedy


def test_a_container_without_the_device_file_says_how_to_pass_it_on(made: Made) -> None:
    (made.usual().root / "dev/infiniband/uverbs0").unlink()
    finding = made.only("RDMA device file")
    assert finding.state == "missing" and "--device /dev/infiniband" in finding.remedy


def test_a_device_file_of_others_names_the_package_with_its_rules(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.usual()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "rdma-core" in made.only("RDMA device file").remedy


def test_without_ib_uverbs_there_are_no_device_files(made: Made) -> None:
    (made.usual().root / "sys/class/infiniband_verbs/uverbs0/ibdev").unlink()
    assert made.only("RDMA device file").remedy == "sudo modprobe ib_uverbs"


def test_nics_of_one_outcome_share_a_line(made: Made) -> None:
    made.usual()
    made.nic("0000:25:01.0", "0000:26:00.0", name="mlx5_1", state="1: DOWN")
    made.nic("0000:35:01.0", "0000:36:00.0", name="mlx5_2")
    up, down = made.found("RDMA port")
    assert (up.state, up.what) == ("ok", "RDMA port (mlx5_0, mlx5_2)")
    assert (down.state, down.what) == ("missing", "RDMA port (mlx5_1)")
    assert "DOWN" in down.why


def test_devices_in_software_are_left_out(made: Made) -> None:
    made.put("sys/class/infiniband/rxe0/ports/1/state", "4: ACTIVE")
    assert pci.rdma_devices(made.root) == []


@pytest.mark.parametrize(
    ("limit", "capabilities", "state"),
    [
        ("unlimited", 0, "ok"),
        (8 << 20, 0, "wrong"),
        (8 << 20, 1 << 14, "ok"),
        (32 * GIB, 0, "wrong"),
        (64 * GIB, 0, "ok"),
    ],
)
def test_locked_memory_needs_room_for_all_of_it(
    made: Made, limit: object, capabilities: int, state: str
) -> None:
    made.usual()
    made.lock_limit(limit)
    made.put("proc/self/status", f"CapEff:\t{capabilities:016x}\n")
    finding = made.only("locked memory")
    assert finding.state == state
    assert state == "ok" or (f"{int(str(limit)) // 1024} KiB" in finding.why and "memlock" in finding.remedy)


# ---- GPUs


def test_peer_memory_takes_the_place_of_dma_buf(made: Made) -> None:
    made.usual().gpus[0]["exports_dmabuf"] = False
    assert "open kernel modules" in made.only("GPU memory").remedy
    made.put("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580\n")
    assert "modprobe nvidia_peermem" in made.only("GPU memory").remedy
    made.put("sys/module/nvidia_peermem/refcnt", "0")
    finding = made.only("GPU memory")
    assert finding.state == "ok" and "peer memory" in finding.why


@pytest.mark.parametrize(("order", "state"), [(200, "ok"), (100, "slow"), (0, "slow")])
def test_writes_that_only_one_gpu_sees_in_order_are_slow(made: Made, order: int, state: str) -> None:
    made.usual().gpus[0]["nic_write_order"] = order
    finding = made.only("order of a NIC's writes")
    assert finding.state == state
    assert state == "ok" or "pinned host memory" in finding.why


@pytest.mark.parametrize(
    ("numa_node", "state", "words"),
    [(0, "ok", "same processor"), (1, "slow", "another processor"), (-1, "ok", "does not say")],
)
def test_a_gpu_without_a_nic_below_its_switch(made: Made, numa_node: int, state: str, words: str) -> None:
    made.gpu(ROOT_PORT, GPU)
    made.nic("0000:85:01.0", NIC, numa_node=numa_node)
    finding = made.only("NIC near the GPU")
    assert finding.state == state
    assert words in finding.why and "mlx5_0" in finding.why


def test_each_gpu_has_the_nics_below_its_own_switch(made: Made) -> None:
    made.usual()
    made.device("0000:85:01.0", config=configuration())
    made.gpu("0000:85:01.0", "0000:86:00.0", "0000:87:00.0")
    made.nic("0000:85:01.0", "0000:86:00.0", "0000:88:00.0", name="mlx5_1")
    made.nic("0000:85:01.0", "0000:86:00.0", "0000:89:00.0", name="mlx5_2", state="1: DOWN")
    first, second = made.found("NIC near the GPU")
    assert first.what.endswith("(cuda:0)") and first.why.startswith("mlx5_0:")
    assert second.what.endswith("(cuda:1)") and second.why.startswith("mlx5_1:")


# ---- PCIe


@pytest.mark.parametrize(
    ("kind", "state"), [("identity", "ok"), ("DMA", "slow"), ("DMA-FQ", "slow"), ("", "ok")]
)
def test_an_iommu_that_translates_is_slow(made: Made, kind: str, state: str) -> None:
    made.usual()
    for address in (GPU, NIC):
        made.put(f"sys/bus/pci/devices/{address}/iommu_group/type", kind + "\n")
    finding = made.only("IOMMU")
    assert finding.state == state and finding.what == "IOMMU (mlx5_0, cuda:0)"
    assert ("iommu=pt" in finding.remedy) == (state == "slow")


def test_only_bridges_between_a_gpu_and_its_nic_are_asked_for_acs(made: Made) -> None:
    made.usual(REDIRECTS)
    finding = made.only("access control")
    assert finding.state == "slow" and "setpci" in finding.remedy
    assert finding.what.endswith(f"({TO_GPU}, {TO_NIC})")


@pytest.mark.parametrize("acs", [None, 0, VALIDATES])
def test_bridges_that_redirect_nothing_are_ok(made: Made, acs: int | None) -> None:
    assert made.usual(acs).only("access control").state == "ok"


@pytest.mark.parametrize("bit", [2, 3, 4, 5])
def test_every_detour_counts(made: Made, bit: int) -> None:
    assert made.usual(1 << bit).only("access control").state == "slow"


def test_acs_matters_only_below_one_switch(made: Made) -> None:
    made.device(ROOT_PORT, config=configuration(REDIRECTS))
    made.gpu(ROOT_PORT, GPU)
    made.device("0000:25:01.0", config=configuration(REDIRECTS))
    made.nic("0000:25:01.0", NIC)
    assert made.found("access control") == []


def test_what_only_root_can_read_says_so(made: Made) -> None:
    made.usual()
    for address in (TO_GPU, TO_NIC, NIC):
        file = made.root / "sys/bus/pci/devices" / address / "config"
        file.write_bytes(file.read_bytes()[:64])
    for what in ("access control", "relaxed ordering"):
        finding = made.only(what)
        assert (finding.state, finding.remedy) == ("missing", "sudo $(command -v weft) doctor")


def test_relaxed_ordering_that_is_off_is_slow(made: Made) -> None:
    made.usual(config=configuration(relaxed=False))
    finding = made.only("relaxed ordering")
    assert finding.state == "slow" and "BIOS" in finding.remedy


def test_lists_of_capabilities_that_lead_in_circles_end(made: Made) -> None:
    space = bytearray(4096)
    space[0x34], space[0x41] = 0x40, 0x40
    struct.pack_into("<I", space, 0x100, 0x0002 | 0x100 << 20)
    made.device(ROOT_PORT, NIC, config=bytes(space))
    device = pci.pci_device(made.root, NIC)
    assert device is not None
    assert pci.allows_relaxed_ordering(device) is True
    assert pci.redirects_peers(device) is False
