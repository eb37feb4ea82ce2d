# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def layers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_layers", ROOT / "tools" / "check_layers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_the_tree_keeps_its_layers(layers: ModuleType) -> None:
    assert layers.breaches(ROOT) == []


@pytest.mark.parametrize(
    ("includer", "included"),
    [
        ("src/base/a.h", "plan/b.h"),
        ("src/plan/a.cc", "moe/b.h"),
        ("src/moe/a.cc", "bind/b.h"),
        ("kernels/moe/a.cuh", "plan/b.h"),
        ("src/transports/proxy/a.cc", "transports/mapped/b.h"),
        ("src/moe/a.cc", "transports/mapped/b.h"),
        ("src/providers/verbs/a.cc", "transfer/b.h"),
        ("src/providers/verbs/a.cc", "providers/fabric/b.h"),
        ("src/transfer/a.cc", "providers/fabric/b.h"),
        ("src/memory/a.cc", "transports/b.h"),
        ("src/plan/a.cc", "memory/b.h"),
        ("kernels/core/a.h", "kernels/moe/b.h"),
        ("kernels/collective/a.cuh", "kernels/moe/b.h"),
        ("compat/nccl/a.cc", "moe/b.h"),
        ("src/moe/a.cc", "measure/loops/b.h"),
        ("src/transports/proxy/a.cc", "measure/jitter/b.h"),
    ],
)
def test_an_include_upwards_is_named(
    layers: ModuleType, tmp_path: Path, includer: str, included: str
) -> None:
    write(tmp_path, includer, f'#include "{included}"\n')
    write(tmp_path, included if included.startswith(("kernels", "measure")) else f"src/{included}")
    (breach,) = layers.breaches(tmp_path)
    assert breach.startswith(f"{includer}: includes {included}")


def test_a_transport_is_known_to_its_folder_and_the_list_alone(layers: ModuleType, tmp_path: Path) -> None:
    for path in ("src/transports/slow_boat/channel.cuh", "src/transports/list.h", "src/jit/launch.cc"):
        write(tmp_path, path, "using Mesh = SlowBoatMesh;  // MappedMesh\n")
    (breach,) = layers.breaches(tmp_path)
    assert breach.startswith("src/jit/launch.cc: names the mesh of slow_boat")


def test_headers_that_need_each_other_are_named(layers: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "src/base/a.h", '#include "base/b.h"\n')
    write(tmp_path, "src/base/b.h", '#include "base/a.h"\n')
    (breach,) = layers.breaches(tmp_path)
    assert breach == "src/base/a.h: needs itself: src/base/a.h -> src/base/b.h -> src/base/a.h"


@pytest.mark.parametrize(
    ("importer", "line", "breach"),
    [
        ("runtime/a.py", "from weft.bench import b", "runtime may not import measure"),
        ("moe/a.py", "import weft.collectives.b", "moe may not import collectives"),
        ("moe/a.py", "def late():\n    import weft.collectives.b", None),
        ("moe/a.py", "def late():\n    import weft.bench.b", None),
        ("../../measure/python/weft/bench/a.py", "from weft.moe import b", None),
    ],
)
def test_an_import_upwards_is_named(
    layers: ModuleType, tmp_path: Path, importer: str, line: str, breach: str | None
) -> None:
    write(tmp_path, f"python/weft/{importer}", line)
    for room in ("python/weft/collectives", "python/weft/moe", "measure/python/weft/bench"):
        write(tmp_path, f"{room}/b.py")
    found = layers.breaches(tmp_path)
    assert [breach in one for one in found] == [True] if breach else found == []


def test_an_include_downwards_is_fine(layers: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "src/moe/a.cc", '#include "base/b.h"\n#include "kernels/moe/c.h"\n#include "plan/d.h"\n')
    for path in ("src/base/b.h", "kernels/moe/c.h", "src/plan/d.h"):
        write(tmp_path, path)
    assert layers.breaches(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "line", "what"),
    [
        ("src/jit/a.cc", 'const char* at = getenv("HOME");', "reads the environment"),
        ("kernels/core/a.cuh", 'asm volatile("nop;");', "inline assembly"),
        ("src/bind/a.cc", "#include <torch/extension.h>", "knows torch"),
        ("src/moe/a.cc", "if (wrong) abort();", "ends the process"),
        ("src/moe/a.cc", 'printf("hello");', "prints"),
    ],
)
def test_a_forbidden_line_is_named(
    layers: ModuleType, tmp_path: Path, path: str, line: str, what: str
) -> None:
    write(tmp_path, path, line)
    (breach,) = layers.breaches(tmp_path)
    assert breach.startswith(f"{path}: {what}")
    write(tmp_path, path, f"// {line}")
    assert layers.breaches(tmp_path) == []
