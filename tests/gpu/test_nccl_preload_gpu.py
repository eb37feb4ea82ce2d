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


PRELOADED = {"LD_PRELOAD": str(LIBRARY), "WEFT_NCCL_REPORT": "1", "WEFT_LOG": "info", "WEFT_TIMEOUT_S": "60"}


def _launch(*program: str, **environment: str) -> tuple[list[str], str]:
    """Return the lines of the ranks' output, and everything that was said."""
    ranks = min(num_ranks_here(), 8)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, *program], env={**os.environ, **environment}, capture_output=True, text=True, timeout=240
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return done.stdout.splitlines(), said


def _train(example: str, **environment: str) -> tuple[list[str], str]:
    """Return the lines with losses, and everything that was said."""
    program = str(ROOT / "examples" / example)
    lines, said = _launch(program, "--backend", "nccl", "--device", "cuda", **environment)
    return [line for line in lines if line.startswith("step")], said


@pytest.mark.parametrize("example", ["ddp.py", "fsdp2.py"])
def test_training_over_the_preloaded_library_has_the_same_losses(example: str) -> None:
    alone, _ = _train(example)
    preloaded, said = _train(example, **PRELOADED)
    losses = [[float(line.split()[-1]) for line in lines] for lines in (alone, preloaded)]
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    served = re.findall(r"ncclAllReduce (\d+) \+ (\d+);", said)
    assert served and all(int(by_weft) > 0 and int(forwarded) == 0 for by_weft, forwarded in served), said


def test_the_real_library_may_connect_while_messages_are_captured() -> None:
    """Weft serves the eager messages before, so the captured ones are the first of the real library."""
    lines, said = _launch(str(Path(__file__).with_name("nccl_captured_messages.py")), **PRELOADED)
    assert sum(line.endswith("right") for line in lines) == min(num_ranks_here(), 8), said
    sends = re.findall(r"ncclSend (\d+) \+ (\d+)", said)
    assert sends and all(int(by_weft) > 0 and int(forwarded) > 0 for by_weft, forwarded in sends), said
