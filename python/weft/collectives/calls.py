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
"op" is one of sum, product, min, max, average; a sum of torch.bool is "or", a product "and". "algorithm" is an
Algorithm to use instead of the chosen one, or a selector's Choice, which also says how it runs.
Threads: one caller at a time, the same order of calls on all ranks.
Raises: Error for a wrong argument, before anything moves; PeerLost, naming the rank that was waited for.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler

from weft import _core
from weft.collectives.contract import Buffer, Collective, Slots
from weft.collectives.exchanges import EXCHANGES
from weft.collectives.executor import CALL_NAMES, FIRST_CHANNELS, Call, Executor, Loaded
from weft.collectives.ir import Algorithm, Op, Span
from weft.collectives.language import Program
from weft.collectives.rows import ELEMENTS, REDUCTIONS
from weft.collectives.selector import COMPILED, STAGED, Choice, Selector, misfit, read_algorithms
from weft.collectives.values import Chunk
from weft.collectives.verifier import verify
from weft.errors import Error, invalid, shortened
from weft.runtime import spans
from weft.runtime.logs import follow
from weft.runtime.plain import plain_address
from weft.runtime.streams import current_stream
from weft.runtime.tensors import index_of, lacking_memory

log = logging.getLogger("weft.collectives")

_MUCH = 256 << 20  # ranks know only their own sizes, and have to choose alike: what is best for large parts
_LARGE_TRANSFER_BYTES = 256 << 10
_DTYPES = {getattr(torch, name): number for name, number in ELEMENTS.items() if hasattr(torch, name)}
_CACHED_SHAPES = 4096


class Transfer(Collective):
    """Rank ``src``'s buffer goes to rank ``dst``; the others do nothing."""

    name = "transfer"
    is_of_pairs = True

    def __init__(self, num_ranks: int, src: int, dst: int) -> None:
        super().__init__(num_ranks)
        self.src, self.dst = src, dst

    def before(self, rank: int) -> Slots:
        return self._chunks() if rank == self.src else []

    def after(self, rank: int) -> Slots:
        return self._chunks() if rank == self.dst else []

    def _chunks(self) -> Slots:
        return [Chunk(self.src, number) for number in range(self.chunk_factor)]


@functools.lru_cache(maxsize=1024)
def transfer(num_ranks: int, src: int, dst: int, instances: int = 1) -> Algorithm:
    """Return the program that sends one buffer from ``src`` to ``dst``, with so many blocks."""
    with Program(f"transfer {src} to {dst}", Transfer(num_ranks, src, dst), instances=instances) as program:
        ref = program.chunk(src, Buffer.input, 0)
        assert ref is not None
        ref.copy(dst, Buffer.output, 0)
    return program.compile()


