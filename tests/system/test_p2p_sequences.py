# SPDX-License-Identifier: Apache-2.0
"""Sequences of phases of the split all-to-all that programs write, and what they do to tensors in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from p2p_checks import Form, check_received, check_sums, exchange, make, results_of, rows_of, sent_of

from weft.errors import Error
from weft.moe.p2p_phases import SavedInput
from weft.testing.cases import MoeCase
from weft.testing.ranks import Rank, run_ranks

MOST = 16


def _overwritten(rank: Rank, form: Form) -> None:
    """Whatever a send got is rubbish after it."""
    case, me = MoeCase((7, 12, 3), 64, 3, 6), rank.rank
    with make(rank, case, form, MOST) as a2a:
        for rubbish in (-1, 0, 1 << 20):
            given = tuple(
                None if tensor is None else tensor.clone() for tensor in sent_of(case, form, me, "cpu")
            )
            handle = a2a.dispatch_send(*given)
            for tensor in given:
                if tensor is not None:
                    tensor.copy_(torch.full(tensor.shape, rubbish, dtype=torch.float32))
            rows = a2a.dispatch_recv(handle)
            check_received(case, form, me, rank.size, rows)
            for weights in (None, case.topk_weights(me)):
                y = results_of(case, form, me, rank.size, rows)
                a2a.combine_send(y, handle, weights)
                y.fill_(float("nan"))
                if weights is not None:
                    weights.fill_(float("nan"))
                check_sums(case, form, me, a2a.combine_recv(handle))


@pytest.mark.parametrize("form", [Form(scale_words=2), Form(padding=4, exact=True)], ids=str)
def test_what_was_sent_may_be_written_again(form: Form) -> None:
    run_ranks(3, _overwritten, form, with_gpus=False)


def test_where_no_copy_is_kept_a_write_is_refused() -> None:
    saved = SavedInput("topk_idx", torch.zeros(2, 3))
    assert saved.tensor().tolist() == [[0.0] * 3] * 2
    saved.tensor().add_(1)  # as on CUDA, where this is the caller's
    with pytest.raises(Error, match=r"^topk_idx: got a tensor written after its send"):
        saved.tensor()
    with torch.inference_mode():
        unwatched = SavedInput("topk_idx", torch.zeros(2))
        unwatched.tensor().add_(1)
        assert unwatched.tensor().tolist() == [1.0, 1.0]


def _one_stays(rank: Rank, stays_after: str) -> None:
    """One exchange stays under way while others come and go: two at once, as was asked for."""
    form, me = Form(padding=2), rank.rank
    cases = [MoeCase((5, 0, 9), 48, 3, 5, seed=seed) for seed in range(6)]
    with make(rank, cases[0], form, MOST, max_in_flight=2) as a2a:
        first = a2a.dispatch_send(*sent_of(cases[0], form, me, "cpu"))
        rows: Any = None
        if stays_after != "dispatch_send":
            rows = a2a.dispatch_recv(first)
        if stays_after == "combine_send":
            a2a.combine_send(results_of(cases[0], form, me, rank.size, rows), first)
        for case in cases[1:]:
            exchange(rank, a2a, case, form)
        if rows is None:
            rows = a2a.dispatch_recv(first)
        check_received(cases[0], form, me, rank.size, rows)
        if stays_after != "combine_send":
            a2a.combine_send(results_of(cases[0], form, me, rank.size, rows), first)
        check_sums(cases[0], form, me, a2a.combine_recv(first))


@pytest.mark.parametrize("stays_after", ["dispatch_send", "dispatch_recv", "combine_send"])
def test_an_exchange_may_stay_while_others_come_and_go(stays_after: str) -> None:
    run_ranks(3, _one_stays, stays_after, with_gpus=False)


def _too_many(rank: Rank, depth: int) -> None:
    """Every third dispatch has more rows than rank 0 takes. Others, before and after, have what fits."""
    form, me, size = Form(), rank.rank, rank.size
    fits = MoeCase((1,) * size, 64, 1, size, "one expert", empty_share=0.0)
    case = MoeCase((6,) * size, 64, 1, size, "one expert", empty_share=0.0)
    with make(rank, case, form, MOST, max_recv_tokens=6, max_in_flight=depth) as a2a:
        for turn in range(9):
            if turn % 3:
                exchange(rank, a2a, fits, form)
                continue
            handle = a2a.dispatch_send(*sent_of(case, form, me, "cpu"))
            if me == 0:
                with pytest.raises(Error, match="max_recv_tokens: got 6, allowed: at least the 18 rows"):
                    a2a.dispatch_recv(handle)
                if turn:  # where there is room, they can be had
                    rows = a2a.dispatch_recv(handle, torch.empty(18, 64, dtype=torch.bfloat16))
                    check_received(case, form, me, size, rows)
            else:
                check_received(case, form, me, size, a2a.dispatch_recv(handle))
        handle = a2a.dispatch_send(*sent_of(case, form, me, "cpu"))
        if me == 0:
            with pytest.raises(Error, match="max_recv_tokens: got 6"):
                a2a.dispatch_recv(handle)
        else:
            a2a.dispatch_recv(handle)
        for _ in range(depth):
            exchange(rank, a2a, fits, form)
        if me == 0:
            with pytest.raises(Error, match=r"^handle: got one whose receive failed, and after another send"):
                a2a.dispatch_recv(handle)


@pytest.mark.parametrize("depth", [1, 2])
def test_after_rows_that_do_not_fit_one_rank_all_go_on(depth: int) -> None:
    run_ranks(3, _too_many, depth, with_gpus=False)


def _in_place(rank: Rank, exact: bool) -> None:
    """Received rows over x, sums over both, sums added to x."""
    form, me = Form(exact=exact), rank.rank
    case = MoeCase((7, 12, 3), 64, 3, 6)
    with make(rank, case, form, MOST) as a2a:
        given = sent_of(case, form, me, "cpu")
        memory = torch.zeros(a2a.max_recv_tokens, 64, dtype=torch.bfloat16)
        x = memory[: case.tokens[me]]
        x.copy_(given[0])
        handle = a2a.dispatch_send(x, *given[1:])
        rows = a2a.dispatch_recv(handle, memory)
        check_received(case, form, me, rank.size, rows)
        memory.copy_(results_of(case, form, me, rank.size, rows))
        a2a.combine_send(memory, handle)
        check_sums(case, form, me, a2a.combine_recv(handle, x))
        x = rows_of(case, form, me)
        handle = a2a.dispatch_send(x, *given[1:])
        a2a.combine_send(results_of(case, form, me, rank.size, a2a.dispatch_recv(handle)), handle)
        check_sums(case, form, me, a2a.combine_recv(handle, x, accumulate=True), rows_of(case, form, me))


@pytest.mark.parametrize("exact", [False, True])
def test_outputs_may_be_where_inputs_were(exact: bool) -> None:
    run_ranks(3, _in_place, exact, with_gpus=False)
