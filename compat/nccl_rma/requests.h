// SPDX-License-Identifier: Apache-2.0
//
// Requests are what NCCL asks about until they have ended: numbers that are never the same again soon, so that one
// that was already taken back is known as such.
//   const uint64_t id = requests.begin(); ... requests.end(id, {}); ... requests.take(id, is_done)
// Threads: the holder of the team's mutex.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/status.h"
#include "transfer/engine.h"

namespace weft::nccl_rma {

struct Request {
  uint32_t generation = 0;
  bool is_used = false;
  bool has_ended = false;
  Status status;
  std::shared_ptr<transfer::Transfer> read;  // ends with it
};

class Requests {
 public:
  uint64_t begin() {
    if (free_.empty()) {
      free_.push_back(static_cast<uint32_t>(all_.size()));
      all_.emplace_back();
    }
    const uint32_t index = free_.back();
    free_.pop_back();
    Request& request = all_[index];
    request.is_used = true;
    request.generation = (request.generation + 1) & 0x7fffffff;
    return uint64_t{request.generation} << 32 | (index + 1);
  }
  // Null for a number that is not, or no longer, a request.
  Request* find(uint64_t id) {
    const uint64_t index = (id & 0xffffffff) - 1;
    if (index >= all_.size() || !all_[index].is_used || all_[index].generation != id >> 32) return nullptr;
    return &all_[index];
  }
  void end(uint64_t id, const Status& status) {
    Request* request = find(id);
    if (!request) return;
    request->has_ended = true;
    request->status = status;
  }
  void release(uint64_t id) {
    Request* request = find(id);
    if (!request) return;
    const uint32_t generation = request->generation;
    *request = {};
    request->generation = generation;
    free_.push_back(static_cast<uint32_t>((id & 0xffffffff) - 1));
  }

 private:
  std::deque<Request> all_;
  std::vector<uint32_t> free_;
};

}  // namespace weft::nccl_rma
