# SPDX-License-Identifier: Apache-2.0
"""NCCL's GIN of type PROXY over libnccl-rma-weft.so: which of NCCL's conditions hold, and whether bytes arrive.

    python tests/gpu/nccl_rma_gin.py prepare --nccl SITE/nvidia/nccl --plugin build/.../libnccl-rma-weft.so
    python tests/gpu/nccl_rma_gin.py run [--ranks 2] [--ranks-per-node 1] [--provider fabric:tcp]

``prepare`` needs no GPU. It compiles nccl_rma_gin.cu (nvcc) and puts what ``run`` needs into build/nccl-rma: the
program, the plug-in, and NCCL's library with the code of one GPU architecture alone, compressed, so that it can be
copied to a machine without network (some 25 MB). ``run`` ends within 60 seconds. It prints the conditions in NCCL's
order, each with its evidence, then what the program checked. Ranks of different nodes have different NCCL_HOSTID: for
NCCL they are on different machines. Status: 0 all is well, 1 something was wrong, 2 NCCL refuses.
"""

from __future__ import annotations

import argparse
import lzma
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "nccl-rma"
OLDEST = 23007  # earlier ones have no RMA tables
BUDGET_S = 56.0
FATBIN = 0xBA55ED50


def keep_one_architecture(library: Path, architecture: int) -> bytes:
    """Return the library with the GPU code of other architectures, and all that only linkers need, as zeros."""
    data = bytearray(library.read_bytes())
    sections = subprocess.run(
        ["readelf", "-S", "-W", str(library)], capture_output=True, text=True, check=True
    ).stdout
    for name, _, offset_, size_ in re.findall(
        r"(\.nv_fatbin|__nv_relfatbin)\s+(\w+)\s+\w+ (\w+) (\w+)", sections
    ):
        at, end = int(offset_, 16), int(offset_, 16) + int(size_, 16)
        while at + 16 <= end:
            magic, _, head, size = struct.unpack_from("<IHHQ", data, at)
            if magic != FATBIN:
                at += 8
                continue
            entry, end_of_fatbin = at + head, at + head + size
            while entry < end_of_fatbin:
                kind, _, entry_head, bytes_ = struct.unpack_from("<HHIQ", data, entry)
                (code_for,) = struct.unpack_from("<I", data, entry + 28)
                if name == "__nv_relfatbin" or code_for != architecture or kind != 2:
                    data[entry + entry_head : entry + entry_head + bytes_] = bytes(bytes_)
                entry += entry_head + bytes_
            at = end_of_fatbin
    return bytes(data)


def prepare(arguments: argparse.Namespace) -> int:
    """Fill build/nccl-rma."""
    nccl = Path(arguments.nccl)
    FOLDER.mkdir(parents=True, exist_ok=True)
    shutil.copy(arguments.plugin, FOLDER / "libnccl-rma-weft.so")
    library = nccl / "lib" / "libnccl.so.2"
    command = [
        arguments.nvcc,
        "-std=c++17",
        "-O2",
        f"-arch=sm_{arguments.architecture}",
        "--cudart",
        "static",
    ]
    command += ["-I", str(nccl / "include"), *arguments.flags.split()]
    command += [str(Path(__file__).with_suffix(".cu")), "-o", str(FOLDER / "nccl_rma_gin")]
    command += ["-Xlinker", str(library), "-Xlinker", "-rpath=$ORIGIN"]
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)
    packed = lzma.compress(keep_one_architecture(library, arguments.architecture), preset=2)
    (FOLDER / "libnccl.so.2.xz").write_bytes(packed)
    (FOLDER / "libnccl.so.2").unlink(missing_ok=True)
    print(f"{FOLDER}: {sum(file.stat().st_size for file in FOLDER.iterdir()) >> 20} MiB")
    return 0


def environment(arguments: argparse.Namespace, node: int) -> dict[str, str]:
    """Return what the ranks of a node run with."""
    wanted = {
        "NCCL_RMA_PLUGIN": str(FOLDER / "libnccl-rma-weft.so"),
        "NCCL_GIN_PLUGIN": "none",
        "NCCL_NET_PLUGIN": "none",
        "NCCL_IB_DISABLE": "1",
        "NCCL_GIN_TYPE": "2",
        "NCCL_HOSTID": f"node{node}",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
        "WEFT_INTERFACE": "lo",
        "WEFT_PROXY_PROVIDER": arguments.provider,
        "WEFT_TIMEOUT_S": "30",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "WEFT_"))}
    return {**kept, **wanted}


