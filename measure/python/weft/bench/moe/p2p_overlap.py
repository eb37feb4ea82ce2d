# SPDX-License-Identifier: Apache-2.0
"""How much of a split exchange is hidden by matrix products between its send and its receive.

Each pair of phases is measured with a product between them: with phases on all SMs, and with phases on few SMs beside
the product; on GPUs as graphs. cuBLAS is told to leave those SMs alone: else a product that spreads its work over all
SMs ends as late as the last of them. exposed_us is the time of the pair with the product, less that of the product on
all SMs. hidden_share is 1 - exposed_us / (the pair alone on all SMs, less an empty graph): 1 where the product takes no
longer than without the pair.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import weft
from weft.bench.moe import peers
from weft.bench.moe.clock import Bench, Inputs
from weft.bench.moe.rows import shape_columns
from weft.bench.report import Note, Row

SMS = (0, 4, 6, 8, 10, 12, 14, 16)  # 0: all, on the caller's stream
STEPS = ("dispatch", "combine")
Make = Callable[[int], weft.P2PAllToAll]  # of so many SMs


@dataclass(frozen=True)
class Product:
    """Matrix products [m, k] x [k, n], one after another, that take about the time that was asked for."""

    name: str
    shape: tuple[int, int, int]  # m, k, n
    times: int
    run: Callable[[], None]


class Overlap:
    """Takes the samples. Collective, as every method."""

    def __init__(self, bench: Bench, inputs: Inputs, x: peers.Payload, y: Tensor, make: Make) -> None:
        self._bench = bench
        self._topk_idx = inputs.routes[0][bench.me.rank].to(bench.device, copy=True)
        self._products = [_product_of(bench, *of) for of in _shapes(bench).items()]
        self._kept: list[Any] = []
        self._calls: dict[str, Callable[[], Any]] = {}
        if bench.options.is_captured:
            self._calls["empty"] = self._captured(torch.zeros(1, device=bench.device).zero_)[0]
        for product, sms in itertools.product(self._products, self._sms):
            run = _leaving(bench, sms, product.run)
            is_captured = bench.options.is_captured
            self._calls[f"product {product.name} {sms}"] = self._captured(run)[0] if is_captured else run
        self.splits = [peers.P2P(make(sms), x, inputs.my_weights) for sms in self._sms]
        for sms, split in zip(self._sms, self.splits, strict=True):
            self._add(f"nothing {sms}", split, y, lambda: None)
            for product in self._products:
                self._add(f"{product.name} {sms}", split, y, _leaving(bench, sms, product.run))

    @property
    def _sms(self) -> tuple[int, ...]:
        return SMS if self._bench.on_gpu else SMS[:1]

    def _add(self, name: str, split: peers.P2P, y: Tensor, between: Callable[[], None]) -> None:
        a2a, handles = split.buffer, [None]

        def dispatch() -> Any:
            handles[0] = split.send(self._topk_idx)
            between()
            return a2a.dispatch_recv(handles[0])

        def combine() -> Any:
            a2a.combine_send(y, handles[0])
            between()
            return a2a.combine_recv(handles[0])

        for step, call in (("dispatch", dispatch), ("combine", combine)):
            self._calls[f"{name} {step}"] = call
        if not self._bench.options.is_captured:
            return
        for _ in range(2):
            dispatch(), combine()
        for step, call in (("dispatch", dispatch), ("combine", combine)):
            self._calls[f"{name} {step}"] = self._captured(call)[0]

    def _captured(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            results = call()
        self._kept.append(results)  # replays write there
        return graph.replay, results

    def take(self, topk_idx: Tensor) -> None:
        """Take one sample of everything along this rank's routes."""
        self._topk_idx.copy_(topk_idx)
        for name, call in self._calls.items():
            self._bench.sample(f"overlap {name}", call)
        if self._bench.on_gpu:
            torch.cuda.synchronize()  # a stream that is full of these would keep the host from the next sample

    def rows(self, us: dict[str, list[float]]) -> list[Row]:
        """Return a row of each step, product and number of SMs."""
        empty = statistics.median(us["overlap empty"]) if "overlap empty" in us else 0.0
        return [
            self._row(us, empty, step, product, sms)
            for step in STEPS
            for product in self._products
            for sms in self._sms
        ]

    def _row(self, us: dict[str, list[float]], empty: float, step: str, product: Product, sms: int) -> Row:
        o = self._bench.options
        both = us[f"overlap {product.name} {sms} {step}"]
        alone, with_all_sms = (
            statistics.median(us[f"overlap nothing {number} {step}"]) for number in (sms, 0)
        )
        product_us, few_us = (
            statistics.median(us[f"overlap product {product.name} {number}"]) for number in (0, sms)
        )
        made = Row(
            f"p2p_{step}.beside",
            o.dtype if step == "dispatch" else "bf16",
            o.tokens,
            0,
            both,
            checked=True,
            series=f"{product.name}, {sms or 'all'} SMs",
        )
        exposed = made.us - product_us
        made.extra = shape_columns(self._bench) | {
            "product": f"{product.times} of {'x'.join(map(str, product.shape))}",
            "sms": sms,
            "product_us": round(product_us, 1),
            "product_few_us": round(few_us, 1),
            "alone_us": round(alone, 1),
            "exposed_us": round(exposed, 1),
            "hidden_share": round(1 - exposed / max(with_all_sms - empty, 1e-3), 3),
        }
        return made

    def destroy(self) -> None:
        """Give all memory back."""
        self._calls, self._kept = {}, []
        for split in self.splits:
            split.buffer.destroy()


