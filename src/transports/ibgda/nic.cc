// SPDX-License-Identifier: Apache-2.0
#include "transports/ibgda/nic.h"

#include <atomic>
#include <cstring>

#include "transports/ibgda/mlx5_nic.h"

namespace weft::ibgda {
namespace {

std::atomic<NicSource*> in_place{nullptr};

}  // namespace

Completion QueuePair::completion(uint32_t index) const {
  const QueueMemory& at = memory();
  const auto* entry = reinterpret_cast<const Completion*>(at.completions) + (index & (at.entries - 1));
  const uint32_t last = load_acquire(&entry->last);
  Completion found{};
  found.vendor = entry->vendor;
  found.syndrome = entry->syndrome;
  found.last = last;
  return found;
}

Status QueuePair::put_entry(uint32_t index, const Entry& entry) {
  const QueueMemory& at = memory();
  std::memcpy(at.ring + (index & (at.blocks - 1)) * kBlockBytes, &entry, sizeof entry);
  store_release(at.record + kRecordOfSends, record_word(index + 1));
  return {};
}

NicSource& nic_source() {
  NicSource* placed = in_place.load(std::memory_order_acquire);
  return placed ? *placed : mlx5_nics();
}

void set_nic_source(NicSource* source) {
  in_place.store(source, std::memory_order_release);
}

}  // namespace weft::ibgda
