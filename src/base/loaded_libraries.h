// SPDX-License-Identifier: Apache-2.0
//
// Which shared libraries are in this process, and where those of NVIDIA's Python packages lie.
//   for (const std::string& path : loaded_libraries("libnccl.so")) ...          // the copies that are loaded
//   for (const std::string& path : nvidia_library_paths("nccl", "libnccl.so.2")) ...   // where one may be, best first
//   WEFT_TRY_ASSIGN(std::string path, nvidia_library(kNccl, config().nccl_library, loaded_libraries("libnccl.so")));
// Threads: any.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace weft {

// Paths, links resolved and each once, of loaded libraries whose file name starts with `stem`.
std::vector<std::string> loaded_libraries(std::string_view stem);

// The folders "site-packages/nvidia" of the Python packages that are loaded in this process, and of the one that Weft
// lies in.
std::vector<std::string> nvidia_packages();

// Where the library `file` of NVIDIA's package `package` may be: those folders, then the system's. The paths are
// candidates; the files may be missing.
std::vector<std::string> nvidia_library_paths(std::string_view package, std::string_view file);

struct NvidiaLibrary {
  const char* title;     // "NCCL"
  const char* package;   // "nccl"
  const char* file;      // "libnccl.so.2"
  const char* variable;  // "WEFT_NCCL_LIBRARY"
};

// The copy to open: the user's choice, `configured`, else the one of `loaded`, else the first that is there. Errors:
// kUnsupported where the choice is "none", where two are loaded, and where none is found.
Result<std::string> nvidia_library(const NvidiaLibrary& library, const std::string& configured,
                                   const std::vector<std::string>& loaded);

}  // namespace weft
