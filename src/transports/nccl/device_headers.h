// SPDX-License-Identifier: Apache-2.0
//
// NCCL's device headers for NVRTC: the texts of a release, changed as a compiler at run time needs them. A table in
// README.md lists the changes and their reasons. Changes match lines, not releases: a future release works if it
// compiles and the sizes that weft_nccl.h asserts hold.
//   WEFT_TRY_ASSIGN(const std::string folder, find_headers("/.../nvidia/nccl/lib/libnccl.so.2", 23007));
//   WEFT_TRY_ASSIGN(auto sources, device_sources(folder, GinType::kProxy, 0));   // for MeshPart::sources
// Threads: any.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "transports/transport.h"

namespace weft::nccl_link {

// ncclGinType_t
enum class GinType : int { kNone = 0, kProxy = 2, kGdaki = 3, kGpi = 4, kEfaGda = 5 };
const char* to_string(GinType type);

// The folder that has nccl.h and nccl_device of the release `version` (23007): WEFT_NCCL_INCLUDE if that is set, else the
// one that lies beside the library. Errors: kUnsupported, naming the folders where there is none, or both versions where
// it is of another release.
Result<std::string> find_headers(const std::string& library_path, int version);

// The sources and options that kernels are compiled with for one back end: all headers by name, among them weft_nccl.h,
// which includes those of GIN. `dev_comm_bytes`: what the library says that ncclDevComm takes, asserted; 0 asserts
// nothing.
// Errors: kUnsupported where the folder has no device headers, kSystem where one cannot be read.
Result<std::shared_ptr<const DeviceSources>> device_sources(const std::string& folder, GinType type,
                                                            uint64_t dev_comm_bytes);

// One header's text with the changes; `name` is its path in the folder. Pure.
std::string for_nvrtc(const std::string& name, std::string_view text);

}  // namespace weft::nccl_link
