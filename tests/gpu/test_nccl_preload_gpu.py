# SPDX-License-Identifier: Apache-2.0
"""PyTorch's DDP over backend nccl, alone and with our libnccl preloaded: the same losses, served by Weft."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_ranks import num_ranks_here

import weft

ROOT = Path(__file__).parents[2]
LIBRARY = Path(weft.__file__).parent / "nccl" / "libnccl.so.2"

pytestmark = [
    pytest.mark.skipif(num_ranks_here() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(not LIBRARY.exists(), reason="built without libnccl.so.2"),
]


def _train(example: str, **environment: str) -> tuple[list[str], str]:
    """Return the lines with losses, and everything that was said."""
    ranks = min(num_ranks_here(), 8)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(ROOT / "examples" / example), "--backend", "nccl", "--device", "cuda"]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return [line for line in done.stdout.splitlines() if line.startswith("step")], said


@pytest.mark.parametrize("example", ["ddp.py", "fsdp2.py"])
def test_training_over_the_preloaded_library_has_the_same_losses(example: str) -> None:
    alone, _ = _train(example)
    preloaded, said = _train(
        example, LD_PRELOAD=str(LIBRARY), WEFT_NCCL_REPORT="1", WEFT_LOG="info", WEFT_TIMEOUT_S="60"
    )
    losses = [[float(line.split()[-1]) for line in lines] for lines in (alone, preloaded)]
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    served = re.findall(r"ncclAllReduce (\d+) \+ (\d+);", said)
    assert served and all(int(by_weft) > 0 and int(forwarded) == 0 for by_weft, forwarded in served), said
