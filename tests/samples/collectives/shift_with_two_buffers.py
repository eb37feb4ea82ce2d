# SPDX-License-Identifier: Apache-2.0
"""A shift that says in place and makes an output of its own: right out of place, and wrong in place."""

from msccl.language import *
from msccl.language.collectives import Collective
from msccl.topologies import *


class Shift(Collective):
    def init_buffers(self):
        return [{Buffer.input: [Chunk(r, 0)], Buffer.output: [None]} for r in range(self.num_ranks)]

    def check(self, prog):
        outputs = [prog.buffers[rank][Buffer.output][0] for rank in range(self.num_ranks)]
        return all(
            outputs[r] is not None and outputs[r].origin_rank == r - 1 for r in range(1, self.num_ranks)
        )


with MSCCLProgram("shift", line(3), Shift(3, 1, True), 1):
    for rank in range(2):
        chunk(rank, Buffer.input, 0).copy(rank + 1, Buffer.output, 0)
    XML()
    assert Check()
