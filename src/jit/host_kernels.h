// SPDX-License-Identifier: Apache-2.0
//
// The list of every kernel that Weft has, once for each mesh that it can run with: where it is, how it is
// called on the host, and one or more typical sets of compile-time constants that the tests compile it with
// for every GPU architecture. Rows are in host_kernels_*.cc.
//   for (const KernelRow& row : kernel_table()) ...
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace weft {

struct KernelRow {
  std::string_view file;
  std::string_view name;
  std::string_view args_type;
  std::string_view mesh_type;
  std::string_view shape_type;  // the host's struct of run-time fields
  uint32_t threads_per_block;   // as launched on GPUs
  std::string_view typical;  // "row_bytes=14336 ranks=8; row_bytes=16 ranks=3": sets of constants, for tests
  size_t args_bytes;
  size_t mesh_bytes;
  void (*run)(const void* args, const void* mesh, const void* shape);  // one host warp
};

std::span<const KernelRow> kernel_table();

// The headers that define a mesh type; none for a type that is not listed.
std::vector<std::string_view> mesh_headers(std::string_view mesh_type);

// The row of a kernel with a mesh type, or null.
const KernelRow* find_kernel(std::string_view name, std::string_view mesh_type);

}  // namespace weft
