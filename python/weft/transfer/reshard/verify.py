# SPDX-License-Identifier: Apache-2.0
"""Proves a plan. Nothing here is the planner's: it reads the layouts, and the pieces as they will be run.

Of each piece: it lies in a box of its source and in one of its destination, of the same tensor; and the bytes that its
runs pair are those of the same elements. Of each box of a destination: its pieces have each element once. Of each
destination: no two boxes share a byte.

That pieces have each element once is an identity of sums. Every index of every dimension gets a random number; an
element weighs the product of its four, and a box the product of four differences of running totals. Pieces that cover a
box once weigh as much as it does; others do so by chance alone, which 64 bits and fresh numbers keep below 10^-12.
"""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt

from weft.errors import Error
from weft.transfer.reshard.layout import Columns, Ints, Layout
from weft.transfer.reshard.plan import Plan

_RUNS_LISTED = 1 << 24  # of a box whose bytes interleave with those of others


def verify(plan: Plan) -> None:
    """Return if the plan writes every byte of every box of every destination once, from who holds that element.

    Plans that were loaded, or came from elsewhere, are proven as well. Takes about as long as planning.
    Raises: weft.Error with the code ``invalid`` naming the first piece, or box, that is wrong, and how.
    """
    stop = plan.start.astype(np.int64) + plan.forms.extent[plan.form]
    _check_pieces_in_boxes(plan, stop)
    _check_addresses(plan)
    _check_each_element_once(plan, stop)
    _check_no_byte_twice(plan.dst)


def _refuse(what: str) -> Error:
    return Error(
        f"verify: {what}; allowed: every byte of every destination once, from a holder of its element"
    )


def _check_pieces_in_boxes(plan: Plan, stop: Ints) -> None:
    src, dst = plan.src, plan.dst
    same = _common_names(src, dst)
    src_name, dst_name = same[0][src.boxes.tensor[plan.src_box]], same[1][dst.boxes.tensor[plan.dst_box]]
    for wrong, what in (
        (src_name != dst_name, "is of different tensors"),
        (
            src.item_bytes[src.boxes.tensor[plan.src_box]] != dst.item_bytes[dst.boxes.tensor[plan.dst_box]],
            "is of different types",
        ),
        (_outside(plan.start, stop, src.boxes, plan.src_box), "is not held by its source"),
        (_outside(plan.start, stop, dst.boxes, plan.dst_box), "is not in its destination's box"),
    ):
        if wrong.any():
            raise _refuse(f"{_piece(plan, int(wrong.argmax()))} {what}")


