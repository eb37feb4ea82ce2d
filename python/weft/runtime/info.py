# SPDX-License-Identifier: Apache-2.0
"""``weft info``: what this machine has, which transports it can use and why not the others, and the settings.

Everything comes from the core and from the system's own files, so it works without torch and without a GPU.
``--json`` prints the same as one object, for scripts and bug reports.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import weft
from weft import _core
from weft.errors import Error
from weft.runtime import nvrtc
from weft.runtime.machine import machine, versions
from weft.runtime.pci import first_line
from weft.runtime.tables import Column, Table, add_wide_argument, make_console

_GIB = 2**30
_VALUE_WIDTH = 66  # what 80 columns leave beside the names of facts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft info``."""
    parser.add_argument(
        "--config", action="store_true", help="show every setting, its value and where it is from"
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="show which way each rank of a job reaches each other one, mapped or by its port; "
        "start it as the job: torchrun ... -m weft info --plan",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add_wide_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print what was asked for; return 0."""
    if args.plan:
        return _print_ways(args)
    facts = {"config": configuration()} if args.config else collect()
    if args.json:
        json.dump(facts, sys.stdout, indent=2)
        print()
        return 0
    console = make_console(args.wide)
    for table in [_config_table(facts["config"])] if args.config else _tables(facts):
        if isinstance(table, Table):
            table.print(console)
        else:
            console.print(table + "\n", highlight=False, markup=False)
    return 0


def _print_ways(args: argparse.Namespace) -> int:
    """Meet the ranks that were started with this one; the first prints the ways between all."""
    from weft.runtime.communicator import Communicator
    from weft.runtime.ways import ways, ways_table

    communicator = Communicator()
    of_ranks = ways(communicator)
    windows = str(communicator.core.port_placement)
    if communicator.rank == 0 and args.json:
        json.dump({"plan": of_ranks, "windows": windows}, sys.stdout, indent=2)
        print()
    elif communicator.rank == 0:
        console = make_console(args.wide)
        ways_table(of_ranks).print(console)
        if windows:
            console.print(f"Windows lie in {windows}", highlight=False, markup=False)
        if communicator.size == 1:
            console.print("One rank has no peers: start this as the job, torchrun ... -m weft info --plan")
    return 0


def configuration() -> list[dict[str, str]]:
    """Return every setting: variable, type, default, value, source, help."""
    names = ("variable", "type", "default", "value", "source", "help")
    return [dict(zip(names, row, strict=True)) for row in _core.config_table()]


def collect() -> dict[str, Any]:
    """Return everything that ``weft info`` shows, as plain data."""
    gpus, why_no_gpus = _gpus()
    devices = ["cpu", *(f"cuda:{gpu['ordinal']}" for gpu in gpus)]
    return {
        "machine": {**machine(), "host_id": _core.host_id(), "numa_nodes": _numa_nodes()},
        "versions": {"weft": weft.__version__, **versions()},
        "toolchain": _toolchain(),
        "gpus": gpus,
        "no_gpus_because": why_no_gpus,
        "links": _links(len(gpus)),
        "nics": rdma_nics(),
        "interface": _interface(),
        "libfabric": libfabric(),
        "providers": providers(),
        "transports": {device: _core.transports(device) for device in devices[:2]},
    }


def libfabric() -> str:
    """Return which libfabric is used and whether it is one to stay with, or why there is none."""
    try:
        path, release, is_sound = _core.libfabric()
    except Error as error:
        return error.one_line()
    return f"libfabric {release} ({path})" + (
        "" if is_sound else "; weft doctor says why a newer one is better"
    )


def providers() -> list[dict[str, Any]]:
    """Return each provider's name, its usable NICs, what proves who sent an immediate, or why it has no NIC."""
    found = []
    for name in _core.transfer_provider_names():
        nics = _core.transfer_find_provider(name).probe()
        usable = [nic["name"] for nic in nics if not nic["unusable_because"]]
        why = "" if usable else next((nic["unusable_because"] for nic in nics), "it found no NIC")
        proofs = sorted({nic["imm_proof"] for nic in nics if not nic["unusable_because"]})
        found.append({"name": name, "nics": usable, "unusable_because": why, "imm_proofs": proofs})
    return found


def _gpus() -> tuple[list[dict[str, Any]], str]:
    try:
        return list(_core.gpus()), ""
    except Error as error:
        return [], str(error)


def _links(num_gpus: int) -> list[list[dict[str, bool]]]:
    """Return how each GPU reaches each other one, by [from][to]."""
    return [[dict(_core.gpu_link(src, dst)) for dst in range(num_gpus)] for src in range(num_gpus)]


def _toolchain() -> dict[str, str]:
    found = nvrtc.find()
    return {
        "nvrtc": str(found.nvrtc or "not found: kernels run on the CPU only"),
        "include": ", ".join(str(folder) for folder in found.include_dirs),
        "kernels": str(found.device_dir),
    }


def _numa_nodes() -> int:
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))


def rdma_nics() -> list[dict[str, str]]:
    """Return the RDMA devices that the kernel knows: name, state, rate, NUMA node."""
    nics = []
    for device in sorted(Path("/sys/class/infiniband").glob("*")):
        port = device / "ports/1"
        facts = {"state": port / "state", "rate": port / "rate", "numa_node": device / "device/numa_node"}
        nics.append({"name": device.name, **{name: first_line(path) or "?" for name, path in facts.items()}})
    return nics


def _interface() -> dict[str, str]:
    """Return where ranks of several nodes would hear of each other: name, address and why, or why nowhere."""
    try:
        return dict(_core.rendezvous_interface())
    except Error as error:
        return {"name": "", "address": "", "why": error.one_line()}


