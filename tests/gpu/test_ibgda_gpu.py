# SPDX-License-Identifier: Apache-2.0
"""Queues and windows of the ibgda transport, used by GPUs and served by a model of the NIC (C++).

Two GPUs take a rank each; one GPU takes both (RANKS_PER_GPU=2). IBGDA_RESULTS names a file for what was measured.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from weft.runtime import nvrtc

ROOT = Path(__file__).parents[2]
# Where queues and windows lie: memory of the host, queues alone in memory of the GPU, both there.
WHERE = {"pinned": "gpus", "device": "gpus_own", "windows": "gpus_windows"}
POSTING_GOAL_NS = 500  # of put_with_signal by one warp
TESTS = {
    "AMillionOperationsArriveInOrder": 150,
    "ABatchRingsOnce": 60,
    "WhatPostingCosts": 90,
    "WhatItsFencesCost": 60,
    "ReplaysOfAGraphLoseNothing": 60,
    "MappedPeersAndPortsSideBySide": 60,
    "LowLatencyRoundsComeBack": 120,
}


def _binary() -> Path:
    built = sorted(ROOT.glob("build/*/weft_tests"), key=os.path.getmtime)
    if not built:
        pytest.skip("the C++ tests are not built (tools/dev-build, with libgtest-dev)")
    return built[-1]


def _keep(results: dict[str, float]) -> None:
    """Add results to the file that IBGDA_RESULTS names."""
    path = os.environ.get("IBGDA_RESULTS")
    if not path:
        return
    file = Path(path)
    kept = json.loads(file.read_text()) if file.exists() else {}
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    kept |= {
        "what": "ibgda: queues in pinned memory or the GPU's own, written by GPUs, served by a model of the NIC; "
        "no NIC took part",
        "gpu": torch.cuda.get_device_name(0),
        "driver": driver.stdout.split("\n")[0],
        "posting_goal_ns": POSTING_GOAL_NS,
    }
    kept["results"] = kept.get("results", {}) | results
    file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


@pytest.mark.parametrize("queues", WHERE)
@pytest.mark.parametrize("name", TESTS)
def test_a_model_of_the_nic_understands_what_gpus_write(name: str, queues: str) -> None:
    """``queues``: where they lie (``WHERE``). The model copies from and to memory of the GPU."""
    ran = _run(f"Ibgda/IbgdaPosts.{name}/{WHERE[queues]}", TESTS[name])
    found = _results(ran.stdout, f"{queues}.")
    _keep(found)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "SKIPPED" not in ran.stdout, ran.stdout
    assert "[  PASSED  ] 1 test" in ran.stdout, ran.stdout
    for case in ("fresh", "lasting"):
        median = found.get(f"{queues}.posting.put_with_signal_256B.{case}.median_ns")
        if median is not None:
            print(
                f"{queues}, {case}: {median:.0f} ns, {'within' if median <= POSTING_GOAL_NS else 'beyond'} the goal"
            )


def test_the_driver_exports_windows_also_after_they_have_grown() -> None:
    """As DMA-BUF, which a NIC would get. Drivers without open kernel modules export nothing."""
    ran = _run("IbgdaWindows.*", 60)
    _keep(_results(ran.stdout, ""))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    if "SKIPPED" in ran.stdout:
        pytest.skip(ran.stdout)


def _results(printed: str, prefix: str) -> dict[str, float]:
    found = re.findall(r"^result (\S+) (\S+)$", printed, re.M)
    return {prefix + key: float(value) for key, value in found}


def _run(tests: str, limit_s: int) -> subprocess.CompletedProcess[str]:
    # Code that is loaded at its first launch would wait there for the other rank's kernel.
    environment = os.environ | {"CUDA_MODULE_LOADING": "EAGER"}
    if compiler := nvrtc.find().nvrtc:  # that of the Python packages, as the library would use
        places = [str(compiler.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = ":".join(place for place in places if place)
    try:
        ran = subprocess.run(
            [str(_binary()), f"--gtest_filter={tests}"],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired as late:
        printed = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout
        pytest.fail(f"not done after {limit_s} s; it printed:\n{printed}")
    print(ran.stdout)
    return ran
