# SPDX-License-Identifier: Apache-2.0
"""What a plan of a resharding is: pieces that sources write to destinations, as arrays that can be kept in a file."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.errors import invalid, quoted
from weft.runtime.files import write_file
from weft.transfer.reshard.layout import DIMS, Ints, Layout

FORMAT = 1  # of files; another one is planned anew
_COLUMNS = ("src_box", "dst_box", "bucket", "form", "start", "src_offset", "dst_offset")
_FORMS = ("extent", "run", "count", "src_stride", "dst_stride")


@dataclass(frozen=True)
class Links:
    """How fast ranks send and receive, Gbit/s: one number for all of a side, or one for each rank."""

    source_gbit: float | Sequence[float] = 400.0
    destination_gbit: float | Sequence[float] = 400.0

    def rates(
        self, sources: int, destinations: int
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return bytes a second of each source and each destination. Raises: weft.Error for wrong numbers."""
        return (
            _rates("source_gbit", self.source_gbit, sources),
            _rates("destination_gbit", self.destination_gbit, destinations),
        )


def _rates(argument: str, given: float | Sequence[float], ranks: int) -> npt.NDArray[np.float64]:
    try:
        gbit = np.broadcast_to(np.asarray(given, np.float64), (ranks,))
    except (TypeError, ValueError):
        raise invalid(argument, quoted(given), f"one number, or {ranks}: one for each rank") from None
    if not (np.isfinite(gbit) & (gbit > 0)).all():
        raise invalid(argument, quoted(given), "numbers above 0")
    return gbit * (1e9 / 8)


@dataclass(frozen=True, eq=False)
class Forms:
    """Shapes that pieces share. A piece is ``run`` bytes, ``count`` times, with strides on both sides.

    Attributes:
        extent: int64[forms, 4], elements in each dimension of the tensor.
        run: int64[forms], bytes that lie densely on both sides.
        count, src_stride, dst_stride: int64[forms, 4], how often, and how many bytes apart, outer to inner; unused
            levels have count 1 and strides 0.
    """

    extent: Ints
    run: Ints
    count: Ints
    src_stride: Ints
    dst_stride: Ints


