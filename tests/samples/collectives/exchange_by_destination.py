# SPDX-License-Identifier: Apache-2.0
"""An all-to-all that asks every chunk where it is going, on a topology of nodes, in MSCCL's names."""

import argparse

from msccl.language import *
from msccl.language.collectives import AllToAll
from msccl.topologies import *
from msccl.topologies.distributed import *

parser = argparse.ArgumentParser()
parser.add_argument("nodes", type=int)
parser.add_argument("ranks_per_node", type=int)
args = parser.parse_args()

topology = distributed_fully_connected(fully_connected(args.ranks_per_node), args.nodes, 1)
ranks = topology.num_nodes()
assert ranks == args.nodes * args.ranks_per_node == len(list(topology.nodes()))
with MSCCLProgram("exchange_by_destination", topology, AllToAll(ranks, 1, False), 1):
    for rank in range(ranks):
        for index in range(ranks):
            c = chunk(rank, Buffer.input, index)
            assert c.get_origin_rank() == rank
            c.copy(c.get_dst_rank(), Buffer.output, c.get_dst_index())
    XML()
    assert Check()
