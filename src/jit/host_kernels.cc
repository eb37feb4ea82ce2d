// SPDX-License-Identifier: Apache-2.0
//
// Adding a kernel: include its file, and add its row. The host version, the compile tests for every GPU architecture
// and the checks of struct sizes follow from the row.
#include "jit/host_kernels.h"

#include <algorithm>

#include "transports/mapped/channel.cuh"

namespace weft {
namespace {

// WEFT_HOST_KERNEL(name, file, function, Args, Mesh, Shape, threads per block on GPUs, typical constants)
#define WEFT_HOST_KERNEL(name, file, function, Args, Mesh, Shape, threads, typical)                                  \
  KernelRow {                                                                                                        \
    file, name, #Args, #Mesh, #Shape, threads, typical, sizeof(Args), sizeof(Mesh),                                  \
        [](const void* args, const void* mesh, const void* shape) {                                                  \
          function<Mesh, Shape>(*static_cast<const Args*>(args), *static_cast<const Mesh*>(mesh),                    \
                                *static_cast<const Shape*>(shape));                                                  \
        }                                                                                                            \
  }

// A mesh for kernels that talk to nobody.
const MeshRow kMeshes[] = {
    {"MappedMesh", "transports/mapped/channel.cuh"},
};

const std::span<const KernelRow> kKernels{};

}  // namespace

std::span<const KernelRow> kernel_table() { return kKernels; }
std::span<const MeshRow> mesh_table() { return kMeshes; }

std::string_view mesh_file(std::string_view mesh_type) {
  const auto found = std::ranges::find(kMeshes, mesh_type, &MeshRow::type);
  return found == std::end(kMeshes) ? std::string_view() : found->file;
}

const KernelRow* find_kernel(std::string_view name, std::string_view mesh_type) {
  for (const KernelRow& row : kernel_table())
    if (row.name == name && row.mesh_type == mesh_type) return &row;
  return nullptr;
}

}  // namespace weft
