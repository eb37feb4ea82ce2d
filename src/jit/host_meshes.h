// SPDX-License-Identifier: Apache-2.0
//
// The meshes that kernels are built for: that of every transport, by itself and together with mapped peers.
//   for_each_mesh<Needs::kAny>([&]<class MeshT>(MeshKind<MeshT> mesh) { use(mesh.name, sizeof(MeshT)); });
#pragma once

#include <string_view>
#include <type_traits>

#include "kernels/core/hybrid.cuh"
#include "transports/list.h"

namespace weft {

// The peers that a kernel needs: any peers; peers that are all mapped, since it takes their addresses; peers behind
// ports.
enum class Needs { kAny, kMapped, kPorts };

// A mesh, as kernels are built for it.
template <class MeshT>
struct MeshKind {
  using type = MeshT;
  std::string_view name;
};

// A kernel that takes peers' addresses does not compile for a mesh that has none.
template <Needs needs, class MeshT, class Use>
void use_mesh(Use& use, MeshKind<MeshT> mesh) {
  if constexpr (needs == Needs::kAny || needs == (MappedMeshOnly<MeshT> ? Needs::kMapped : Needs::kPorts))
    use(mesh);
}

// Calls `use` for each mesh that has what is needed.
template <Needs needs, class Use>
void for_each_mesh(Use use) {
#define WEFT_TRANSPORT(folder, MeshT)               \
  use_mesh<needs>(use, MeshKind<MeshT>{#MeshT});    \
  if constexpr (!std::is_same_v<MeshT, MappedMesh>) \
    use_mesh<needs>(                                \
        use, MeshKind<HybridMesh<MappedMesh, MeshT>>{"HybridMesh<weft::MappedMesh, weft::" #MeshT ">"});
  WEFT_TRANSPORTS(WEFT_TRANSPORT)
#undef WEFT_TRANSPORT
}

}  // namespace weft
