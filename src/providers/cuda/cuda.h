// SPDX-License-Identifier: Apache-2.0
//
// The provider of GPUs of one host: it opens libcuda, and its NICs are the GPUs (`cuda:0`). Bytes go by copy engines from
// memory of one process to memory of another. Its rails stand in for a NIC that reaches memory of GPUs: writes are
// unordered, and immediates follow their bytes. Lists of pages are copied by a kernel, if the process has given one; copies
// that a kernel may wait for (copy_in_own_context()) go by copy engines alone.
//   std::shared_ptr<Provider> provider = make_cuda();
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "providers/provider.h"

namespace weft::provider {

struct CudaOptions {
  bool host_only = false;  // one NIC without a GPU, `cuda:host`: for tests of what is not copied by GPUs
};
std::shared_ptr<Provider> make_cuda(CudaOptions options = {});

// Launches a kernel on `stream` of the primary context that copies `count` stretches; `list` is in memory of that GPU.
struct Stretch {
  uint64_t src, dst, bytes;
};
using CopyStretches = Status (*)(int device, void* stream, const Stretch* list, uint32_t count,
                                 uint64_t longest_bytes);
// For rails that are opened from now on. `prepare` is called when one opens, so that nothing is compiled in a transfer.
void give_copy_kernel(Status (*prepare)(int device), CopyStretches copy);

}  // namespace weft::provider
