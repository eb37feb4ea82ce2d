// SPDX-License-Identifier: Apache-2.0
#include "jit/host_kernels.h"

#include <vector>

#include "jit/host_kernel_rows.h"
#include "transports/list.h"

namespace weft {
namespace {

std::vector<KernelRow> make_table() {
  std::vector<KernelRow> rows;
  add_high_throughput_kernels(rows);
  add_low_latency_kernels(rows);
  add_collective_kernels(rows);
  add_other_kernels(rows);
  return rows;
}

}  // namespace

std::span<const KernelRow> kernel_table() {
  static const std::vector<KernelRow> rows = make_table();
  return rows;
}

// A mesh of several parts names them all.
std::vector<std::string_view> mesh_headers(std::string_view mesh_type) {
  std::vector<std::string_view> headers;
#define WEFT_TRANSPORT(folder, MeshT)                   \
  if (mesh_type.find(#MeshT) != std::string_view::npos) \
    headers.push_back("transports/" #folder "/channel.cuh");
  WEFT_TRANSPORTS(WEFT_TRANSPORT)
#undef WEFT_TRANSPORT
  if (mesh_type.starts_with("HybridMesh<")) headers.push_back("kernels/core/hybrid.cuh");
  return headers;
}

const KernelRow* find_kernel(std::string_view name, std::string_view mesh_type) {
  for (const KernelRow& row : kernel_table())
    if (row.name == name && row.mesh_type == mesh_type) return &row;
  return nullptr;
}

}  // namespace weft
