# SPDX-License-Identifier: Apache-2.0
"""Tensors that can be taken as they are: the core and Python agree on which, and where they lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

from weft.runtime import plain


class _Subclass(torch.Tensor):
    pass


def _cut(num_bytes: int, offset: int = 0) -> torch.Tensor:
    tensor = torch.arange(64.0)[offset:]
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(4)


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


TAKEN: dict[str, Callable[[], torch.Tensor]] = {
    "rows": lambda: torch.ones(3, 8, dtype=torch.bfloat16),
    "a part": lambda: torch.arange(24).view(3, 8)[1:],
    "a number": lambda: torch.tensor(3.0),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(4)),
    "one that needs a gradient": lambda: torch.ones(4, requires_grad=True),
    "one row of a transposed matrix": lambda: torch.ones(5, 1).t(),
    "float8": lambda: torch.ones(16).to(torch.float8_e4m3fn),
    "bool": lambda: torch.ones(5, dtype=torch.bool),
    "all that a cut storage still has": lambda: _cut(64 * 4, offset=16),
}
ASKED: dict[str, Callable[[], object]] = {
    "no tensor": lambda: [1, 2],
    "None": lambda: None,
    "an empty one": lambda: torch.ones(0, 4),
    "gaps": lambda: torch.ones(4, 8)[:, :4],
    "a broadcast": lambda: torch.ones(1).expand(4),
    "a subclass": lambda: torch.ones(4).as_subclass(_Subclass),
    "a fake one": _fake,
    "meta": lambda: torch.empty(4, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": _nested,
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.qint8),
    "negated": lambda: torch.ones(2, dtype=torch.complex64).conj().imag[:1],
    "freed": lambda: _cut(0),
    "cut": lambda: _cut(100),
    "cut behind an offset": lambda: _cut(64 * 4 - 8, offset=32),
}


@pytest.mark.parametrize("name", TAKEN)
def test_plain_tensors_are_taken_by_both(name: str) -> None:
    tensor = TAKEN[name]()
    address = tensor.detach().data_ptr()
    assert plain.plain_address(tensor) == plain.plain_address_by_python(tensor) == address
    assert plain.signature_of((tensor, None))
    assert plain.signature_by_python((tensor, None))


@pytest.mark.parametrize("name", ASKED)
def test_others_are_asked_about_by_both(name: str) -> None:
    value = ASKED[name]()
    assert plain.plain_address(value) == plain.plain_address_by_python(value) == 0


def test_conjugated_numbers_have_no_signature() -> None:
    conjugated = torch.ones(3, dtype=torch.complex64).conj()
    assert not plain.signature_of((conjugated,))
    assert not plain.signature_by_python((conjugated,))


both = pytest.mark.parametrize(
    "signature_of", [plain.signature_of, plain.signature_by_python], ids=["core", "python"]
)


@both
def test_a_signature_is_of_type_and_shape_not_of_values(signature_of: Callable[..., object]) -> None:
    base = signature_of((torch.ones(3, 4), None))
    assert base == signature_of((torch.zeros(3, 4), None))
    others = [
        signature_of((torch.ones(4, 3), None)),
        signature_of((torch.ones(12), None)),
        signature_of((torch.ones(3, 4, 1), None)),
        signature_of((torch.ones(3, 4, dtype=torch.float64), None)),
        signature_of((torch.ones(3, 4, dtype=torch.int32), None)),
        signature_of((None, torch.ones(3, 4))),
        signature_of((torch.ones(3, 4),)),
        signature_of((torch.ones(3, 4), torch.ones(3, 4))),
        signature_of((torch.ones(13)[1:].view(3, 4), None)),  # rows may not begin there
    ]
    assert all(other and other != base for other in others)
    assert len(set(others)) == len(others)


@both
def test_a_signature_has_options_with_their_types(signature_of: Callable[..., object]) -> None:
    x = torch.ones(3, 4)
    options = [(), (None,), (0,), (1,), (2,), (-1,), (True,), (False,), (b"",), (b"1",), (b"1", 1), (1, b"1")]
    options += [("",), ("1",), ("\u00fc",), ("1", 1)]
    options += [((),), ((1,),), ((True,),), ((1, 2),), ((1,), 2), (1, (2,)), (((1,),),)]
    signatures = [signature_of((x,), *given) for given in options]
    assert all(signatures)
    assert len(set(signatures)) == len(options)
    assert signatures == [signature_of((torch.zeros(3, 4),), *given) for given in options]


@both
def test_what_is_no_option_has_no_signature(signature_of: Callable[..., object]) -> None:
    assert not signature_of((torch.ones(3),), [1])
    assert not signature_of((torch.ones(3),), {})
    assert not signature_of((torch.ones(3),), (1, [2]))
    assert not plain.signature_of((torch.ones(3),), 1 << 70)
    assert not plain.signature_of((torch.ones(3),), torch.tensor(3))  # of which nothing says the value


def test_what_is_no_text_has_no_signature() -> None:
    assert not plain.signature_of((torch.ones(3),), "\ud800")


def test_a_plan_is_found_by_its_signature() -> None:
    book, x, plan = plain.PlanBook(), torch.ones(3, 4), object()
    key = (b"call", "sum", 1)
    assert plain.find_plan(book, (x,), *key) is None
    assert book.keep(plan, (x,), *key) is plan
    assert plain.find_plan(book, (torch.zeros(3, 4),), *key) is plan
    for tensors, others in (
        ((x,), (b"call", "sum", True)),
        ((x, None), key),
        ((x.int(),), key),
        ((x.t(),), key),
    ):
        assert plain.find_plan(book, tensors, *others) is None
    book.keep(object(), (x.t(),), *key)  # no plain tensor: nobody finds it
    assert list(book.values()) == [plan]
    by_python = {plain.signature_by_python((x,), *key): plan}
    assert plain.find_by_python(by_python, (torch.zeros(3, 4),), *key) is plan
    assert plain.find_by_python(by_python, (x.t(),), *key) is None


def test_the_core_reads_where_torch_describes() -> None:
    describes = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert (plain.plain_address is not plain.plain_address_by_python) == describes