class Collectives:
    """All collectives of one communicator. Making it is collective.

    Args: core: the core communicator. timeout_s: bound of every wait; None takes the communicator's.
    """

    def __init__(self, core: Any, timeout_s: float | None = None) -> None:
        self.rank = int(core.rank)
        self.size = int(core.size)
        self.device = str(core.device)
        self._is_cpu = self.device == "cpu"
        self._ordinal = -1 if self._is_cpu else torch.device(self.device).index
        self._executor = Executor(core, timeout_s) if self.size > 1 else None
        self._selector = _agreed_selector(core, "cpu" if self._is_cpu else "nvlink")
        self._loaded: dict[int, Loaded] = {}
        self._keeps: dict[int, bool] = {}
        self._writes: dict[int, bool] = {}
        self._kept: list[Algorithm] = []  # keeps the ids that these are keyed by alive
        self._choices: dict[tuple[str, int, int, bool], Choice] = {}
        # By signature: what runs such calls, and the elements of their output.
        self._plans: dict[tuple[Any, ...], tuple[Any, int]] = self._executor.plans if self._executor else {}
        self._next_sender = 0

    def __repr__(self) -> str:
        return f"Collectives(rank {self.rank} of {self.size}, {self.device})"

    @contextlib.contextmanager
    def within(self, timeout_s: float | None) -> Iterator[None]:
        """Bound every wait of the calls inside by ``timeout_s`` seconds; None leaves the bound as it is."""
        with self._executor.within(timeout_s) if self._executor else contextlib.nullcontext():
            yield

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
        self._element("tensor", tensor)
        elems = tensor.numel()
        if out is None:
            out = tensor
        else:
            self._check_like("out", out, elems, tensor)
            num_bytes = elems * tensor.element_size()
            if not (_are_apart(tensor, out) and self._takes_both("allreduce", num_bytes, algorithm)):
                _copy(out, tensor)
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
        self._element("tensor", tensor)
        elems = tensor.numel()
        out = self._out(out, self._shape_of_out("allgather", tensor.shape), tensor)
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
        self._element("tensor", tensor)
        self._check_parts(tensor)
        out = self._out(out, self._shape_of_out("reducescatter", tensor.shape), tensor)
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
        self._element("tensor", tensor)
        if input_splits is not None or output_splits is not None:
            return self._all_to_all_v(tensor, out, input_splits, output_splits, algorithm)
        self._check_parts(tensor)
        out = self._out(out, self._shape_of_out("alltoall", tensor.shape), tensor)
        self._run("alltoall", tensor, out, tensor.numel() // self.size, tensor.numel(), None, algorithm)
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
        self._element("tensor", tensor)
        out = self._out(out, self._shape_of_out("sendrecv", tensor.shape), tensor)
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
        self._element("tensor", tensor)
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
        self._element("tensor", tensor)
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
        root = self._check_rank("root", root)
        self._element("tensor", tensor)
        elems = tensor.numel()
        is_root = self.rank == root
        target = self._out(out, (self.size, *tensor.shape), tensor) if is_root else tensor
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
        root = self._check_rank("root", root)
        self._element("out", out)
        if self.rank == root:
            if tensor is None:
                raise invalid("tensor", None, f"a tensor on rank {root}, the root")
            self._check_like("tensor", tensor, out.numel() * self.size, out)
        else:
            tensor = out
        self._run("scatter", tensor, out, out.numel(), out.numel(), None, algorithm, root)
        return out

    # -- point to point ----------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send to rank ``dst``, which calls recv(); the other ranks do nothing."""
        if self._repeat("send", tensor, tensor, None, dst) is None:
            peer = self._check_rank("peer", dst)
            self._transfer("send", tensor, self.rank, peer, peer)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Fill ``tensor`` with what rank ``src`` sends; return it."""
        if self._repeat("recv", tensor, tensor, None, src) is None:
            peer = self._check_rank("peer", src)
            self._transfer("recv", tensor, peer, self.rank, peer)
        return tensor

    def recv_any(self, tensor: torch.Tensor) -> int:
        """Fill ``tensor`` with what some rank sends, whoever is first; return that rank.

        Raises: Error for a tensor without elements, which nobody is seen to send; PeerLost when nobody sends.
        """
        if tensor.numel() == 0:
            raise invalid("tensor", "no elements", "one element or more, to be received from any rank")
        self._element("tensor", tensor)
        src = self._need_executor().wait_for_sender(self._next_sender)
        self._next_sender = (src + 1) % self.size  # nobody is passed over for ever
        self._transfer("recv", tensor, src, self.rank, src)
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
        element = self._element("input" if input is not None else "output", like)
        loaded = self._loaded_own(algorithm)
        elems = self._chunk_elems(algorithm, like, is_input=input is not None)
        chunks_in, chunks_out = chunk_counts(algorithm, self.rank)
        if input is not None:
            self._check_like("input", input, chunks_in * elems, like)
        if output is None:
            is_same = not algorithm.outofplace and input is not None and chunks_in == chunks_out
            shape = like.shape if chunks_in == chunks_out else (chunks_out * elems,)
            output = input if is_same else torch.empty(shape, dtype=like.dtype, device=like.device)
        assert output is not None
        self._check_like("output", output, chunks_out * elems, like)
        if input is not None:
            self._check_form(algorithm, input, output, elems)
        source = output if input is None else input
        part = elems * loaded.per_part
        reduction = _reduction(op, like.dtype)
        places = _address("input", source), _address("output", output)
        call = Call(*places, part, element, reduction, stream=self._stream())
        self._need_executor().run(loaded, call)
        return output

    def _loaded_own(self, algorithm: Algorithm) -> Loaded:
        if not isinstance(algorithm, Algorithm):
            raise invalid("algorithm", type(algorithm).__name__, "an Algorithm: compile() returns one")
        if id(algorithm) not in self._loaded:
            verify(algorithm)
        return self._load(algorithm)

    def _chunk_elems(self, algorithm: Algorithm, tensor: torch.Tensor, is_input: bool) -> int:
        chunks = chunk_counts(algorithm, self.rank)[0 if is_input else 1]
        if chunks == 0 or tensor.numel() == 0 or tensor.numel() % chunks:
            name = "input" if is_input else "output"
            allowed = (
                f"a multiple of {chunks}, the chunks that rank {self.rank} of {algorithm.name} has there"
            )
            raise invalid(f"{name}'s elements", tensor.numel(), allowed)
        return tensor.numel() // chunks

    def _check_form(
        self, algorithm: Algorithm, input: torch.Tensor, output: torch.Tensor, elems: int
    ) -> None:
        """Check that what input and output share is what the program was proven for."""
        if _are_apart(input, output):
            if not algorithm.outofplace:
                raise invalid(
                    "output", "apart from the input", f"the input, as {algorithm.name} works in place"
                )
            return
        places = [0, 0]
        if algorithm.contract is not None:
            own = algorithm.contract.in_form(True)
            for at, buffer in enumerate((Buffer.input, Buffer.output)):
                to, index = own.alias(self.rank, buffer, 0)
                if to != buffer:
                    places[at] = index
        chunk = elems * input.element_size()
        begins_alike = input.data_ptr() - output.data_ptr() == (places[0] - places[1]) * chunk
        if not (algorithm.inplace and begins_alike):
            allowed = "memory apart from the input's" if algorithm.outofplace else "the input's memory"
            raise invalid("output", "memory that the input shares", f"{allowed}, as {algorithm.name} says")

    def chosen(self, collective: str, num_bytes: int) -> list[str]:
        """Return what serves calls of that collective and size so far, as "name protocol", and the mode."""
        return [
            choice.label()
            for (name, size, _, _), choice in self._choices.items()
            if (name, size) == (collective, num_bytes)
        ]

    # -- calls like earlier ones ---------------------------------------------------------------------------------

    def _repeat(
        self,
        collective: str,
        tensor: torch.Tensor,
        out: torch.Tensor | None,
        op: str | None = None,
        root: int = 0,
    ) -> torch.Tensor | None:
        """Run a call if one like it was planned; return its output. None: nothing ran, and checks will say why.

        A plan holds for all calls of a signature, but not what may change beneath it: each time it is asked whether a
        tensor is an ordinary one on the device with all its memory, and how input and output share theirs.
        """
        try:
            source = plain_address(tensor)
            target = source if out is tensor else 0 if out is None else plain_address(out)
            between = None if out is None else _overlap(tensor, source, out, target)
            kind = (tensor.dtype, tensor.shape, tensor.device)
            known = self._plans.get((collective, op, root, type(root), *kind, between))
            if known is None or source == 0:
                return None
            planned, out_elems = known
            if out is None:
                shape = self._shape_of_out(collective, tensor.shape)
                out = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
                target = out.data_ptr()
            elif out is not tensor and (
                out.dtype is not tensor.dtype or out.numel() != out_elems or out.device != tensor.device
            ):
                return None
        except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError):
            return None
        if target == 0:
            return None
        run = planned.run
        if profiler._is_profiler_enabled or spans.NVTX:
            run = spans.around(CALL_NAMES.get(collective, collective), run)
        run(source, target, self._stream())
        return out

    def _keep(
        self,
        collective: str,
        tensor: torch.Tensor,
        out: torch.Tensor,
        op: str | None,
        root: int,
        planned: Any,
    ) -> None:
        """Let _repeat() find a call of these tensors as they are."""
        if len(self._plans) >= _CACHED_SHAPES:
            self._plans.clear()
        between = _overlap(tensor, tensor.data_ptr(), out, out.data_ptr())
        signature = (collective, op, root, int, tensor.dtype, tensor.shape, tensor.device, between)
        self._plans[signature] = (planned, out.numel())

    # -- parts -------------------------------------------------------------------------------------------------

    def _transfer(self, name: str, tensor: torch.Tensor, src: int, dst: int, peer: int) -> None:
        if src == dst:
            raise invalid("peer", src, f"another rank of {self.size}")
        element = self._element("tensor", tensor)
        # One block moves some 20 GB/s between GPUs. Channels that the executor began with need no other rank.
        is_large = not self._is_cpu and tensor.numel() * tensor.element_size() >= _LARGE_TRANSFER_BYTES
        loaded = self._load(transfer(self.size, src, dst, FIRST_CHANNELS[False] if is_large else 1))
        address = _address("tensor", tensor)
        call = Call(address, address, tensor.numel(), element, stream=self._stream())
        if call.part_elems:
            planned = self._need_executor().plan(loaded, call)
            spans.run(CALL_NAMES.get(name, name), planned.run, call.input, call.output, call.stream)
            self._keep(name, tensor, tensor, None, peer, planned)

    def _run(
        self,
        collective: str,
        tensor: torch.Tensor,
        out: torch.Tensor,
        part_elems: int,
        total_elems: int,
        op: str | None,
        algorithm: Algorithm | Choice | None,
        root: int = 0,
        inplace: bool = False,
    ) -> None:
        element = _DTYPES[tensor.dtype]  # the caller has checked the tensor
        reduction = _reduction(op, tensor.dtype) if op is not None else 0
        root = self._check_rank("root", root)
        if part_elems == 0:
            return
        if self._executor is None:
            _copy(out, tensor)
            return
        num_bytes = total_elems * tensor.element_size()
        choice = self._choose(collective, num_bytes, root, inplace, algorithm)
        given = tensor
        if collective == "reduce" and self.rank != root and self._writes_buffers(choice.algorithm):
            tensor = out = tensor.clone()
        target = out
        if not (inplace or choice.algorithm.outofplace or choice.way is not None):
            tensor, target = self._joined(collective, tensor, out, choice.algorithm)
        elif not (inplace and choice.algorithm.inplace):
            tensor, target = self._apart(collective, tensor, out, root, choice.algorithm)
        call = Call(
            _address("tensor", tensor),
            _address("out", target),
            part_elems,
            element,
            reduction,
            choice.slice_bytes,
            choice.num_sms,
            self._stream(),
            choice.mode == COMPILED,
        )
        if choice.way is not None:
            planned = self._executor.plan_exchange(EXCHANGES[choice.algorithm.name], call, choice.way)
        else:
            planned = self._executor.plan(self._load(choice.algorithm), call)
        spans.run(CALL_NAMES.get(collective, collective), planned.run, call.input, call.output, call.stream)
        if target is not out:
            _copy(out, target)
        elif tensor is given and algorithm is None:
            self._keep(collective, tensor, out, op, root, planned)

    def _choose(
        self,
        collective: str,
        num_bytes: int,
        root: int,
        inplace: bool,
        algorithm: Algorithm | Choice | None,
    ) -> Choice:
        if algorithm is not None:
            if not isinstance(algorithm, (Algorithm, Choice)):
                raise invalid("algorithm", shortened(algorithm), "an Algorithm, a Choice or None")
            choice = algorithm if isinstance(algorithm, Choice) else Choice(algorithm)
            given = choice.algorithm
            if mismatch := misfit(given, collective, inplace, root, may_copy=True):
                raise invalid("algorithm", f"{given.name}, which {mismatch}", f"one for {collective}")
            if choice.way is not None and given.name not in EXCHANGES:
                raise invalid("algorithm", choice.label(), f"an exchange: {', '.join(EXCHANGES)}")
            if choice.mode == STAGED and given.protocol != "Simple":
                raise invalid("algorithm", choice.label(), "Simple with staged")
            return choice
        key = (collective, num_bytes, root, inplace)
        known = self._choices.get(key)
        if known is None:
            known = self._selector.choose(collective, num_bytes, inplace, root)
            if len(self._choices) >= _CACHED_SHAPES:
                self._choices.clear()
            self._choices[key] = known
        return known

    def _apart(
        self, collective: str, tensor: torch.Tensor, out: torch.Tensor, root: int, algorithm: Algorithm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what to run on where input and output share memory: a copy of the smaller one, as peers may read an
        input late and write an output early. Ranks need not agree on it."""
        is_unused = collective in ("gather", "scatter") and self.rank != root
        if _are_apart(tensor, out) or is_unused:
            return tensor, out
        is_own_part = out.data_ptr() + self.rank * tensor.nbytes == tensor.data_ptr()
        if collective == "allgather" and is_own_part and algorithm and self._keeps_own_part(algorithm):
            return tensor, out
        return (tensor, torch.empty_like(out)) if out.nbytes < tensor.nbytes else (tensor.clone(), out)

    def _joined(
        self, collective: str, tensor: torch.Tensor, out: torch.Tensor, algorithm: Algorithm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what an algorithm for in-place calls alone runs on: the larger tensor and its own part of it. What
        was not given so is copied there; an input that such an algorithm writes to is copied, too."""
        if collective == "alltoall":
            _copy(out, tensor)
            return out, out
        if collective == "allgather":
            own = out.view(self.size, -1)[self.rank]
            _copy(own, tensor)
            return own, out
        whole = tensor.view(self.size, -1)
        if whole[self.rank].data_ptr() == out.data_ptr() and self._keeps_other_parts(algorithm):
            return tensor, out
        whole = whole.clone()
        return whole, whole[self.rank].view(out.shape)

    def _keeps_other_parts(self, algorithm: Algorithm) -> bool:
        """Return whether this rank's in-place reduce_scatter leaves all of its input but its own part as it is."""
        contract, program = algorithm.contract, algorithm.ranks[self.rank]
        assert contract is not None
        own = {contract.alias(self.rank, Buffer.output, c) for c in range(contract.output_chunks(self.rank))}
        written = (slot for block in program.blocks for step in block.steps for slot in step.writes())
        return all(
            buffer == Buffer.scratch or contract.alias(self.rank, buffer, index) in own
            for buffer, index in written
        )

    def _keeps_own_part(self, algorithm: Algorithm) -> bool:
        """Return whether this rank's part of an all_gather's output is written by copying the input there only."""
        known = self._keeps.get(id(algorithm))
        if known is None:
            program = algorithm.ranks[self.rank]
            first = self.rank * program.input_chunks
            own = {(Buffer.output, first + c) for c in range(program.input_chunks)}
            writers = [step for block in program.blocks for step in block.steps if own & {*step.writes()}]
            known = all(
                step.op is Op.COPY and step.src == Span(Buffer.input, step.dst.index - first)
                for step in writers
            )
            self._keeps[id(algorithm)] = known
            self._kept.append(algorithm)
        return known

    def _check_rank(self, name: str, rank: int) -> int:
        number = index_of(rank)
        if number is None or not 0 <= number < self.size:
            raise invalid(name, shortened(rank) if rank is None else rank, f"0 to {self.size - 1}")
        return number

    def _writes_buffers(self, algorithm: Algorithm) -> bool:
        """Return whether this rank's program writes its input or output."""
        known = self._writes.get(id(algorithm))
        if known is None:
            steps = (step for block in algorithm.ranks[self.rank].blocks for step in block.steps)
            known = any(buffer != Buffer.scratch for step in steps for buffer, _ in step.writes())
            self._writes[id(algorithm)] = known
            self._kept.append(algorithm)
        return known

    def _takes_both(self, collective: str, num_bytes: int, algorithm: Algorithm | Choice | None) -> bool:
        """Return whether what serves an in-place call also takes an output apart from its input."""
        if self._executor is None:
            return False
        choice = self._choose(collective, num_bytes, 0, True, algorithm)
        return choice.way is not None or not choice.algorithm.inplace

    def _load(self, algorithm: Algorithm) -> Loaded:
        loaded = self._loaded.get(id(algorithm))
        if loaded is None:
            loaded = self._need_executor().load(algorithm)
            self._loaded[id(algorithm)] = loaded
            self._kept.append(algorithm)
        return loaded

    def delay_links(self, delays: Sequence[tuple[float, float]]) -> None:
        """Make the links from this rank slow, for tests on the CPU: use weft.testing.links.delay_links().

        ``delays``: (latency in ns, ns per byte) of the link to each rank; none: as fast as they are.
        """
        self._need_executor().delay_links(delays)

    def _need_executor(self) -> Executor:
        if self._executor is None:
            raise Error("a single rank has nobody to send to")
        return self._executor

    def _all_to_all_v(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None,
        input_splits: Sequence[int] | None,
        output_splits: Sequence[int] | None,
        algorithm: Algorithm | Choice | None,
    ) -> torch.Tensor:
        element = self._element("tensor", tensor)
        if tensor.dim() == 0:
            raise invalid("tensor", "no dimensions", "rows, to be split among ranks")
        row_elems = math.prod(tensor.shape[1:])
        sent = self._splits("input_splits", input_splits, tensor.shape[0])
        rows_out = (
            sum(_counts("output_splits", output_splits)) if output_splits is not None else tensor.shape[0]
        )
        came = self._splits("output_splits", output_splits, rows_out)
        if sent[self.rank] != came[self.rank]:
            raise invalid("output_splits", came[self.rank], f"{sent[self.rank]} from this rank to itself")
        out = self._out(out, (rows_out, *tensor.shape[1:]), tensor)
        if self._executor is None:
            _copy(out, tensor)
            return out
        loaded = self._load(self._choose("alltoallv", _MUCH, 0, False, algorithm).algorithm)
        tensor, target = self._apart("alltoallv", tensor, out, 0, None)
        call = Call(_address("tensor", tensor), _address("out", target), 0, element, stream=self._stream())
        self._executor.run_with_sizes(loaded, call, _places(sent, row_elems), _places(came, row_elems))
        if target is not out:
            _copy(out, target)
        return out

    def _splits(self, name: str, splits: Sequence[int] | None, rows: int) -> list[int]:
        if splits is None:
            if rows % self.size:
                raise invalid(name, None, f"given, since {rows} rows do not divide by {self.size} ranks")
            return [rows // self.size] * self.size
        counts = _counts(name, splits)
        if len(counts) != self.size or sum(counts) != rows:
            raise invalid(name, counts, f"{self.size} numbers of rows that sum to {rows}")
        return counts

    def _stream(self) -> int:
        return 0 if self._is_cpu else int(current_stream(self._ordinal))

    def _element(self, name: str, tensor: torch.Tensor) -> int:
        if not isinstance(tensor, torch.Tensor):
            raise invalid(name, type(tensor).__name__, "a torch.Tensor")
        element = _DTYPES.get(tensor.dtype)
        if element is None:
            raise invalid(f"{name}.dtype", tensor.dtype, ", ".join(str(dtype) for dtype in _DTYPES))
        if not (tensor.is_cpu if self._is_cpu else tensor.is_cuda and tensor.get_device() == self._ordinal):
            raise invalid(f"{name}.device", tensor.device, self.device)
        is_plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_neg()
        if not is_plain or not tensor.is_contiguous():
            raise invalid(name, _form(tensor), "a contiguous tensor")
        if lack := lacking_memory(tensor):
            raise invalid(name, lack, "a tensor with all its memory")
        return element

    def _out(self, out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        if out is None:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        self._check_like("out", out, math.prod(shape), like)
        return out

    def _check_like(self, name: str, tensor: torch.Tensor, elems: int, like: torch.Tensor) -> None:
        self._element(name, tensor)
        if tensor.dtype != like.dtype or tensor.numel() != elems:
            given = f"{tensor.dtype}[{tensor.numel()}]"
            raise invalid(name, given, f"{like.dtype} with {elems} elements")

    def _check_parts(self, tensor: torch.Tensor) -> None:
        if tensor.dim() == 0 or tensor.shape[0] % self.size:
            raise invalid(
                "tensor.shape", tuple(tensor.shape), f"a first dimension that divides by {self.size} ranks"
            )

    def _shape_of_out(self, collective: str, shape: torch.Size) -> tuple[int, ...]:
        if collective == "allgather":
            return (self.size, *shape)
        return (shape[0] // self.size, *shape[1:]) if collective == "reducescatter" else tuple(shape)


def chunk_counts(algorithm: Algorithm, rank: int) -> tuple[int, int]:
    """Return the chunks of a rank's input and output."""
    contract, program = algorithm.contract, algorithm.ranks[rank]
    if contract is None:
        return program.input_chunks, program.output_chunks
    return contract.input_chunks(rank), contract.output_chunks(rank)


def _agreed_selector(core: Any, machine: str) -> Selector:
    """Return a selector that chooses as every other rank's does. Collective."""
    config = _core.config()
    follow(config.log)
    cache = Path(config.cache_dir).expanduser()
    ranks = int(core.size)
    key = machine_key(str(core.device))
    places, is_first = config.algorithm_dir, int(core.rank) == 0
    per_node = ranks_per_node(core)
    if per_node:
        key = f"{key}, {per_node} a node"
    selector = Selector(
        *(ranks, machine, key, cache, places), may_copy=True, tells=is_first, per_node=per_node
    )
    prints = core.all_gather_text(selector.fingerprint()) if ranks > 1 else []
    others = [rank for rank, theirs in enumerate(prints) if theirs != prints[0]]
    if not others:
        return selector
    log.warning(
        "ranks %s read other tables or algorithms than rank 0 (WEFT_CACHE_DIR, WEFT_ALGORITHM_DIR): "
        "no rank uses any",
        others,
    )
    if int(core.rank) in others:
        read_algorithms(places, ranks)  # rank 0 told of its own files only
    return Selector(ranks, machine, per_node=per_node)


def ranks_per_node(core: Any) -> int:
    """Return how many ranks each node of a communicator has, one node after the other; 0: one node, or they differ."""
    nodes = [facts["node"] for facts in core.facts]
    per_node = nodes.count(nodes[0])
    cut = [rank // per_node for rank in range(len(nodes))]
    return per_node if per_node < len(nodes) and nodes == [nodes[0] + at for at in cut] else 0


def _address(name: str, tensor: torch.Tensor) -> int:
    """Return where a tensor's memory is. Raises: Error where it has none, as one that FakeTensorMode made."""
    address = tensor.data_ptr()
    if address == 0 and tensor.numel():
        raise invalid(name, f"{type(tensor).__name__} without memory", "a tensor with memory")
    return address


def _counts(name: str, splits: Any) -> list[int]:
    try:
        given = [index_of(count) for count in splits]
    except (TypeError, RuntimeError, NotImplementedError):
        given = [None]
    counts = [count for count in given if count is not None]
    if len(counts) < len(given) or min(counts, default=0) < 0 or sum(counts) >= 1 << 48:
        raise invalid(name, shortened(splits), "numbers of rows, none below 0")
    return counts


def _places(rows: Sequence[int], row_elems: int) -> list[tuple[int, int]]:
    places, at = [], 0
    for count in rows:
        places.append((at, count * row_elems))
        at += count * row_elems
    return places


def _form(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    if tensor.is_nested:
        return "a nested tensor"
    return "a negated view" if tensor.is_neg() else f"strides {tuple(tensor.stride())}"


def _are_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    first, second = a.data_ptr(), b.data_ptr()
    return first + a.nbytes <= second or second + b.nbytes <= first


def _overlap(tensor: torch.Tensor, source: int, out: torch.Tensor, target: int) -> int | None:
    """Return how far an input begins after the output that it shares memory with; None where it shares none."""
    is_apart = source + tensor.nbytes <= target or target + out.nbytes <= source
    return None if is_apart else source - target


def _copy(out: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy between contiguous tensors of one size, which may overlap; unseen by autograd, as every result."""
    if out.data_ptr() == tensor.data_ptr():
        return
    with torch.inference_mode():
        out.view(-1).copy_((tensor if _are_apart(tensor, out) else tensor.clone()).view(-1))


def _reduction(op: str, dtype: torch.dtype) -> int:
    if not isinstance(op, str) or op not in REDUCTIONS:
        raise invalid("op", op, ", ".join(REDUCTIONS))
    if dtype is not torch.bool:
        return REDUCTIONS[op]
    if op == "average":
        raise invalid("op", op, "sum, product, min or max of torch.bool")
    return REDUCTIONS[{"sum": "max", "product": "min"}.get(op, op)]  # or, and: a byte of a bool is 0 or 1


def machine_key(device: str) -> str:
    """Name the machine for tables: the GPU's name, or the number of cores."""
    if device == "cpu":
        import os

        return f"cpu {os.cpu_count()} cores"
    return str(torch.cuda.get_device_name(device))
