// SPDX-License-Identifier: Apache-2.0
#include "transports/nvshmem/library.h"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>

#include "base/config.h"
#include "base/loaded_libraries.h"

namespace weft::nvshmem_link {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFile = "libnvshmem_host.so.3";

Result<std::unique_ptr<Library>> load(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) return Status::make(Code::kUnsupported, "{}", dlerror());
  auto library = std::make_unique<Library>();
  library->path = path;
#define WEFT_NVSHMEM_CALL(function, result, parameters)                                        \
  library->function = reinterpret_cast<decltype(library->function)>(dlsym(handle, #function)); \
  if (!library->function) return Status::make(Code::kUnsupported, "{} has no " #function, path);
  WEFT_NVSHMEM_CALLS(WEFT_NVSHMEM_CALL)
#undef WEFT_NVSHMEM_CALL
  int major = 0, minor = 0, patch = 0;
  library->nvshmemx_vendor_get_version_info(&major, &minor, &patch);
  library->version = text("{}.{}.{}", major, minor, patch);
  if (major < kLeastMajor)
    return Status::make(Code::kUnsupported, "{} is NVSHMEM {}; Weft needs {}.0 or newer", path,
                        library->version, kLeastMajor);
  library->serves_host = dlsym(handle, "weftStandsInForNvshmem") != nullptr;
  return library;  // stays open as long as the process
}

Result<std::string> path_to_open() {
  if (!config().nvshmem_library.empty()) return expand_home(config().nvshmem_library);
  const std::vector<std::string> loaded = loaded_libraries("libnvshmem_host.so");
  if (loaded.size() > 1)
    return Status::make(
        Code::kUnsupported,
        "this process has loaded two copies of NVSHMEM, {} and {}; WEFT_NVSHMEM_LIBRARY says which "
        "to use",
        loaded[0], loaded[1]);
  if (loaded.size() == 1) return loaded[0];
  std::string tried;
  for (const std::string& path : nvidia_library_paths("nvshmem", kFile)) {
    std::error_code ignored;
    if (fs::exists(path, ignored)) return path;
    tried += (tried.empty() ? "" : ", ") + path;
  }
  return Status::make(Code::kUnsupported,
                      "no NVSHMEM is loaded, nor found (pip install nvidia-nvshmem-cu13, or set "
                      "WEFT_NVSHMEM_LIBRARY); looked at {}",
                      tried);
}

}  // namespace

Result<const Library*> open_library() {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Library>> opened;
  std::lock_guard lock(mutex);
  WEFT_TRY_ASSIGN(const std::string path, path_to_open());
  if (const auto known = opened.find(path); known != opened.end()) return known->second.get();
  WEFT_TRY_ASSIGN(std::unique_ptr<Library> library, load(path));
  return (opened[path] = std::move(library)).get();
}

}  // namespace weft::nvshmem_link
