// SPDX-License-Identifier: Apache-2.0
#include "compat/nccl/machine.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <mutex>

#include "base/config.h"
#include "base/cuda_driver.h"
#include "base/loaded_libraries.h"
#include "base/log.h"
#include "compat/nccl/real.h"
#include "jit/toolchain.h"

namespace weft::nccl {
namespace {

namespace fs = std::filesystem;

// As weft.collectives.calls.machine_key().
std::string machine_key(Device device) {
  if (device.is_host()) return text("cpu {} cores", sysconf(_SC_NPROCESSORS_ONLN));
  const auto driver = cuda_driver();
  char name[256] = {};
  if (!driver.ok() || (*driver)->cuDeviceGetName(name, sizeof name - 1, device.ordinal) != CUDA_SUCCESS)
    return "";
  return name;
}

// As weft.collectives.selector.table_name(), of the book beside that table.
fs::path tuned_book(Device device, uint32_t ranks) {
  std::string key = machine_key(device);
  std::replace_if(key.begin(), key.end(), [](unsigned char c) { return !std::isalnum(c); }, '-');
  const char* machine = device.is_host() ? "cpu" : "nvlink";
  return fs::path(expand_home(config().cache_dir)) /
         text("collectives-{}-{}-{}.book", machine, key.empty() ? "any" : key, ranks);
}

// The newest libnvrtc.so.N of a folder, whose name has nothing after the number.
fs::path newest_nvrtc(const fs::path& folder) {
  const std::string stem = "libnvrtc.so.";
  fs::path best;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(stem) || name.find_first_not_of("0123456789", stem.size()) != std::string::npos)
      continue;
    if (best.empty() ||
        std::stoi(name.substr(stem.size())) > std::stoi(best.filename().string().substr(stem.size())))
      best = entry.path();
  }
  return best;
}

struct CudaPlaces {
  fs::path libraries;
  std::vector<fs::path> headers;
};

// As weft.runtime.nvrtc: CUDA 13 and newer share one folder; before, each package had its own.
std::vector<CudaPlaces> cuda_places() {
  std::vector<CudaPlaces> places;
  for (const fs::path root : nvidia_packages()) {
    std::vector<fs::path> shared;
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(root, ignored)) {
      const std::string name = entry.path().filename().string();
      if (name.size() > 2 && name.starts_with("cu") && std::isdigit(static_cast<unsigned char>(name[2])))
        shared.push_back(entry.path());
    }
    std::sort(shared.rbegin(), shared.rend());
    for (const fs::path& folder : shared)
      places.push_back({folder / "lib", {folder / "include", folder / "include/cccl"}});
    places.push_back({root / "cuda_nvrtc/lib", {root / "cuda_runtime/include", root / "cuda_cccl/include"}});
  }
  places.push_back({"/usr/local/cuda/lib64", {"/usr/local/cuda/include", "/usr/local/cuda/include/cccl"}});
  return places;
}

}  // namespace

Result<ProgramBook> find_book(Device device, uint32_t ranks) {
  const BookMachine machine = device.is_host() ? BookMachine::kCpu : BookMachine::kNvlink;
  std::string reasons;
  std::vector<fs::path> paths;
  if (!config().program_book.empty()) paths.emplace_back(expand_home(config().program_book));
  const fs::path tuned =
      tuned_book(device, ranks);  // nobody named it: it must be this user's, as the cache around it
  paths.push_back(tuned);
  paths.push_back(fs::path(own_folder()) / "programs.book");
  for (const fs::path& path : paths) {
    std::error_code ignored;
    if (!fs::exists(path, ignored)) {
      reasons += text("; {}: not there", path.string());
      continue;
    }
    Result<ProgramBook> book = ProgramBook::read(path.string(), ranks, machine, path == tuned);
    if (book.ok()) {
      log_debug("nccl: programs for {} ranks from {}", ranks, path.string());
      return book;
    }
    log_warn("nccl: a program book is not used: {}", book.status().message());
    reasons += "; " + book.status().message();
  }
  return Status(Code::kUnsupported, "no program book" + reasons);
}

void find_toolchain() {
  static std::once_flag once;
  std::call_once(once, [] {
    Toolchain found;
    // Beside the library in a package (weft/nccl, weft/device).
    found.device_dir = (fs::path(own_folder()).parent_path() / "device").string();
    for (const CudaPlaces& place : cuda_places()) {
      const fs::path library = newest_nvrtc(place.libraries);
      if (library.empty()) continue;
      found.nvrtc = library.string();
      std::error_code ignored;
      for (const fs::path& headers : place.headers)
        if (fs::is_directory(headers, ignored)) found.include_dirs.push_back(headers.string());
      break;
    }
    set_toolchain(std::move(found));
  });
}

}  // namespace weft::nccl
