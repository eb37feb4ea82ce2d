// SPDX-License-Identifier: Apache-2.0
//
// Bulk copies (TMA), which RowPipe, RowQueue and RowWriter are made of from sm_90 on. Before, RowPipe loads and stores.
#pragma once

#include "kernels/target/cuda/groups.h"
#include "kernels/target/cuda/memory.h"

namespace weft {

WEFT_DEVICE uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kHasBulkCopies = true, kHasRowQueue = true;

namespace bulk {

WEFT_DEVICE void barrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
// Makes initialised barriers and finished generic accesses visible to the bulk copy engine.
WEFT_DEVICE void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Makes all memory that this thread has seen visible to the copies that it starts later.
WEFT_DEVICE void fence_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

WEFT_DEVICE void load(std::byte* stage, const std::byte* src, uint32_t bytes, uint64_t* barrier) {
  const uint32_t b = shared_address(barrier);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(stage)),
      "l"(src), "r"(bytes), "r"(b)
      : "memory");
}
WEFT_DEVICE void wait_loaded(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
WEFT_DEVICE void store(std::byte* dst, const std::byte* stage, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst),
               "r"(shared_address(stage)), "r"(bytes)
               : "memory");
}
WEFT_DEVICE void commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <uint32_t kPending>
WEFT_DEVICE void wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <uint32_t kPending>
WEFT_DEVICE void wait_written() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
  fence_async();
}

}  // namespace bulk
#else
inline constexpr bool kHasBulkCopies = false, kHasRowQueue = false;
#endif

}  // namespace weft

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#include "kernels/target/row_pipe_in_bulk.h"
#else
#include "kernels/target/row_pipe_by_loads.h"
#endif
