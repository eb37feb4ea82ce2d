# SPDX-License-Identifier: Apache-2.0
"""From two layouts to a plan. Pure: no clock, no environment, no engine; the same arguments give the same plan.

Every element that a destination has is written once, by one of the sources that hold it. All is done on arrays of
regions, as models have a million boxes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.errors import Error, invalid, quoted
from weft.transfer.buffers import whole
from weft.transfer.reshard.balance import Floats, Groups, bound_s, shares
from weft.transfer.reshard.layout import DIMS, Columns, Ints, Layout
from weft.transfer.reshard.plan import Forms, Links, Plan, key_of
from weft.transfer.reshard.regions import Regions, cells_of, overlaps, ranges, regions_of

_CUT_BYTES_MIN = 64 << 10  # pieces are not cut smaller than that to balance links
_CUTS_OF_A_SHARE = 32
_SEED = 54


@dataclass(frozen=True)
class _Demands:
    """What a destination's box needs of a cell: rows of ``cells`` and of the destination's boxes, and indices."""

    cell: Ints
    dst_box: Ints
    start: Ints
    stop: Ints
    nbytes: Ints

    def take(self, rows: npt.NDArray[np.int64]) -> _Demands:
        return _Demands(
            self.cell[rows], self.dst_box[rows], self.start[rows], self.stop[rows], self.nbytes[rows]
        )


def plan(
    src: Layout,
    dst: Layout,
    *,
    links: Links | None = None,
    bucket_bytes: int = 1 << 30,
    cache: str | os.PathLike[str] | None = None,
) -> Plan:
    """Return which bytes each source writes to each destination.

    Tensors meet by name; what either side ties is one tensor. Sources may have more tensors than destinations need.
    Where several sources hold an element, the choice makes the busiest link as little busy as can be.

    Args:
        src, dst: where the elements are, and where they are needed. The ranks of the two have nothing to do with each
            other.
        links: rates of ranks, that weigh the choice and make the prediction; None: 400 Gbit/s each.
        bucket_bytes: tensors are cut into buckets of so many bytes of the destinations' tensors, 1 or more. Each is
            counted by one immediate for every source and destination.
        cache: a folder, where plans are kept under the digests of what they are made from. It must be as trusted as
            the program.
    Raises: weft.Error naming the tensor that sources do not have, or have in another shape or type, or the first box
        with elements that no source holds.
    """
    if not isinstance(src, Layout) or not isinstance(dst, Layout):
        raise invalid("src, dst", f"{type(src).__name__}, {type(dst).__name__}", "Layouts")
    links = links or Links()
    if whole("bucket_bytes", bucket_bytes) == 0:
        raise invalid("bucket_bytes", 0, "1 or more")
    if cache is None:
        return _made(src, dst, links, bucket_bytes)
    if not Path(cache).is_dir():
        raise invalid("cache", quoted(cache), "a folder that exists")
    file = Path(cache) / f"{key_of(src, dst, links, bucket_bytes)}.npz"
    try:
        return Plan.load(file, src, dst, links=links, bucket_bytes=bucket_bytes)
    except (OSError, Error):  # none yet, or a broken one
        made = _made(src, dst, links, bucket_bytes)
        made.save(file)
        return made


def _made(src: Layout, dst: Layout, links: Links, bucket_bytes: int) -> Plan:
    src_number, dst_number = _numbers(src, dst)
    cells = cells_of(_regions(src.boxes, src_number))
    needs = _regions(dst.boxes, dst_number)
    of_cell, of_need = overlaps(cells, needs)
    start = np.maximum(cells.start[of_cell], needs.start[of_need])
    stop = np.minimum(cells.stop[of_cell], needs.stop[of_need])
    _check_all_held(dst, needs, of_need, np.prod(stop - start, axis=1))
    item_bytes = np.zeros(int(dst_number.max(initial=0)) + 1, np.int64)
    item_bytes[dst_number] = dst.item_bytes
    nbytes = np.prod(stop - start, axis=1) * item_bytes[needs.tensor[of_need]]
    rows = np.repeat(np.arange(len(of_need)), needs.count[of_need])
    boxes = needs.boxes[ranges(needs.first[of_need], needs.count[of_need])]
    demands = _Demands(of_cell[rows], boxes, start[rows], stop[rows], nbytes[rows])
    rates, dst_rates = links.rates(src.ranks, dst.ranks)
    demands, src_box, bound = _chosen(demands, cells, src, dst, rates)
    received = np.bincount(dst.boxes.rank, dst.nbytes, dst.ranks)
    bound = max(bound, float((received / dst_rates).max(initial=0.0)))
    return _plan_of(src, dst, links, bucket_bytes, demands, src_box, bound)


def _numbers(src: Layout, dst: Layout) -> tuple[Ints, Ints]:
    """Return common numbers of both sides' tensors, -1 where the destination has none. Raises: weft.Error."""
    roots: dict[str, str] = {}

    def untied(name: str) -> str:
        while name in roots:
            name = roots[name]
        return name

    for alias, name in [*src.tied.items(), *dst.tied.items()]:  # the two sides may tie other ways round
        first, second = sorted((untied(alias), untied(name)))
        if first != second:
            roots[second] = first

    has_box = np.bincount(dst.boxes.tensor, minlength=len(dst.names)) > 0
    sources = {untied(name): meta for name, meta in src.tensors.items()}
    numbers: dict[str, int] = {}
    for name, needed in zip(dst.names, has_box, strict=True):
        numbers.setdefault(untied(name), len(numbers))
        meta = sources.get(untied(name))
        if needed and meta is None:
            raise invalid("src", f"no tensor {name!r}", "a layout that has all tensors of dst")
        if needed and meta != dst.tensors[name]:
            raise invalid(
                "src", f"{name!r} as {meta}", f"{dst.tensors[name]}, as dst has it: plans do not cast"
            )
    return (
        np.array([numbers.get(untied(name), -1) for name in src.names], np.int64),
        np.array([numbers[untied(name)] for name in dst.names], np.int64),
    )


