# SPDX-License-Identifier: Apache-2.0
"""An in-place all-gather that names the receiver's place by the sender's input, as MSCCL's scripts may."""

from msccl.language import *
from msccl.language.collectives import AllGather
from msccl.topologies import *

with MSCCLProgram("gather_by_senders_index", fully_connected(3), AllGather(3, 1, True), 1):
    for rank in range(3):
        for other in range(3):
            if other != rank:
                chunk(rank, Buffer.input, 0).copy(other, Buffer.input, 0)
    XML()
    assert Check()
