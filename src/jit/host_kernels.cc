// SPDX-License-Identifier: Apache-2.0
#include "jit/host_kernels.h"

#include <vector>

#include "jit/host_meshes.h"
#include "jit/kernel_list.h"
#include "kernels/collective/exchange_args.h"
#include "kernels/collective/program_args.h"
#include "kernels/core/copy_pages.cuh"
#include "kernels/moe/engram_args.h"
#include "kernels/moe/high_throughput_args.h"
#include "kernels/moe/low_latency_args.h"
#include "kernels/moe/ring_args.h"
#include "kernels/moe/two_level_args.h"

namespace weft {

// Each is in a file of its own, which CMake writes (host_kernel.cc.in).
#ifdef WEFT_HOST_KERNELS
#define WEFT_ROW(needs, file, function, Args, Shape, threads, typical) \
  HostFunction host_##function(std::string_view mesh_type);
WEFT_KERNELS(WEFT_ROW)
WEFT_EXTRA_KERNELS(WEFT_ROW)
#undef WEFT_ROW
#define WEFT_HOST_FUNCTION(function, mesh_type) host_##function(mesh_type)
#else
#define WEFT_HOST_FUNCTION(function, mesh_type) nullptr
#endif

namespace {

std::vector<KernelRow> make_table() {
  std::vector<KernelRow> rows;
#define WEFT_ROW(needs, file, function, Args, Shape, threads, typical)                         \
  for_each_mesh<Needs::needs>([&]<class MeshT>(MeshKind<MeshT> mesh) {                         \
    rows.push_back({file, #function, #Args, mesh.name, #Shape, threads, typical, sizeof(Args), \
                    sizeof(MeshT), WEFT_HOST_FUNCTION(function, mesh.name)});                  \
  });
  WEFT_KERNELS(WEFT_ROW)
  WEFT_EXTRA_KERNELS(WEFT_ROW)
#undef WEFT_ROW
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
  const auto add = [&](std::string_view mesh, std::string_view header) {
    if (mesh_type.find(mesh) != std::string_view::npos) headers.push_back(header);
  };
#define WEFT_TRANSPORT(folder, MeshT) add(#MeshT, "transports/" #folder "/channel.cuh");
  WEFT_TRANSPORTS(WEFT_TRANSPORT)
#undef WEFT_TRANSPORT
#define WEFT_TRANSPORT(folder, MeshT) add(#MeshT, WEFT_EXTRA_FOLDER #folder "/channel.cuh");
  WEFT_EXTRA_TRANSPORTS(WEFT_TRANSPORT)
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
