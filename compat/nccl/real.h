// SPDX-License-Identifier: Apache-2.0
//
// The real NCCL library, opened when it is first needed: it serves the calls that Weft does not.
//   if (auto* all_reduce = real<decltype(&ncclAllReduce)>("ncclAllReduce")) return all_reduce(...);
// It is WEFT_NCCL_LIBRARY; else that of the Python packages that are loaded, else the system's. Threads: any.
#pragma once

#include <string>

namespace weft::nccl {

// The address of a function, or null where the library or the function is missing.
void* real_symbol(const char* name);

template <class Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(real_symbol(name));
}

// Its path; empty where there is none, and then the log lists the paths that were tried.
const std::string& real_path();

// The folder of this library.
std::string own_folder();

}  // namespace weft::nccl
