# SPDX-License-Identifier: Apache-2.0
"""NCCL's device headers as NVRTC takes them: the texts of a release, changed as a compiler at run time needs them.

    headers = device_headers(Path(".../nvidia/nccl/include"))     # by name; with "weft_nccl.h", which comes first
    options = gin_options(2)                                      # for one back end of GIN

No kernel of Weft's is compiled so: these are for checks of what a channel over GIN would take
(docs/decisions/0044-libraries-bring-memory.md). What is changed, and why, is a table in transports/nccl/README.md. The
changes go by what a line is, not by a release: a release that NCCL has not made yet works if it compiles and the sizes
that weft_nccl.h asserts hold.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from weft.errors import Error

# Before all headers of NCCL: what the C and CUDA headers would have brought that they include.
_PRELUDE = """#pragma once
#include <cuda/atomic>
#include <cuda/std/climits>
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda/std/cstring>
#include <cuda/std/limits>
#include <cuda/std/type_traits>
#include <cuda/std/utility>
using cuda::std::int8_t; using cuda::std::int16_t; using cuda::std::int32_t; using cuda::std::int64_t;
using cuda::std::uint8_t; using cuda::std::uint16_t; using cuda::std::uint32_t; using cuda::std::uint64_t;
using cuda::std::uintptr_t; using cuda::std::intptr_t; using cuda::std::size_t; using cuda::std::ptrdiff_t;
namespace std { using namespace cuda::std; }
#ifndef assert
#define assert(condition) ((void)0)
#endif
#define EIO 5
#define EAGAIN 11
#define EBUSY 16
#define EINVAL 22
#define ETIMEDOUT 110
typedef uint8_t __u8; typedef uint16_t __u16; typedef uint32_t __u32; typedef uint64_t __u64;
typedef uint16_t __be16; typedef uint32_t __be32; typedef uint64_t __be64;
#ifndef CUDA_VERSION
#define CUDA_VERSION 12020
#endif
enum CUmemLocationType {
  CU_MEM_LOCATION_TYPE_INVALID = 0, CU_MEM_LOCATION_TYPE_DEVICE = 1, CU_MEM_LOCATION_TYPE_HOST = 2,
  CU_MEM_LOCATION_TYPE_HOST_NUMA = 3, CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT = 4
};
#define WEFT_TYPEOF(x) cuda::std::remove_reference_t<decltype(x)>
"""

# After them: sizes that NICs and host threads read. Attributes in the wrong place would change them in silence.
_ASSERTIONS = """
#if NCCL_GIN_GDAKI_ENABLE
static_assert(sizeof(doca_gpunetio_ib_mlx5_wqe_ctrl_seg) == 16, "the control segment of a work queue entry");
static_assert(sizeof(doca_gpu_dev_verbs_wqe) == 64, "a work queue entry");
#endif
#if NCCL_GIN_PROXY_ENABLE
static_assert(sizeof(ncclGinProxyGfd_t) == 8 * ncclGinProxyGfdQwords, "a descriptor of the proxy");
#endif
template <unsigned long long... bytes>
__global__ void weft_layout() {}
"""

# Only these: the rest are collectives, with many types of numbers.
_INCLUDED = (
    "nccl_device/coop.h",
    "nccl_device/impl/core__funcs.h",
    "nccl_device/impl/comm__funcs.h",
    "nccl_device/impl/ptr__funcs.h",
    "nccl_device/impl/gin__funcs.h",
)
_BACKENDS = {"PROXY": 2, "GDAKI": 3, "GPI": 4, "EFA_GDA": 5}  # NCCL's ginType

# A source with this at its end is compiled with the sizes of ncclDevComm and of a window in a name: layout_of().
LAYOUT_PROBE = "template __global__ void weft_layout<sizeof(ncclDevComm), sizeof(ncclWindow_vidmem)>();\n"


def device_headers(folder: Path) -> list[tuple[str, str]]:
    """Return (name, text) of each header in ``folder``, and of weft_nccl.h, which includes those of GIN.

    Raises: weft.Error, code unsupported, where there are none.
    """
    if not (folder / "nccl.h").is_file() or not (folder / "nccl_device").is_dir():
        raise Error(f"{folder} has no device headers of NCCL", "unsupported")
    inner = sorted(path for path in (folder / "nccl_device").rglob("*") if path.suffix in (".h", ".cuh"))
    paths = [folder / "nccl.h", *inner]
    names = [path.relative_to(folder).as_posix() for path in paths]
    headers = [(name, for_nvrtc(name, path.read_text())) for name, path in zip(names, paths, strict=True)]
    included = "".join(f'#include "{name}"\n' for name in _INCLUDED)
    return [*headers, ("weft_nccl.h", _PRELUDE + included + _ASSERTIONS)]


def gin_options(backend: int) -> list[str]:
    """Return what the compiler is told to make code for this back end alone."""
    enabled = [f"-DNCCL_GIN_{name}_ENABLE={int(number == backend)}" for name, number in _BACKENDS.items()]
    return ["-default-device", "--std=c++20", *enabled]


def layout_of(cubin: bytes) -> tuple[int, int]:
    """Return the bytes of ncclDevComm and of a window, by a cubin that was compiled with LAYOUT_PROBE.

    The mangled name of the instance has the numbers: _Z11weft_layoutIJLy240ELy88EEEvv.
    """
    found = re.search(rb"_Z11weft_layoutIJL[my](\d+)EL[my](\d+)EEEvv", cubin)
    assert found, "the compiled probe names no sizes of NCCL's structures"
    return int(found[1]), int(found[2])


def for_nvrtc(name: str, text: str) -> str:
    """Return one header's text with the changes; ``name`` is its path in the folder."""
    if name == "nccl.h":
        return _short_nccl_h(text)
    text = _attributes_in_front(_plain_includes(name, text))
    # Functions of the host have no place here; their prototypes would be errors.
    if name != "nccl_device/utility.h":
        text = re.sub(r"(NCCL_EXTERN_C|NCCL_API)?\s*\b__host__\b(?!\s*__device__)[^;{}]*;", "", text)
    text = re.sub(r"(#[ \t]*define[ \t]+\w*TYPEOF\(x\))[^\n]*", r"\1 WEFT_TYPEOF(x)", text)
    text = re.sub(r"\b(__typeof__|typeof)\s*\(", "WEFT_TYPEOF(", text)
    text = re.sub(r"\b__builtin_memcpy\b", "memcpy", text)
    # In a union whose other branches are larger; no element is no array here.
    return re.sub(r"\[(sizeof\(T\) ?/ ?\d+)\]", r"[\1 ? \1 : 1]", text)


