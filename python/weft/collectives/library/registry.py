# SPDX-License-Identifier: Apache-2.0
"""The list of library algorithms. Each is a function over the rank count, registered by a decorator.

@algorithm(AllGather, factor=lambda n: 1)
def allgather_allpairs(n: int) -> None: ...

build("allgather_allpairs", 8, inplace=True, protocol="LL").compile()
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from weft.collectives.contract import Collective
from weft.collectives.language import Program
from weft.errors import invalid

Body = Callable[..., None]


def any_ranks(n: int) -> bool:
    return n >= 2


def power_of_two(n: int) -> bool:
    return n >= 2 and n & (n - 1) == 0


def even(n: int) -> bool:
    return n >= 4 and n % 2 == 0


@dataclasses.dataclass(frozen=True)
class Entry:
    """One algorithm: its contract, for which rank counts it exists, and the function that writes it."""

    name: str
    contract: Callable[..., Collective]
    body: Body
    applies: Callable[[int], bool]
    factor: Callable[..., int]
    forms: tuple[bool, ...]

    @property
    def collective(self) -> str:
        return str(getattr(self.contract, "name", "custom"))

    @property
    def options(self) -> list[str]:
        """Names of the algorithm's own options, beside the rank count."""
        return list(inspect.signature(self.body).parameters)[1:]

    @property
    def summary(self) -> str:
        return (self.body.__doc__ or "").strip().splitlines()[0]

    def program(
        self,
        ranks: int,
        inplace: bool = False,
        protocol: str = "Simple",
        instances: int = 1,
        min_bytes: int = 0,
        max_bytes: int | None = None,
        **options: Any,
    ) -> Program:
        """Return the traced program. Raises: Error when it does not exist for ``ranks`` or the form."""
        if not self.applies(ranks):
            raise invalid("ranks", ranks, f"what {self.name} is written for: {self.summary}")
        if instances < 1:
            raise invalid("instances", instances, "1 or more")
        if inplace not in self.forms:
            raise invalid("inplace", inplace, f"{self.forms[0]} for {self.name}")
        known = {key: value for key, value in options.items() if key in self.options}
        contract_options = {key: value for key, value in options.items() if key in ("root", "shift")}
        unknown = options.keys() - known.keys() - contract_options.keys()
        if unknown:
            raise invalid("options", sorted(unknown), f"{', '.join(self.options) or 'none'} for {self.name}")
        contract = self.contract(ranks, self.factor(ranks, **known), inplace, **contract_options)
        program = Program(
            self.name, contract, None, instances, protocol, min_bytes=min_bytes, max_bytes=max_bytes
        )
        with program:
            self.body(ranks, **known)
        return program


_ENTRIES: dict[str, Entry] = {}


def algorithm(
    contract: Callable[..., Collective],
    factor: Callable[..., int] = lambda n, **_: 1,
    applies: Callable[[int], bool] = any_ranks,
    forms: tuple[bool, ...] = (False, True),
) -> Callable[[Body], Body]:
    """Register a function as library algorithm. ``forms``: out of place (False), in place (True), or both."""

    def register(body: Body) -> Body:
        name = body.__name__
        _ENTRIES[name] = Entry(name, contract, body, applies, factor, forms)
        return body

    return register


def entries() -> dict[str, Entry]:
    """Return all algorithms by name, in the order in which they are written."""
    return dict(_ENTRIES)


def build(name: str, ranks: int, **options: Any) -> Program:
    """Return the program of the algorithm ``name``. Options: those of Entry.program(), and the algorithm's own."""
    if name not in _ENTRIES:
        raise invalid("name", name, ", ".join(sorted(_ENTRIES)))
    return _ENTRIES[name].program(ranks, **options)
