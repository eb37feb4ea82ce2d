# SPDX-License-Identifier: Apache-2.0
"""What may be registered with a transfer engine, and what may happen to it meanwhile."""

from __future__ import annotations

import contextlib
import gc
import mmap
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.errors import Error
from weft.runtime.tensors import unlike_memory
from weft.testing.ranks import Rank, run_ranks
from weft.transfer import Memory, TransferEngine, nics

PROVIDERS = ["loopback", "fabric:tcp", "fabric:shm"]
TIMEOUT_S = 60.0
BYTES = 8 << 20  # the C library gives pieces of this size back to the system as soon as they are free


class _Wrapper(torch.Tensor):
    """A subclass whose tensors hold others, as DTensor's do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(function))


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(4)


def _freed() -> torch.Tensor:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


STRANGE: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "conjugated": (lambda: torch.zeros(4, dtype=torch.complex64).conj(), "a conjugated view"),
    "negated": (lambda: torch._neg_view(torch.zeros(4)), "a negated view"),
    "imaginary": (lambda: torch.zeros(1, dtype=torch.complex64).conj().imag, "a negated view"),
    "sparse": (lambda: torch.zeros(4).to_sparse(), "torch.sparse_coo"),
    "sparse rows": (lambda: torch.zeros(4, 4).to_sparse_csr(), "torch.sparse_csr"),
    "meta": (lambda: torch.zeros(4, device="meta"), "a tensor on meta"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8),
        "a quantised tensor of torch.quint8",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(4)]), "a nested tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.zeros(4)], layout=torch.jagged),
        "torch.jagged",
    ),
    "fake": (_fake, "FakeTensor without"),
    "wrapper": (lambda: _Wrapper(torch.zeros(4)), "_Wrapper without"),
    "freed": (_freed, "storage of 0 bytes"),
    "strided": (lambda: torch.zeros(8)[::2], "a tensor with strides"),
    "expanded": (lambda: torch.zeros(1).expand(4), "a tensor with strides"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_tensor_whose_memory_is_not_its_values_is_refused(kind: str) -> None:
    make, words = STRANGE[kind]
    with TransferEngine("loopback") as engine, pytest.raises(Error, match=r"^source: got ") as raised:
        engine.register(make(), remote_write=True)
    assert words in str(raised.value) and ", allowed: " in str(raised.value)


@pytest.mark.parametrize("kind", [kind for kind in STRANGE if kind not in ("meta", "strided", "expanded")])
def test_all_parts_of_weft_refuse_such_tensors_in_the_same_words(kind: str) -> None:
    import weft
    from weft.moe.arguments import check_tensor
    from weft.runtime.bootstrap import SingleRank

    make, words = STRANGE[kind]
    why = unlike_memory(make())
    assert words in why
    refused: list[Callable[[torch.Tensor], Any]] = [
        lambda given: check_tensor("x", given, tuple(given.shape), (), given.device),
    ]
    if make().dtype == torch.float32:
        comm = weft.Communicator(SingleRank(), device="cpu")
        refused.append(comm.all_reduce)
    if "nested" in kind or kind == "jagged":  # which have no shape to be compared
        refused = refused[1:]
    for call in refused:
        with pytest.raises(Error) as raised:
            call(make())
        assert why in str(raised.value), raised.value


class _Registered:
    """Memory of engine b that engine a writes to, all of it."""

    def __init__(self, provider: str, target: Any) -> None:
        self.a = TransferEngine(provider, name="a", timeout_s=TIMEOUT_S)
        self.b = TransferEngine(provider, name="b", timeout_s=TIMEOUT_S)
        self.source = torch.arange(BYTES // 8)
        self.src = self.a.register(self.source)
        self.memory: Memory = self.b.register(target, remote_write=True)
        self.peer = self.a.connect(self.b.address)
        self.remote = self.a.attach(self.memory.descriptor)
        (self.back,) = self.b.peers
        self.writes = 0

    def write(self) -> None:
        self.writes += 1
        self.a.write(self.src, self.remote, imm=1).wait()
        self.b.imm(self.back, 1).wait(self.writes)

    def close(self) -> None:
        self.a.close()
        self.b.close()


def _hold_tensor(rank: Rank, provider: str) -> None:
    target = torch.zeros(BYTES // 8, dtype=torch.int64)
    alias = target.view(2, -1)
    held = _Registered(provider, target)
    for resize in (
        lambda: target.untyped_storage().resize_(0),
        lambda: target.untyped_storage().resize_(2 * BYTES),
        lambda: target.resize_(BYTES),
        lambda: target.resize_((BYTES, 2)),
        lambda: target.resize_as_(torch.zeros(BYTES, dtype=torch.int64)),
        lambda: alias.resize_(BYTES),
    ):
        with pytest.raises(
            Error, match=r"^resize_: got a tensor whose storage is registered with a transfer engine"
        ):
            resize()
        held.write()
    assert target.resize_(4).tolist() == [0, 1, 2, 3]  # which moves nothing
    target.resize_(BYTES // 8)
    held.write()
    assert torch.equal(target, held.source)
    # Without a resize, too, memory lives as long as it is registered.
    target.set_()
    alias.data = torch.zeros(1, dtype=torch.int64)
    gc.collect()
    held.write()
    held.memory.unregister()
    again = torch.zeros(BYTES // 8, dtype=torch.int64)
    memory = held.b.register(again, remote_write=True)
    memory.unregister()
    again.untyped_storage().resize_(0)
    assert again.untyped_storage().nbytes() == 0
    held.close()


def _notice_what_torch_moved(rank: Rank, provider: str) -> None:
    target = torch.zeros(4, dtype=torch.int64)
    with TransferEngine(provider) as a, TransferEngine(provider) as b:
        memory = b.register(target)
        peer = b.connect(a.address)
        torch.add(torch.zeros(1 << 10, dtype=torch.int64), 1, out=target)
        for call in (lambda: b.send(peer, memory), lambda: b.recv(peer, memory)):
            with pytest.raises(
                Error, match=r"^(src|dst): got memory that was resized since it was registered"
            ):
                call()
        memory.unregister()
        b.send(peer, b.register(target)).cancel()


def _hold_buffers(rank: Rank, provider: str) -> None:
    array, pages, numbers = bytearray(BYTES), mmap.mmap(-1, BYTES), numpy.zeros(BYTES // 8, dtype=numpy.int64)
    resizes: list[tuple[Any, tuple[Callable[[], Any], ...]]] = [
        (array, (lambda: array.extend(b"more"), array.clear)),
        (pages, (pages.close, lambda: pages.resize(2 * BYTES))),
        (numbers, (lambda: numbers.resize(BYTES),)),
    ]
    for target, attempts in resizes:
        held = _Registered(provider, target)
        for attempt in attempts:
            with contextlib.suppress(BufferError, ValueError, SystemError):
                attempt()
                raise AssertionError("it was resized")
            held.write()
        assert bytes(memoryview(target).cast("B")[:16]) == held.source[:2].numpy().tobytes()
        held.memory.unregister()
        held.close()


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("act", [_hold_tensor, _notice_what_torch_moved, _hold_buffers])
def test_registered_memory_stays_in_place(act: Callable[[Rank, str], None], provider: str) -> None:
    unusable = [nic.unusable_because for nic in nics(provider)]
    if all(unusable):
        pytest.skip(unusable[0])
    run_ranks(1, act, provider, with_group=False)  # a rank, as what fails may end its process
