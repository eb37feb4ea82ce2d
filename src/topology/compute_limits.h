// SPDX-License-Identifier: Apache-2.0
//
// What the machine offers to one rank's kernels; compute_limits() (jit/mesh_launch.h) asks the device for it.
#pragma once

#include <cstdint>

namespace weft {

struct ComputeLimits {
  bool is_cuda;
  uint32_t max_blocks;        // SMs, or 1 on the host
  uint32_t host_threads;      // per rank, on the host
  uint32_t shared_bytes;      // per block
  bool has_clusters = false;  // whether blocks can be launched in clusters, which have SMs side by side
};

}  // namespace weft
