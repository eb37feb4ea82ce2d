# SPDX-License-Identifier: Apache-2.0
"""What only tests/gpu/test_ibgda_gpu.py launches compiles for GPUs, too: a mistake should not show there first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_compile_all import check_usage, needs_nvrtc

from weft import _core

KERNEL = Path(__file__).parents[1] / "support" / "channel_replay.cuh"


@needs_nvrtc
@pytest.mark.parametrize("mesh", ["IbgdaMesh", "HybridMesh<weft::MappedMesh, weft::IbgdaMesh>", "ProxyMesh"])
def test_the_kernel_that_graphs_replay_compiles(mesh: str) -> None:
    text = re.sub(r"(?m)^#(pragma|include).*$", "", KERNEL.read_text())
    key = _core.KernelKey(
        file="kernels/core/wait.cuh",
        name="channel_replay",
        args_type="ChannelReplayArgs",
        mesh_type=mesh,
        shape=[],
        threads_per_block=32,
        prelude=text,
    )
    check_usage(_core.compile_kernel(key, "sm_90a"))
