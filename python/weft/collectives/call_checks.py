# SPDX-License-Identifier: Apache-2.0
"""What collectives check about tensors before anything moves, and how tensors share memory.

Every check raises weft.Error that names the argument, what was given and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.collectives.contract import Buffer
from weft.collectives.ir import Algorithm
from weft.collectives.rows import BITWISE, ELEMENTS, MOVED_ELEMENTS, REDUCTIONS
from weft.errors import invalid, shortened
from weft.runtime.tensors import PLAIN, index_of, unlike_memory


def _dtypes(elements: Mapping[str, int]) -> dict[torch.dtype, int]:
    """Return the core's numbers of element types, by torch's types, as far as this torch has them."""
    return {getattr(torch, name): number for name, number in elements.items() if hasattr(torch, name)}


DTYPES = _dtypes({**ELEMENTS, **MOVED_ELEMENTS})
_REDUCED = _dtypes(ELEMENTS)


class CallChecks:
    """Checks the arguments of one communicator's calls.

    Args: device: of the communicator, as "cpu" or "cuda:1"; ordinal: its number, -1 for the CPU. rank, size: of it.
    """

    def __init__(self, rank: int, size: int, device: str, ordinal: int) -> None:
        self._rank, self._size, self._device, self._ordinal = rank, size, device, ordinal
        self._is_cpu = ordinal < 0

    def rank(self, name: str, rank: int) -> int:
        """Check that it is a rank; return it as an int."""
        number = index_of(rank)
        if number is None or not 0 <= number < self._size:
            raise invalid(name, shortened(rank) if rank is None else rank, f"0 to {self._size - 1}")
        return number

    def element(self, name: str, tensor: torch.Tensor) -> int:
        """Check that a tensor is one that programs move; return the number of its element type."""
        if not isinstance(tensor, torch.Tensor):
            raise invalid(name, type(tensor).__name__, "a torch.Tensor")
        element = DTYPES.get(tensor.dtype)
        if element is None:
            raise invalid(f"{name}.dtype", tensor.dtype, ", ".join(str(dtype) for dtype in DTYPES))
        if not (tensor.is_cpu if self._is_cpu else tensor.is_cuda and tensor.get_device() == self._ordinal):
            raise invalid(f"{name}.device", tensor.device, self._device)
        if why := unlike_memory(tensor):
            raise invalid(name, why, PLAIN)
        if not tensor.is_contiguous():
            raise invalid(name, f"strides {tuple(tensor.stride())}", "a contiguous tensor")
        return element

    def out(self, out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Return an output of that many elements: the one that was given, or a new one."""
        if out is None:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        self.like("out", out, math.prod(shape), like)
        return out

    def like(self, name: str, tensor: torch.Tensor, elems: int, like: torch.Tensor) -> None:
        """Check that a tensor has ``elems`` elements of ``like``'s type."""
        self.element(name, tensor)
        if tensor.dtype != like.dtype or tensor.numel() != elems:
            given = f"{tensor.dtype}[{tensor.numel()}]"
            raise invalid(name, given, f"{like.dtype} with {elems} elements")

    def parts(self, tensor: torch.Tensor) -> None:
        """Check that a tensor has an equal part for every rank."""
        if tensor.dim() == 0 or tensor.shape[0] % self._size:
            raise invalid(
                "tensor.shape", tuple(tensor.shape), f"a first dimension that divides by {self._size} ranks"
            )

    def splits(self, name: str, splits: Sequence[int] | None, rows: int) -> list[int]:
        """Return how many of ``rows`` rows belong to each rank; None: equal shares."""
        if splits is None:
            if rows % self._size:
                raise invalid(name, None, f"given, since {rows} rows do not divide by {self._size} ranks")
            return [rows // self._size] * self._size
        counts = row_counts(name, splits)
        if len(counts) != self._size or sum(counts) != rows:
            raise invalid(name, counts, f"{self._size} numbers of rows that sum to {rows}")
        return counts

    def chunk_elems(self, algorithm: Algorithm, tensor: torch.Tensor, is_input: bool) -> int:
        """Return how many elements a chunk of a program's input or output has."""
        chunks = chunk_counts(algorithm, self._rank)[0 if is_input else 1]
        if chunks == 0 or tensor.numel() == 0 or tensor.numel() % chunks:
            name = "input" if is_input else "output"
            allowed = (
                f"a multiple of {chunks}, the chunks that rank {self._rank} of {algorithm.name} has there"
            )
            raise invalid(f"{name}'s elements", tensor.numel(), allowed)
        return tensor.numel() // chunks

    def form(self, algorithm: Algorithm, input: torch.Tensor, output: torch.Tensor, elems: int) -> None:
        """Check that what input and output share is what the program was proven for."""
        if are_apart(input, output):
            if not algorithm.outofplace:
                raise invalid(
                    "output", "apart from the input", f"the input, as {algorithm.name} works in place"
                )
            return
        places = [0, 0]
        if algorithm.contract is not None:
            own = algorithm.contract.in_form(True)
            for at, buffer in enumerate((Buffer.input, Buffer.output)):
                to, index = own.alias(self._rank, buffer, 0)
                if to != buffer:
                    places[at] = index
        chunk = elems * input.element_size()
        begins_alike = input.data_ptr() - output.data_ptr() == (places[0] - places[1]) * chunk
        if not (algorithm.inplace and begins_alike):
            allowed = "memory apart from the input's" if algorithm.outofplace else "the input's memory"
            raise invalid("output", "memory that the input shares", f"{allowed}, as {algorithm.name} says")


def chunk_counts(algorithm: Algorithm, rank: int) -> tuple[int, int]:
    """Return the chunks of a rank's input and output."""
    contract, program = algorithm.contract, algorithm.ranks[rank]
    if contract is None:
        return program.input_chunks, program.output_chunks
    return contract.input_chunks(rank), contract.output_chunks(rank)


def address_of(name: str, tensor: torch.Tensor) -> int:
    """Return where a tensor's memory is. Raises: Error where it has none, as one that FakeTensorMode made."""
    address = tensor.data_ptr()
    if address == 0 and tensor.numel():
        raise invalid(name, f"{type(tensor).__name__} without memory", "a tensor with memory")
    return address


def check_tag(tag: Any) -> int:
    """Return a message's tag as an int."""
    number = index_of(tag)
    if number is None or not 0 <= number < 1 << 31:
        raise invalid("tag", shortened(tag), "a whole number from 0 to 2147483647")
    return number


def row_counts(name: str, splits: Any) -> list[int]:
    """Return numbers of rows as ints."""
    try:
        given = [index_of(count) for count in splits]
    except (TypeError, RuntimeError, NotImplementedError):
        given = [None]
    counts = [count for count in given if count is not None]
    if len(counts) < len(given) or min(counts, default=0) < 0 or sum(counts) >= 1 << 48:
        raise invalid(name, shortened(splits), "numbers of rows, none below 0")
    return counts


def are_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two contiguous tensors share no byte."""
    first, second = a.data_ptr(), b.data_ptr()
    return first + a.nbytes <= second or second + b.nbytes <= first


def overlap(tensor: torch.Tensor, source: int, out: torch.Tensor, target: int) -> int | None:
    """Return how far an input begins after the output that it shares memory with; None where it shares none."""
    is_apart = source + tensor.nbytes <= target or target + out.nbytes <= source
    return None if is_apart else source - target


def copy_into(out: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy between contiguous tensors of one size, which may overlap; unseen by autograd, as every result."""
    if out.data_ptr() == tensor.data_ptr():
        return
    with torch.inference_mode():
        out.view(-1).copy_((tensor if are_apart(tensor, out) else tensor.clone()).view(-1))


def reduction_number(op: str, dtype: torch.dtype) -> int:
    """Return the core's number of an operation on elements of that type."""
    if not isinstance(op, str) or op not in REDUCTIONS:
        raise invalid("op", op, ", ".join(REDUCTIONS))
    if dtype not in _REDUCED:
        raise invalid(
            "op", f"{op} of {dtype}", f"moves of it alone; reductions of {', '.join(map(str, _REDUCED))}"
        )
    if op in BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise invalid("op", f"{op} of {dtype}", f"{op} of integers and torch.bool")
    if dtype is not torch.bool:
        return REDUCTIONS[op]
    if op == "average":
        raise invalid("op", op, "sum, product, min, max, band, bor or bxor of torch.bool")
    return REDUCTIONS[{"sum": "max", "product": "min"}.get(op, op)]  # or, and: a byte of a bool is 0 or 1
