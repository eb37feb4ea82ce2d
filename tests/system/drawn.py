# SPDX-License-Identifier: Apache-2.0
"""How tests draw random cases for a pool of ranks."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def drawn(max_examples: int) -> settings:
    """Return the settings of a test that draws ``max_examples`` cases, the same in every run."""
    return settings(
        max_examples=max_examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        phases=(Phase.generate,),  # a smaller failing case is not worth minutes of fresh ranks
    )