def _tables(facts: dict[str, Any]) -> list[Table | str]:
    """Return what to print, in order; a line where a table would be empty."""
    machine_facts = {name: value for name, value in facts["machine"].items() if name != "gpus"}
    tables: list[Table | str] = [
        _pairs("Machine", machine_facts | facts["versions"]),
        _pairs("Kernels", facts["toolchain"]),
    ]
    tables.append(_gpu_table(facts["gpus"]) if facts["gpus"] else f"GPUs: none ({facts['no_gpus_because']})")
    if len(facts["gpus"]) > 1:
        tables.append(_link_table(facts))
    no_nics = "RDMA devices: none (the kernel lists nothing in /sys/class/infiniband)"
    tables.append(_nic_table(facts["nics"]) if facts["nics"] else no_nics)
    at = facts["interface"]
    where = f"{at['name']}@{at['address']}" if at["name"] else "no interface"
    tables.append(f"Ranks of several nodes hear of each other on {where} (WEFT_INTERFACE): {at['why']}")
    tables += [_transport_table(device, rows) for device, rows in facts["transports"].items()]
    tables.append(_provider_table(facts["providers"]))
    tables.append(f"Providers fabric:... use {facts['libfabric']}")
    if any(not provider["nics"] for provider in facts["providers"]):
        tables.append("`weft doctor` says what is missing for what, and which command helps.")
    return tables


def _table(title: str, key: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    heads = [Column(head, is_number=head in numbers) for head in columns]
    return Table(title, [Column(key, is_key=True, never_folds=True), *heads])


def _pairs(title: str, facts: dict[str, Any]) -> Table:
    table = _table(title, "what", "value")
    for name, value in facts.items():
        text = ", ".join(value) if isinstance(value, list) else str(value)
        table.add(name.replace("_gib", " GiB").replace("_", " "), _folded(text))
    return table


def _folded(text: str) -> str:
    """Return a long text, such as a path, in lines that end after a slash or a space."""
    done, line = [], ""
    for part in re.split(r"(?<=[/ ])", text):
        if line and len(line) + len(part) > _VALUE_WIDTH:
            done.append(line.rstrip(" "))
            line = ""
        line += part
    return "\n".join([*done, line])


def _gpu_table(gpus: list[dict[str, Any]]) -> Table:
    numbers = ("memory GiB", "SMs", "compute", "NUMA", "NVLinks")
    columns = ("device", "name", "memory GiB", "SMs", "compute", "PCI", "NUMA", "NVLinks", "shares memory by")
    table = _table("GPUs", *columns, numbers=numbers)
    for gpu in gpus:
        ways = [way for way in ("vmm", "fabric") if gpu[f"can_share_{way}"]] + ["ipc"]
        table.add(
            f"cuda:{gpu['ordinal']}",
            gpu["name"],
            f"{gpu['bytes'] / _GIB:.0f}",
            str(gpu["sms"]),
            gpu["compute_capability"],
            gpu["pci_address"],
            _or_unknown(gpu["numa_node"]),
            _or_unknown(gpu["nvlinks"]),
            ", ".join(ways),
        )
    return table


def _or_unknown(number: int) -> str:
    return "?" if number < 0 else str(number)


def _link_table(facts: dict[str, Any]) -> Table:
    names = [f"cuda:{gpu['ordinal']}" for gpu in facts["gpus"]]
    table = _table("Links (row reaches column)", "", *names)
    for row, (name, links) in enumerate(zip(names, facts["links"], strict=True)):
        nvlinks = facts["gpus"][row]["nvlinks"]
        table.add(name, *("" if row == column else _link(link, nvlinks) for column, link in enumerate(links)))
    return table


def _link(link: dict[str, bool], nvlinks: int) -> str:
    if not link["can_access"]:
        return "no"
    name = f"NVLink x{nvlinks}" if link["is_nvlink"] else "PCIe"
    return name if link["has_atomics"] else f"{name}, no atomics"


def _nic_table(nics: list[dict[str, str]]) -> Table:
    table = _table("RDMA devices", "name", "state", "rate", "NUMA")
    for nic in nics:
        table.add(nic["name"], nic["state"], nic["rate"], nic["numa_node"])
    return table


def _transport_table(device: str, transports: list[dict[str, Any]]) -> Table:
    columns = ("name", "usable", "reach", "carried by", "atomics", "ordering")
    estimates = ("latency us", "bandwidth GB/s")
    title = f"Transports of {device} (latency and bandwidth are estimates)"
    table = _table(title, *columns, *estimates, numbers=estimates)
    for transport in transports:
        why_not = transport["unusable_because"]
        usable = why_not == ""
        table.add(
            transport["name"],
            "yes" if usable else f"no: {why_not}",
            transport["reach"],
            ": ".join(filter(None, (transport["carried_by"], transport["details"]))),
            "yes" if transport["has_atomics"] else "no",
            transport["ordering"],
            f"{transport['latency_us']:g}" if usable else "",
            f"{transport['bandwidth_gb_s']:g}" if usable else "",
        )
    return table


def _provider_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("Providers of the transfer engine", "name", "usable", "NICs", "immediates proven by")
    for row in rows:
        usable = "yes" if row["nics"] else f"no: {row['unusable_because']}"
        table.add(row["name"], usable, ", ".join(row["nics"]), ", ".join(row["imm_proofs"]))
    return table


def _config_table(rows: list[dict[str, str]]) -> Table:
    columns = ("variable", "value", "what it does")
    table = _table("Settings (environment variables; --json also has types and defaults)", *columns)
    for row in rows:
        is_default = row["source"] == "default"
        value = row["value"] if is_default else f"{row['value']} ({row['source']}; default {row['default']})"
        table.add(row["variable"], value, row["help"], style=None if is_default else "bold")
    return table