def notes() -> list[Note]:
    """Return what the report says of the columns."""
    return [
        Note("beside: a matrix product runs between send and receive"),
        Note(
            "sms: SMs that the phases use and cuBLAS does not; 0: all SMs, on the product's stream", ("sms",)
        ),
        Note("alone us: send and receive without a product", ("alone us",)),
        Note(
            "product us: the product alone, on all SMs; product few us: without the SMs of the phases",
            ("product us", "product few us"),
        ),
        Note("exposed us: time of the pair with its product, less product us", ("exposed us",)),
        Note(
            "hidden share: 1 - exposed us / (alone us on all SMs - an empty graph), of medians",
            ("hidden share",),
        ),
    ]


def _leaving(bench: Bench, sms: int, run: Callable[[], None]) -> Callable[[], None]:
    """Return ``run`` with cuBLAS told that the device has so many SMs less."""
    if not bench.on_gpu or sms == 0:
        return run

    def running() -> None:
        with _sms_of_cublas(torch.cuda.get_device_properties(bench.device).multi_processor_count - sms):
            run()

    return running


@contextlib.contextmanager
def _sms_of_cublas(number: int) -> Iterator[None]:
    cublas = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).split('.', maxsplit=1)[0]}")
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    if status := cublas.cublasSetSmCountTarget(handle, number):
        raise RuntimeError(f"cublasSetSmCountTarget: status {status}")
    try:
        yield
    finally:
        cublas.cublasSetSmCountTarget(handle, 0)


def _shapes(bench: Bench) -> dict[str, tuple[int, int, int]]:
    """Return products by name: what an expert makes of so many tokens, and of many: 128, 120, 112 and 104 large tiles,
    each of which takes an SM, and short ones."""
    o = bench.options
    if not bench.on_gpu:
        return {"square": (128, 128, 128)}
    few = (max(o.tokens, 1), o.hidden, 4096)
    tiles = {str(rows // 16): (rows, 2048, 2048) for rows in (2048, 1920, 1792, 1664)}
    return {"tokens": few, **tiles, "short": (8192, 512, 8192)}


def _product_of(bench: Bench, name: str, shape: tuple[int, int, int]) -> Product:
    m, k, n = shape
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32
    a = torch.ones(m, k, dtype=dtype, device=bench.device)
    b = torch.ones(k, n, dtype=dtype, device=bench.device)

    def run(times: int) -> float:
        if bench.on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            torch.mm(a, b)
        if bench.on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6 / times

    run(10)
    times = max(round(bench.options.overlap_us / run(50)), 1)

    def product() -> None:
        for _ in range(times):
            torch.mm(a, b)

    return Product(name, shape, times, product)
