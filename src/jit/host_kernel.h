// SPDX-License-Identifier: Apache-2.0
//
// How the version of a kernel for the CPU is made from its row in kernel_list.h, for every mesh that it can run with.
// CMake writes a file for each row, from host_kernel.cc.in:
//   #include "kernels/moe/ring.cuh"
//   WEFT_HOST_KERNEL(kAny, ring_send, RingArgs, RingShape)   // defines HostFunction host_ring_send(mesh_type)
#pragma once

#include "jit/host_kernels.h"
#include "jit/host_meshes.h"

#define WEFT_HOST_KERNEL(needs, function, Args, Shape)                                                   \
  namespace weft {                                                                                       \
  HostFunction host_##function(std::string_view mesh_type) {                                             \
    HostFunction run = nullptr;                                                                          \
    for_each_mesh<Needs::needs>([&]<class MeshT>(MeshKind<MeshT> mesh) {                                 \
      if (mesh.name != mesh_type) return;                                                                \
      run = [](const void* args, const void* device_mesh, const void* shape) {                           \
        function<MeshT, Shape>(*static_cast<const Args*>(args), *static_cast<const MeshT*>(device_mesh), \
                               *static_cast<const Shape*>(shape));                                       \
      };                                                                                                 \
    });                                                                                                  \
    return run;                                                                                          \
  }                                                                                                      \
  }  // namespace weft
