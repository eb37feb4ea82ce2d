// SPDX-License-Identifier: Apache-2.0
#include "transports/nvshmem/device_library.h"

#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <regex>
#include <sstream>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/digest.h"
#include "transports/nvshmem/session.h"

namespace weft::nvshmem_link {
namespace {

namespace fs = std::filesystem;

// The oldest release whose headers were compiled and linked; nothing is known against older ones.
constexpr std::array<int, 3> kLeastVersion = {3, 4, 5};

// Before NVSHMEM's headers: what the C headers would have brought that they include.
constexpr const char* kPrelude = R"(#pragma once
#include <cuda/std/climits>
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda/std/limits>
#include <cuda/std/type_traits>
using cuda::std::int8_t; using cuda::std::int16_t; using cuda::std::int32_t; using cuda::std::int64_t;
using cuda::std::uint8_t; using cuda::std::uint16_t; using cuda::std::uint32_t; using cuda::std::uint64_t;
using cuda::std::uintptr_t; using cuda::std::intptr_t;
typedef uint8_t __u8; typedef uint16_t __u16; typedef uint32_t __u32; typedef uint64_t __u64;
typedef uint16_t __be16; typedef uint32_t __be32; typedef uint64_t __be64;
)";

// Headers of the system have no place in device code: these names stand for nothing.
constexpr const char* kEmptyHeaders[] = {"stdint.h",    "limits.h",  "stddef.h",           "errno.h",
                                         "stdio.h",     "stdlib.h",  "string.h",           "assert.h",
                                         "math.h",      "unistd.h",  "complex.h",          "linux/types.h",
                                         "type_traits", "algorithm", "infiniband/mlx5dv.h"};

// NVSHMEM's calls that end in put_signal are left out: in its archive they take an unsigned long where NVRTC's uint64_t is
// an unsigned long long. A signal of its own behind a fence says the same, and orders earlier puts, too.
constexpr const char* kUnit = R"(#include <device/nvshmem_defines.h>
#include <device/nvshmemx_defines.h>
extern "C" {
__device__ void weft_nvshmem_put(void* dst, const void* src, unsigned long long bytes, int peer) {
  nvshmem_putmem_nbi(dst, src, bytes, peer);
}
__device__ void weft_nvshmem_put_warp(void* dst, const void* src, unsigned long long bytes, int peer) {
  nvshmemx_putmem_nbi_warp(dst, src, bytes, peer);
}
__device__ void weft_nvshmem_get(void* dst, const void* src, unsigned long long bytes, int peer) {
  nvshmem_getmem(dst, src, bytes, peer);
}
__device__ void weft_nvshmem_get_warp(void* dst, const void* src, unsigned long long bytes, int peer) {
  nvshmemx_getmem_warp(dst, src, bytes, peer);
}
__device__ void weft_nvshmem_set(void* word, unsigned long long value, int peer) {
  nvshmem_fence();
  nvshmemx_signal_op(static_cast<uint64_t*>(word), value, NVSHMEM_SIGNAL_SET, peer);
}
__device__ void weft_nvshmem_add(void* word, unsigned long long n, int peer) {
  nvshmem_fence();
  nvshmemx_signal_op(static_cast<uint64_t*>(word), n, NVSHMEM_SIGNAL_ADD, peer);
}
__device__ void weft_nvshmem_quiet() { nvshmem_quiet(); }
__device__ int weft_nvshmem_rank() { return nvshmem_my_pe(); }
}
)";

// Kernels have up to 1024 threads of 64 registers; what they call may have no more.
constexpr const char* kUnitOptions[] = {"--std=c++20",
                                        "-default-device",
                                        "--relocatable-device-code=true",
                                        "--maxrregcount=64",
                                        "--pre-include=weft_nvshmem_prelude.h",
                                        "-w"};

Result<std::string> read_bytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  if (file) bytes << file.rdbuf();
  if (!file || !bytes) return Status::make(Code::kSystem, "{} cannot be read", path.string());
  return std::move(bytes).str();
}

