// SPDX-License-Identifier: Apache-2.0
//
// Digest is SHA-256 (FIPS 180-4): for names and checksums of cached files, and for base/proof.h.
//   const std::string name = Digest().add(source).add(options).hex();
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace weft {

class Digest {
 public:
  Digest& bytes(std::string_view data);
  // Bytes with their length before them, so that add("ab").add("c") differs from add("a").add("bc").
  Digest& add(std::string_view data);
  // 64 lower-case hexadecimal digits of everything so far, or its 32 bytes; the object is used up.
  std::string hex();
  std::array<uint8_t, 32> value();

 private:
  void block(const unsigned char* data);

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> pending_{};
  uint64_t total_bytes_ = 0;
};

}  // namespace weft
