# SPDX-License-Identifier: Apache-2.0
"""Two micro-batches overlap through one buffer, on two streams."""

from __future__ import annotations

from gpu_ranks import num_ranks_here, run_on_gpus
from micro_batches import overlap_two_micro_batches


def test_two_micro_batches_in_flight_stay_apart() -> None:
    run_on_gpus(num_ranks_here(), overlap_two_micro_batches, 10_000, "cuda")
