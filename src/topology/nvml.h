// SPDX-License-Identifier: Apache-2.0
//
// What only NVIDIA's management library knows: how many NVLinks a GPU has. Opened at run time; absent on many
// machines.
//   const int links = active_nvlinks("0000:1b:00.0");     // -1 where nobody can say
// Threads: any.
#pragma once

#include <string>

namespace weft {

// NVLinks of the GPU at a PCI address that are up; -1 where the library is missing or does not know.
int active_nvlinks(const std::string& pci_address);

// Whether two GPUs reach each other over NVLink, directly or through a switch; false where nobody can say.
bool is_nvlink_pair(const std::string& pci_address, const std::string& other_pci_address);

}  // namespace weft
