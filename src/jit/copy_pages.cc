// SPDX-License-Identifier: Apache-2.0
#include "jit/copy_pages.h"

#include <algorithm>

#include "jit/jit.h"
#include "kernels/core/copy_pages.cuh"
#include "transports/mapped/channel.cuh"

namespace weft {
namespace {

constexpr uint32_t kThreads = 512, kWarps = kThreads / 32;
constexpr uint32_t kMostBlocks = 64;  // stores of so many SMs fill an NVLink of H200; the rest is the user's

KernelKey key() {
  return {"kernels/core/copy_pages.cuh", "copy_pages", "CopyPagesArgs", "MappedMesh", {}, kThreads};
}

}  // namespace

Status prepare_copy_pages(int device) {
  return Jit::of({Device::Kind::kCuda, device}).get(key()).status();
}

Status copy_pages(int device, void* stream, const PageCopy* list, uint32_t count, uint64_t longest_bytes) {
  Jit& jit = Jit::of({Device::Kind::kCuda, device});
  WEFT_TRY_ASSIGN(const Kernel* kernel, jit.get(key()));
  const uint64_t units = (longest_bytes + kCopyUnitBytes - 1) / kCopyUnitBytes * count;
  const auto blocks =
      static_cast<uint32_t>(std::clamp<uint64_t>((units + kWarps - 1) / kWarps, 1, kMostBlocks));
  const Launch how{.blocks = blocks, .threads_per_block = kThreads, .stream = stream};
  return jit.launch(*kernel, how, CopyPagesArgs{list, longest_bytes, count}, MappedMesh{}, CopyPagesShape{});
}

}  // namespace weft
