// SPDX-License-Identifier: Apache-2.0
#include "compat/nccl/real.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/config.h"
#include "base/log.h"

namespace weft::nccl {
namespace {

namespace fs = std::filesystem;

struct Library {
  void* handle = nullptr;
  std::string path;
};

int note_package(dl_phdr_info* info, size_t, void* found) {
  const std::string path = info->dlpi_name;
  const std::string folder = "/site-packages/";
  const size_t at = path.find(folder);
  if (at != std::string::npos)
    static_cast<std::set<std::string>*>(found)->insert(path.substr(0, at + folder.size()) + "nvidia");
  return 0;
}

std::vector<std::string> candidates() {
  if (config().nccl_library == "none") return {};
  if (!config().nccl_library.empty()) return {expand_home(config().nccl_library)};
  std::vector<std::string> paths;
  for (const std::string& package : nvidia_packages()) paths.push_back(package + "/nccl/lib/libnccl.so.2");
  for (const char* folder : {"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64",
                             "/usr/local/cuda/lib64", "/usr/local/lib", "/opt/nccl/lib"})
    paths.push_back(std::string(folder) + "/libnccl.so.2");
  return paths;
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

std::vector<std::string> nvidia_packages() {
  std::set<std::string> found;
  dl_iterate_phdr(note_package, &found);
  return {found.begin(), found.end()};
}

std::string own_folder() {
  Dl_info info{};
  if (!dladdr(reinterpret_cast<const void*>(&own_folder), &info) || !info.dli_fname) return ".";
  std::error_code ignored;
  return fs::absolute(info.dli_fname, ignored).parent_path().string();
}

}  // namespace weft::nccl
