// SPDX-License-Identifier: Apache-2.0
#include "base/loaded_libraries.h"

#include <link.h>

#include <filesystem>
#include <set>

#include "base/config.h"
#include "base/text.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

int note_path(dl_phdr_info* info, size_t, void* found) {
  if (info->dlpi_name && *info->dlpi_name)
    static_cast<std::set<std::string>*>(found)->insert(info->dlpi_name);
  return 0;
}

std::set<std::string> all_loaded() {
  std::set<std::string> paths;
  dl_iterate_phdr(note_path, &paths);
  return paths;
}

}  // namespace

std::vector<std::string> loaded_libraries(std::string_view stem) {
  std::set<std::string> found;
  for (const std::string& path : all_loaded()) {
    if (!fs::path(path).filename().string().starts_with(stem)) continue;
    std::error_code failed;
    const fs::path real = fs::canonical(path, failed);
    found.insert(failed ? path : real.string());
  }
  return {found.begin(), found.end()};
}

std::vector<std::string> nvidia_packages() {
  std::set<std::string> found;
  const std::string folder = "/site-packages/";
  for (const std::string& path : all_loaded())
    if (const size_t at = path.find(folder); at != std::string::npos)
      found.insert(path.substr(0, at + folder.size()) + "nvidia");
  return {found.begin(), found.end()};
}

std::vector<std::string> nvidia_library_paths(std::string_view package, std::string_view file) {
  std::vector<std::string> paths;
  for (const std::string& folder : nvidia_packages())
    paths.push_back(text("{}/{}/lib/{}", folder, package, file));
  for (const char* folder : {"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64",
                             "/usr/local/cuda/lib64", "/usr/local/lib"})
    paths.push_back(text("{}/{}", folder, file));
  paths.push_back(text("/opt/{}/lib/{}", package, file));
  return paths;
}

Result<std::string> nvidia_library(const NvidiaLibrary& library, const std::string& configured,
                                   const std::vector<std::string>& loaded) {
  if (configured == "none") return Status::make(Code::kUnsupported, "{} is none", library.variable);
  if (!configured.empty()) return expand_home(configured);
  if (loaded.size() > 1)
    return Status::make(Code::kUnsupported,
                        "this process has loaded two copies of {}, {} and {}; {} says which to use",
                        library.title, loaded[0], loaded[1], library.variable);
  if (loaded.size() == 1) return loaded[0];
  std::string tried;
  for (const std::string& path : nvidia_library_paths(library.package, library.file)) {
    std::error_code ignored;
    if (fs::exists(path, ignored)) return path;
    tried += (tried.empty() ? "" : ", ") + path;
  }
  return Status::make(Code::kUnsupported,
                      "no {} is loaded, nor found (pip install nvidia-{}-cu13, or set {}); looked at {}",
                      library.title, library.package, library.variable, tried);
}

}  // namespace weft