def start(arguments: argparse.Namespace, until: float) -> tuple[str, list[int]]:
    """Run all ranks, and return everything that was said and how the processes ended."""
    meeting = FOLDER / f"id.{os.getpid()}"
    meeting.unlink(missing_ok=True)
    per_process = arguments.ranks if arguments.threads else 1
    processes = []
    for first in range(0, arguments.ranks, per_process):
        log = (FOLDER / f"rank{first}.log").open("w+")
        numbers = [arguments.ranks, first, per_process, meeting, arguments.operations]
        process = subprocess.Popen(
            [str(FOLDER / "nccl_rma_gin"), *map(str, numbers)],
            env=environment(arguments, first // arguments.ranks_per_node),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        processes.append((process, log))
    said, ends = "", []
    for process, log in processes:
        try:
            process.wait(max(0.5, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        ends.append(process.returncode)
        log.seek(0)
        said += log.read()
    meeting.unlink(missing_ok=True)
    return said, ends


def conditions(said: str) -> list[tuple[str, bool | None, str]]:
    """Return NCCL's conditions in its order: what, whether it holds (None: not known), the line that says so."""

    def line(pattern: str) -> str:
        found = re.search(f".*{pattern}.*", said)
        return found.group(0).strip() if found else ""

    version = re.search(r"NCCL (\d+) at run time", said)
    refusal = "Symmetric memory is not supported"
    asked = "device API" in said
    rows = [
        ("a CUDA driver", version is not None, line("CUDA driver version|at run time")),
        ("NCCL 2.30.7 or newer", bool(version) and int(version[1]) >= OLDEST, line("at run time")),
        ("GPUDirect RDMA with CUDA VMM, attribute 110", "(110): holds" in said, line(r"\(110\)")),
        (
            "NCCL opens the plug-in",
            bool(line("RMA/Plugin: Loaded rma plugin Weft")),
            line("RMA/Plugin: .*(Load|Fail)"),
        ),
        ("the plug-in has a network", bool(line("RMA/Plugin: Assigned plugin Weft")), line("RMA/Weft: ")),
        (
            "GIN of type PROXY over it",
            bool(line("GIN/Plugin: Assigned plugin Weft type 2")),
            line("GIN/Plugin: .*(Assigned|Failed)"),
        ),
        (
            "symmetric memory (P2P, VMM, GIN on all ranks)",
            asked and refusal not in said,
            line(refusal) or line("device API"),
        ),
        ("the communicator says PROXY", "GIN type 2" in said, line("device API")),
        ("a window", "a window: ok" in said, line("a window: ")),
        ("a device communicator", "put of 1 B" in said, line("ncclDevCommCreate")),
    ]
    first = next((i for i, row in enumerate(rows) if not row[1]), len(rows))
    return [
        (what, holds if i <= first else (holds or None), why) for i, (what, holds, why) in enumerate(rows)
    ]


def run(arguments: argparse.Namespace) -> int:
    """Run the program and explain what came of it."""
    until = time.monotonic() + BUDGET_S
    library = FOLDER / "libnccl.so.2"
    if not library.exists():
        library.write_bytes(lzma.decompress((FOLDER / "libnccl.so.2.xz").read_bytes()))
    said, ends = start(arguments, until)
    for what, holds, why in conditions(said):
        print(f"{ {True: 'holds  ', False: 'FAILS  ', None: 'unknown'}[holds] }  {what}    [{why[:220]}]")
    shown = re.findall(r"^rank .: .*(?:ok|FAILED|refused.*|us \(.*|done|hangs)$", said, re.MULTILINE)
    print("\n".join(shown))
    if any(ends):
        warnings = [text for text in said.splitlines() if "WARN" in text or "RMA/Weft" in text]
        print("\n".join(text[:300] for text in warnings[:30] + said.splitlines()[-20:]))
    print(f"ends: {ends}; all that was said: {FOLDER}/rank*.log")
    return max((1 if end not in (0, 2) else end for end in ends), key=lambda end: (end == 1, end))


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("prepare", help="fill build/nccl-rma; no GPU needed")
    make.add_argument("--nccl", required=True, help="folder with NCCL's include and lib, 2.30.7 or newer")
    make.add_argument("--plugin", required=True, help="the libnccl-rma-weft.so that was built")
    make.add_argument("--nvcc", default="nvcc")
    make.add_argument("--flags", default="", help="more flags for nvcc")
    make.add_argument("--architecture", type=int, default=90)
    make.set_defaults(act=prepare)
    go = commands.add_parser("run", help="run it, 60 s at most")
    go.add_argument("--ranks", type=int, default=2)
    go.add_argument("--ranks-per-node", type=int, default=1)
    go.add_argument("--provider", default="fabric:tcp", help="WEFT_PROXY_PROVIDER; loopback needs --threads")
    go.add_argument("--threads", action="store_true", help="ranks are threads of one process")
    go.add_argument("--operations", type=int, default=20000, help="puts with signals of each rank")
    go.set_defaults(act=run)
    arguments = parser.parse_args()
    return int(arguments.act(arguments))


if __name__ == "__main__":
    sys.exit(main())
