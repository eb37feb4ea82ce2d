// SPDX-License-Identifier: Apache-2.0
//
// Heap hands out ranges of offsets of the local window: where operations put outputs that peers write into.
//   Heap heap(4096, window->bytes());
//   std::optional<uint64_t> at = heap.take(bytes);   // first fit, kAlignment-aligned; none when nothing fits
//   heap.give(*at);
// Each rank has its own heap; the same sequence of calls gives the same offsets on every rank.
// Threads: any.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

namespace weft {

class Heap {
 public:
  static constexpr uint64_t kAlignment = 256;

  // Offsets [begin, end), both rounded inwards to kAlignment.
  Heap(uint64_t begin, uint64_t end);

  // The first free range of `bytes` bytes (at least kAlignment), or none.
  std::optional<uint64_t> take(uint64_t bytes);
  // Returns a range; false, and nothing changes, if `offset` is not one that take() gave and that is still
  // out.
  bool give(uint64_t offset);
  // Adds [current end, end): what a grown window brings. Smaller than the current end: nothing happens. `apart`: no
  // range crosses the current end, which costs kAlignment bytes.
  void extend(uint64_t end, bool apart = false);

  // Bytes of the largest range that take() could give now.
  uint64_t largest() const;
  // Bytes that are out.
  uint64_t taken_bytes() const;
  uint64_t end() const;

 private:
  void put_free(uint64_t begin, uint64_t end);

  mutable std::mutex mutex_;
  uint64_t end_;
  std::map<uint64_t, uint64_t> free_;   // begin -> end, never adjacent
  std::map<uint64_t, uint64_t> taken_;  // begin -> end
};

}  // namespace weft
