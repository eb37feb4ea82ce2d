# SPDX-License-Identifier: Apache-2.0
"""Combines whose ids are not those of the dispatch, for the tests of every way there.

A slot means the row of its expert, as in DeepEP: slots may be masked by an id below 0, and stand elsewhere in their
token. All numbers are small, so that every order of sums gives the same bits. What must not be looked at is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.errors import Error
from weft.testing.ranks import Rank

TOKENS, HIDDEN, TOP_K, EXPERTS = 7, 256, 4, 8
MOST_TOKENS = 8

Change = Callable[[Tensor], Tensor]


def _masked(*slots: int, by: int = -1) -> Change:
    def change(ids: Tensor) -> Tensor:
        ids[:, list(slots)] = by
        return ids

    return change


def _some_rows(ids: Tensor) -> Tensor:
    ids[1::2] = ids[1::2].flip(1)
    ids[::3, 1] = -1
    return ids


def _one_twice(ids: Tensor) -> Tensor:
    ids[:, 2] = ids[:, 0]
    return ids


CHANGES: dict[str, Change] = {
    "the same": lambda ids: ids,
    "the last masked": _masked(TOP_K - 1),
    "the first masked": _masked(0),
    "two masked": _masked(0, 2),
    "all masked": _masked(*range(TOP_K)),
    "masked by -7": _masked(1, by=-7),
    "reversed": lambda ids: ids.flip(1),
    "rotated": lambda ids: ids.roll(1, 1),
    "rotated and masked": lambda ids: _masked(1, 2)(ids.roll(1, 1)),
    "some tokens": _some_rows,
    "one expert twice": _one_twice,
}
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "exact": {"exact": True},
    "logfmt": {"use_logfmt": True},
    "hook": {"return_recv_hook": True},
    "exact, hook": {"exact": True, "return_recv_hook": True},
    "asynchronous": {"async_finish": True},
    "zero copy": {"zero_copy": True},
    "overlap": {"overlap": True},
}


def given_ids(rank: int, num_tokens: int = TOKENS) -> Tensor:
    """Return int64 [tokens, top_k] of distinct experts, some slots empty."""
    random = torch.Generator().manual_seed(17 + rank)
    ids = torch.stack([torch.randperm(EXPERTS, generator=random)[:TOP_K] for _ in range(TOKENS)])
    ids[2:3, 3] = -1
    return ids[:num_tokens].clone()


def given_weights(ids: Tensor) -> Tensor:
    """Return float32 like ids: powers of two."""
    return 2.0 ** -(torch.arange(ids.numel()).view(ids.shape) % 3).float()


def rows_of(rank: int, num_tokens: int) -> Tensor:
    """Return bf16 [tokens, HIDDEN] of small numbers, whole ones."""
    values = torch.arange(num_tokens * HIDDEN).view(num_tokens, HIDDEN) + rank
    return (values % 3 + 1).bfloat16()


def factor(expert: int) -> int:
    """Return what an expert multiplies its rows by."""
    return expert % 3 + 1


def expected(x: Tensor, sent: Tensor, sent_weights: Tensor, ids: Tensor, weights: Tensor | None) -> Tensor:
    """Return what a combine gives of experts that multiply by their factor(); None: weights of the dispatch."""
    total = torch.zeros(x.shape)
    for token in range(ids.size(0)):
        for slot in range(ids.size(1)):
            expert = int(ids[token, slot])
            if expert < 0:
                continue
            weight = (
                weights[token, slot]
                if weights is not None
                else sent_weights[token, (sent[token] == expert).nonzero()[0, 0]]
            )
            total[token] += float(weight) * factor(expert) * x[token].float()
    return total.bfloat16()


def results(recv: Tensor, handle: Any, rank: Rank, meant: list[Tensor]) -> Tensor:
    """Return what experts make of their rows: NaN where no slot of the token means it any more."""
    y = torch.full_like(recv, float("nan"))
    src_info, layout = handle[0].cpu(), handle[1].cpu()
    for local in range(recv.size(0)):
        expert = rank.rank * -(-EXPERTS // rank.size) + local
        for source, ids in enumerate(meant):
            begin, count = int(layout[local, source] >> 32), int(layout[local, source] & 0xFFFFFFFF)
            for row in range(begin, begin + count):
                if bool((ids[int(src_info[local, row])] == expert).any()):
                    y[local, row] = recv[local, row] * factor(expert)
    return y


def combined_with(buffer: weft.Buffer, y: Tensor, handle: Any, *call: Any, **how: Any) -> Tensor:
    """Combine in one of the FORMS, of which overlap is for the CPU."""
    layer = None
    rows = y
    if how.get("zero_copy"):
        buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
    if how.get("overlap"):
        rows = torch.full_like(y, float("nan"))
        signals = torch.zeros(y.size(0), dtype=torch.uint32)
        how |= {"src_signals": signals, "src_signal_expect_value": 1}

        def finish() -> None:
            rows.copy_(y)
            signals.view(torch.int32).fill_(1)

        layer = Thread(target=finish)
        layer.start()
    out, event, hook = buffer.low_latency_combine(rows, *call, handle, **how)
    if how.get("async_finish"):
        event.current_stream_wait()
    if hook is not None:
        hook()
    if layer is not None:
        layer.join()
    return out


def check_other_ids(
    rank: Rank, buffer: weft.Buffer, form: str, weights_at: str, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Each of the CHANGES after a dispatch of its own. weights_at: "combine", "dispatch" or "both"."""
    num_tokens = (TOKENS, 3, 0, 5)[rank.rank % 4]
    sent = given_ids(rank.rank, num_tokens)
    sent_weights = given_weights(sent)
    x = rows_of(rank.rank, num_tokens)
    all_sent = [given_ids(r, (TOKENS, 3, 0, 5)[r % 4]) for r in range(rank.size)]
    for name, change in CHANGES.items():
        travel = {} if weights_at == "combine" else {"topk_weights": sent_weights.to(device)}
        given = x.to(device), sent.to(device, dtype)
        recv, *_, handle, _, _ = buffer.low_latency_dispatch(
            *given, MOST_TOKENS, EXPERTS, use_fp8=False, **travel
        )
        ids = change(sent.clone())
        meant = [change(of_rank.clone()) for of_rank in all_sent]
        weights = None if weights_at == "dispatch" else given_weights(ids).flip(0)
        y = results(recv, handle, rank, meant)
        of_slots = None if weights is None else weights.to(device)
        out = combined_with(buffer, y, handle, ids.to(device, dtype), of_slots, **FORMS[form])
        want = expected(x, sent, sent_weights, ids, weights)
        assert torch.equal(out.cpu(), want), (name, form, weights_at, rank.rank)


