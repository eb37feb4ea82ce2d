// SPDX-License-Identifier: Apache-2.0
#include "memory/heap.h"

#include <algorithm>
#include <iterator>

namespace weft {
namespace {

uint64_t round_down(uint64_t value) {
  return value / Heap::kAlignment * Heap::kAlignment;
}
uint64_t round_up(uint64_t value) {
  return round_down(value + Heap::kAlignment - 1);
}

}  // namespace

Heap::Heap(uint64_t begin, uint64_t end) : end_(std::max(round_up(begin), round_down(end))) {
  if (round_up(begin) < end_) free_[round_up(begin)] = end_;
}

std::optional<uint64_t> Heap::take(uint64_t bytes) {
  if (bytes > UINT64_MAX - kAlignment) return std::nullopt;
  const uint64_t need = std::max(round_up(bytes), kAlignment);
  std::lock_guard lock(mutex_);
  const auto fits = [need](const auto& range) { return range.second - range.first >= need; };
  const auto found = std::find_if(free_.begin(), free_.end(), fits);
  if (found == free_.end()) return std::nullopt;
  const auto [begin, end] = *found;
  free_.erase(found);
  if (begin + need < end) free_[begin + need] = end;
  taken_[begin] = begin + need;
  return begin;
}

bool Heap::give(uint64_t offset) {
  std::lock_guard lock(mutex_);
  const auto found = taken_.find(offset);
  if (found == taken_.end()) return false;
  const auto [begin, end] = *found;
  taken_.erase(found);
  put_free(begin, end);
  return true;
}

void Heap::extend(uint64_t end, bool apart) {
  std::lock_guard lock(mutex_);
  if (round_down(end) <= end_) return;
  const uint64_t begin = end_ + (apart ? kAlignment : 0);
  if (begin < round_down(end)) put_free(begin, round_down(end));
  end_ = round_down(end);
}

// Adds a free range and joins it with its neighbours.
void Heap::put_free(uint64_t begin, uint64_t end) {
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == end) {
    end = next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin() && std::prev(next)->second == begin) {
    std::prev(next)->second = end;
    return;
  }
  free_[begin] = end;
}

uint64_t Heap::largest() const {
  std::lock_guard lock(mutex_);
  uint64_t bytes = 0;
  for (const auto& [begin, end] : free_) bytes = std::max(bytes, end - begin);
  return bytes;
}

uint64_t Heap::taken_bytes() const {
  std::lock_guard lock(mutex_);
  uint64_t bytes = 0;
  for (const auto& [begin, end] : taken_) bytes += end - begin;
  return bytes;
}

uint64_t Heap::end() const {
  std::lock_guard lock(mutex_);
  return end_;
}

}  // namespace weft
