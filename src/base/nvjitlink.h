// SPDX-License-Identifier: Apache-2.0
//
// NVIDIA's linker for device code, opened at run time: the copy that the process has loaded (torch brings one), else the one
// that is found.
//   WEFT_TRY_ASSIGN(const NvJitLink* linker, open_nvjitlink());
//   WEFT_TRY_ASSIGN(std::string cubin, linker->link({kernel, unit}, "/.../libnvshmem_device.a", "sm_90a"));
// Threads: any.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace weft {

class NvJitLink {
 public:
  // One cubin of relocatable ones and an archive. Errors: kSystem with the linker's log.
  Result<std::string> link(const std::vector<std::string>& cubins, const std::string& archive,
                           const std::string& architecture) const;
  const std::string& path() const { return path_; }

  // Finds its functions. Errors: kUnsupported.
  Status load(const std::string& path);

 private:
  using Handle = void*;
  std::string log_of(Handle handle) const;

  int (*Create)(Handle*, uint32_t, const char**) = nullptr;
  int (*Destroy)(Handle*) = nullptr;
  int (*AddData)(Handle, int, const void*, size_t, const char*) = nullptr;
  int (*AddFile)(Handle, int, const char*) = nullptr;
  int (*Complete)(Handle) = nullptr;
  int (*GetLinkedCubinSize)(Handle, size_t*) = nullptr;
  int (*GetLinkedCubin)(Handle, void*) = nullptr;
  int (*GetErrorLogSize)(Handle, size_t*) = nullptr;
  int (*GetErrorLog)(Handle, char*) = nullptr;
  std::string path_;
};

// Opened once per path. Errors: kUnsupported with every path that was tried.
Result<const NvJitLink*> open_nvjitlink();

}  // namespace weft
