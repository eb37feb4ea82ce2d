# SPDX-License-Identifier: Apache-2.0
"""libnccl-rma-weft.so as it is installed; and, with --thorough, a million operations through it under faults."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_cpp import chosen_binary, why_not

import weft

LIBRARY = Path(weft.__file__).parent / "nccl" / "libnccl-rma-weft.so"
PLACES = ["loopback_wild_v13", "loopback_wild_v14", "fabric_tcp_v14", "fabric_shm_v14"]


@pytest.mark.skipif(not LIBRARY.exists(), reason="built without libnccl-rma-weft.so")
def test_the_library_is_where_the_command_says_and_has_what_nccl_looks_up() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "weft.nccl_rma_path"], capture_output=True, text=True, check=True
    )
    assert Path(ran.stdout.strip()) == LIBRARY
    library = ctypes.CDLL(ran.stdout.strip())
    names = [
        ctypes.c_char_p.in_dll(library, f"nccl{table}").value for table in ("RmaPlugin_v13", "RmaPlugin_v14")
    ]
    assert names == [b"Weft", b"Weft"]  # the first member of a table
    assert not hasattr(library, "ncclRmaPlugin_v15")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place", PLACES)
def test_a_million_operations_are_exact(place: str, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--thorough"):
        pytest.skip("--thorough: a minute each")
    binary = chosen_binary(request.config)
    if reason := why_not(binary):
        pytest.skip(reason)
    ran = subprocess.run(
        [str(binary), f"--gtest_filter=*TrafficOfTwoTimesTwoRanksIsExact/{place}"],
        env={**os.environ, "RMA_OPERATIONS": "1000000"},
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert ran.returncode == 0 and "[  PASSED  ] 1 test" in ran.stdout, (
        ran.stdout[-4000:] + ran.stderr[-2000:]
    )
