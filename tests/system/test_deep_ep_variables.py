# SPDX-License-Identifier: Apache-2.0
"""The variables of DeepEP's NCCL back end: the drop-in says in one line what each comes to."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import PYTHON, run_program

from weft import deep_ep_path

CASES = {
    "auto": ({"DEEP_EP_BACKEND": "auto"}, "info", "DEEP_EP_BACKEND=auto is what Weft does"),
    "nccl": (
        {"DEEP_EP_BACKEND": "nccl_gin"},
        "warning",
        "DEEP_EP_BACKEND=nccl_gin is not used: WEFT_TRANSPORT chooses (auto); nccl asks for windows in NCCL's "
        "memory, and for GIN between nodes",
    ),
    "chosen": (
        {"DEEP_EP_BACKEND": "nccl", "WEFT_TRANSPORT": "nccl"},
        "info",
        "DEEP_EP_BACKEND=nccl is WEFT_TRANSPORT=nccl",
    ),
    "no_gin": ({"EP_DISABLE_GIN": "1"}, "info", "EP_DISABLE_GIN=1 is what Weft does"),
    "gin_chosen": (
        {"EP_DISABLE_GIN": "1", "NCCL_GIN_TYPE": "2", "WEFT_TRANSPORT": "mapped,nccl"},
        "warning",
        "EP_DISABLE_GIN=1 is not used: WEFT_TRANSPORT=nccl goes through GIN between nodes; NCCL_GIN_TYPE=2 "
        "is not used: NCCL itself reads it, and Weft takes what NCCL has",
    ),
    "gin": (
        {"EP_DISABLE_GIN": "0", "NCCL_GIN_TYPE": "3"},
        "warning",
        "EP_DISABLE_GIN=0 is not used: nothing of Weft's goes through GIN; between nodes it takes "
        "WEFT_PROXY_PROVIDER; NCCL_GIN_TYPE=3 is not used: NCCL itself reads it; nothing of Weft's goes through GIN",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_says_what_a_variable_comes_to(case: str, tmp_path: Path) -> None:
    given, level, line = CASES[case]
    more = {"PYTHONPATH": str(deep_ep_path.folder()), "WEFT_LOG": "info", **given}
    ran = run_program([*PYTHON, "-c", "import deep_ep"], tmp_path, more=more)
    assert ran.returncode == 0, ran.stderr
    assert f"weft {level}: DeepEP's variables: {line}\n" in ran.stderr


def test_without_them_nothing_is_said(tmp_path: Path) -> None:
    more = {"PYTHONPATH": str(deep_ep_path.folder()), "WEFT_LOG": "info"}
    ran = run_program([*PYTHON, "-c", "import deep_ep"], tmp_path, more=more)
    assert "DeepEP's variables" not in ran.stderr
