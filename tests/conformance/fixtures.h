// SPDX-License-Identifier: Apache-2.0
//
// What a transport brings to the conformance suite: its name, its mesh type, and the numbers of ranks to try.
// A new transport adds its fixture here and to Fixtures; EveryTransportIsTested fails until it does.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "comm/window.h"
#include "support/ranks.h"
#include "transports/list.h"

namespace weft::testing {

struct MappedFixture {
  static constexpr const char* kName = "mapped";
  static constexpr const char* kTransport = kName;  // as Communicator::create() is asked for
  using Mesh = MappedMesh;
  static std::vector<RanksAre> kinds() { return {RanksAre::kThreads, RanksAre::kProcesses}; }
  static std::vector<int> ranks() { return {1, 2, 3, 7, 17}; }
  static void set_up() {}
  static void tear_down() {}
};

using Fixtures = ::testing::Types<MappedFixture>;
inline constexpr const char* kTestedTransports[] = {MappedFixture::kName};

// The mesh of a window, if it is of the type that the fixture expects.
template <class Mesh>
Mesh mesh_of(const Window& window) {
  Mesh mesh{};
  EXPECT_EQ(window.mesh().value.size(), sizeof mesh) << window.mesh().type;
  if (window.mesh().value.size() == sizeof mesh) std::memcpy(&mesh, window.mesh().value.data(), sizeof mesh);
  return mesh;
}

}  // namespace weft::testing
