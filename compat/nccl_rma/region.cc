// SPDX-License-Identifier: Apache-2.0
#include "compat/nccl_rma/region.h"

#include <atomic>
#include <cstring>
#include <mutex>

#include "base/cuda_driver.h"
#include "compat/nccl_rma/rma.h"

namespace weft::nccl_rma {

Result<provider::Range> range_of(void* data, uint64_t bytes, int pointer_kind) {
  provider::Range range{data, bytes};
  if (pointer_kind == kPointerHost) return range;
  if (pointer_kind != kPointerCuda)
    return Status::invalid("type: got {}, allowed: {} (host), {} (CUDA)", pointer_kind,
                           static_cast<int>(kPointerHost), static_cast<int>(kPointerCuda));
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  range.kind = provider::MemoryKind::kCuda;
  WEFT_TRY(cuda_status(driver->cuPointerGetAttribute(&range.device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                                     reinterpret_cast<CUdeviceptr>(data)),
                       "asking which GPU has {}", data));
  return range;
}

transfer::CopyQueue& Placer::queue(int device) {
  return queues_.try_emplace(device, device).first->second;
}

Status Placer::put(Region& to, uint64_t offset, const void* host, uint64_t bytes) {
  if (to.is_on_gpu()) return queue(to.range.device).copy(to.at(offset), host, bytes);
  if (bytes) std::memcpy(to.at(offset), host, bytes);
  return {};
}

Status Placer::copy(Region& to, uint64_t to_offset, const Region& from, uint64_t from_offset,
                    uint64_t bytes) {
  const provider::Range& gpu = to.is_on_gpu() ? to.range : from.range;
  if (gpu.kind == provider::MemoryKind::kCuda)
    return queue(gpu.device).copy(to.at(to_offset), from.at(from_offset), bytes);
  if (bytes) std::memmove(to.at(to_offset), from.at(from_offset), bytes);
  return {};
}

Status Placer::add(Region& to, uint64_t offset, uint64_t value) {
  if (!to.is_on_gpu()) {
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(to.at(offset)))
        .fetch_add(value, std::memory_order_release);
    return {};
  }
  // Teams may share a word, and a GPU's copies all run on one stream: who reads it next sees what is written here.
  static std::mutex one_at_a_time;
  std::lock_guard lock(one_at_a_time);
  uint64_t now = 0;
  if (const auto known = to.words.find(offset); known != to.words.end())
    now = known->second;
  else
    WEFT_TRY(transfer::copy_to_host(&now, to.at(offset), sizeof now, to.range));
  now += value;
  if (to.never_reset) to.words[offset] = now;
  return queue(to.range.device).copy(to.at(offset), &now, sizeof now);
}

Status Placer::finish() {
  Status first;
  for (auto& [device, copies] : queues_)
    if (Status status = copies.finish(); first.ok()) first = std::move(status);
  return first;
}

}  // namespace weft::nccl_rma
