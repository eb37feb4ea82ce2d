# SPDX-License-Identifier: Apache-2.0
"""Ranks that the tests of a file share; files that want other numbers of them have fixtures of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from weft.testing.ranks import RankPool


@pytest.fixture(scope="module", params=(1, 2, 3, 4))
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    from weft.testing.ranks import RankPool

    with RankPool(request.param, with_gpus=False) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    from weft.testing.ranks import RankPool

    with RankPool(2, with_gpus=False) as ranks:
        yield ranks
