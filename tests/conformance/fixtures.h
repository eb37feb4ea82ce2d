// SPDX-License-Identifier: Apache-2.0
//
// What a transport brings to the conformance suite: its name, its mesh type, and how to get a mesh over a
// window. A new transport adds its fixture here and to Fixtures; EveryTransportIsTested fails until it does.
#pragma once

#include <gtest/gtest.h>

#include "memory/window.h"
#include "transports/mapped/connection.h"

namespace weft::testing {

struct MappedFixture {
  static constexpr const char* kName = "mapped";
  using Mesh = MappedMesh;
  static Result<Mesh> connect(const Window& window) { return mapped_mesh(window); }
};

using Fixtures = ::testing::Types<MappedFixture>;
inline constexpr const char* kTestedTransports[] = {MappedFixture::kName};

}  // namespace weft::testing
