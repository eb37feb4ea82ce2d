# SPDX-License-Identifier: Apache-2.0
"""Tensors as torch.distributed gives them, of any strides, complex or sparse, as what collectives take.

in_place(tensor, lambda dense: collectives.all_reduce(dense))
add_up(sparse, Asked("sum"), lambda tensor: collectives)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from weft.collectives.calls import Collectives
from weft.collectives.torch_reduction import Asked
from weft.errors import invalid
from weft.runtime.tensors import PLAIN, unlike_memory

CollectivesOf = Callable[[torch.Tensor], Collectives]  # those of a tensor's device


def real_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory in a type that collectives have. Raises: Error for a tensor without memory
    here."""
    if not isinstance(tensor, torch.Tensor):
        raise invalid("tensor", type(tensor).__name__, "a torch.Tensor")
    if tensor.device.type not in ("cpu", "cuda"):
        raise invalid("tensor.device", tensor.device, "cpu or cuda")
    if why := unlike_memory(tensor):
        raise invalid("tensor", why, PLAIN)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def check_parts(
    name: str, parts: Sequence[torch.Tensor], ranks: int, like: torch.Tensor, own: int | None = None
) -> None:
    """Check that a list has one tensor for each rank, of one type, each with as many elements as ``like``.

    own: the only place whose number of elements counts; None: all do.
    """
    if len(parts) != ranks:
        raise invalid(name, f"{len(parts)} tensors", f"{ranks}, one for each rank")
    for at, part in enumerate(parts):
        is_counted = own is None or at == own
        if part.dtype != like.dtype or (is_counted and part.numel() != like.numel()):
            size = f" with {like.numel()} elements" if is_counted else ""
            raise invalid(f"{name}[{at}]", f"{part.dtype}[{part.numel()}]", f"{like.dtype}{size}")


def are_even(parts: Sequence[torch.Tensor]) -> bool:
    """Say whether all tensors of a list have as many elements."""
    return all(part.numel() == parts[0].numel() for part in parts)


def in_place(tensor: torch.Tensor, act: Callable[[torch.Tensor], object]) -> None:
    """Let ``act`` change a tensor of any strides, as a dense one."""
    real = real_of(tensor)
    if real.is_contiguous():
        act(real)
        return
    dense = real.contiguous()
    act(dense)
    with torch.no_grad():
        real.copy_(dense)


def into(output: torch.Tensor, act: Callable[[torch.Tensor], object]) -> None:
    """Let ``act`` fill a tensor of any strides, as a dense one."""
    real = real_of(output)
    if real.is_contiguous():
        act(real)
        return
    dense = torch.empty_like(real, memory_format=torch.contiguous_format)
    act(dense)
    with torch.no_grad():
        real.copy_(dense)


def gather_uneven(parts: Sequence[torch.Tensor], tensor: torch.Tensor, rank: int, of: CollectivesOf) -> None:
    """Fill ``parts[r]`` with rank r's tensor. Every rank's list has the same sizes, so that all take this way."""

    def fill(part: torch.Tensor, root: int) -> None:
        of(part).broadcast(part, root)

    own = real_of(parts[rank])
    own.copy_(real_of(tensor).reshape(own.shape))
    for root, part in enumerate(parts):
        in_place(part, partial(fill, root=root))


def reduce_scatter_uneven(
    output: torch.Tensor, parts: Sequence[torch.Tensor], rank: int, asked: Asked, of: CollectivesOf
) -> None:
    """Fill ``output`` with the reduction of all ranks' ``parts[rank]``; sizes as gather_uneven() has them."""
    result = asked.scaled(real_of(parts[rank]).clone(memory_format=torch.contiguous_format))
    for root, part in enumerate(parts):
        given = result if root == rank else asked.scaled(real_of(part).contiguous())
        of(given).reduce(given, root, asked.op)
    real = real_of(output)
    real.copy_(result.view(real.shape))


def add_up(tensor: torch.Tensor, asked: Asked, of: CollectivesOf) -> None:
    """Add up sparse COO tensors of one form; each rank may have other elements, and as many as it likes."""
    if asked.op != "sum":
        raise invalid("op", asked.op, "SUM or PREMUL_SUM, for sparse tensors")
    own = tensor.detach().coalesce()
    indices, values = own.indices(), real_of(own.values())
    form = [own.sparse_dim(), *own.shape, *values.shape[1:]]
    facts = torch.tensor([values.shape[0], *_fixed(form)], device=tensor.device)
    counts = of(facts).all_gather(facts)
    if not (counts[:, 1:] == counts[0, 1:]).all():
        raise invalid(
            "tensor", f"shape {tuple(own.shape)}", "the same shape and sparse dimensions on all ranks"
        )
    sizes = counts[:, 0].tolist()
    all_indices = _gather_rows(indices.t().contiguous(), sizes, of)
    all_values = _gather_rows(asked.scaled(values.contiguous()), sizes, of)
    if own.is_complex():
        all_values = torch.view_as_complex(all_values)
    total = torch.sparse_coo_tensor(all_indices.t(), all_values, own.shape).coalesce()
    with torch.no_grad():
        tensor.copy_(total)


def _gather_rows(rows: torch.Tensor, sizes: Sequence[int], of: CollectivesOf) -> torch.Tensor:
    """Return all ranks' rows, ``sizes[r]`` from rank r, in rank order."""
    most = max(sizes)
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    gathered = of(padded).all_gather(padded)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])


_FORM_NUMBERS = 16


def _fixed(form: Sequence[int]) -> list[int]:
    """Return the numbers of a sparse tensor's form, filled up to a length that all ranks have."""
    if len(form) > _FORM_NUMBERS:
        raise invalid("tensor", f"{len(form)} sizes", f"a sparse tensor of at most {_FORM_NUMBERS} sizes")
    return [*form, *[-1] * (_FORM_NUMBERS - len(form))]
