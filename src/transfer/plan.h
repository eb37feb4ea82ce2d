// SPDX-License-Identifier: Apache-2.0
//
// How a request becomes writes of rails: which bytes, on which rail, and how many immediates the target will
// count.
//   for (const Shard& s : shard_range(bytes, {.rails = 4}, first)) post(s.rail, s.offset, s.bytes);
// Pure functions, so both sides of a transfer can compute the same numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "providers/provider.h"

namespace weft::transfer {

// When the immediate of a request arrives.
//   kOnce: one per target, after all its bytes, however they were cut. The default.
//   kEach: one with every write of a rail; expected_imms() says how many. No extra round trip on unordered rails.
enum class Notify : uint8_t { kOnce, kEach };

struct RailPlan {
  uint32_t rails = 1;                     // local rails to spread over
  uint64_t shard_bytes_min = 8192;        // no shard is smaller, and shards start at multiples of this
  uint64_t piece_bytes_max = UINT64_MAX;  // longest write of a rail
};

struct Shard {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint32_t rail = 0;
};

// Cuts [0, bytes) into at most `rails` shards of nearly equal size and those into pieces; a range of zero
// bytes is one piece of zero bytes. Pieces of different rails alternate. The first shard goes to
// `first_rail`.
std::vector<Shard> shard_range(uint64_t bytes, const RailPlan& plan, uint32_t first_rail);

// A list of pages: page i lies at offset + stride_bytes * (indices.empty() ? i : indices[i]).
struct Pages {
  uint64_t offset = 0;
  uint64_t stride_bytes = 0;
  std::vector<uint32_t> indices;  // empty: 0, 1, 2, ... count - 1
  uint64_t count = 0;             // taken from indices when these are given
  uint64_t size() const { return indices.empty() ? count : indices.size(); }
  uint64_t at(uint64_t i) const { return offset + stride_bytes * (indices.empty() ? i : indices[i]); }
};

struct PagePair {
  uint64_t src = 0;
  uint64_t dst = 0;
  uint64_t bytes = 0;
};
// Pairs the pages of both sides; neighbours in both become one piece when `merge`. Errors: kInvalid when the
// lists differ in length or an offset does not fit 64 bits.
Result<std::vector<PagePair>> pair_pages(const Pages& src, const Pages& dst, uint64_t page_bytes, bool merge);

// How transfers reach registered memory, and why that way.
enum class MemoryPath : uint8_t {
  kHost,        // host memory, straight by the NICs
  kDmabuf,      // device memory, exported to the NICs' driver
  kPeerMemory,  // device memory, through a kernel module of the device's maker
  kStaged,      // device memory, packed through pinned host memory
};
const char* to_string(MemoryPath path);
struct MemoryChoice {
  MemoryPath path = MemoryPath::kHost;
  std::string reason;
};
// `nics`: those of every rail; one that cannot reach the memory makes all of them go through the host.
MemoryChoice choose_memory_path(provider::MemoryKind kind, const std::vector<provider::Nic>& nics);

// Immediates that a target counts for one request with Notify::kEach (with kOnce it is 1).
uint64_t expected_imms(uint64_t bytes, const RailPlan& sender);                            // single write
uint64_t expected_page_imms(uint64_t pages, uint64_t page_bytes, const RailPlan& sender);  // paged write

}  // namespace weft::transfer
