# SPDX-License-Identifier: Apache-2.0
"""What other users of the host can find: nothing that they can open, and no name that they can guess."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from weft.transfer import TransferEngine, nics


def regions() -> dict[str, int]:
    """Return the mode of each shared memory object of Weft's name."""
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in Path("/dev/shm").glob("weft-*")}


def test_shared_memory_is_its_owners_alone_and_has_a_random_name() -> None:
    unusable = [nic.unusable_because for nic in nics("fabric:shm")]
    if all(unusable):
        pytest.skip(unusable[0])
    before = regions()
    with_two = [TransferEngine("fabric:shm", name=name) for name in "ab"]
    made = {name: mode for name, mode in regions().items() if name not in before}
    for engine in with_two:
        engine.close()
    assert len(made) >= 2
    assert set(made.values()) == {0o600}, made
    keys = [re.search(r"-(\d+)(?!.*-\d)", name) for name in made]
    assert all(key and int(key[1]) > 1 << 32 for key in keys), made
    assert len({key[1] for key in keys if key}) == len(made)
    assert not set(regions()) & set(made)
