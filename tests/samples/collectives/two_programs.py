# SPDX-License-Identifier: Apache-2.0
"""A custom collective whose check() reads origin_rank, in two programs of one script, in MSCCL's names."""

from msccl.language import *
from msccl.language.collectives import Collective
from msccl.topologies import *


class FromFirst(Collective):
    """Rank 0's chunk reaches all others."""

    def init_buffers(self):
        return [
            {Buffer.input: [Chunk(0, 0, -1, 0) if rank == 0 else None], Buffer.output: [None]}
            for rank in range(self.num_ranks)
        ]

    def check(self, prog):
        outputs = [prog.buffers[rank][Buffer.output][0] for rank in range(1, self.num_ranks)]
        return all(c is not None and (c.origin_rank, c.origin_index) == (0, 0) for c in outputs)


with MSCCLProgram("flat", fully_connected(3), FromFirst(3, 1, False), 1):
    c = chunk(0, Buffer.input, 0)
    c.copy(1, Buffer.output, 0)
    c.copy(2, Buffer.output, 0)
    XML()
    Check()

with MSCCLProgram("chain", line(3), FromFirst(3, 1, False), 1):
    chunk(0, Buffer.input, 0).copy(1, Buffer.output, 0).copy(2, Buffer.output, 0)
    XML()
    Check()
