// SPDX-License-Identifier: Apache-2.0
//
// A Region is memory that every rank of a team has registered in one call; a Placer does to this rank's part what
// peers ask for: puts bytes, adds to signal words.
//   Placer placer; placer.put(region, offset, bytes, count); placer.add(region, word, 1); WEFT_TRY(placer.finish());
// Order: what a placer does becomes visible in the order of the calls, all of it before finish() returns. Words of the
// host are added to atomically, with release; words of a GPU by copies, so only by this process. Threads: the holder of
// the team's mutex.
#pragma once

#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "transfer/copier.h"
#include "transfer/engine.h"

namespace weft::nccl_rma {

struct Region {
  uint32_t number = 0;  // the same on every rank
  provider::Range range;
  bool never_reset = false;  // only peers change its words
  std::shared_ptr<transfer::Memory> memory;
  struct Part {
    uint64_t bytes = 0;
    bool is_staged = false;
    std::shared_ptr<transfer::Remote> remote;  // null: this rank's own
  };
  std::vector<Part> parts;                       // by rank
  std::unordered_map<uint64_t, uint64_t> words;  // of a GPU, never reset: what they are, by offset

  bool is_on_gpu() const { return range.kind == provider::MemoryKind::kCuda; }
  char* at(uint64_t offset) const { return static_cast<char*>(range.data) + offset; }
};

inline bool fits(uint64_t offset, uint64_t bytes, uint64_t all) {
  return bytes <= all && offset <= all - bytes;
}

// The range that NCCL names. Errors: kInvalid for a kind that is none, kSystem where the driver does not know the
// pointer.
Result<provider::Range> range_of(void* data, uint64_t bytes, int pointer_kind);

class Placer {
 public:
  Status put(Region& to, uint64_t offset, const void* host, uint64_t bytes);
  // Between two regions of this rank.
  Status copy(Region& to, uint64_t to_offset, const Region& from, uint64_t from_offset, uint64_t bytes);
  // `offset` is a multiple of 8.
  Status add(Region& to, uint64_t offset, uint64_t value);
  Status finish();

 private:
  transfer::CopyQueue& queue(int device);
  std::map<int, transfer::CopyQueue> queues_;  // of GPUs
};

}  // namespace weft::nccl_rma
