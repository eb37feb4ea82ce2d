# SPDX-License-Identifier: Apache-2.0
"""``weft doctor``: lists what this machine lacks, which feature needs it, and the command that installs it.

Each line says what works (``ok``), what does not and what that costs (``missing``), what works below the machine's
speed (``slow``), or what is wrong and has to be changed (``wrong``). The command's status is 1 if anything is wrong;
what is missing is a choice.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from weft import _core
from weft.errors import Error
from weft.runtime import nic_checks, nvrtc
from weft.runtime.findings import Finding
from weft.runtime.info import providers
from weft.runtime.listeners import listeners
from weft.runtime.logs import printable
from weft.runtime.tables import WIDTH


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``weft doctor``."""
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of lines")


def run(args: argparse.Namespace) -> int:
    """Print every finding; return 1 if one is wrong, else 0."""
    findings = examine()
    if args.json:
        json.dump([asdict(finding) for finding in findings], sys.stdout, indent=2)
        print()
    else:
        for finding in findings:
            print("\n".join(map(printable, lines(finding))))
    return 1 if any(finding.state == "wrong" for finding in findings) else 0


def lines(finding: Finding) -> list[str]:
    """Return what is printed of a finding: a line for people who scan, the rest indented below it."""
    lines = _wrapped(f"{finding.state:8} {finding.what}: {finding.serves}", "")
    lines += _wrapped(finding.why, _INDENT) if finding.why else []
    # A command stays on one line, to be copied.
    return [*lines, f"{_INDENT}-> {finding.remedy}"] if finding.remedy else lines


_INDENT = " " * 9


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=_INDENT, break_long_words=False
    )


