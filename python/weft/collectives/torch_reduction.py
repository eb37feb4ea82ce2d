# SPDX-License-Identifier: Apache-2.0
"""Which reduction a call of torch.distributed asks for.

asked = asked_of(options, tensor)
collectives.all_reduce(asked.scaled(tensor), asked.op, out=tensor)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from weft.collectives.call_checks import reduction_number
from weft.errors import Error, invalid

_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.AVG: "average",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
    dist.ReduceOp.PREMUL_SUM: "sum",
}


@dataclass(frozen=True)
class Asked:
    """A reduction by its name here. ``factor``: of PREMUL_SUM, by which a rank's values are multiplied before."""

    op: str
    factor: float | torch.Tensor | None = None

    def scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or, where there is a factor, a new one with its values times the factor, rounded once."""
        if self.factor is None:
            return tensor
        with torch.no_grad():
            if tensor.element_size() == 1:  # torch stores such floats, and does not multiply them
                return (tensor.float() * self.factor).to(tensor.dtype)
            return torch.mul(tensor, self.factor, out=torch.empty_like(tensor))


def asked_of(options: Any, tensor: torch.Tensor) -> Asked:
    """Return the reduction that a call's options ask for, of such a tensor. Raises: Error for one that Weft lacks."""
    given = getattr(options, "reduceOp", dist.ReduceOp.SUM)
    name = next((name for known, name in _OPS.items() if given == known), None)
    if name is None:
        raise invalid("op", _name_of(given), f"{', '.join(map(_name_of, _OPS))}")
    if tensor.is_complex() and name not in ("sum", "average"):  # of each part by itself
        raise invalid("op", name, f"SUM, AVG or PREMUL_SUM of {tensor.dtype}")
    if given != dist.ReduceOp.PREMUL_SUM:
        return Asked(name)
    return Asked(name, _factor_of(given, tensor))


def _factor_of(op: Any, tensor: torch.Tensor) -> float | torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise invalid(
            "op", f"PREMUL_SUM of {tensor.dtype}", "PREMUL_SUM of floating-point or complex tensors"
        )
    reduction_number("sum", tensor.dtype.to_real())
    state: Any = op.__getstate__() if isinstance(op, dist.ReduceOp) else ()
    factor = state[1] if len(state) > 1 else None
    if factor is None:
        raise Error(
            "op: got PREMUL_SUM without a factor, allowed: one made with its factor, a number or a tensor"
        )
    if not isinstance(factor, torch.Tensor):
        return float(factor)
    is_near = factor.device in (tensor.device, torch.device("cpu"))
    if factor.numel() != 1 or factor.is_complex() or not is_near:
        shown = f"{factor.dtype}{list(factor.shape)} on {factor.device}"
        raise invalid("op's factor", shown, f"one real number, on {tensor.device} or the CPU")
    return factor.detach().reshape(())


def _name_of(op: Any) -> str:
    """Return what torch calls a reduction, such as BAND."""
    return str(op.op if isinstance(op, dist.ReduceOp) else op).rpartition(".")[2]
