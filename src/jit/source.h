// SPDX-License-Identifier: Apache-2.0
//
// The text that NVRTC gets for a kernel: the generated file, and every Weft header that it includes.
// Pure but for reading the headers.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "jit/jit.h"
#include "jit/toolchain.h"

namespace weft {

// What profilers show: "weft_low_latency_dispatch".
std::string entry_point(const KernelKey& key);

// The trace that kernels compiled from now on contain: none unless WEFT_TRACE_SPANS is above 0.
enum class Traced : int { kNothing, kBlocks, kAll };
Traced what_is_traced();
// Kernels with a trace note when their blocks began and ended, and no more. Of the process, for benchmarks.
void trace_blocks_only(bool is_on);

// The generated file. args_bytes and mesh_bytes are the host's sizes of the two structs, asserted there; 0
// asserts nothing.
std::string kernel_source(const KernelKey& key, size_t args_bytes, size_t mesh_bytes);

// Every header that `source` includes with quotes, and those that they include, in order of first mention.
// Names are relative to `root`, as device code must spell them. One that is not there is left out: it may
// stand in a branch for another target, and if not the compiler names it.
std::vector<NvrtcHeader> headers_of(const std::string& source, const std::string& root);

// The names inside #include <...> of these headers, each once. They are CUDA's, and part of what a cached
// kernel depends on.
std::vector<std::string> system_headers_of(const std::vector<NvrtcHeader>& headers);

// Reads a whole file. kSystem when it cannot be read.
Result<std::string> read_file(const std::string& path);

}  // namespace weft