def examine() -> list[Finding]:
    """Look at everything that Weft uses where it finds it."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _torch,
        _gpus,
        _host_compiler,
        _cache,
        _libfabric,
        _providers,
        _nics,
        _ports,
        _plots,
        _drop_in,
    ]
    return merged([finding for check in checks for finding in check()])


def merged(findings: list[Finding]) -> list[Finding]:
    """Return the findings, those of one remedy in one where the first of them stood: one fix is said once."""
    same: dict[tuple[str, str, str], list[Finding]] = {}
    for at, finding in enumerate(findings):
        same.setdefault((finding.state, finding.why, finding.remedy or str(at)), []).append(finding)
    return [_one_of(group) for group in same.values()]


def _one_of(group: list[Finding]) -> Finding:
    if len(group) == 1:
        return group[0]
    what, serves = (_joined([getattr(finding, name) for finding in group]) for name in ("what", "serves"))
    return dataclasses.replace(group[0], what=what, serves=serves)


def _joined(texts: list[str]) -> str:
    """Return texts as a list; words that all of them begin with are said once."""
    words = [text.split() for text in texts]
    same = [
        each[0] for each in itertools.takewhile(lambda each: len(set(each)) == 1, zip(*words, strict=False))
    ]
    return f"{' '.join(same)} {'; '.join(' '.join(each[len(same) :]) for each in words)}".strip()


def package_command(package: str) -> str:
    """Return the line that installs a package of the system."""
    sudo = "" if os.geteuid() == 0 else "sudo "
    known = shutil.which("apt-get") is not None
    return f"{sudo}apt-get install -y {package}" if known else f"install {package} (its name on Debian)"


def _torch() -> Iterator[Finding]:
    serves = "weft.Buffer, weft.Communicator, the backend of torch.distributed"
    if importlib.util.find_spec("torch"):
        yield Finding("ok", f"torch {metadata.version('torch')}", serves)
    else:
        yield Finding("missing", "torch", serves, remedy="pip install torch numpy")


def _gpus() -> Iterator[Finding]:
    serves = "kernels on NVIDIA GPUs; without, the same kernels run on the CPU"
    try:
        count = len(_core.gpus())
        yield Finding("ok", f"{count} NVIDIA GPUs", serves)
    except Error as error:
        yield Finding(
            "missing", "NVIDIA GPUs", serves, str(error), "install NVIDIA's driver where there is a GPU"
        )
        return
    if _core.config().nvrtc or nvrtc.find().nvrtc:
        yield Finding("ok", "NVRTC", "compiles kernels for GPUs")
    elif importlib.util.find_spec("torch") is None:
        yield Finding("missing", "NVRTC", "compiles kernels for GPUs", "torch, which brings it, is missing")
    else:
        remedy = "pip install torch (its CUDA build brings NVRTC), or name a file with WEFT_NVRTC"
        yield Finding(
            "missing", "NVRTC", "compiles kernels for GPUs", "no Python package, no toolkit", remedy
        )


def _host_compiler() -> Iterator[Finding]:
    serves = "collective programs compiled for the CPU; without, they are interpreted"
    if found := shutil.which("c++"):
        yield Finding("ok", f"C++ compiler {found}", serves)
    else:
        yield Finding("missing", "C++ compiler", serves, "no c++ on the path", package_command("g++"))


def _cache() -> Iterator[Finding]:
    folder = Path(os.path.expanduser(_core.config().cache_dir))
    serves = "compiled kernels are kept for the next process"
    there = next(path for path in (folder, *folder.parents) if path.exists())
    refused = _core.why_not_private(str(folder))
    if not os.access(there, os.W_OK | os.X_OK):
        why = f"{there} cannot be written: every process compiles its kernels anew"
        yield Finding(
            "wrong", f"cache {folder}", serves, why, "set WEFT_CACHE_DIR to a folder that can be written"
        )
    elif refused:
        yield Finding(
            "wrong", f"cache {folder}", serves, f"{refused}: every process compiles its kernels anew"
        )
    else:
        yield Finding("ok", f"cache {folder}", serves)


def _ports() -> Iterator[Finding]:
    """Say of each open port of this user's jobs who can reach it; as a warning, if it is open to a network without a
    secret."""
    for one in listeners():
        what, serves = f"port {one.where()}", f"process {one.pid} ({one.command})"
        if one.has_secret or one.is_local:
            asked = "callers must know the job's secret" if one.has_secret else "no WEFT_JOB_SECRET is set"
            yield Finding("ok", what, serves, asked)
            continue
        why = "its process has no WEFT_JOB_SECRET: unless the program gives one itself, whoever reaches it is let in"
        yield Finding(
            "missing", what, serves, why, "export WEFT_JOB_SECRET=auto, or a secret (docs/security.md)"
        )


def _libfabric() -> Iterator[Finding]:
    serves = "ranks over fabric:tcp and fabric:shm that outlive a peer that dies"
    try:
        path, release, is_sound = _core.libfabric()
    except Error:
        return  # the providers say so
    if is_sound:
        yield Finding("ok", f"libfabric {release} ({path})", serves)
        return
    why = (
        f"this is release {release} ({path}): releases before 2.0 now and then end a process while a peer of it "
        "dies or is stopped"
    )
    remedy = "pip install mpich, which brings libfabric 2; or name another one with WEFT_LIBFABRIC"
    yield Finding("missing", "libfabric 2.0 or newer", serves, why, remedy)


# The system packages that a provider needs, by the start of the provider's name.
LIBRARIES = {"fabric": "libfabric1", "verbs": "libibverbs1 ibverbs-providers"}


def _providers() -> Iterator[Finding]:
    for provider in providers():
        what, serves = (
            f"provider {provider['name']}",
            f"transfers over {NETWORKS.get(provider['name'], provider['name'])}",
        )
        if provider["nics"]:
            yield Finding("ok", f"{what} ({', '.join(provider['nics'])})", serves)
            continue
        library = LIBRARIES.get(provider["name"].partition(":")[0], "")
        is_library_missing = "cannot open shared object" in provider["unusable_because"]
        remedy = package_command(library) if library and is_library_missing else ""
        yield Finding("missing", what, serves, provider["unusable_because"], remedy)


NETWORKS = {
    "fabric:efa": "AWS's EFA",
    "fabric:cxi": "HPE Slingshot",
    "fabric:verbs": "InfiniBand and RoCE, through libfabric",
    "fabric:tcp": "TCP",
    "fabric:shm": "shared memory of one host",
    "verbs": "InfiniBand and RoCE",
    "cuda": "NVLink or PCIe, between GPUs of one host",
    "loopback": "the memory of one process, for tests",
}


def _nics() -> Iterator[Finding]:
    """Look at what stands between NICs and GPUs (nic_checks.py)."""
    try:
        gpus = list(_core.gpus())
    except Error:
        gpus = []
    yield from nic_checks.examine(Path("/"), gpus)


def _plots() -> Iterator[Finding]:
    serves = "pictures of weft demo and weft bench --plot"
    if importlib.util.find_spec("matplotlib"):
        yield Finding("ok", "matplotlib", serves)
    else:
        yield Finding("missing", "matplotlib", serves, remedy="pip install matplotlib")


def _drop_in() -> Iterator[Finding]:
    installed = {name for name in ("weft-deep-ep", "deep-ep") if _is_installed(name)}
    if len(installed) == 2:
        why = "weft-deep-ep and deep_ep both own the folder deep_ep: what imports find is what was installed last"
        remedy = "pip uninstall weft-deep-ep deep_ep, then install the one that import deep_ep is to find"
        yield Finding("wrong", "deep_ep", "programs written for DeepEP", why, remedy)


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
