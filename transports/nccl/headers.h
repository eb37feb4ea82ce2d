// SPDX-License-Identifier: Apache-2.0
//
// NCCL's device headers as NVRTC takes them: the texts beside a library, with the changes that a compiler at run time
// needs. For kernels that reach peers through GIN; those of mapped peers need none of it.
//   WEFT_TRY_ASSIGN(auto headers, device_headers("/.../nvidia/nccl/include", 23007));
//   NVRTC: each by its name; #include "weft_nccl.h" before anything else, and the options of gin_options(GinBackend::kProxy)
// What is changed, and why: a table in README.md. The changes go by what a line is, not by a release: a release that NCCL
// has not made yet is used if it compiles and the sizes that weft_nccl.h asserts hold.
// Threads: any.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace weft::nccl_link {

// What carries GIN's operations; the numbers are NCCL's ginType.
enum class GinBackend { kProxy = 2, kGdaki = 3, kGpi = 4 };

struct Header {
  std::string name;  // as #include spells it
  std::string text;
};

// The headers in `folder`, and weft_nccl.h, which includes those of GIN. Errors: kUnsupported where there are none, or
// they are of another release than `version` (ncclGetVersion() of the library; 0: any), with both.
Result<std::vector<Header>> device_headers(const std::string& folder, int version);

// What the compiler is told to make code for this back end alone.
std::vector<std::string> gin_options(GinBackend backend);

// One header's text with the changes; `name` is its path in the folder. Pure.
std::string for_nvrtc(const std::string& name, std::string text);

// The sizes that a cubin was compiled with which instantiates layout_probe(): of ncclDevComm, and of a window. Pure.
// Errors: kSystem where it has none.
struct Layout {
  uint64_t dev_comm_bytes = 0, window_bytes = 0;
};
std::string layout_probe();
Result<Layout> read_layout(const std::string& cubin);

}  // namespace weft::nccl_link
