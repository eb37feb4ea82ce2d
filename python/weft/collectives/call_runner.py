# SPDX-License-Identifier: Apache-2.0
"""How a checked call runs: chosen, brought onto memory that its program takes, and planned. Plans are cached.

``Collectives`` (weft.collectives.calls) is this with a method for each collective. A call takes one of two ways:

* ``_repeat()``: one of that signature ran before, and its plan runs again. No check of arguments is made twice.
* ``_run()`` after all checks: choose, find the memory, plan, run; ``_keep()`` lets the next one take the first way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd import profiler

from weft.collectives.agreed_selector import agreed_selector
from weft.collectives.call_checks import (
    DTYPES,
    CallChecks,
    address_of,
    check_tag,
    copy_into,
    overlap,
    reduction_number,
)
from weft.collectives.call_memory import CallMemory
from weft.collectives.contract import Buffer, Collective, Slots
from weft.collectives.exchanges import EXCHANGES
from weft.collectives.executor import CALL_NAMES, FIRST_CHANNELS, Call, Executor, Loaded
from weft.collectives.ir import Algorithm
from weft.collectives.language import Program
from weft.collectives.selector import misfit
from weft.collectives.values import Chunk
from weft.collectives.variants import COMPILED, STAGED, Choice
from weft.errors import Error, invalid, shortened
from weft.runtime import spans
from weft.runtime.plain import PlanBook, find_plan, plain_address
from weft.runtime.streams import current_stream

_LARGE_TRANSFER_BYTES = 256 << 10
_CACHED_SHAPES = 4096
ALGORITHMS = "an Algorithm, which a program's compile() and weft.collectives.load(path) return"


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


class CallRunner:
    """Runs the calls of one communicator. Making it is collective; arguments as of Collectives."""

    def __init__(self, core: Any, timeout_s: float | None = None) -> None:
        self.rank = int(core.rank)
        self.size = int(core.size)
        self.device = str(core.device)
        self._is_cpu = self.device == "cpu"
        self._ordinal = -1 if self._is_cpu else torch.device(self.device).index
        self._executor = Executor(core, timeout_s) if self.size > 1 else None
        self._selector = agreed_selector(core, "cpu" if self._is_cpu else "nvlink")
        self._loaded: dict[int, Loaded] = {}
        self._held: list[Algorithm] = []  # keeps the ids that _loaded is keyed by alive
        self._checks = CallChecks(self.rank, self.size, self.device, self._ordinal)
        self._memory = CallMemory(self.rank, self.size)
        self._choices: dict[tuple[str, int, int, bool], Choice] = {}
        # What runs calls of a signature, and the elements of their output.
        self._plans = self._executor.plans if self._executor else PlanBook()
        self._next_sender = 0

    @contextlib.contextmanager
    def within(self, timeout_s: float | None) -> Iterator[None]:
        """Bound every wait of the calls inside by ``timeout_s`` seconds; None leaves the bound as it is."""
        with self._executor.within(timeout_s) if self._executor else contextlib.nullcontext():
            yield

    def chosen(self, collective: str, num_bytes: int) -> list[str]:
        """Return what serves calls of that collective and size so far, as "name protocol", and the mode."""
        return [
            choice.label()
            for (name, size, _, _), choice in self._choices.items()
            if (name, size) == (collective, num_bytes)
        ]

    def delay_links(self, delays: Sequence[tuple[float, float]]) -> None:
        """Make the links from this rank slow, for tests on the CPU: use weft.testing.links.delay_links().

        ``delays``: (latency in ns, ns per byte) of the link to each rank; none: as fast as they are.
        """
        self._need_executor().delay_links(delays)

    def _repeat(
        self,
        collective: str,
        tensor: torch.Tensor,
        out: torch.Tensor | None,
        op: str | int | None = None,
        root: int = 0,
    ) -> torch.Tensor | None:
        """Run a call if one like it was planned; return its output. None: nothing ran, and checks will say why.

        op: of a message its tag.

        A signature holds all that checks look at but the output. Each time it is asked whether that is an ordinary
        tensor with all its memory, and how input and output share theirs.
        """
        try:
            target, between = 0, 0 if out is tensor else None
            if out is not None and out is not tensor:
                target = plain_address(out)
                between = overlap(tensor, tensor.data_ptr(), out, target)
            known = find_plan(self._plans, (tensor,), collective, op, root, between)
            if known is None:
                return None
            planned, out_elems = known
            if out is None:
                shape = self._shape_of_out(collective, tensor.shape)
                out = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            elif out is not tensor and (
                target == 0
                or out.dtype is not tensor.dtype
                or out.numel() != out_elems
                or out.device != tensor.device
            ):
                return None
        except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError):
            return None
        run = planned.run
        if profiler._is_profiler_enabled or spans.NVTX:
            run = spans.around(CALL_NAMES.get(collective, collective), run)
        run(tensor.data_ptr(), out.data_ptr(), self._stream())
        return out

    def _keep(
        self,
        collective: str,
        tensor: torch.Tensor,
        out: torch.Tensor,
        op: str | int | None,
        root: int,
        planned: Any,
    ) -> None:
        """Let _repeat() find a call of these tensors as they are."""
        between = overlap(tensor, tensor.data_ptr(), out, out.data_ptr())
        self._plans.keep((planned, out.numel()), (tensor,), collective, op, root, between)

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
        element = DTYPES[tensor.dtype]  # the caller has checked the tensor
        reduction = reduction_number(op, tensor.dtype) if op is not None else 0
        root = self._checks.rank("root", root)
        if part_elems == 0:
            return
        if self._executor is None:
            copy_into(out, tensor)
            return
        num_bytes = total_elems * tensor.element_size()
        choice = self._choose(collective, num_bytes, root, inplace, algorithm)
        given = tensor
        is_exchange = choice.way is not None
        is_unasked = collective == "reduce" and self.rank != root  # its buffer stays as it is
        if is_unasked and not is_exchange and self._memory.writes_buffers(choice.algorithm):
            tensor = out = tensor.clone()
        target = out
        if not (inplace or choice.algorithm.outofplace or is_exchange):
            tensor, target = self._memory.joined(collective, tensor, out, choice.algorithm)
        elif not (inplace and choice.algorithm.inplace):
            tensor, target = self._memory.apart(collective, tensor, out, root, choice.algorithm)
        call = Call(
            address_of("tensor", tensor),
            address_of("out", target),
            part_elems,
            element,
            reduction,
            choice.slice_bytes,
            choice.num_sms,
            self._stream(),
            choice.mode == COMPILED,
        )
        if choice.way is not None:
            planned = self._executor.plan_exchange(EXCHANGES[choice.algorithm.name], call, choice.way, root)
        else:
            planned = self._executor.plan(self._load(choice.algorithm), call)
        spans.run(CALL_NAMES.get(collective, collective), planned.run, call.input, call.output, call.stream)
        if target is not out:
            copy_into(out, target)
        elif tensor is given and algorithm is None:
            self._keep(collective, tensor, out, op, root, planned)

    def _transfer(self, name: str, tensor: torch.Tensor, src: int, dst: int, peer: int, tag: int) -> None:
        if src == dst:
            raise invalid("peer", src, f"another rank of {self.size}")
        element = self._checks.element("tensor", tensor)
        tag = check_tag(tag)
        # One block moves some 20 GB/s between GPUs. Channels that the executor began with need no other rank.
        is_large = not self._is_cpu and tensor.numel() * tensor.element_size() >= _LARGE_TRANSFER_BYTES
        loaded = self._load(transfer(self.size, src, dst, FIRST_CHANNELS[False] if is_large else 1))
        address = address_of("tensor", tensor)
        call = Call(address, address, tensor.numel(), element, stream=self._stream(), tag=tag)
        if call.part_elems:
            planned = self._need_executor().plan(loaded, call)
            spans.run(CALL_NAMES.get(name, name), planned.run, call.input, call.output, call.stream)
            self._keep(name, tensor, tensor, tag, peer, planned)

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
                raise invalid("algorithm", shortened(algorithm), f"{ALGORITHMS}; a Choice or None")
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
            self._held.append(algorithm)
        return loaded

    def _need_executor(self) -> Executor:
        if self._executor is None:
            raise Error("a single rank has nobody to send to")
        return self._executor

    def _stream(self) -> int:
        return 0 if self._is_cpu else int(current_stream(self._ordinal))

    def _shape_of_out(self, collective: str, shape: torch.Size) -> tuple[int, ...]:
        if collective == "allgather":
            return (self.size, *shape)
        return (shape[0] // self.size, *shape[1:]) if collective == "reducescatter" else tuple(shape)
