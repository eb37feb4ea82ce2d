# SPDX-License-Identifier: Apache-2.0
"""Weft's own declarations of the CUDA driver agree with NVIDIA's header, wherever one is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "src/base/cuda_driver.h"


def cuda_h() -> Path:
    folders = [
        *Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/include"),
        Path("/usr/local/cuda/include"),
    ]
    for folder in folders:
        if (folder / "cuda.h").exists():
            return folder
    pytest.skip("no cuda.h on this machine")


def struct_fields(text: str) -> list[tuple[str, str]]:
    """Return (struct, field) for each plain field that the header declares."""
    pairs = []
    for struct, body in re.findall(r"^(?:struct|union) (CU\w+) \{\n(.*?)^\};", text, re.M | re.S):
        body = re.sub(r"struct \{.*?\} ", "int ", body, flags=re.S)
        for line in body.splitlines():
            names = re.sub(r"^\s*(const )?\w+( \w+)?[ *]+(?=\w)", "", line.split(";")[0])
            pairs += [(struct, name.strip().split("[")[0]) for name in names.split(",") if name.strip()]
    return pairs


def check_source(text: str) -> str:
    """Return a C++ file that compiles only when sizes, offsets, values and signatures agree."""
    functions = re.sub(r"\\\n", " ", text[text.index("#define WEFT_CUDA_FUNCTIONS") :].split("\n\n")[0])
    rows = re.findall(r"WEFT_CUDA_FUNCTION\((\w+), (\w+),\s*\(([^()]*)\)\)", functions)
    assert len(rows) > 50, "the function table was not parsed"
    constants = re.findall(r"^constexpr \w+ (CU\w+) = (\d+);", text, re.M)
    assert len(constants) > 40, "the constants were not parsed"
    fields = struct_fields(text)
    assert ("CUlaunchConfig", "numAttrs") in fields, "the structs were not parsed"

    lines = [
        '#include "base/cuda_driver.h"',
        "#include <cstddef>",
        "namespace ours {",
        "using namespace weft;",
    ]
    lines += [f"using fn_{member} = CUresult (*)({params});" for member, _, params in rows]
    lines += ["}", "#define __CUDA_API_VERSION_INTERNAL", "#include <cuda.h>"]
    lines.append(
        "template <class R, class... A, class S, class... B> constexpr bool agree(R (*)(A...), S (*)(B...)) {"
        " if constexpr (sizeof...(A) != sizeof...(B)) return false;"
        " else return sizeof(R) == sizeof(S) && ((sizeof(A) == sizeof(B)) && ...); }"
    )
    lines += [f'static_assert(agree(ours::fn_{m}{{}}, (decltype(&::{s})){{}}), "{m}");' for m, s, _ in rows]
    lines += [f'static_assert({value} == (int)::{name}, "{name}");' for name, value in constants]
    for struct, field in fields:
        at = f"offsetof(weft::{struct}, {field}) == offsetof(::{struct}, {field})"
        lines.append(f'static_assert({at}, "{struct}.{field}");')
    for struct in dict.fromkeys(struct for struct, _ in fields):
        lines.append(f'static_assert(sizeof(weft::{struct}) == sizeof(::{struct}), "{struct}");')
    return "\n".join(lines) + "\n"


def compile_check(tmp_path: Path, source: str) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "check.cc").write_text(source)
    command = [
        compiler,
        "-std=c++20",
        "-fsyntax-only",
        "-w",
        f"-I{ROOT / 'src'}",
        f"-I{cuda_h()}",
        "check.cc",
    ]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_declarations_agree_with_cuda_h(tmp_path: Path) -> None:
    done = compile_check(tmp_path, check_source(HEADER.read_text()))
    assert done.returncode == 0, done.stderr


def test_a_wrong_value_is_noticed(tmp_path: Path) -> None:
    wrong = HEADER.read_text().replace("MULTIPROCESSOR_COUNT = 16", "MULTIPROCESSOR_COUNT = 17")
    done = compile_check(tmp_path, check_source(wrong))
    assert done.returncode != 0
    assert "MULTIPROCESSOR_COUNT" in done.stderr
