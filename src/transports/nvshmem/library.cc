// SPDX-License-Identifier: Apache-2.0
#include "transports/nvshmem/library.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

#include "base/config.h"
#include "base/loaded_libraries.h"

namespace weft::nvshmem_link {
namespace {

constexpr NvidiaLibrary kNvshmem{"NVSHMEM", "nvshmem", "libnvshmem_host.so.3", "WEFT_NVSHMEM_LIBRARY"};

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
  using Calls = const shmem::HostCalls* (*)();
  if (const auto calls = reinterpret_cast<Calls>(dlsym(handle, "weftStandsInForNvshmem"))) {
    library->serves_host = true;
    library->host_calls = calls();
  }
  return library;  // stays open as long as the process
}

}  // namespace

Result<const Library*> open_library() {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Library>> opened;
  std::lock_guard lock(mutex);
  WEFT_TRY_ASSIGN(const std::string path,
                  nvidia_library(kNvshmem, config().nvshmem_library, loaded_libraries("libnvshmem_host.so")));
  if (const auto known = opened.find(path); known != opened.end()) return known->second.get();
  WEFT_TRY_ASSIGN(std::unique_ptr<Library> library, load(path));
  return (opened[path] = std::move(library)).get();
}

}  // namespace weft::nvshmem_link
