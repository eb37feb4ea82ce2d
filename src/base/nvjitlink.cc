// SPDX-License-Identifier: Apache-2.0
#include "base/nvjitlink.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "base/config.h"
#include "base/loaded_libraries.h"

namespace weft {
namespace {

// nvJitLinkInputType
constexpr int kCubin = 1, kArchive = 6;
constexpr const char* kReleases[] = {"13", "12"};

// Some releases have the plain name, all have one with the least release that is compatible.
void* find_function(void* library, const std::string& name) {
  void* found = dlsym(library, ("nvJitLink" + name).c_str());
  for (const char* release : kReleases)
    if (!found) found = dlsym(library, text("__nvJitLink{}_{}_0", name, release).c_str());
  return found;
}

std::vector<std::string> paths_to_try() {
  if (!config().nvjitlink.empty()) return {expand_home(config().nvjitlink)};
  std::vector<std::string> paths = loaded_libraries("libnvJitLink.so");
  for (const char* release : kReleases) {
    const std::string file = text("libnvJitLink.so.{}", release);
    // Packages of CUDA 12 have a folder each, later ones share one.
    for (const std::string& folder : nvidia_packages()) {
      paths.push_back(text("{}/cu{}/lib/{}", folder, release, file));
      paths.push_back(text("{}/nvjitlink/lib/{}", folder, file));
    }
    paths.push_back(file);
  }
  return paths;
}

}  // namespace

Status NvJitLink::load(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) return Status::make(Code::kUnsupported, "{}", dlerror());
#define WEFT_LINK_FUNCTION(name)                                          \
  name = reinterpret_cast<decltype(name)>(find_function(library, #name)); \
  if (!name) return Status::make(Code::kUnsupported, "{} has no nvJitLink" #name, path);
  WEFT_LINK_FUNCTION(Create)
  WEFT_LINK_FUNCTION(Destroy)
  WEFT_LINK_FUNCTION(AddData)
  WEFT_LINK_FUNCTION(AddFile)
  WEFT_LINK_FUNCTION(Complete)
  WEFT_LINK_FUNCTION(GetLinkedCubinSize)
  WEFT_LINK_FUNCTION(GetLinkedCubin)
  WEFT_LINK_FUNCTION(GetErrorLogSize)
  WEFT_LINK_FUNCTION(GetErrorLog)
#undef WEFT_LINK_FUNCTION
  path_ = path;  // the library stays open as long as the process
  return {};
}

std::string NvJitLink::log_of(Handle handle) const {
  size_t bytes = 0;
  if (GetErrorLogSize(handle, &bytes) != 0 || bytes < 2) return "it gives no reason";
  std::string log(bytes, '\0');
  GetErrorLog(handle, log.data());
  log.resize(std::min(log.find('\0'), log.size()));
  return log;
}

Result<std::string> NvJitLink::link(const std::vector<std::string>& cubins, const std::string& archive,
                                    const std::string& architecture) const {
  const std::string option = "-arch=" + architecture;
  const char* options[] = {option.c_str()};
  Handle handle = nullptr;
  if (const int result = Create(&handle, 1, options); result != 0)
    return Status::make(Code::kSystem, "{}: nvJitLinkCreate failed with {} for {}", path_, result,
                        architecture);
  struct End {
    const NvJitLink& linker;
    Handle& handle;
    ~End() { linker.Destroy(&handle); }
  } end{*this, handle};
  int result = 0;
  for (const std::string& cubin : cubins)
    if (result == 0) result = AddData(handle, kCubin, cubin.data(), cubin.size(), "weft");
  if (result == 0) result = AddFile(handle, kArchive, archive.c_str());
  if (result == 0) result = Complete(handle);
  size_t bytes = 0;
  if (result == 0) result = GetLinkedCubinSize(handle, &bytes);
  std::string linked(bytes, '\0');
  if (result == 0) result = GetLinkedCubin(handle, linked.data());
  if (result == 0) return linked;
  return Status::make(Code::kSystem, "{} does not link with {} for {}: error {}: {}", path_, archive,
                      architecture, result, log_of(handle));
}

Result<const NvJitLink*> open_nvjitlink() {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<NvJitLink>> opened;
  std::lock_guard lock(mutex);
  std::string tried;
  for (const std::string& path : paths_to_try()) {
    if (const auto known = opened.find(path); known != opened.end()) return known->second.get();
    auto linker = std::make_unique<NvJitLink>();
    const Status status = linker->load(path);
    if (status.ok()) return (opened[path] = std::move(linker)).get();
    tried += (tried.empty() ? "" : "; ") + status.message();
  }
  return Status::make(
      Code::kUnsupported,
      "no nvJitLink to link kernels with (pip install nvidia-nvjitlink, or set WEFT_NVJITLINK): {}", tried);
}

}  // namespace weft