def check_stray_ids(rank: Rank, buffer: weft.Buffer, hook: bool) -> str:
    """A slot of rank 0 names an expert that its token was not sent to. Return its error: nobody else has one."""
    sent = given_ids(rank.rank)
    weights, x = given_weights(sent), rows_of(rank.rank, TOKENS)
    said = ""
    for is_wrong in (True, False, True, False):
        recv, _, handle, _, _ = buffer.low_latency_dispatch(x, sent, MOST_TOKENS, EXPERTS, use_fp8=False)
        y = results(recv, handle, rank, [given_ids(r) for r in range(rank.size)])
        ids = sent.clone()
        if is_wrong and rank.rank == 0:
            ids[4, 2] = next(e for e in range(EXPERTS) if e not in sent[4])
            with pytest.raises(Error) as error:
                combined_with(buffer, y, handle, ids, weights, return_recv_hook=hook)
            said = str(error.value)
        else:
            out = combined_with(buffer, y, handle, ids, weights, return_recv_hook=hook)
            assert torch.equal(out, expected(x, sent, weights, ids, weights))
    return said


def check_said(said: str) -> None:
    """The error names argument, rank, token, slot and expert."""
    wrong = next(e for e in range(EXPERTS) if e not in given_ids(0)[4])
    assert "topk_idx" in said and "rank 0" in said, said
    assert f"slot 2 of token 4 names expert {wrong}" in said, said
