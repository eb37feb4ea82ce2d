# SPDX-License-Identifier: Apache-2.0
"""Some seconds of tests/system/transfer_soak.py."""

from __future__ import annotations

import pytest
import transfer_soak

from weft.transfer import nics

SECONDS = 10.0


@pytest.mark.timeout(SECONDS + 120)
def test_every_byte_is_accounted_for_while_peers_die() -> None:
    unusable = [nic.unusable_because for nic in nics("fabric:tcp")]
    if all(unusable):
        pytest.skip(unusable[0])
    account = transfer_soak.soak_killed_peers("fabric:tcp", SECONDS)
    account.check()
    assert account.peers_killed >= 2


@pytest.mark.timeout(SECONDS + 120)
def test_every_byte_is_accounted_for_while_the_network_misbehaves() -> None:
    account = transfer_soak.soak_loopback(SECONDS)
    account.check()
    assert account.operations > 100
