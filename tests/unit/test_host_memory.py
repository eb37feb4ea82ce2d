# SPDX-License-Identifier: Apache-2.0
"""Results on the CPU: when their memory is used again, and when not."""

from __future__ import annotations

import threading

import torch

from weft.moe.host_memory import HostMemory

_SHAPE = (1024, 2048)


def test_a_result_that_is_gone_lends_its_place():
    memory = HostMemory()
    first = memory.empty(_SHAPE, torch.bfloat16)
    place = first.data_ptr()
    del first
    again = memory.empty(_SHAPE, torch.bfloat16)
    assert again.data_ptr() == place
    assert memory.empty(_SHAPE, torch.bfloat16).data_ptr() != place


def test_views_and_storages_keep_a_result():
    memory = HostMemory()
    whole = memory.empty(_SHAPE, torch.bfloat16).fill_(3)
    row, storage = whole[1], whole.untyped_storage()
    del whole
    memory.empty(_SHAPE, torch.bfloat16).fill_(4)
    assert (row == 3).all()
    del row
    memory.empty(_SHAPE, torch.bfloat16).fill_(5)
    assert (torch.empty(0, dtype=torch.bfloat16).set_(storage) == 3).all()


def test_results_are_ordinary_tensors():
    memory = HostMemory()
    result = memory.empty(_SHAPE, torch.float32)
    assert (result.shape, result.dtype, result.is_contiguous()) == (_SHAPE, torch.float32, True)
    assert result._base is None  # autograd lets them be changed in place
    leaf = result.zero_().requires_grad_()
    (leaf * 2).sum().backward()
    assert (leaf.grad == 2).all()
    storage = result.detach().untyped_storage()
    assert storage.resizable()
    num_bytes = storage.nbytes()
    storage.resize_(0)
    assert storage.nbytes() == 0
    assert storage.resize_(num_bytes).nbytes() == num_bytes


def test_a_storage_that_was_freed_is_not_used_again():
    memory = HostMemory()
    memory.empty(_SHAPE, torch.bfloat16).untyped_storage().resize_(0)
    assert memory.empty(_SHAPE, torch.bfloat16).fill_(1).sum() == 1024 * 2048


def test_a_default_device_changes_nothing():
    with torch.device("meta"):
        assert HostMemory().empty(_SHAPE, torch.bfloat16).device.type == "cpu"


def test_a_storage_is_not_used_for_much_less():
    memory = HostMemory()
    place = memory.empty((8 << 20,), torch.uint8).data_ptr()  # gone at once
    small = memory.empty((4 << 20,), torch.uint8)
    assert small.data_ptr() != place
    assert memory.empty((7 << 20,), torch.uint8).data_ptr() == place


def test_small_and_empty_results():
    memory = HostMemory()
    assert memory.empty((0, 7168), torch.bfloat16).shape == (0, 7168)
    assert memory.empty((3,), torch.int32).shape == (3,)


def test_only_the_newest_places_are_kept():
    memory = HostMemory()
    results = [memory.empty(_SHAPE, torch.bfloat16) for _ in range(5)]
    newest = {result.data_ptr() for result in results[2:]}
    while results:
        del results[0]
    again = [memory.empty(_SHAPE, torch.bfloat16) for _ in range(3)]
    assert {result.data_ptr() for result in again} == newest


def test_results_outlive_their_memory_and_die_in_any_thread():
    memory = HostMemory()
    results = [memory.empty(_SHAPE, torch.bfloat16).fill_(i) for i in range(8)]
    del memory
    assert all((result == i).all() for i, result in enumerate(results))

    memory, mistakes = HostMemory(), []

    def work(number: int) -> None:
        for _ in range(50):
            mine = memory.empty(_SHAPE, torch.int16).fill_(number)
            if not (mine == number).all():
                mistakes.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not mistakes


def test_what_went_to_shared_memory_is_not_used_again():
    memory = HostMemory()
    result = memory.empty(_SHAPE, torch.bfloat16).fill_(3)
    for_others = torch.empty(0, dtype=torch.bfloat16).set_(
        torch.UntypedStorage._new_shared_fd_cpu(*result.untyped_storage()._share_fd_cpu_())
    )
    del result  # here, while another process, as multiprocessing's queues make it, still has it
    memory.empty(_SHAPE, torch.bfloat16).fill_(4)
    assert (for_others == 3).all()
