# SPDX-License-Identifier: Apache-2.0
"""Every kernel and choice of code compiles for AMD's CDNA 3 with clang alone: no ROCm, no GPU. Nothing is run."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
from kernel_cases import Case, covering_cases, sample_cases

from weft import _core

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = "gfx942"
COMPILERS = [f"clang++-{version}" for version in range(30, 16, -1)] + ["clang++", "amdclang++"]
FLAGS = ["-x", "hip", f"--offload-arch={ARCHITECTURE}", "--cuda-device-only", "--no-gpu-bundle-output"]
FREESTANDING = ["-nogpulib", "-nogpuinc", "-std=c++20", "-O2", f"-I{ROOT}", f"-I{ROOT / 'src'}"]


def compile_with(compiler: str, source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "kernel.hip").write_text(source)
    command = [compiler, *FLAGS, *FREESTANDING, "-Wall", "-Rpass-analysis=kernel-resource-usage"]
    command += ["-o", "kernel.o", "kernel.hip"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@functools.cache
def working_compiler() -> tuple[str | None, str]:
    """Return the newest clang that makes code for the architecture, else None and why each one failed."""
    why = []
    for name in COMPILERS:
        if shutil.which(name) is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            tried = compile_with(name, "__attribute__((global)) void weft_kernel() {}\n", Path(folder))
        if tried.returncode == 0:
            return name, ""
        why.append(f"{name}: {tried.stderr.strip().splitlines()[0] if tried.stderr else 'failed'}")
    found = "; ".join(why) or "none installed (apt install clang-19 lld-19)"
    return None, f"no clang with lld that compiles for {ARCHITECTURE}: {found}"


@dataclass(frozen=True)
class Compilation:
    """One kernel by clang: what it printed, and the first bytes of what it made."""

    case: Case

    def __str__(self) -> str:
        return str(self.case)

    @property
    def is_in_sample(self) -> bool:
        return self.case in sample_cases()

    def run(self) -> tuple[str, bytes]:
        compiler, why = working_compiler()
        if compiler is None:
            pytest.skip(why)
        with tempfile.TemporaryDirectory() as folder:
            done = compile_with(compiler, _core.kernel_source(self.case.key()), Path(folder))
            assert done.returncode == 0, done.stderr
            return done.stderr, (Path(folder) / "kernel.o").read_bytes()[:4]


@pytest.mark.parametrize("compiling", [*map(Compilation, covering_cases())], ids=str, indirect=True)
def test_kernel_compiles_without_spills(compiling: Future[tuple[str, bytes]]) -> None:
    log, start_of_object = compiling.result()
    assert start_of_object == b"\x7fELF"
    usage = dict(re.findall(r"remark:\s+([\w /\[\]]+): (\d+)", log))
    print(f"{ARCHITECTURE}: {usage}")
    assert usage["VGPRs Spill"] == "0", "registers spill to memory"
    assert "warning:" not in log, log
