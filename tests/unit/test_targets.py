# SPDX-License-Identifier: Apache-2.0
"""The target headers offer the same names, so that a kernel written for one compiles for all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TARGETS = Path(__file__).resolve().parents[2] / "kernels/target"
WEAK = Path(__file__).resolve().parents[1] / "weak/target"  # for tests of order alone
SHARED = {
    "cuda": ["gpu", "row_pipe_by_loads", "row_pipe_in_bulk"],
    "hip": ["gpu", "row_pipe_by_loads", "numbers_portable"],
    "host": [],
    "weak": ["gpu", "row_pipe_in_bulk", "numbers_portable"],
}
# A function or method that kernels may call.
FUNCTION = re.compile(
    r"^(?:  |)(?:template <[^>]*>\s+)?[\w:<>&* ]*?[\w>&*] [&*]?(\w+)\([^;{]*?\)[^;{]*\{", re.MULTILINE
)
KEYWORDS = {"if", "for", "while", "switch", "return"}


def public_part(text: str) -> str:
    """Return the header without nested namespaces, comments, attributes and private members."""
    text = text[text.index("namespace weft {") + 16 :]
    text = re.sub(r"^namespace (\w*).*?^\}  // namespace \1$", "", text, flags=re.M | re.S)
    text = re.sub(r"//[^\n]*|\[\[[^\]]*\]\] ", "", text)  # attributes, too
    return re.sub(r"^ private:\n.*?^\};", "};", text, flags=re.M | re.S)


def names(target: str) -> set[str]:
    folder = TARGETS / target if target != "weak" else WEAK
    shared = [TARGETS / f"{name}.h" for name in SHARED[target]]
    sources = [path.read_text() for path in [*sorted(folder.glob("*.h")), *shared]]
    text = "".join(public_part(source) for source in sources if "namespace weft {" in source)
    functions = set(FUNCTION.findall(text)) - KEYWORDS
    types = set(re.findall(r"^(?:struct|class) (?:alignas\(\d+\) )?(\w+)", text, re.MULTILINE))
    macros = set(re.findall(r"^#define (WEFT_\w+)", "".join(sources), re.MULTILINE))
    return functions | types | macros


# RowQueue, RowWriter and what they have: kernels ask kHasRowQueue, which all targets have.
ROW_QUEUE = {"RowQueue", "RowWriter", "ask", "begin", "finish", "front", "has_room", "pop", "fence_acquired"}
# What only one target has, each for a reason that kernels need not know.
OWN = {
    "cuda": {"shared_address", "help_while_waiting", "AddedRow", *ROW_QUEUE},
    "host": {
        "BlockBarrier",
        "HostHelp",
        "HostThread",
        "WEFT_HOST_TARGET",
        *("HalfLanes", "map", "combine_lanes", "divide_lanes"),  # element.cuh asks for them on the host alone
        "wait",
        "publish_streaming_stores",
        "copy_row_streaming",
    },
    "hip": set(),
    "weak": {"WEFT_WEAK_LANES", *ROW_QUEUE},
}


def test_names_are_found() -> None:
    assert {
        "Block",
        "Warp",
        "RowPipe",
        "Vec16",
        "load_acquire",
        "store_release",
        "now_ns",
        "scan_exclusive",
        "drain",
    } <= names("cuda")


@pytest.mark.parametrize("target", ["host", "hip", "weak"])
def test_target_has_what_cuda_has(target: str) -> None:
    missing = names("cuda") - OWN["cuda"] - names(target)
    extra = names(target) - OWN[target] - names("cuda")
    assert not missing, f"{target}.h lacks {sorted(missing)}"
    assert not extra, f"{target}.h has what cuda.h lacks: {sorted(extra)}"
