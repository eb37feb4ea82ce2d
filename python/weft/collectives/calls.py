# SPDX-License-Identifier: Apache-2.0
"""Collectives on torch tensors, CPU and CUDA.

    comm = weft.Communicator(group)
    comm.all_reduce(t)                             # in place
    out = comm.all_gather(t)
    comm.collectives.all_reduce(t, algorithm=mine) # Collectives, with all options

Tensors are contiguous and on the communicator's device; outputs may share memory with inputs. Every rank passes the
same dtype and number of elements, except where sizes are said to differ. On CUDA a call is enqueued on the current
stream and may be captured in a graph, whose order counts then. Otherwise calls on several streams run one after the
other, in the order of the calls; sends and receives only after earlier collectives. On the CPU a call is finished on
return.
"op" is one of sum, product, min, max, average; of integers and torch.bool also band, bor, bxor, of their bits. A sum
of torch.bool is "or", a product "and". Types without arithmetic of their own, such as float8_e8m0fnu, are moved and not
reduced. "algorithm" is an Algorithm to use instead of the chosen one, or a selector's Choice, which also says how it
runs.
Threads: one caller at a time, the same order of calls on all ranks.
Raises: Error for a wrong argument, before anything moves; PeerLost, naming the rank that was waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from weft.collectives.call_checks import (
    address_of,
    are_apart,
    chunk_counts,
    copy_into,
    reduction_number,
    row_counts,
)
from weft.collectives.call_runner import ALGORITHMS, CallRunner
from weft.collectives.executor import Call, Loaded
from weft.collectives.ir import Algorithm
from weft.collectives.variants import Choice
from weft.collectives.verifier import proven
from weft.errors import invalid, shortened

_MUCH = 256 << 20  # ranks know only their own sizes, and have to choose alike: what is best for large parts


class Collectives(CallRunner):
    """All collectives of one communicator. Making it is collective.

    Args: core: the core communicator. timeout_s: bound of every wait; None takes the communicator's.
    """

    def __repr__(self) -> str:
        return f"Collectives(rank {self.rank} of {self.size}, {self.device})"

    # -- symmetric ---------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | Choice | None = None,
    ) -> torch.Tensor:
        """Reduce over all ranks, in place or into ``out`` (same shape and dtype); return the result."""
        if algorithm is None:
            done = self._repeat("allreduce", tensor, tensor if out is None else out, op)
            if done is not None:
                return done
        self._checks.element("tensor", tensor)
        elems = tensor.numel()
        if out is None:
            out = tensor
        else:
            self._checks.like("out", out, elems, tensor)
            num_bytes = elems * tensor.element_size()
            if not (are_apart(tensor, out) and self._takes_both("allreduce", num_bytes, algorithm)):
                copy_into(out, tensor)
                tensor = out
        self._run("allreduce", tensor, out, elems, elems, op, algorithm, inplace=True)
        return out

    def all_gather(
        self,
        tensor: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | Choice | None = None,
    ) -> torch.Tensor:
        """Return all ranks' tensors as [ranks, *shape], in rank order. ``out`` has ranks times the elements."""
        if algorithm is None:
            done = self._repeat("allgather", tensor, out)
            if done is not None:
                return done
        self._checks.element("tensor", tensor)
        elems = tensor.numel()
        out = self._checks.out(out, self._shape_of_out("allgather", tensor.shape), tensor)
        self._run("allgather", tensor, out, elems, elems * self.size, None, algorithm)
        return out

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | Choice | None = None,
    ) -> torch.Tensor:
        """Reduce over all ranks; return part ``rank`` of the result. The first dimension divides by the ranks."""
        if algorithm is None:
            done = self._repeat("reducescatter", tensor, out, op)
            if done is not None:
                return done
        self._checks.element("tensor", tensor)
        self._checks.parts(tensor)
        out = self._checks.out(out, self._shape_of_out("reducescatter", tensor.shape), tensor)
        self._run("reducescatter", tensor, out, out.numel(), tensor.numel(), op, algorithm)
        return out

    def all_to_all(
        self,
        tensor: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        algorithm: Algorithm | Choice | None = None,
    ) -> torch.Tensor:
        """Send part q of ``tensor`` to rank q; return the parts that came, in rank order.

        Parts are equal shares of the first dimension, or have ``input_splits`` rows each; ``output_splits`` then says
        how many rows come from each rank.
        """
        if algorithm is None and input_splits is None and output_splits is None:
            done = self._repeat("alltoall", tensor, out)
            if done is not None:
                return done
        self._checks.element("tensor", tensor)
        if input_splits is not None or output_splits is not None:
            return self._all_to_all_v(tensor, out, input_splits, output_splits, algorithm)
        self._checks.parts(tensor)
        out = self._checks.out(out, self._shape_of_out("alltoall", tensor.shape), tensor)
        self._run("alltoall", tensor, out, tensor.numel() // self.size, tensor.numel(), None, algorithm)
        return out

    def _all_to_all_v(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        algorithm: Algorithm | Choice | None,
    ) -> torch.Tensor:
        element = self._checks.element("tensor", tensor)
        if tensor.dim() == 0:
            raise invalid("tensor", "no dimensions", "rows, to be split among ranks")
        row_elems = math.prod(tensor.shape[1:])
        sent = self._checks.splits("input_splits", input_splits, tensor.shape[0])
        rows_out = (
            sum(row_counts("output_splits", output_splits)) if output_splits is not None else tensor.shape[0]
        )
        came = self._checks.splits("output_splits", output_splits, rows_out)
        if sent[self.rank] != came[self.rank]:
            raise invalid("output_splits", came[self.rank], f"{sent[self.rank]} from this rank to itself")
        out = self._checks.out(out, (rows_out, *tensor.shape[1:]), tensor)
        if self._executor is None:
            copy_into(out, tensor)
            return out
        loaded = self._load(self._choose("alltoallv", _MUCH, 0, False, algorithm).algorithm)
        tensor, target = self._memory.apart("alltoallv", tensor, out, 0, None)
        call = Call(
            address_of("tensor", tensor), address_of("out", target), 0, element, stream=self._stream()
        )
        self._executor.run_with_sizes(loaded, call, _places(sent, row_elems), _places(came, row_elems))
        if target is not out:
            copy_into(out, target)
        return out

    def send_recv(
        self,
        tensor: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | Choice | None = None,
    ) -> torch.Tensor:
        """Pass ``tensor`` to the next rank; return what the previous one passed."""
        if algorithm is None:
            done = self._repeat("sendrecv", tensor, out)
            if done is not None:
                return done
        self._checks.element("tensor", tensor)
        out = self._checks.out(out, self._shape_of_out("sendrecv", tensor.shape), tensor)
        self._run("sendrecv", tensor, out, tensor.numel(), tensor.numel(), None, algorithm)
        return out

    # -- with a root -------------------------------------------------------------------------------------------

    def broadcast(
        self, tensor: torch.Tensor, root: int = 0, *, algorithm: Algorithm | Choice | None = None
    ) -> torch.Tensor:
        """Overwrite ``tensor`` with rank ``root``'s; return it."""
        if algorithm is None:
            done = self._repeat("broadcast", tensor, tensor, None, root)
            if done is not None:
                return done
        self._checks.element("tensor", tensor)
        self._run(
            "broadcast", tensor, tensor, tensor.numel(), tensor.numel(), None, algorithm, root, inplace=True
        )
        return tensor

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        op: str = "sum",
        *,
        algorithm: Algorithm | Choice | None = None,
    ) -> torch.Tensor:
        """Reduce over all ranks into rank ``root``'s ``tensor``, in place; other ranks' tensors stay."""
        if algorithm is None:
            done = self._repeat("reduce", tensor, tensor, op, root)
            if done is not None:
                return done
        self._checks.element("tensor", tensor)
        self._run("reduce", tensor, tensor, tensor.numel(), tensor.numel(), op, algorithm, root, inplace=True)
        return tensor

    def gather(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | Choice | None = None,
    ) -> torch.Tensor | None:
        """Return all ranks' tensors as [ranks, *shape] on rank ``root``, None elsewhere."""
        root = self._checks.rank("root", root)
        self._checks.element("tensor", tensor)
        elems = tensor.numel()
        is_root = self.rank == root
        target = self._checks.out(out, (self.size, *tensor.shape), tensor) if is_root else tensor
        self._run("gather", tensor, target, elems, elems, None, algorithm, root)
        return target if is_root else None

    def scatter(
        self,
        tensor: torch.Tensor | None,
        out: torch.Tensor,
        root: int = 0,
        *,
        algorithm: Algorithm | Choice | None = None,
    ) -> torch.Tensor:
        """Fill ``out`` with part ``rank`` of rank ``root``'s ``tensor``; other ranks pass None."""
        root = self._checks.rank("root", root)
        self._checks.element("out", out)
        if self.rank == root:
            if tensor is None:
                raise invalid("tensor", None, f"a tensor on rank {root}, the root")
            self._checks.like("tensor", tensor, out.numel() * self.size, out)
        else:
            tensor = out
        self._run("scatter", tensor, out, out.numel(), out.numel(), None, algorithm, root)
        return out

    # -- point to point ----------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Send to rank ``dst``, which calls recv(); the other ranks do nothing.

        tag: the receiver's, from 0 on. Messages come in the order in which they were sent: a tag finds none, but one
        that differs is an Error at both ends.
        Threads: messages of different peers or directions may be under way at once.
        """
        if self._repeat("send", tensor, tensor, tag, dst) is None:
            peer = self._checks.rank("peer", dst)
            self._transfer("send", tensor, self.rank, peer, peer, tag)

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> torch.Tensor:
        """Fill ``tensor`` with what rank ``src`` sends, as send() says; return it."""
        if self._repeat("recv", tensor, tensor, tag, src) is None:
            peer = self._checks.rank("peer", src)
            self._transfer("recv", tensor, peer, self.rank, peer, tag)
        return tensor

    def recv_any(self, tensor: torch.Tensor, tag: int = 0) -> int:
        """Fill ``tensor`` with what some rank sends, whoever is first; return that rank.

        Raises: Error for a tensor without elements, whose sender cannot be seen; PeerLost when no rank sends.
        """
        if tensor.numel() == 0:
            raise invalid("tensor", "no elements", "one element or more, to be received from any rank")
        self._checks.element("tensor", tensor)
        src = self._need_executor().wait_for_sender(self._next_sender)
        self._next_sender = (src + 1) % self.size  # so that every rank gets its turn
        self._transfer("recv", tensor, src, self.rank, src, tag)
        return src

    # -- any program -------------------------------------------------------------------------------------------

    def run(
        self,
        algorithm: Algorithm,
        input: torch.Tensor | None,
        output: torch.Tensor | None = None,
        op: str = "sum",
    ) -> torch.Tensor:
        """Run a program of one's own, of any collective; return the output.

        Args:
            algorithm: verified when it is first used here, with the same result on all ranks.
            input: its elements are cut into the program's input chunks; None for a rank that has none.
            output: of as many elements for each of its chunks; None: a new one, of the input's shape if it has as many
                chunks, or the input itself where the program serves in-place calls only. Memory that input and output
                share must be what the program takes for one memory.
        """
        like = input if input is not None else output
        if like is None:
            raise invalid("input", None, "a tensor as input or output")
        element = self._checks.element("input" if input is not None else "output", like)
        loaded = self._loaded_own(algorithm)
        elems = self._checks.chunk_elems(algorithm, like, is_input=input is not None)
        chunks_in, chunks_out = chunk_counts(algorithm, self.rank)
        if input is not None:
            self._checks.like("input", input, chunks_in * elems, like)
        if output is None:
            is_same = not algorithm.outofplace and input is not None and chunks_in == chunks_out
            shape = like.shape if chunks_in == chunks_out else (chunks_out * elems,)
            output = input if is_same else torch.empty(shape, dtype=like.dtype, device=like.device)
        assert output is not None
        self._checks.like("output", output, chunks_out * elems, like)
        if input is not None:
            self._checks.form(algorithm, input, output, elems)
        source = output if input is None else input
        part = elems * loaded.per_part
        reduction = reduction_number(
            op, like.dtype if loaded.reduces else torch.uint8
        )  # bytes, where it only moves
        places = address_of("input", source), address_of("output", output)
        call = Call(*places, part, element, reduction, stream=self._stream())
        self._need_executor().run(loaded, call)
        return output

    def _loaded_own(self, algorithm: Algorithm) -> Loaded:
        if not isinstance(algorithm, Algorithm):
            raise invalid("algorithm", shortened(algorithm), ALGORITHMS)
        proven(algorithm)
        return self._load(algorithm)


def _places(rows: Sequence[int], row_elems: int) -> list[tuple[int, int]]:
    places, at = [], 0
    for count in rows:
        places.append((at, count * row_elems))
        at += count * row_elems
    return places
