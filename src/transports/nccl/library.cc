// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/library.h"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "base/config.h"
#include "base/loaded_libraries.h"
#include "base/log.h"

namespace weft::nccl_link {
namespace {

namespace fs = std::filesystem;

constexpr NvidiaLibrary kNccl{"NCCL", "nccl", "libnccl.so.2", "WEFT_NCCL_LIBRARY"};

template <class Function>
bool find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  return function != nullptr;
}

// Weft's own libnccl.so.2 (compat/nccl) has NCCL's name and interface, and no windows.
bool is_ours(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD | RTLD_LOCAL);
  if (!handle) return false;
  const bool is_ours = dlsym(handle, "weftNcclCounts") != nullptr;
  dlclose(handle);
  return is_ours;
}

// The copies of NCCL in this process.
std::vector<std::string> copies() {
  std::vector<std::string> paths = loaded_libraries("libnccl.so");
  std::erase_if(paths, is_ours);
  return paths;
}

// Its symbols are for who asks for them here: another copy's users must not find them, nor it theirs.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kOwnSymbols = 0;  // sanitizers refuse to load a library so
#else
constexpr int kOwnSymbols = RTLD_DEEPBIND;
#endif

Result<std::unique_ptr<Library>> load(const std::string& path, bool has_others) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | (has_others ? kOwnSymbols : 0));
  if (!handle) return Status::make(Code::kUnsupported, "{}", dlerror());
  auto library = std::make_unique<Library>();
  library->path = path;
  if (!find(handle, "ncclGetVersion", library->GetVersion) ||
      library->GetVersion(&library->version) != kSuccess)
    return Status::make(Code::kUnsupported, "{} does not say its version", path);
  if (library->version < kLeastVersion)
    return Status::make(Code::kUnsupported, "{} is NCCL {}; windows for device code need {} or newer", path,
                        version_text(library->version), version_text(kLeastVersion));
#define WEFT_NCCL_CALL(member, parameters)                                            \
  if (!find(handle, "nccl" #member, library->member))                                 \
    return Status::make(Code::kUnsupported, "{} (NCCL {}) has no nccl" #member, path, \
                        version_text(library->version));
  WEFT_NCCL_CALLS(WEFT_NCCL_CALL)
  WEFT_NCCL_CALL(GetErrorString, )
  WEFT_NCCL_CALL(GetLastError, )
  WEFT_NCCL_CALL(TeamLsa, )
#undef WEFT_NCCL_CALL
  find(handle, "ncclGetLsaDevicePointer", library->GetLsaDevicePointer);
  find(handle, "ncclCommQueryProperties", library->CommQueryProperties);
  find(handle, "ncclDevCommCreate", library->DevCommCreate);
  find(handle, "ncclDevCommDestroy", library->DevCommDestroy);
  library->serves_host = dlsym(handle, "weftStandsInForNccl") != nullptr;
  return library;  // stays open as long as the process
}

}  // namespace

std::string version_text(int version) {
  return text("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

Result<const Library*> open_library() {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Library>> opened;
  static std::set<std::string> brought;  // by this transport, refused ones, too: nobody else's copies
  std::lock_guard lock(mutex);
  std::vector<std::string> loaded = copies();
  std::erase_if(loaded, [&](const std::string& path) { return brought.contains(path); });
  WEFT_TRY_ASSIGN(const std::string wanted, nvidia_library(kNccl, config().nccl_library, loaded));
  std::error_code failed;
  const fs::path real = fs::canonical(wanted, failed);
  const std::string path = failed ? wanted : real.string();
  if (const auto known = opened.find(path); known != opened.end()) return known->second.get();
  const bool was_loaded = std::ranges::find(loaded, path) != loaded.end();
  if (!was_loaded) brought.insert(path);
  WEFT_TRY_ASSIGN(std::unique_ptr<Library> library, load(path, !loaded.empty()));
  library->was_loaded = was_loaded;
  return (opened[path] = std::move(library)).get();
}

}  // namespace weft::nccl_link
