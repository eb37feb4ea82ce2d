# SPDX-License-Identifier: Apache-2.0
"""Which memory a program may run on, where a call's input and output are given otherwise than it takes them."""

from __future__ import annotations

import torch

from weft.collectives.call_checks import are_apart, copy_into
from weft.collectives.contract import Buffer
from weft.collectives.ir import Algorithm, Op, Span


class CallMemory:
    """Finds the tensors that one rank of ``size`` runs a call on; what it learns of a program it keeps."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._keeps: dict[int, bool] = {}
        self._writes: dict[int, bool] = {}
        self._held: list[Algorithm] = []  # keeps the ids that these are keyed by alive

    def apart(
        self, collective: str, tensor: torch.Tensor, out: torch.Tensor, root: int, algorithm: Algorithm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what to run on where input and output share memory: a copy of the smaller one, as peers may read an
        input late and write an output early. Ranks need not agree on it."""
        is_unused = collective in ("gather", "scatter") and self._rank != root
        if are_apart(tensor, out) or is_unused:
            return tensor, out
        is_own_part = out.data_ptr() + self._rank * tensor.nbytes == tensor.data_ptr()
        if collective == "allgather" and is_own_part and algorithm and self._keeps_own_part(algorithm):
            return tensor, out
        return (tensor, torch.empty_like(out)) if out.nbytes < tensor.nbytes else (tensor.clone(), out)

    def joined(
        self, collective: str, tensor: torch.Tensor, out: torch.Tensor, algorithm: Algorithm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what an algorithm for in-place calls alone runs on: the larger tensor and its own part of it. An input
        or output that lies elsewhere is copied there; an input that such an algorithm overwrites is copied, too."""
        if collective == "alltoall":
            copy_into(out, tensor)
            return out, out
        if collective == "allgather":
            own = out.view(self._size, -1)[self._rank]
            copy_into(own, tensor)
            return own, out
        whole = tensor.view(self._size, -1)
        if whole[self._rank].data_ptr() == out.data_ptr() and self._keeps_other_parts(algorithm):
            return tensor, out
        whole = whole.clone()
        return whole, whole[self._rank].view(out.shape)

    def writes_buffers(self, algorithm: Algorithm) -> bool:
        """Return whether this rank's program writes its input or output."""
        known = self._writes.get(id(algorithm))
        if known is None:
            steps = (step for block in algorithm.ranks[self._rank].blocks for step in block.steps)
            known = any(buffer != Buffer.scratch for step in steps for buffer, _ in step.writes())
            self._writes[id(algorithm)] = known
            self._held.append(algorithm)
        return known

    def _keeps_other_parts(self, algorithm: Algorithm) -> bool:
        """Return whether this rank's in-place reduce_scatter leaves all of its input but its own part as it is."""
        contract, program = algorithm.contract, algorithm.ranks[self._rank]
        assert contract is not None
        own = {
            contract.alias(self._rank, Buffer.output, c) for c in range(contract.output_chunks(self._rank))
        }
        written = (slot for block in program.blocks for step in block.steps for slot in step.writes())
        return all(
            buffer == Buffer.scratch or contract.alias(self._rank, buffer, index) in own
            for buffer, index in written
        )

    def _keeps_own_part(self, algorithm: Algorithm) -> bool:
        """Return whether this rank's part of an all_gather's output is written by copying the input there only."""
        known = self._keeps.get(id(algorithm))
        if known is None:
            program = algorithm.ranks[self._rank]
            first = self._rank * program.input_chunks
            own = {(Buffer.output, first + c) for c in range(program.input_chunks)}
            writers = [step for block in program.blocks for step in block.steps if own & {*step.writes()}]
            known = all(
                step.op is Op.COPY and step.src == Span(Buffer.input, step.dst.index - first)
                for step in writers
            )
            self._keeps[id(algorithm)] = known
            self._held.append(algorithm)
        return known
