// SPDX-License-Identifier: Apache-2.0
//
// What the files of CollectiveRunner share: runner.cc makes one, runner_program.cc and runner_exchange.cc plan and
// start its calls, runner_fault.cc says why one failed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "collective/runner.h"
#include "collective/shared_addresses.h"
#include "kernels/core/carver.h"

namespace weft {

inline constexpr const char* kExchangeNames[kExchanges] = {
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter"};
constexpr uint64_t kBounceBytes = 64 << 10;  // with source and result it fits a core's second cache

// What direct_ holds.
struct DirectTables {
  uint64_t windows_at, processes_at, readers_at, bounce_at, end;
};
inline DirectTables direct_tables(uint64_t ranks, bool is_host) {
  Carver carver;
  DirectTables tables{};
  tables.windows_at = carver.take((kMaxWindows + SharedAddresses::kPieces) * sizeof(std::byte* const*));
  tables.processes_at = carver.take(ranks * sizeof(uint32_t));
  tables.readers_at = carver.take(ranks * sizeof(uint32_t));
  tables.bounce_at = carver.take(is_host ? kBounceBytes : 16, 4096);
  tables.end = carver.end();
  return tables;
}

inline Launch launch_of(const GridPlan& grid) {
  return {grid.blocks, grid.threads_per_block, grid.shared_bytes, nullptr, false};
}

}  // namespace weft
