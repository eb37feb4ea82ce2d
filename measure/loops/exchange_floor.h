// SPDX-License-Identifier: Apache-2.0
//
// ExchangeFloor exchanges bytes between ranks that map each other, with nothing around it: what `weft bench floor` times.
//   WEFT_TRY_ASSIGN(auto floor, ExchangeFloor::create(comm, 8 << 20));
//   WEFT_TRY(floor->run({FloorWay::kBulk, true, 1 << 20, 3, 32}, stream));    // every rank; in a graph, too
//   ... when the stream has come to the end: WEFT_TRY(floor->check()), then times_at(): see FloorStamp
// Threads: one caller; create() and run() are called by all ranks of the communicator, run() alike and in one order.
#pragma once

#include <memory>

#include "comm/window.h"
#include "measure/kernels/exchange_floor.cuh"
#include "memory/host_visible.h"

namespace weft {

enum class FloorWay : int64_t { kStores = kFloorStores, kBulk = kFloorBulk, kLines = kFloorLines };

struct FloorLoad {
  FloorWay way = FloorWay::kStores;
  bool waits = true;    // false: a copy, which ends when its own stores have arrived
  uint64_t bytes = 16;  // to each peer; a multiple of 16, more than 0
  uint32_t peers = 1;   // 1 to R - 1; of lines R - 1
  uint32_t blocks = 1;  // at most a GPU's SMs; on the host threads
};

class ExchangeFloor {
 public:
  // Room for `bytes` to each peer. Errors: kInvalid for one rank, or for 0 bytes; kUnsupported where some rank is not
  // mapped; those of Window::create().
  static Result<std::unique_ptr<ExchangeFloor>> create(std::shared_ptr<Communicator> comm, uint64_t bytes);

  // In the order of `stream`. Errors: kInvalid for a load that does not fit; those of launches.
  Status run(const FloorLoad& load, void* stream);
  // kPeerLost, naming ranks, where a launch that has ended waited in vain.
  Status check() const;

  const Window& window() const { return *window_; }
  Status check_owner() const { return window_->check_owner(); }
  uint64_t most_bytes() const { return most_bytes_; }
  uint64_t most_line_bytes() const;  // of bytes that go as lines
  uint32_t most_blocks() const { return most_blocks_; }
  // Places in the window: of launches, stamps, sources by distance, what came by source, and lines by parity and source.
  const ExchangeFloorArgs& places() const { return args_; }

 private:
  explicit ExchangeFloor(std::unique_ptr<Window> window) : window_(std::move(window)) {}
  Status check_load(const FloorLoad& load) const;

  std::unique_ptr<Window> window_;
  std::unique_ptr<HostVisible> fault_;
  ExchangeFloorArgs args_{};
  uint64_t most_bytes_ = 0;
  uint32_t most_blocks_ = 0;
};

}  // namespace weft
