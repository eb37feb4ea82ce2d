// SPDX-License-Identifier: Apache-2.0
//
// Memory for scenarios.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "weak/machine.h"

namespace weft::weak {

inline constexpr std::byte kPoison{0xa5};

// Memory of a rank that others may see, 128-byte aligned.
class Buffer {
 public:
  Buffer(Machine& machine, const std::string& name, uint64_t bytes, std::byte fill)
      : bytes_(bytes + 128, fill) {
    base_ = bytes_.data() + (128 - reinterpret_cast<uintptr_t>(bytes_.data()) % 128) % 128;
    machine.memory().share(name, base_, bytes);
  }
  std::byte* at(uint64_t offset = 0) const { return base_ + offset; }

 private:
  std::vector<std::byte> bytes_;
  std::byte* base_;
};

// Elements that the machine knows by one name, all alike at first.
template <class T>
T* shared_array(std::deque<Buffer>& buffers, Machine& machine, const std::string& name, uint64_t count,
                std::byte fill = std::byte{0}) {
  return reinterpret_cast<T*>(buffers.emplace_back(machine, name, count * sizeof(T), fill).at());
}

// After a run: the word that a host finds there. False: the run has failed.
template <class T>
bool is_value(Machine& machine, const T* at, T want, const std::string& what) {
  T got{};
  if (!machine.read_at_end(at, sizeof(T), &got)) return false;
  if (got == want) return true;
  machine.fail("wrong result: " + what + " is " + std::to_string(got) + ", not " + std::to_string(want));
  return false;
}

}  // namespace weft::weak
