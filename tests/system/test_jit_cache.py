# SPDX-License-Identifier: Apache-2.0
"""The disk cache of compiled kernels, as processes share it. Needs NVRTC but no GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weft import _core
from weft.runtime import nvrtc

TOOLS = nvrtc.find()
ARCHITECTURE = "sm_90a"
pytestmark = pytest.mark.skipif(TOOLS.nvrtc is None, reason="no NVRTC (pip install nvidia-cuda-nvrtc)")

KERNEL = """
#pragma once
#include "kernels/target/target.h"
#include "kernels/probe/probe_args.h"
namespace weft {
template <class Mesh, class Shape>
WEFT_KERNEL void probe(const ProbeArgs& a, const Mesh&, const Shape&) { *a.out = a.value + Shape::step; }
}
"""
ARGS = """
#pragma once
#include "kernels/target/target.h"
namespace weft { struct NoMesh {}; struct ProbeArgs { uint32_t* out; uint32_t value; }; }
"""


@pytest.fixture
def device_dir(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A copy of the device sources with a small kernel in it, which the JIT uses during the test."""
    folder = tmp_path / "device"
    shutil.copytree(TOOLS.device_dir / "kernels", folder / "kernels")
    (folder / "kernels/probe").mkdir()
    (folder / "kernels/probe/probe.cuh").write_text(KERNEL)
    (folder / "kernels/probe/probe_args.h").write_text(ARGS)
    use_sources(folder)
    yield folder
    nvrtc.install(_core)


def use_sources(folder: Path) -> None:
    includes = [str(path) for path in TOOLS.include_dirs]
    _core.set_toolchain(nvrtc=str(TOOLS.nvrtc), include_dirs=includes, device_dir=str(folder))


def probe_key(step: int = 1) -> _core.KernelKey:
    return _core.KernelKey(
        file="kernels/probe/probe.cuh",
        name="probe",
        args_type="ProbeArgs",
        mesh_type="NoMesh",
        shape=[("step", step)],
        threads_per_block=32,
    )


def compile_probe(cache: Path, step: int = 1, architecture: str = ARCHITECTURE) -> _core.Compiled:
    return _core.compile_kernel(probe_key(step), architecture, str(cache))


def test_second_compile_comes_from_the_cache(device_dir: Path, tmp_path: Path) -> None:
    first = compile_probe(tmp_path / "cache")
    second = compile_probe(tmp_path / "cache")
    assert not first.is_cached
    assert second.is_cached
    assert second.cubin == first.cubin
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"{first.cache_name}.cubin"]


def test_everything_that_changes_the_code_changes_the_name(device_dir: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    names = [compile_probe(cache).cache_name]
    names.append(compile_probe(cache, step=2).cache_name)
    names.append(compile_probe(cache, architecture="sm_80").cache_name)
    header = device_dir / "kernels/probe/probe_args.h"  # included by the kernel's file only
    header.write_text(header.read_text() + "// changed\n")
    names.append(compile_probe(cache).cache_name)
    assert len(set(names)) == len(names)


def test_the_place_of_the_sources_does_not_change_the_name(device_dir: Path, tmp_path: Path) -> None:
    before = compile_probe(tmp_path / "cache")
    moved = tmp_path / "elsewhere"
    shutil.copytree(device_dir, moved)
    use_sources(moved)
    after = compile_probe(tmp_path / "cache")
    assert after.cache_name == before.cache_name
    assert after.is_cached


def test_a_truncated_file_is_compiled_again(device_dir: Path, tmp_path: Path) -> None:
    first = compile_probe(tmp_path / "cache")
    file = tmp_path / "cache" / f"{first.cache_name}.cubin"
    file.write_bytes(file.read_bytes()[:-100])
    again = compile_probe(tmp_path / "cache")
    assert not again.is_cached
    assert again.cubin == first.cubin
    assert compile_probe(tmp_path / "cache").is_cached


CHILD = """
import sys
import test_jit_cache as t
from pathlib import Path
t.use_sources(Path(sys.argv[1]))
sys.stdin.readline()
for step in range(4):
    compiled = t.compile_probe(Path(sys.argv[2]), step)
    print(step, compiled.is_cached, len(compiled.cubin), hash(compiled.cubin), flush=True)
"""


def start(device_dir: Path, cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(device_dir), str(cache)],
        cwd=Path(__file__).parent,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path), "PYTHONHASHSEED": "0"} | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(child: subprocess.Popen[str]) -> tuple[list[list[str]], str]:
    out, err = child.communicate("go\n", timeout=120)
    assert child.returncode == 0, err
    return [line.split() for line in out.splitlines()], err


def test_two_processes_compile_the_same_kernels_at_once(device_dir: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    children = [start(device_dir, cache) for _ in range(2)]
    for child in children:  # both are released before either is waited for
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    (first, _), (second, _) = (finish(child) for child in children)
    assert [row[2:] for row in first] == [row[2:] for row in second]
    assert len(first) == 4
    third, _ = finish(start(device_dir, cache))
    assert all(row[1] == "True" for row in third)
    assert [row[2:] for row in third] == [row[2:] for row in first]
    assert len(list(cache.iterdir())) == 4, "nothing written aside is left behind"


def test_a_folder_that_cannot_be_written_costs_one_warning(device_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    rows, err = finish(start(device_dir, tmp_path / "file/cache"))
    assert len(rows) == 4
    assert all(row[1] == "False" for row in rows)
    assert err.count("WEFT_CACHE_DIR") == 1, err
