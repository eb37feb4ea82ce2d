# SPDX-License-Identifier: Apache-2.0
"""The variables of DeepEP's NCCL back end: the drop-in says in one line what each comes to."""

from __future__ import annotations

from subprocess import CompletedProcess

import pytest
from programs import run_in_each

from weft import deep_ep_path

Programs = dict[str, CompletedProcess[str]]
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


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    given = {case: variables for case, (variables, _, _) in CASES.items()} | {"without": {}}
    more = {"PYTHONPATH": str(deep_ep_path.folder()), "WEFT_LOG": "info"}
    return run_in_each(given, "import deep_ep", tmp_path_factory.mktemp("variables"), more)


@pytest.mark.parametrize("case", CASES)
def test_one_line_says_what_a_variable_comes_to(case: str, ran: Programs) -> None:
    _, level, line = CASES[case]
    assert ran[case].returncode == 0, ran[case].stderr
    assert f"weft {level}: DeepEP's variables: {line}\n" in ran[case].stderr


def test_without_them_nothing_is_said(ran: Programs) -> None:
    assert ran["without"].returncode == 0
    assert "DeepEP's variables" not in ran["without"].stderr