def _outside(
    start: npt.NDArray[np.int32], stop: Ints, boxes: Columns, rows: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    is_out = (start < boxes.start[rows]) | (stop > boxes.stop[rows]) | (stop <= start)
    return np.asarray(is_out.any(axis=1))


def _common_names(src: Layout, dst: Layout) -> tuple[Ints, Ints]:
    """Return numbers of both sides' tensors, equal where the names are, or are tied."""
    ties = [*src.tied.items(), *dst.tied.items()]
    first = {name: name for name in {*src.names, *dst.names, *(name for tie in ties for name in tie)}}
    while any(first[one] != first[other] for one, other in ties):
        for tie in ties:
            least = min(first[name] for name in tie)
            first.update(dict.fromkeys(tie, least))
    number = {name: i for i, name in enumerate(sorted(set(first.values())))}
    of_src, of_dst = (np.array([number[first[n]] for n in side.names], np.int64) for side in (src, dst))
    return of_src, of_dst


def _check_addresses(plan: Plan) -> None:
    """Check that a piece's runs are the bytes of its elements, in both boxes' memories, in the same order."""
    forms, src, dst = plan.forms, plan.src.boxes, plan.dst.boxes
    for box, boxes, offset in ((plan.src_box, src, plan.src_offset), (plan.dst_box, dst, plan.dst_offset)):
        begin = boxes.offset[box] + ((plan.start - boxes.start[box]) * boxes.strides[box]).sum(axis=1)
        if (begin != offset).any():
            raise _refuse(
                f"{_piece(plan, int((begin != offset).argmax()))} begins at another element's place"
            )
    for piece in _examples(plan):
        form, src_row, dst_row = plan.form[piece], plan.src_box[piece], plan.dst_box[piece]
        nest = _loops(forms.count[form], forms.src_stride[form], forms.dst_stride[form])
        elements = _loops(forms.extent[form], src.strides[src_row], dst.strides[dst_row])
        item = int(plan.dst.item_bytes[dst.tensor[dst_row]])
        if not _walk_alike([*nest, (int(forms.run[form]), 1, 1)], [*elements, (item, 1, 1)]):
            raise _refuse(f"{_piece(plan, int(piece))} pairs bytes of different elements")


def _examples(plan: Plan) -> Ints:
    """Return pieces among which is one for each form and strides of both boxes."""
    _, first, which = np.unique(plan.form, return_index=True, return_inverse=True)
    example = first[which]
    src, dst = plan.src.boxes.strides, plan.dst.boxes.strides
    item = plan.dst.item_bytes[plan.dst.boxes.tensor]
    differs = (src[plan.src_box] != src[plan.src_box[example]]).any(axis=1)
    differs |= (dst[plan.dst_box] != dst[plan.dst_box[example]]).any(axis=1)
    differs |= item[plan.dst_box] != item[plan.dst_box[example]]
    return np.concatenate([first, np.flatnonzero(differs)])


def _loops(count: Ints, src_stride: Ints, dst_stride: Ints) -> list[tuple[int, int, int]]:
    return list(zip(count.tolist(), src_stride.tolist(), dst_stride.tolist(), strict=True))


def _walk_alike(nest: list[tuple[int, int, int]], elements: list[tuple[int, int, int]]) -> bool:
    """Return whether loops (count, source's stride, destination's) pair the bytes that the elements' loops pair.

    ``elements`` may be walked in another order: each loop of ``nest`` takes, from the innermost outwards, dimensions
    that continue it, until it is full.
    """
    left = [loop for loop in elements if loop[0] != 1]
    for count, src_stride, dst_stride in reversed([loop for loop in nest if loop[0] != 1]):
        if count < 1:
            return False
        done = 1
        while done < count:
            fitting = [
                loop
                for loop in left
                if loop[1:] == (src_stride * done, dst_stride * done) and count % (done * loop[0]) == 0
            ]
            if not fitting:
                return False
            left.remove(fitting[0])
            done *= fitting[0][0]
    return not left


def _check_each_element_once(plan: Plan, stop: Ints) -> None:
    dst = plan.dst
    longest = int(dst.extents.max(initial=1))
    totals = np.frombuffer(secrets.token_bytes(8 * 4 * (longest + 1)), np.uint64).reshape(4, -1)
    wanted = _weight(totals, dst.boxes.start, dst.boxes.stop)
    found = np.zeros(len(wanted), np.uint64)
    np.add.at(found, plan.dst_box, _weight(totals, plan.start, stop))
    volume = np.zeros(len(wanted), np.int64)
    np.add.at(volume, plan.dst_box, np.prod(plan.forms.extent, axis=1)[plan.form])
    expected = np.prod(dst.boxes.stop - dst.boxes.start, axis=1)
    wrong = (found != wanted) | (volume != expected)
    if wrong.any():
        row = int(wrong.argmax())
        raise _refuse(
            f"{volume[row]} elements are written to {dst.describe(row)}, which has {expected[row]}"
            + (", some of them twice" if volume[row] >= expected[row] else "")
        )


def _weight(
    totals: npt.NDArray[np.uint64], start: npt.NDArray[np.int64 | np.int32], stop: Ints
) -> npt.NDArray[np.uint64]:
    """Return weights of boxes [n], modulo 2^64."""
    weight = np.ones(len(start), np.uint64)
    for dim, total in enumerate(totals):
        weight *= total[stop[:, dim]] - total[start[:, dim]]
    return weight


def _check_no_byte_twice(dst: Layout) -> None:
    """Check that no two boxes of a rank share a byte, and no two elements of a box.

    Boxes whose spans do not meet share none, and neither do elements of a box whose strides each pass all within them.
    The runs of others are listed.
    """
    boxes = dst.boxes
    if not len(boxes):
        return
    order = np.lexsort((boxes.offset, boxes.memory, boxes.rank))
    reach, is_tangled = _reaches(dst)
    begin, end = boxes.offset[order], (boxes.offset + reach)[order]
    places = boxes.rank[order] * len(dst.memories) + boxes.memory[order]
    memory = np.cumsum(np.r_[False, places[1:] != places[:-1]])
    far = int(end.max())
    if far > (1 << 62) // (int(memory[-1]) + 1):
        raise _refuse(f"memories of {far} bytes are too long to be looked at")
    begin, end = begin + memory * far, end + memory * far  # all memories one after another
    meets = np.r_[False, begin[1:] < np.maximum.accumulate(end)[:-1]]
    cluster = np.cumsum(~meets) - 1
    looked_at = np.bincount(cluster) > 1
    looked_at[cluster[is_tangled[order]]] = True
    for one in np.flatnonzero(looked_at):
        first, last = np.searchsorted(cluster, [one, one + 1])
        _check_runs_apart(dst, order[first:last])


def _reaches(layout: Layout) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return how many bytes each box spans, and whether its own strides may meet."""
    boxes = layout.boxes
    extent = boxes.stop - boxes.start
    order = np.argsort(boxes.strides, axis=1)
    extent, strides = np.take_along_axis(extent, order, 1), np.take_along_axis(boxes.strides, order, 1)
    reach: Ints = layout.item_bytes[boxes.tensor]
    is_tangled = np.zeros(len(boxes), bool)
    for dim in range(extent.shape[1]):
        is_tangled |= (extent[:, dim] > 1) & (strides[:, dim] < reach)
        reach = reach + (extent[:, dim] - 1) * strides[:, dim]
    return reach, is_tangled


def _check_runs_apart(dst: Layout, rows: Ints) -> None:
    begins, lengths, owners = [], [], []
    for row in rows:
        begin, length = _runs_of(dst, int(row))
        begins.append(begin)
        lengths.append(np.full(len(begin), length))
        owners.append(np.full(len(begin), row))
    at, nbytes, owner = (np.concatenate(column) for column in (begins, lengths, owners))
    order = np.argsort(at, kind="stable")
    end = np.maximum.accumulate((at + nbytes)[order])
    meets = at[order][1:] < end[:-1]
    if meets.any():
        row = int(meets.argmax())
        one, other = int(owner[order][row]), int(owner[order][row + 1])
        where = dst.memories[dst.boxes.memory[other]]
        raise _refuse(f"{dst.describe(one)} and {dst.describe(other)} share bytes of the memory {where!r}")


def _runs_of(layout: Layout, row: int) -> tuple[Ints, int]:
    """Return where the dense runs of a box begin, bytes, and how long they are."""
    boxes = layout.boxes
    loops = sorted(zip(boxes.strides[row].tolist(), (boxes.stop - boxes.start)[row].tolist(), strict=True))
    length = int(layout.item_bytes[boxes.tensor[row]])
    begin = boxes.offset[row : row + 1]
    for stride, extent in loops:
        if stride == length and len(begin) == 1:
            length *= extent
        elif extent > 1:
            if len(begin) * extent > _RUNS_LISTED:
                raise _refuse(
                    f"{layout.describe(row)} has more than {_RUNS_LISTED} runs beside other boxes' bytes"
                )
            begin = np.asarray(begin[:, None] + np.arange(extent) * stride, np.int64).reshape(-1)
    return begin, length


def _piece(plan: Plan, piece: int) -> str:
    src, dst = plan.src.boxes, plan.dst.boxes
    name = plan.dst.names[dst.tensor[plan.dst_box[piece]]]
    ranks = f"rank {src.rank[plan.src_box[piece]]} to rank {dst.rank[plan.dst_box[piece]]}"
    return f"piece {piece} of {name!r}, {ranks}, from {plan.start[piece].tolist()} on,"
