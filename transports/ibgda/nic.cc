// SPDX-License-Identifier: Apache-2.0
#include "transports/ibgda/nic.h"

#include <atomic>

#include "transports/ibgda/mlx5_nic.h"

namespace weft::ibgda {
namespace {

std::atomic<NicSource*> in_place{nullptr};

}  // namespace

NicSource& nic_source() {
  NicSource* placed = in_place.load(std::memory_order_acquire);
  return placed ? *placed : mlx5_nics();
}

void set_nic_source(NicSource* source) {
  in_place.store(source, std::memory_order_release);
}

}  // namespace weft::ibgda
