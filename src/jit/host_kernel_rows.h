// SPDX-License-Identifier: Apache-2.0
//
// How a file of kernels makes their rows. Adding a kernel: include its file in the host_kernels_*.cc of its family, and
// add its row there. The host versions (one for each mesh), the compile tests for every GPU architecture and the
// checks of struct sizes follow from the row. Families are files of their own so that two cores compile them.
//   void add_foo_kernels(std::vector<KernelRow>& rows) {
//     for_each_mesh([&]<class MeshT>(MeshKind<MeshT> mesh) {
//       WEFT_HOST_KERNEL(kAny, "kernels/foo.cuh", run_foo, FooArgs, FooShape, 256, "row_bytes=16; row_bytes=7168");
//     });
//   }
#pragma once

#include <string_view>
#include <type_traits>
#include <vector>

#include "jit/host_kernels.h"
#include "kernels/core/hybrid.cuh"
#include "transports/list.h"

namespace weft {

// The families: each adds its rows, for every mesh.
void add_high_throughput_kernels(std::vector<KernelRow>& rows);
void add_low_latency_kernels(std::vector<KernelRow>& rows);
void add_collective_kernels(std::vector<KernelRow>& rows);
void add_other_kernels(std::vector<KernelRow>& rows);

// What a kernel must be able to do with its peers: anything will do; it takes addresses of all of them; it is there for
// those that have none.
enum class Needs { kAny, kMapped, kPorts };

// A mesh, as kernels are built for it.
template <class MeshT>
struct MeshKind {
  using type = MeshT;
  std::string_view name;
};

template <Needs needs, class MeshT, class AddRow>
void add_row(AddRow add) {
  // A kernel that takes peers' addresses does not compile for a mesh that has none.
  if constexpr (needs == Needs::kAny || needs == (MappedMeshOnly<MeshT> ? Needs::kMapped : Needs::kPorts))
    add();
}

// WEFT_HOST_KERNEL(what it needs, file, function, Args, Shape, threads per block on GPUs, typical constants)
#define WEFT_HOST_KERNEL(needs, file, function, Args, Shape, threads, typical)                            \
  add_row<Needs::needs, MeshT>([&]<class M = MeshT> {                                                     \
    rows.push_back({file, #function, #Args, mesh.name, #Shape, threads, typical, sizeof(Args), sizeof(M), \
                    [](const void* args, const void* device_mesh, const void* shape) {                    \
                      function<M, Shape>(*static_cast<const Args*>(args),                                 \
                                         *static_cast<const M*>(device_mesh),                             \
                                         *static_cast<const Shape*>(shape));                              \
                    }});                                                                                  \
  })

// Calls add for the mesh of every transport, alone and with mapped peers beside its ports.
template <class Add>
void for_each_mesh(Add add) {
#define WEFT_TRANSPORT(folder, MeshT)               \
  add(MeshKind<MeshT>{#MeshT});                     \
  if constexpr (!std::is_same_v<MeshT, MappedMesh>) \
    add(MeshKind<HybridMesh<MappedMesh, MeshT>>{"HybridMesh<weft::MappedMesh, weft::" #MeshT ">"});
  WEFT_TRANSPORTS(WEFT_TRANSPORT)
#undef WEFT_TRANSPORT
}

}  // namespace weft
