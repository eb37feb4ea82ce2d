// SPDX-License-Identifier: Apache-2.0
//
// Where the compiler for GPUs and the kernels' sources are. Python knows (weft/runtime/nvrtc.py) and says so
// at import; WEFT_NVRTC and WEFT_CUDA_INCLUDE override it, and without Python the system's places are
// searched. Threads: set_toolchain() before the first use of a CUDA device.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace weft {

struct Toolchain {
  std::string nvrtc;                      // absolute path of libnvrtc; empty: look in the system
  std::vector<std::string> include_dirs;  // CUDA headers (cuda_bf16.h); searched after Weft's own
  std::string device_dir;                 // the folder that has kernels/ and transports/
};

void set_toolchain(Toolchain toolchain);
Toolchain toolchain();

// NVRTC's answer to one compilation.
struct NvrtcOutput {
  std::string cubin;
  std::string log;  // ptxas' report of registers, shared memory, stack and spills included
};

struct NvrtcHeader {
  std::string name;  // as #include spells it
  std::string text;
};

// The compiler library, opened once per path. Threads: any; NVRTC serialises what it must.
class Nvrtc {
 public:
  // The NVRTC of the current toolchain. kUnsupported, with every path that was tried, where there is none.
  static Result<const Nvrtc*> open();

  // Names the compiler in cache keys: "13.0, 102345678 bytes". Two builds of one version differ in size.
  const std::string& identity() const { return identity_; }
  const std::string& path() const { return path_; }
  // Major * 1000 + minor * 10, as in CUDA_VERSION.
  int version() const { return version_; }

  // Compiles a source to a cubin. kSystem with the compiler's log when it refuses.
  Result<NvrtcOutput> compile(const std::string& source, const std::vector<NvrtcHeader>& headers,
                              const std::vector<std::string>& options) const;

 private:
  struct Functions;
  Status load(const std::string& path);

  std::string path_;
  std::string identity_;
  int version_ = 0;
  const Functions* functions_ = nullptr;
};

}  // namespace weft
