# SPDX-License-Identifier: Apache-2.0
"""Kernels with ports through NCCL's GIN, compiled with the device headers of one release."""

from __future__ import annotations

from pathlib import Path

from kernel_cases import Case

from weft import _core

# Back ends of GIN, by NCCL's numbers.
BACKENDS = {"PROXY": 2, "GDAKI": 3, "GPI": 4}
ARCHITECTURES = ("sm_90a", "sm_100a")
LEAST = (2, 30, 3)  # kLeastVersionOfPorts

# What ncclDevComm takes in the library of each release: asserted where kernels are compiled.
DEV_COMM_BYTES = {
    (2, 30, 3): 240,
    (2, 30, 4): 240,
    (2, 30, 7): 240,
    (2, 31, 2): 248,
    (2, 32, 3): 248,
}
MESHES = ("NcclMesh", "HybridMesh<weft::MappedMesh, weft::NcclMesh>")


def version_of(folder: Path) -> tuple[int, int, int]:
    """Return the release of the headers in ``folder``."""
    words = [line.split() for line in (folder / "nccl.h").read_text().splitlines()]
    values = {line[1]: line[2] for line in words if len(line) > 2 and line[0] == "#define"}
    return (int(values["NCCL_MAJOR"]), int(values["NCCL_MINOR"]), int(values["NCCL_PATCH"]))


def sources_of(folder: Path, backend: str, dev_comm_bytes: int | None = None) -> _core.DeviceSources:
    """Return the headers in ``folder`` as the compiler gets them."""
    if dev_comm_bytes is None:
        dev_comm_bytes = DEV_COMM_BYTES.get(version_of(folder), 0)
    return _core.nccl_device_sources(str(folder), BACKENDS[backend], dev_comm_bytes)


def compile_channel_loop(sources: _core.DeviceSources, mesh_type: str, architecture: str) -> _core.Compiled:
    """Compile the kernel that makes every call of a channel; raise weft.Error with the compiler's log."""
    for index, row in enumerate(_core.kernel_table()):
        if row.name == "channel_loop_run" and row.mesh_type == mesh_type:
            return _core.compile_kernel(Case(index, "").key(sources=sources), architecture)
    raise AssertionError(f"no channel_loop_run for {mesh_type}")


def has_backend(folder: Path, backend: str) -> bool:
    """Whether a release has that back end."""
    return (folder / "nccl_device" / "gin" / backend.lower()).exists()