def _short_nccl_h(text: str) -> str:
    """Return the part of nccl.h that device code uses; all of it takes the compiler seconds."""
    kept = (
        r"#define\s+NCCL_(?:MAJOR|MINOR|PATCH|SUFFIX|VERSION_CODE)\b[^\n]*",
        r"#define\s+NCCL_VERSION\([^\n]*",
        r"#define\s+NCCL_WIN_[^\n]*",
        r"typedef\s+enum\s*\{[^}]*ncclSuccess[^}]*\}\s*ncclResult_t;",
        r"typedef\s+struct\s+\w+\s*\*\s*nccl(?:Comm|Window)_t;",
    )
    return "\n".join(
        ["#pragma once", *(found for pattern in kept for found in re.findall(pattern, text)), ""]
    )


def _plain_includes(name: str, text: str) -> str:
    """Drop includes of the system, for which the prelude stands; spell NCCL's own from the folder's root.

    Headers in memory have one name each.
    """

    def plain(found: re.Match[str]) -> str:
        what = found[2]
        if found[1] == "<":
            return '#include "nccl.h"' if what == "nccl.h" else found[0] if what.startswith("cuda/") else ""
        if not what.startswith("nccl_device/") and what not in ("nccl.h", "nccl_device.h"):
            what = posixpath.normpath(posixpath.join(posixpath.dirname(name), what))
        return f'#include "{what}"'

    return re.sub(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"].*$', plain, text, flags=re.MULTILINE)


_ATTRIBUTES_BEHIND = re.compile(r"\}((?:\s*__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)\s*)+)([^;{}]*;)")


def _attributes_in_front(text: str) -> str:
    """Move the attributes of ``struct S {...} __attribute__((packed)) name;`` behind ``struct``.

    NVRTC drops attributes at the end without a word. Behind ``struct`` it heeds them.
    """
    while found := _ATTRIBUTES_BEHIND.search(text):
        depth, opening = 0, found.start()
        while True:
            depth += {"}": 1, "{": -1}.get(text[opening], 0)
            if depth == 0:
                break
            opening -= 1
            if opening < 0:
                return text
        keywords = list(re.finditer(r"struct|union", text[:opening]))
        if not keywords:
            return text
        at = keywords[-1].end()
        attributes = " ".join(found[1].split())
        text = f"{text[:at]} {attributes} {text[at : found.start()]}}} {found[2]}{text[found.end() :]}"
    return text
