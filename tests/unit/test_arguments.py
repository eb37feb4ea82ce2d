# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

import weft
from weft.moe import arguments
from weft.moe.events import EventHandle

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "value",
    [
        None,
        [[1.0]],
        torch.zeros(2, 3),
        torch.zeros(2, 4, dtype=torch.float64),
        torch.zeros(4, 2).T,
        torch.zeros(2, 4, device="meta"),
        torch.zeros(2, 4).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(4)] * 2, layout=torch.jagged),
        torch._neg_view(torch.zeros(2, 4)),
    ],
    ids=["none", "list", "shape", "dtype", "strides", "device", "sparse", "nested", "negated"],
)
def test_a_wrong_tensor_is_described_beside_what_is_allowed(value: object) -> None:
    with pytest.raises(weft.Error, match=r"^scores: got .*, allowed: contiguous float32\[2, 4\] on cpu$"):
        arguments.check_tensor("scores", value, (2, 4), (torch.float32,), CPU)


def test_a_tensor_of_any_type_is_allowed_by_its_shape() -> None:
    with pytest.raises(weft.Error, match=r"allowed: a contiguous tensor \[tokens, 4\] on cpu$"):
        arguments.check_tensor("x", torch.zeros(4, 2).T, ("tokens", 4), (), CPU)


def test_a_tensor_whose_storage_was_freed_is_refused() -> None:
    freed = torch.zeros(2, 4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(weft.Error, match=r"scores: got .*storage of 0 bytes"):
        arguments.check_tensor("scores", freed, (2, 4), (torch.float32,), CPU)
    arguments.check_tensor("scores", torch.zeros(0, 4), (0, 4), (torch.float32,), CPU)


def test_outputs_share_memory_with_nothing() -> None:
    memory = torch.zeros(8)
    arguments.check_apart({"out": memory[:4]}, {"x": memory[4:], "weights": None})
    arguments.check_apart({"out": memory[:4], "empty": memory[2:2]}, {"x": memory[4:], "same": memory[4:]})
    with pytest.raises(weft.Error, match=r"^out: got memory that x uses too"):
        arguments.check_apart({"out": memory[:5]}, {"x": memory[4:]})
    with pytest.raises(weft.Error, match=r"^out: got memory that out_count uses too"):
        arguments.check_apart({"out": memory, "out_count": memory[7:]}, {})


def test_names_in_a_shape_stand_for_any_length() -> None:
    value = torch.zeros(5, 4)
    assert arguments.check_tensor("x", value, ("tokens", 4), (), CPU) is value


def test_rows_are_whole_aligned_words() -> None:
    arguments.check_rows("x", torch.zeros(0, 8).bfloat16(), "tokens", (), CPU)
    with pytest.raises(weft.Error, match="rows of 14 bytes"):
        arguments.check_rows("x", torch.zeros(2, 7).bfloat16(), "tokens", (), CPU)
    with pytest.raises(weft.Error, match="rows of 0 bytes"):
        arguments.check_rows("x", torch.zeros(2, 0), "tokens", (), CPU)
    shifted = torch.zeros(1 + 16, dtype=torch.uint8)[1:].view(1, 16)
    with pytest.raises(weft.Error, match="16-byte aligned"):
        arguments.check_rows("x", shifted, "tokens", (), CPU)


def test_scales_may_have_any_strides() -> None:
    rows = torch.zeros(3, 16, dtype=torch.uint8)
    scales = torch.zeros(4, 3).T
    assert arguments.check_rows_with_scales((rows, scales), "tokens", CPU)[1] is scales
    with pytest.raises(weft.Error, match="a tuple of 3"):
        arguments.check_rows_with_scales((rows, scales, scales), "tokens", CPU)


@pytest.mark.parametrize(("bad_id", "text"), [(-2, "expert -2"), (8, "expert 8")])
def test_the_worst_expert_id_is_named(bad_id: int, text: str) -> None:
    topk_idx = torch.tensor([[0, bad_id]])
    with pytest.raises(weft.Error, match=f"topk_idx: got {text}, allowed: -1 to"):
        arguments.check_expert_ids(topk_idx, 8)
    arguments.check_expert_ids(topk_idx[:0], 8)


def test_biases_are_one_tensor_or_two() -> None:
    bias = torch.zeros(2, 8).bfloat16()
    for given, count in ((None, 0), (bias, 1), ((bias, bias), 2), ((bias,), 1)):
        assert len(arguments.check_bias(given, (2, 8), torch.bfloat16, CPU)) == count
    with pytest.raises(weft.Error, match="bias: got 3 tensors"):
        arguments.check_bias((bias,) * 3, (2, 8), torch.bfloat16, CPU)
    with pytest.raises(weft.Error, match="bias"):
        arguments.check_bias(bias, (3, 8), torch.bfloat16, CPU)


def test_comm_stream_outputs_need_an_event_and_async() -> None:
    arguments.check_allocation(True, EventHandle(), True)
    for previous, is_async in ((None, True), (EventHandle(), False)):
        with pytest.raises(weft.Error, match="allocate_on_comm_stream"):
            arguments.check_allocation(True, previous, is_async)
