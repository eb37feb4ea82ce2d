# SPDX-License-Identifier: Apache-2.0
"""Declarations of libraries that are opened at run time agree with the headers of whatever release is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import abi_headers  # noqa: E402

NAMES = sorted(abi_headers.LIBRARIES)
MISSING = {
    "fabric": "libfabric's headers are not installed (package libfabric-dev)",
    "verbs": "libibverbs' headers are not installed (package libibverbs-dev)",
    "mlx5": "libmlx5's headers are not installed (package libibverbs-dev)",
    "cuda": "cuda.h is not installed (pip install nvidia-cuda-runtime)",
}
# rdma-core 56 appended a field, and the symbol that is called leaves it alone.
MAY_BE_LONGER = {"ibv_port_attr"}


def text_of(name: str) -> str:
    """Return a committed header, each declaration in a line."""
    return re.sub(r",\n +", ", ", (ROOT / abi_headers.LIBRARIES[name].written).read_text())


def fields_of(lines: Iterator[str]) -> list[str]:
    """Return the paths of the fields up to the end of a struct, and at last what it is called there."""
    found: list[str] = []
    for line in lines:
        line = line.strip()
        if line.startswith("}"):
            return [*found, line[1:-1].strip()]
        if line.endswith("{"):
            *inner, name = fields_of(lines)
            name = name.split("[")[0]
            found += [f"{name}.{field}" if name else field for field in inner] + ([name] if name else [])
        elif pointer := re.search(r"\(\*(\w+)\)", line):
            found.append(pointer[1])
        else:
            names = re.findall(r"(\w+)(?:\[\d+\])*(?:[,;]| : \d+)", line)
            found += [name for name in names if f"{name} :" not in line]  # bits have no place
    raise AssertionError("a struct without an end")


def structs_of(text: str) -> dict[str, list[str]]:
    """Return the fields of each struct, which is named as ``struct tag``."""
    found: dict[str, list[str]] = {}
    lines = iter(text.splitlines())
    for line in lines:
        if head := re.fullmatch(r"((?:struct|union) \w+) \{", line):
            found[head[1]] = fields_of(lines)[:-1]
    return found


FIELD = """static_assert([]<class T>(T*) {{
  if constexpr (requires(T t) {{ t.{field}; }})
    return offsetof(T, {field}) == offsetof(weft::{tag}, {field}) &&
           sizeof(T{{}}.{field}) == sizeof(weft::{tag}{{}}.{field});
  else return true; }}(({kind} ::{tag}*)nullptr), "{tag}.{field}");
"""
AGREE = """template <class R, class... A, class S, class... B> constexpr bool agree(R (*)(A...), S (*)(B...)) {
  if constexpr (sizeof...(A) != sizeof...(B)) return false;
  else if constexpr (std::is_void_v<R> || std::is_void_v<S>) return std::is_void_v<R> == std::is_void_v<S>;
  else return sizeof(R) == sizeof(S) && ((sizeof(A) == sizeof(B)) && ...);
}
"""


def check_source(name: str, text: str, known: set[str]) -> str:
    """Return a C++ file that compiles where all that upstream has agrees: values, places, sizes, parameters."""
    constants = re.findall(r"^constexpr \w+ (\w+) = (.+);", text, re.MULTILINE)
    functions = re.findall(r"^[\w*& ]+?(\w+)\(.*\);", text, re.MULTILINE)
    structs = structs_of(text)
    assert constants and functions and structs, "the header was not parsed"
    lines = [f'#include "{ROOT / abi_headers.LIBRARIES[name].written}"', "#include <type_traits>"]
    lines += [f"#include <{header}>" for header in abi_headers.LIBRARIES[name].headers]
    lines.append(AGREE)
    lines += [
        f'static_assert((unsigned long long)({constant}) == (unsigned long long)({value}), "{constant}");'
        for constant, value in constants
        if constant in known
    ]
    lines += [
        f'static_assert(agree((decltype(&weft::{function})){{}}, (decltype(&::{function})){{}}), "{function}");'
        for function in functions
        if function in known
    ]
    for struct, fields in structs.items():
        kind, tag = struct.split()
        if tag not in known:
            continue
        lines += [FIELD.format(field=field, tag=tag, kind=kind) for field in fields]
        if tag not in MAY_BE_LONGER:
            lines.append(f'static_assert(sizeof(weft::{tag}) >= sizeof({kind} ::{tag}), "{tag}");')
    return "\n".join(lines) + "\n"


def compiled(
    name: str, tmp_path: Path, change: tuple[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Compile the check of a header, or of a changed one."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = abi_headers.LIBRARIES[name]
    command = [compiler, "-std=c++20", "-w", *library.flags, *(f"-I{folder}" for folder in library.folders)]
    (tmp_path / "names.cc").write_text("".join(f"#include <{header}>\n" for header in library.headers))
    read = subprocess.run(
        [*command, "-E", "-dD", "names.cc"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    if read.returncode != 0:
        pytest.skip(MISSING[name])
    text = text_of(name)
    if change:
        assert change[0] in text
        text = text.replace(*change)
        (tmp_path / "abi.h").write_text(text)
    source = check_source(name, text, set(re.findall(r"\w+", read.stdout)))
    if change:
        source = source.replace(str(ROOT / library.written), "abi.h")
    (tmp_path / "check.cc").write_text(source)
    command += ["-fsyntax-only", "-I.", "check.cc"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_header_agrees_with_the_installed_release(name: str, tmp_path: Path) -> None:
    done = compiled(name, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("fabric", ("FI_EAVAIL = 259", "FI_EAVAIL = 258"), "FI_EAVAIL"),
        (
            "fabric",
            ("  uint64_t caps, mode;\n  uint32_t addr_format;", "  uint64_t caps;\n  uint32_t addr_format;"),
            "fi_info",
        ),
        ("verbs", ("handle, lkey, rkey;", "handle, rkey;"), "ibv_mr.rkey"),
        ("mlx5", ("uint64_t tir_icm_addr", "uint32_t tir_icm_addr"), "mlx5dv_qp.tir_icm_addr"),
        ("cuda", ("cuInit(unsigned int Flags)", "cuInit(unsigned long Flags)"), "cuInit"),
    ],
)
def test_what_does_not_agree_is_named(name: str, change: tuple[str, str], said: str, tmp_path: Path) -> None:
    done = compiled(name, tmp_path, change)
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_header_is_what_the_script_writes(name: str) -> None:
    committed = (ROOT / abi_headers.LIBRARIES[name].written).read_text()
    try:
        made = abi_headers.header_of(abi_headers.LIBRARIES[name])
    except FileNotFoundError as missing:
        pytest.skip(f"headers cannot be read here: {missing} (clang, and the library's headers)")
    if made.splitlines()[2] != committed.splitlines()[2]:
        pytest.skip(f"another release is installed: {made.splitlines()[2][3:]}")
    assert made == committed