def _regions(boxes: Columns, number: Ints) -> Regions:
    tensor = number[boxes.tensor] if len(number) else boxes.tensor
    rows = np.flatnonzero(tensor >= 0)
    rows = rows[np.argsort(boxes.rank[rows], kind="stable")]
    return regions_of(tensor[rows], boxes.start[rows], boxes.stop[rows], rows)


def _check_all_held(dst: Layout, needs: Regions, of_need: Ints, volume: Ints) -> None:
    """Raise weft.Error unless cells, which do not overlap, have all elements of each region that is needed."""
    held = np.zeros(len(needs), np.int64)
    np.add.at(held, of_need, volume)
    lacking = held < needs.volume
    if lacking.any():
        row = int(lacking.argmax())
        given = f"{held[row]} of {needs.volume[row]} elements of {dst.describe(int(needs.boxes[needs.first[row]]))}"
        raise invalid("src", given, "a layout that holds every element of dst")


def _chosen(
    demands: _Demands, cells: Regions, src: Layout, dst: Layout, rates: Floats
) -> tuple[_Demands, Ints, float]:
    """Return demands, some of them cut, the source's box for each, and the seconds that sources need at least."""
    group_of_cell, count, first = _groups(cells, src)
    groups = len(count)
    held = np.bincount(group_of_cell[demands.cell], demands.nbytes, groups).astype(np.int64)
    given_groups = Groups(
        np.concatenate([[0], np.cumsum(count)]), src.boxes.rank[cells.boxes[ranges(first, count)]], held
    )
    given, loads = shares(given_groups, rates)
    bound = bound_s(given_groups, loads, rates)
    demands = _cut(demands, group_of_cell, held // np.maximum(_CUTS_OF_A_SHARE * count, 1), count)
    place = _places(demands, group_of_cell, given_groups, given, dst)
    place = np.minimum(place, cells.count[demands.cell] - 1)
    return demands, cells.boxes[cells.first[demands.cell] + place], bound


def _groups(cells: Regions, src: Layout) -> tuple[Ints, Ints, Ints]:
    """Return the group of each cell, those with the same holders, and each group's number of holders and first box."""
    random = np.random.default_rng(_SEED).integers(0, 1 << 63, src.ranks + 1, dtype=np.uint64)
    marks = random[src.boxes.rank[cells.boxes]]
    sums = np.add.reduceat(marks, cells.first[:-1]) if len(cells) else marks
    sums += cells.count.astype(np.uint64) * random[-1]
    # Two sets with one sum would only be balanced as one: a place among holders is taken in the cell's own.
    _, example, group = np.unique(sums, return_index=True, return_inverse=True)
    return np.asarray(group, np.int64), cells.count[example], cells.first[example]


def _cut(demands: _Demands, group_of_cell: Ints, limit: Ints, count: Ints) -> _Demands:
    """Return demands of which none with a choice is longer than its group's limit, as far as rows can be cut."""
    group = group_of_cell[demands.cell]
    wanted = -(-demands.nbytes // np.maximum(limit, _CUT_BYTES_MIN)[group])
    extent = demands.stop - demands.start
    dim = np.argmax(extent > 1, axis=1)  # the outermost one that can be cut
    rows = np.arange(len(dim))
    length = extent[rows, dim]
    parts = np.where(count[group] > 1, np.minimum(np.maximum(wanted, 1), np.maximum(length, 1)), 1)
    if not (parts > 1).any():
        return demands
    row = np.repeat(rows, parts)
    part = ranges(np.zeros(len(parts), np.int64), parts)
    many = demands.take(row)
    dim, length, parts = dim[row], length[row], parts[row]
    each = np.arange(len(row))
    begin = many.start[each, dim]
    many.start[each, dim] = begin + part * length // parts
    many.stop[each, dim] = begin + (part + 1) * length // parts
    nbytes = many.nbytes // length * (many.stop[each, dim] - many.start[each, dim])
    return _Demands(many.cell, many.dst_box, many.start, many.stop, np.where(parts > 1, nbytes, many.nbytes))


def _places(demands: _Demands, group_of_cell: Ints, groups: Groups, given: Floats, dst: Layout) -> Ints:
    """Return which of its cell's holders serves each demand, so that each holder gives about its share.

    A group's demands stand in the order of destinations; a holder serves those next to each other, so that few pairs of
    ranks talk.
    """
    group = group_of_cell[demands.cell]
    place = np.zeros(len(group), np.int64)
    rows = np.flatnonzero(np.diff(groups.first)[group] > 1)
    if not len(rows):
        return place
    rows = rows[np.lexsort((demands.dst_box[rows], dst.boxes.rank[demands.dst_box[rows]], group[rows]))]
    ends = np.cumsum(demands.nbytes[rows]).astype(np.float64)
    middle = ends - demands.nbytes[rows] / 2
    which = group[rows]
    ahead = np.concatenate([[0.0], np.cumsum(np.where(np.diff(groups.first) > 1, groups.nbytes, 0))])
    for one in np.unique(which):
        part = groups.of(int(one))
        begin, end = np.searchsorted(which, [one, one + 1])
        edges = ahead[one] + np.cumsum(given[part])
        place[rows[begin:end]] = np.searchsorted(edges[:-1], middle[begin:end])
    return place


def _plan_of(
    src: Layout,
    dst: Layout,
    links: Links,
    bucket_bytes: int,
    demands: _Demands,
    src_box: Ints,
    bound: float,
) -> Plan:
    """Return demands as the pieces of a plan, sorted by source, bucket and destination."""
    sizes = np.prod(dst.extents, axis=1) * dst.item_bytes
    bucket = ((np.cumsum(sizes) - sizes) // bucket_bytes)[dst.boxes.tensor[demands.dst_box]]
    order = np.lexsort((demands.dst_box, dst.boxes.rank[demands.dst_box], bucket, src.boxes.rank[src_box]))
    demands, src_box, bucket = demands.take(order), src_box[order], bucket[order]
    form, forms = _forms(src, dst, demands, src_box)
    return Plan(
        src,
        dst,
        links,
        bucket_bytes,
        src_box.astype(np.int32),
        demands.dst_box.astype(np.int32),
        bucket.astype(np.int32),
        form.astype(np.int32),
        demands.start.astype(np.int32),
        _offset(src.boxes, src_box, demands.start),
        _offset(dst.boxes, demands.dst_box, demands.start),
        forms,
        bound,
    )


def _offset(boxes: Columns, box: Ints, start: Ints) -> Ints:
    inside = (start - boxes.start[box]) * boxes.strides[box]
    return np.asarray(boxes.offset[box] + inside.sum(axis=1), np.int64)


def _forms(src: Layout, dst: Layout, demands: _Demands, src_box: Ints) -> tuple[Ints, Forms]:
    """Return each demand's form: runs of bytes that are dense on both sides, and loops around them."""
    item = dst.item_bytes[dst.boxes.tensor[demands.dst_box]][:, None]
    columns = [
        demands.stop - demands.start,
        src.boxes.strides[src_box],
        dst.boxes.strides[demands.dst_box],
        item,
    ]
    which, keys = _unique_rows(np.concatenate(columns, axis=1))
    extent, a, b = keys[:, :DIMS], keys[:, DIMS : 2 * DIMS], keys[:, 2 * DIMS : 3 * DIMS]
    return which, Forms(extent, *_runs(extent, a, b, keys[:, -1]))


def _unique_rows(rows: Ints) -> tuple[Ints, Ints]:
    """Return the number of each row among the different ones, and these. By a sum, as sorting rows is slow."""
    weights = np.random.default_rng(_SEED).integers(0, 1 << 63, rows.shape[1], dtype=np.uint64) | np.uint64(1)
    sums = (rows.astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
    _, example, which = np.unique(sums, return_index=True, return_inverse=True)
    different = rows[example]
    if not np.array_equal(different[which], rows):  # two rows with one sum
        different, which = np.unique(rows, axis=0, return_inverse=True)
    return np.asarray(which, np.int64).reshape(-1), different


def _runs(extent: Ints, a: Ints, b: Ints, item: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return run, counts and strides [n, 4] of nests of loops over elements: loops that continue each other are one."""
    rows = np.arange(len(extent))
    # The destination's innermost dimension comes last; those of extent 1 are no loops.
    order = np.argsort(np.where(extent > 1, -b, -(1 << 62)), axis=1, kind="stable")
    extent, a, b = (np.take_along_axis(column, order, axis=1) for column in (extent, a, b))
    # Levels from inner to outer; level 0 is the run.
    count, src_stride, dst_stride = (np.zeros((len(rows), DIMS + 1), np.int64) for _ in range(3))
    count[:, 0], src_stride[:, 0], dst_stride[:, 0] = item, 1, 1
    level = np.zeros(len(rows), np.int64)
    for dim in reversed(range(DIMS)):
        n, s, d = extent[:, dim], a[:, dim], b[:, dim]
        reach = count[rows, level]
        goes_on = (s == src_stride[rows, level] * reach) & (d == dst_stride[rows, level] * reach)
        is_loop = n > 1
        count[rows, level] *= np.where(is_loop & goes_on, n, 1)
        level += is_loop & ~goes_on
        new = np.flatnonzero(is_loop & ~goes_on)
        count[new, level[new]], src_stride[new, level[new]], dst_stride[new, level[new]] = (
            n[new],
            s[new],
            d[new],
        )
    outward = slice(DIMS, 0, -1)
    return count[:, 0], np.maximum(count[:, outward], 1), src_stride[:, outward], dst_stride[:, outward]


def summary(made: Plan) -> Mapping[str, object]:
    """Return what ``weft plan reshard`` prints of a plan, as plain values."""
    runs = made.forms.run[made.form]
    pairs = np.unique(made.src_rank * max(made.dst.ranks, 1) + made.dst_rank)
    return {
        "sources": made.src.ranks,
        "destinations": made.dst.ranks,
        "tensors": len(made.dst.names),
        "bytes": int(made.nbytes.sum()),
        "pieces": len(made),
        "runs": int(made.runs.sum()),
        "run_bytes_min": int(runs.min()) if len(runs) else 0,
        "run_bytes_mean": float(made.nbytes.sum() / max(int(made.runs.sum()), 1)),
        "pairs": len(pairs),
        "buckets": int(made.bucket.max(initial=-1)) + 1,
        "source_bytes_max": int(made.source_bytes.max(initial=0)),
        "source_bytes_mean": float(made.source_bytes.mean()) if made.src.ranks else 0.0,
        "destination_bytes_max": int(made.destination_bytes.max(initial=0)),
        "predicted_s": made.predicted_s,
        "bound_s": made.bound_s,
        "share": made.share,
    }
