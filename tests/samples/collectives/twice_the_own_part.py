# SPDX-License-Identifier: Apache-2.0
"""A wrong all-reduce: rank 0 adds rank 1 twice. It stays refused, in a sentence."""

from msccl.language import *
from msccl.language.collectives import AllReduce
from msccl.topologies import *

with MSCCLProgram("twice", fully_connected(2), AllReduce(2, 1, True), 1):
    total = chunk(0, Buffer.input, 0).reduce(chunk(1, Buffer.input, 0))
    total = chunk(0, Buffer.input, 0).reduce(chunk(1, Buffer.input, 0))
    total.copy(1, Buffer.input, 0)
    XML()
    Check()
