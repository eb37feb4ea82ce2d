// SPDX-License-Identifier: Apache-2.0
#include "compat/nccl/real.h"

#include <dlfcn.h>

#include <filesystem>

#include "base/config.h"
#include "base/loaded_libraries.h"
#include "base/log.h"

namespace weft::nccl {
namespace {

namespace fs = std::filesystem;

struct Library {
  void* handle = nullptr;
  std::string path;
};

std::vector<std::string> candidates() {
  if (config().nccl_library == "none") return {};
  if (!config().nccl_library.empty()) return {expand_home(config().nccl_library)};
  return nvidia_library_paths("nccl", "libnccl.so.2");
}

// By path, since the bare name is this library's own; its symbols are to find each other, not ours.
Library open_real() {
  std::string tried;
  for (const std::string& path : candidates()) {
    std::error_code ignored;
    if (!fs::exists(path, ignored)) {
      tried += "; " + path + ": not there";
      continue;
    }
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    if (!handle) {
      tried += text("; {}: {}", path, dlerror());
    } else if (dlsym(handle, "weftNcclCounts")) {
      dlclose(handle);
      tried += "; " + path + ": it is this library";
    } else {
      log_info("nccl: the real library is {}", path);
      return {handle, path};
    }
  }
  log_info("nccl: no real library{}", tried);
  return {};
}

const Library& library() {
  static const Library opened = open_real();
  return opened;
}

}  // namespace

void* real_symbol(const char* name) {
  return library().handle ? dlsym(library().handle, name) : nullptr;
}

const std::string& real_path() {
  return library().path;
}

std::string own_folder() {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<const void*>(&own_folder), &info) || !info.dli_fname) return ".";
  std::error_code ignored;
  return fs::absolute(info.dli_fname, ignored).parent_path().string();
}

}  // namespace weft::nccl
