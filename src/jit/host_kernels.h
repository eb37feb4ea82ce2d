// SPDX-License-Identifier: Apache-2.0
//
// The table of every kernel that Weft has (kernel_list.h), once for each mesh that it can run with: where it is, how it is
// called on the host, and one or more typical sets of compile-time constants that the tests compile it with
// for every GPU architecture.
//   for (const KernelRow& row : kernel_table()) ...
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace weft {

// One host warp of a kernel.
using HostFunction = void (*)(const void* args, const void* mesh, const void* shape);

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
  HostFunction
      run;  // null in a build that compiles kernels for the CPU when they are asked for (host_compile.h)
};

std::span<const KernelRow> kernel_table();

// The headers that define a mesh type; none for a type that is not listed.
std::vector<std::string_view> mesh_headers(std::string_view mesh_type);

// The row of a kernel with a mesh type, or null.
const KernelRow* find_kernel(std::string_view name, std::string_view mesh_type);

}  // namespace weft