Result<std::array<int, 3>> version_of(const fs::path& include) {
  WEFT_TRY_ASSIGN(const std::string text, read_bytes(include / "non_abi/nvshmem_version.h"));
  static const std::regex number(R"(#define NVSHMEM_VENDOR_(MAJOR|MINOR|PATCH)_VERSION (\d+))");
  std::array<int, 3> version{};
  for (std::sregex_iterator found(text.begin(), text.end(), number), end; found != end; ++found)
    version[(*found)[1] == "MAJOR" ? 0 : (*found)[1] == "MINOR" ? 1 : 2] = std::stoi((*found)[2]);
  return version;
}

std::string version_text(const std::array<int, 3>& version) {
  return text("{}.{}.{}", version[0], version[1], version[2]);
}

// A module's constants of NVSHMEM, which say where the heap and the peers are, are filled in by NVSHMEM.
Status initialise_module(void* module) {
  const Library* nvshmem = Session::of_process().library();
  if (!nvshmem)
    return Status::make(Code::kUnsupported, "nvshmem: a kernel with its ports was loaded before it runs");
  const int result = nvshmem->nvshmemx_cumodule_init(module);
  if (result == 0) return {};
  return Status::make(Code::kSystem,
                      "nvshmemx_cumodule_init: NVSHMEM {} did not initialise a kernel's module: error {} "
                      "(NVSHMEM_DEBUG=INFO says more)",
                      nvshmem->version, result);
}

}  // namespace

Result<DeviceLibrary> find_device_library(const std::string& library_path, const std::string& version) {
  const std::string& named = config().nvshmem_home;
  const fs::path root =
      named.empty() ? fs::path(library_path).parent_path().parent_path() : fs::path(expand_home(named));
  const fs::path include = root / "include", archive = root / "lib/libnvshmem_device.a";
  std::error_code ignored;
  if (!fs::is_regular_file(include / "device/nvshmem_defines.h", ignored) ||
      !fs::is_regular_file(archive, ignored))
    return Status::make(
        Code::kUnsupported,
        "no device library of NVSHMEM {} for {}: looked for include/device/nvshmem_defines.h and "
        "lib/libnvshmem_device.a in {}; WEFT_NVSHMEM_HOME names another folder",
        version, library_path, root.string());
  WEFT_TRY_ASSIGN(const auto theirs, version_of(include));
  if (version_text(theirs) != version)
    return Status::make(
        Code::kUnsupported,
        "{} has the device library of NVSHMEM {}, {} is {}; kernels must be linked with its own "
        "(WEFT_NVSHMEM_HOME names another folder)",
        root.string(), version_text(theirs), library_path, version);
  if (theirs < kLeastVersion)
    return Status::make(Code::kUnsupported, "NVSHMEM {} is too old for ports, which need {} or newer",
                        version, version_text(kLeastVersion));
  return DeviceLibrary{include.string(), archive.string(), version};
}

Result<std::shared_ptr<const DeviceSources>> device_sources(const DeviceLibrary& library) {
  // One object for each, so that kernels which were compiled with it are found again.
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<const DeviceSources>> made;
  std::lock_guard lock(mutex);
  if (const auto known = made.find(library.archive); known != made.end()) return known->second;
  WEFT_TRY_ASSIGN(const std::string archive, read_bytes(library.archive));
  Digest digest;
  digest.add(archive);
  const std::string release =
      text("-DWEFT_NVSHMEM_RELEASE=v{}_{}", std::regex_replace(library.version, std::regex("\\."), "_"),
           digest.hex().substr(0, 16));
  auto sources = std::make_shared<DeviceSources>();
  sources->options = {"-DWEFT_NVSHMEM_CALLS", release};
  sources->archive = library.archive;
  sources->on_load = initialise_module;
  sources->unit.name = "nvshmem_calls";
  sources->unit.text = kUnit;
  for (const char* name : kEmptyHeaders) sources->unit.headers.emplace_back(name, "");
  sources->unit.headers.emplace_back("weft_nvshmem_prelude.h", kPrelude);
  for (const char* option : kUnitOptions) sources->unit.options.emplace_back(option);
  sources->unit.options.push_back(release);
  sources->unit.options.push_back("-I" + library.include);
  return made[library.archive] = std::move(sources);
}

}  // namespace weft::nvshmem_link
