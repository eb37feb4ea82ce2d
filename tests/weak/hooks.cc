// SPDX-License-Identifier: Apache-2.0
//
// Plain accesses of kernels. -fsanitize=thread makes the compiler call these before each; there is no ThreadSanitizer here.
// Before a load they put the bytes that it is to see into memory.
#include <cstdint>
#include <cstring>

#include "weak/machine.h"

namespace {

using weft::weak::machine;

void before_read(void* at, uint64_t bytes, const void* code) {
  if (!weft::weak::is_in_a_lane()) return;
  std::byte seen[16];
  auto* to = static_cast<std::byte*>(at);
  for (uint64_t done = 0; done < bytes; done += sizeof(seen)) {
    const auto piece = static_cast<uint32_t>(std::min<uint64_t>(bytes - done, sizeof(seen)));
    if (!machine().memory().region_of(to + done)) return;
    machine().load(to + done, piece, seen, {.whole = bytes == 8 ? 8u : 4u}, {"plain load", {}, code});
    std::memcpy(to + done, seen, piece);
  }
}
void before_write(void* at, uint64_t bytes, const void* code) {
  if (weft::weak::is_in_a_lane()) machine().plain_store_follows(at, bytes, code);
}

}  // namespace

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* at, uint64_t bytes) {
  before_read(at, bytes, __builtin_return_address(0));
}
void __tsan_write_range(void* at, uint64_t bytes) {
  before_write(at, bytes, __builtin_return_address(0));
}
#define WEFT_HOOKS(bytes)                                 \
  void __tsan_read##bytes(void* at) {                     \
    before_read(at, bytes, __builtin_return_address(0));  \
  }                                                       \
  void __tsan_write##bytes(void* at) {                    \
    before_write(at, bytes, __builtin_return_address(0)); \
  }                                                       \
  void __tsan_unaligned_read##bytes(void* at) {           \
    before_read(at, bytes, __builtin_return_address(0));  \
  }                                                       \
  void __tsan_unaligned_write##bytes(void* at) {          \
    before_write(at, bytes, __builtin_return_address(0)); \
  }
WEFT_HOOKS(1)
WEFT_HOOKS(2)
WEFT_HOOKS(4)
WEFT_HOOKS(8)
WEFT_HOOKS(16)
}
