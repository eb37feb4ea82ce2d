// SPDX-License-Identifier: Apache-2.0
//
// ChannelLoop times the channel between two ranks of a window, in the kernel that calls it:
//   WEFT_TRY_ASSIGN(auto loop, ChannelLoop::create(comm, 64 << 20));
//   seconds = *loop->run({ChannelCall::kPutWithSignal, ChannelWay::kRoundTrip, 16, 1000, 5});   // both ranks
// The first half of the window past header_bytes() is read, the second written.
// Threads: one caller; create() and run() are collective calls of the two ranks of the communicator.
#pragma once

#include <memory>
#include <vector>

#include "comm/window.h"
#include "measure/kernels/channel_loop.cuh"
#include "memory/device_memory.h"
#include "memory/host_visible.h"

namespace weft {

struct ChannelLoad {
  ChannelCall call = ChannelCall::kPutWithSignal;
  ChannelWay way = ChannelWay::kRoundTrip;
  uint64_t bytes = 16;  // of one put; a multiple of 16
  uint32_t count = 1;   // calls, or round trips, of a repetition
  uint32_t repeats = 1;
};

class ChannelLoop {
 public:
  // Errors: kInvalid for a communicator that has not two ranks; kUnsupported on GPUs that map each other; those of Window::create().
  static Result<std::unique_ptr<ChannelLoop>> create(std::shared_ptr<Communicator> comm, uint64_t bytes);

  // Seconds of each repetition on rank 0; on rank 1 zeros. Errors: kInvalid for sizes that do not fit,
  // kPeerLost naming the rank, expected and seen.
  Result<std::vector<double>> run(const ChannelLoad& load);

  const Window& window() const { return *window_; }
  Status check_owner() const { return window_->check_owner(); }
  uint64_t src_at() const { return header_bytes(); }
  uint64_t dst_at() const { return header_bytes() + room(); }
  uint64_t room() const;           // bytes that may be sent, and received
  Result<uint64_t> added() const;  // what the peer has added here so far

 private:
  explicit ChannelLoop(std::unique_ptr<Window> window) : window_(std::move(window)) {}
  static uint64_t header_bytes() { return 4096; }
  std::unique_ptr<Window> window_;
  std::unique_ptr<HostVisible> fault_;
  std::unique_ptr<OwnStream> stream_;  // ranks may share a GPU; null on the host
  uint64_t said_ = 0, added_ = 0;
};

}  // namespace weft
