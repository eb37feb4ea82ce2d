# SPDX-License-Identifier: Apache-2.0
"""An all-reduce adds in one order for all ranks: what rounds must round alike, or copies of a model drift apart."""

from __future__ import annotations

import pytest

from weft.collectives import interpreter
from weft.collectives.contract import Buffer
from weft.collectives.library.registry import build, entries
from weft.collectives.structure import check_structure
from weft.collectives.values import Value


class _Rounded(Value):
    """A sum that knows in which order it was made. a + b is b + a, but (a + b) + c is not a + (b + c)."""

    __slots__ = ("order",)

    def __init__(self, parts: tuple[tuple[int, int], ...], order: str) -> None:
        super().__init__(parts)
        self.order = order

    def __add__(self, other: Value) -> _Rounded:
        assert isinstance(other, _Rounded)
        both = sorted((self.order, other.order))
        return _Rounded(super().__add__(other).parts, f"({both[0]}+{both[1]})")


ALL_REDUCES = [name for name, entry in entries().items() if entry.collective == "allreduce"]


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_all_ranks_get_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    initial = interpreter._initial

    def rounded(*args: object) -> dict[interpreter.Slot, Value]:
        values = initial(*args)  # type: ignore[arg-type]
        return {slot: _Rounded(value.parts, repr(value)) for slot, value in values.items()}

    monkeypatch.setattr(interpreter, "_initial", rounded)
    entry = entries()[name]
    for ranks in filter(entry.applies, range(2, 9)):
        for inplace in entry.forms:
            algorithm = build(name, ranks, inplace=inplace).compile().unrotated()
            run = interpreter.Interpreter(algorithm, inplace, check_structure(algorithm))
            assert run.hang() == ""
            chunks = entry.contract(ranks, entry.factor(ranks), inplace).output_chunks(0)
            for index in range(chunks):
                orders = {run._values[run._slot(rank, Buffer.output, index)].order for rank in range(ranks)}
                assert len(orders) == 1, (ranks, index, orders)