@dataclass(frozen=True, eq=False)
class Plan:
    """Which bytes go from which source to which destination. ``plan`` makes one, ``verify`` proves one.

    A piece is a box of elements that one rank has and another needs. Pieces are sorted by source, bucket and
    destination.

    Attributes:
        src, dst: the layouts.
        links: what it was balanced for.
        bucket_bytes: of destinations' bytes, that are counted by one immediate for each source and destination.
        src_box, dst_box: int32[pieces], rows of ``src.boxes`` and ``dst.boxes``.
        bucket, form: int32[pieces], the latter a row of ``forms``.
        start: int32[pieces, 4], the first element.
        src_offset, dst_offset: int64[pieces], its place in the memories of the boxes, bytes.
        bound_s: no plan for these layouts and links can take less.
    """

    src: Layout
    dst: Layout
    links: Links
    bucket_bytes: int
    src_box: npt.NDArray[np.int32]
    dst_box: npt.NDArray[np.int32]
    bucket: npt.NDArray[np.int32]
    form: npt.NDArray[np.int32]
    start: npt.NDArray[np.int32]
    src_offset: Ints
    dst_offset: Ints
    forms: Forms = field(repr=False)
    bound_s: float

    def __len__(self) -> int:
        return len(self.src_box)

    def __repr__(self) -> str:
        return (
            f"Plan({len(self)} pieces, {self.nbytes.sum() / 1e9:.3g} GB from {self.src.ranks} to "
            f"{self.dst.ranks} ranks, {self.predicted_s:.3g} s, bound {self.bound_s:.3g} s)"
        )

    @cached_property
    def src_rank(self) -> Ints:
        """int64[pieces]: who writes."""
        return self.src.boxes.rank[self.src_box]

    @cached_property
    def dst_rank(self) -> Ints:
        """int64[pieces]: who is written to."""
        return self.dst.boxes.rank[self.dst_box]

    @cached_property
    def runs(self) -> Ints:
        """int64[pieces]: how many dense runs each is."""
        return np.asarray(np.prod(self.forms.count, axis=1)[self.form], np.int64)

    @cached_property
    def nbytes(self) -> Ints:
        """int64[pieces]: bytes of each."""
        return self.runs * self.forms.run[self.form]

    @cached_property
    def source_bytes(self) -> Ints:
        """int64[sources]: what each source writes."""
        return np.bincount(self.src_rank, self.nbytes, self.src.ranks).astype(np.int64)

    @cached_property
    def destination_bytes(self) -> Ints:
        """int64[destinations]: what each destination receives."""
        return np.bincount(self.dst_rank, self.nbytes, self.dst.ranks).astype(np.int64)

    @cached_property
    def predicted_s(self) -> float:
        """Seconds that the busiest link takes at its rate."""
        sources, destinations = self.links.rates(self.src.ranks, self.dst.ranks)
        times = np.concatenate([self.source_bytes / sources, self.destination_bytes / destinations])
        return float(times.max(initial=0.0))

    @property
    def share(self) -> float:
        """The bound over the prediction: 1.0 is a plan that none can be faster than."""
        return self.bound_s / self.predicted_s if self.predicted_s else 1.0

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan and of what it was made from, in hexadecimal: equal on both sides that run one plan."""
        sha = hashlib.sha256(key_of(self.src, self.dst, self.links, self.bucket_bytes).encode())
        for column in [
            *(getattr(self, name) for name in _COLUMNS),
            *(getattr(self.forms, name) for name in _FORMS),
        ]:
            sha.update(np.ascontiguousarray(column, "<i8").tobytes())
        return sha.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, which others see whole or not at all. The layouts are named by their digests."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        forms = {f"forms_{name}": getattr(self.forms, name) for name in _FORMS}
        facts = np.array([repr(fact) for fact in _facts(self.src, self.dst, self.links, self.bucket_bytes)])
        content = io.BytesIO()
        np.savez_compressed(content, facts=facts, bound_s=np.float64(self.bound_s), **columns, **forms)
        write_file(Path(path), content.getvalue())

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        src: Layout,
        dst: Layout,
        *,
        links: Links | None = None,
        bucket_bytes: int,
    ) -> Plan:
        """Return the plan of a file. Nothing of it is believed but its form: verify it unless you wrote it.

        Raises: weft.Error unless it was made for these layouts, links and buckets; OSError if it cannot be read.
        """
        links = links or Links()
        try:
            with np.load(path, allow_pickle=False) as file:
                facts = [str(fact) for fact in file["facts"]]
                columns = {name: file[name] for name in _COLUMNS}
                forms = Forms(**{name: file[f"forms_{name}"] for name in _FORMS})
                bound_s = float(file["bound_s"])
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
            raise invalid("path", f"{path} ({error})", "a file of Plan.save") from None
        if facts != [repr(fact) for fact in _facts(src, dst, links, bucket_bytes)]:
            raise invalid("path", path, "a plan of the same layouts, links, buckets and format")
        _check_form(str(path), columns, forms, len(src.boxes), len(dst.boxes))
        return Plan(src, dst, links, bucket_bytes, **columns, forms=forms, bound_s=bound_s)


def key_of(src: Layout, dst: Layout, links: Links, bucket_bytes: int) -> str:
    """Return a digest of all that a plan is made from."""
    return hashlib.sha256(repr(_facts(src, dst, links, bucket_bytes)).encode()).hexdigest()


def _facts(src: Layout, dst: Layout, links: Links, bucket_bytes: int) -> tuple[object, ...]:
    sources, destinations = links.rates(src.ranks, dst.ranks)
    return FORMAT, src.digest, dst.digest, sources.tolist(), destinations.tolist(), bucket_bytes


def _check_form(
    path: str, columns: dict[str, npt.NDArray[np.int64]], forms: Forms, src_boxes: int, dst_boxes: int
) -> None:
    """Raise weft.Error unless all arrays of a file have the shapes and ranges with which they can be looked at."""
    pieces = len(columns["src_box"])
    wanted = {name: (pieces, DIMS) if name == "start" else (pieces,) for name in _COLUMNS}
    limits = {"src_box": src_boxes, "dst_box": dst_boxes, "form": len(forms.run), "bucket": 1 << 31}
    for name, column in columns.items():
        is_good = column.shape == wanted[name] and column.dtype.kind == "i"
        limit = limits.get(name, 1 << 62)
        if not is_good or (pieces and not 0 <= column.min() <= column.max() < limit):
            raise invalid(
                "path", f"{path} with {name} {column.dtype}{list(column.shape)}", "a file of Plan.save"
            )
    for name in _FORMS:
        column = getattr(forms, name)
        shape = (len(forms.run),) if name == "run" else (len(forms.run), DIMS)
        if column.shape != shape or column.dtype != np.int64:
            raise invalid(
                "path", f"{path} with {name} {column.dtype}{list(column.shape)}", "a file of Plan.save"
            )
