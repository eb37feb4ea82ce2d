# SPDX-License-Identifier: Apache-2.0
"""Two micro-batches overlap through one buffer."""

from __future__ import annotations

import pytest
from micro_batches import overlap_two_micro_batches

from weft.testing.ranks import run_ranks


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_two_micro_batches_in_flight_stay_apart(num_ranks: int) -> None:
    run_ranks(num_ranks, overlap_two_micro_batches, 200, "cpu", with_gpus=False)
