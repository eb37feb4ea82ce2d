# SPDX-License-Identifier: Apache-2.0
"""Device code that uses every call of GIN that Weft's channels would need, compiled with NCCL's own headers."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from nccl_device_headers import LAYOUT_PROBE, device_headers, gin_options, layout_of

from weft import _core

# Back ends of GIN, by NCCL's numbers.
BACKENDS = {"PROXY": 2, "GDAKI": 3, "GPI": 4}
ARCHITECTURES = ("sm_90a", "sm_100a")

# Unprefixed remote actions have another name from 2.30.5 on; both names of the two are tried by version.
SOURCE = """
#if NCCL_VERSION_CODE >= 23005
#define SIGNAL_ADD ncclGin_WeakSignalAdd
#else
#define SIGNAL_ADD ncclGin_SignalAdd
#endif
extern "C" __global__ void every_call(ncclDevComm comm, ncclWindow_t window, unsigned long long offset,
                                      unsigned long long* seen) {
  const int peer = (comm.rank + 1) % comm.nRanks;
  const ncclTeam world = ncclTeamWorld(comm);
  ncclGin gin{comm, static_cast<int>(blockIdx.x)};
  gin.put(world, peer, window, offset, window, offset, 4096, ncclGin_None{}, ncclGin_None{}, ncclCoopThread{});
  gin.put(world, peer, window, offset, window, offset, 64, SIGNAL_ADD{0, 3}, ncclGin_None{}, ncclCoopThread{});
  gin.putValue(world, peer, window, offset, static_cast<unsigned long long>(7), ncclGin_None{}, ncclCoopThread{});
  gin.signal(world, peer, SIGNAL_ADD{1, 1}, ncclCoopThread{});
  gin.flush(ncclCoopThread{});
  *seen = gin.readSignal(0);
}
extern "C" __global__ void loads_and_stores(ncclDevComm comm, ncclWindow_t window) {
  auto* theirs = static_cast<int*>(ncclGetLsaPointer(window, 0, (comm.lsaRank + 1) % comm.lsaSize));
  *theirs = comm.rank;
}
"""


class Sizes(NamedTuple):
    """Bytes that NCCL's structures take in compiled code."""

    dev_comm: int
    window: int


# What the library of each release has, so that a probe that goes wrong is noticed.
KNOWN_SIZES = {
    (2, 28, 9): Sizes(200, 72),
    (2, 29, 2): Sizes(200, 72),
    (2, 29, 3): Sizes(200, 72),
    (2, 29, 7): Sizes(224, 72),
    (2, 30, 3): Sizes(240, 72),
    (2, 30, 4): Sizes(240, 88),
    (2, 30, 7): Sizes(240, 88),
    (2, 31, 2): Sizes(248, 88),
    (2, 32, 3): Sizes(248, 96),
}


def version_of(folder: Path) -> tuple[int, int, int]:
    """Return the release of the headers in ``folder``."""
    words = [line.split() for line in (folder / "nccl.h").read_text().splitlines()]
    values = {line[1]: line[2] for line in words if len(line) > 2 and line[0] == "#define"}
    return (int(values["NCCL_MAJOR"]), int(values["NCCL_MINOR"]), int(values["NCCL_PATCH"]))


def compile_every_call(folder: Path, backend: str, architecture: str) -> Sizes:
    """Compile ``SOURCE`` with the headers in ``folder``; raise weft.Error with the compiler's log where it refuses."""
    source = f'#include "weft_nccl.h"\n{SOURCE}{LAYOUT_PROBE}'
    log, cubin = _core.compile_source(
        source, device_headers(folder), gin_options(BACKENDS[backend]), architecture
    )
    assert "error" not in log, log
    return Sizes(*layout_of(cubin))


def has_backend(folder: Path, backend: str) -> bool:
    """Whether a release has that back end."""
    return (folder / "nccl_device" / "gin" / backend.lower()).exists()
