# SPDX-License-Identifier: Apache-2.0
"""A tensor that a send was given and later phases read: indices, and weights where owners of tokens sum with them.

    ids = Kept("topk_idx", topk_idx)       # in the send
    tensor = ids.tensor()                  # in a later phase

On the CPU it is a copy, so that the caller may write the tensor again. On CUDA that would be one more kernel in each
send: it is the caller's, and refused where torch has written it meanwhile. Threads: any.
"""

from __future__ import annotations

from torch import Tensor

from weft.errors import invalid

_NOT_COUNTED = -1


def times_written(tensor: Tensor) -> int:
    """Return how often torch has written a tensor in place; -1 of one of inference mode, where it does not count."""
    return _NOT_COUNTED if tensor.is_inference() else int(tensor._version)


class Kept:
    """A tensor as a send got it. name: of the argument."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self._name = name
        self._tensor = tensor.clone() if tensor.is_cpu else tensor
        self._times_written = times_written(self._tensor)

    def tensor(self) -> Tensor:
        """Return it. Raises: weft.Error where it has been written since."""
        if times_written(self._tensor) != self._times_written:
            raise invalid(self._name, "a tensor written after its send", "left as it is until combine_recv()")
        return self._tensor
