// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/headers.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>

#include "transports/nccl/library.h"

namespace weft::nccl_link {
namespace {

namespace fs = std::filesystem;

// Before all headers of NCCL: what the C and CUDA headers would have brought that they include.
constexpr const char* kPrelude = R"(#pragma once
#include <cuda/atomic>
#include <cuda/std/climits>
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda/std/cstring>
#include <cuda/std/limits>
#include <cuda/std/type_traits>
#include <cuda/std/utility>
using cuda::std::int8_t; using cuda::std::int16_t; using cuda::std::int32_t; using cuda::std::int64_t;
using cuda::std::uint8_t; using cuda::std::uint16_t; using cuda::std::uint32_t; using cuda::std::uint64_t;
using cuda::std::uintptr_t; using cuda::std::intptr_t; using cuda::std::size_t; using cuda::std::ptrdiff_t;
namespace std { using namespace cuda::std; }
#ifndef assert
#define assert(condition) ((void)0)
#endif
#define EIO 5
#define EAGAIN 11
#define EBUSY 16
#define EINVAL 22
#define ETIMEDOUT 110
typedef uint8_t __u8; typedef uint16_t __u16; typedef uint32_t __u32; typedef uint64_t __u64;
typedef uint16_t __be16; typedef uint32_t __be32; typedef uint64_t __be64;
#ifndef CUDA_VERSION
#define CUDA_VERSION 12020
#endif
enum CUmemLocationType {
  CU_MEM_LOCATION_TYPE_INVALID = 0, CU_MEM_LOCATION_TYPE_DEVICE = 1, CU_MEM_LOCATION_TYPE_HOST = 2,
  CU_MEM_LOCATION_TYPE_HOST_NUMA = 3, CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT = 4
};
#define WEFT_TYPEOF(x) cuda::std::remove_reference_t<decltype(x)>
)";

// After them: sizes that NICs and host threads read. Attributes in the wrong place would change them in silence.
constexpr const char* kAssertions = R"(
#if NCCL_GIN_GDAKI_ENABLE
static_assert(sizeof(doca_gpunetio_ib_mlx5_wqe_ctrl_seg) == 16, "the control segment of a work queue entry");
static_assert(sizeof(doca_gpu_dev_verbs_wqe) == 64, "a work queue entry");
#endif
#if NCCL_GIN_PROXY_ENABLE
static_assert(sizeof(ncclGinProxyGfd_t) == 8 * ncclGinProxyGfdQwords, "a descriptor of the proxy");
#endif
template <unsigned long long... bytes>
__global__ void weft_layout() {}
)";

// Only these: the rest are collectives, with many types of numbers.
constexpr const char* kIncluded[] = {
    "nccl_device/coop.h",
    "nccl_device/impl/core__funcs.h",
    "nccl_device/impl/comm__funcs.h",
    "nccl_device/impl/ptr__funcs.h",
    "nccl_device/impl/gin__funcs.h",
};

Result<std::string> read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  if (!file) return Status::make(Code::kUnsupported, "{} cannot be read", path.string());
  return std::move(text).str();
}

std::string replaced(const std::string& text, const char* pattern, const char* with) {
  return std::regex_replace(text, std::regex(pattern), with);
}

// The part of nccl.h that device code uses; all of it takes the compiler seconds.
std::string short_nccl_h(const std::string& text) {
  std::string out = "#pragma once\n";
  const auto keep = [&](const char* pattern) {
    const std::regex wanted(pattern);
    for (std::sregex_iterator found(text.begin(), text.end(), wanted), end; found != end; ++found)
      out += found->str() + "\n";
  };
  keep(R"(#define\s+NCCL_(MAJOR|MINOR|PATCH|SUFFIX|VERSION_CODE)\b[^\n]*)");
  keep(R"(#define\s+NCCL_VERSION\([^\n]*)");
  keep(R"(#define\s+NCCL_WIN_[^\n]*)");
  keep(R"(typedef\s+enum\s*\{[^}]*ncclSuccess[^}]*\}\s*ncclResult_t;)");
  keep(R"(typedef\s+struct\s+\w+\s*\*\s*nccl(Comm|Window)_t;)");
  return out;
}

int version_of(const std::string& nccl_h) {
  std::smatch found;
  if (!std::regex_search(nccl_h, found, std::regex(R"(#define\s+NCCL_VERSION_CODE\s+(\d+))"))) return 0;
  return std::atoi(found[1].str().c_str());
}

// Includes of the system go: the prelude stands for them. Includes of NCCL's own are spelled from the folder's root, as
// headers in memory have one name.
std::string plain_includes(const std::string& name, const std::string& text) {
  const std::regex line(R"(^([ \t]*)#[ \t]*include[ \t]*([<"])([^>"]+)[>"].*$)");
  std::istringstream lines(text);
  std::string out;
  for (std::string one; std::getline(lines, one); out += one + "\n") {
    std::smatch found;
    if (one.find("include") == std::string::npos || !std::regex_match(one, found, line)) continue;
    const std::string what = found[3];
    if (found[2] == "<") {
      if (what == "nccl.h")
        one = "#include \"nccl.h\"";
      else if (!what.starts_with("cuda/"))
        one.clear();
      continue;
    }
    const bool is_from_root = what.starts_with("nccl_device/") || what == "nccl.h" || what == "nccl_device.h";
    const fs::path at = is_from_root ? fs::path(what) : fs::path(name).parent_path() / what;
    one = "#include \"" + at.lexically_normal().generic_string() + "\"";
  }
  return out;
}

// `struct S {...} __attribute__((packed)) name;`: NVRTC drops attributes there without a word. Behind `struct` it heeds
// them.
std::string attributes_in_front(std::string text) {
  static const std::regex behind(R"(\}((?:\s*__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)\s*)+)([^;{}]*;))");
  for (std::smatch found; std::regex_search(text, found, behind);) {
    const auto close = static_cast<size_t>(found.position(0));
    size_t open = close;
    for (int depth = 0;; --open) {
      if (text[open] == '}') ++depth;
      if (text[open] == '{' && --depth == 0) break;
      if (open == 0) return text;
    }
    const size_t as_struct = text.rfind("struct", open), as_union = text.rfind("union", open);
    const bool is_struct =
        as_union == std::string::npos || (as_struct != std::string::npos && as_struct > as_union);
    const size_t keyword = is_struct ? as_struct : as_union;
    if (keyword == std::string::npos) return text;
    const std::string attributes = found[1], rest = found[2];
    text.replace(close, static_cast<size_t>(found.length(0)), "} " + rest);
    text.insert(keyword + (is_struct ? 6 : 5), " " + replaced(attributes, R"(\s+)", " "));
  }
  return text;
}

}  // namespace

std::string for_nvrtc(const std::string& name, std::string text) {
  if (name == "nccl.h") return short_nccl_h(text);
  text = plain_includes(name, text);
  text = attributes_in_front(std::move(text));
  // Functions of the host have no place here; their prototypes would be errors.
  if (name != "nccl_device/utility.h")
    text = replaced(text, R"((NCCL_EXTERN_C|NCCL_API)?\s*\b__host__\b(?!\s*__device__)[^;{}]*;)", "");
  text = replaced(text, R"((#[ \t]*define[ \t]+\w*TYPEOF\(x\))[^\n]*)", "$1 WEFT_TYPEOF(x)");
  text = replaced(text, R"(\b(__typeof__|typeof)\s*\()", "WEFT_TYPEOF(");
  text = replaced(text, R"(\b__builtin_memcpy\b)", "memcpy");
  // In a union whose other branches are larger; no element is no array here.
  return replaced(text, R"(\[(sizeof\(T\) ?/ ?\d+)\])", "[$1 ? $1 : 1]");
}

Result<std::vector<Header>> device_headers(const std::string& folder, int version) {
  const Result<std::string> nccl_h = read(fs::path(folder) / "nccl.h");
  std::error_code ignored;
  if (!nccl_h.ok() || !fs::exists(fs::path(folder) / "nccl_device", ignored))
    return Status::make(Code::kUnsupported, "{} has no device headers of NCCL", folder);
  if (const int theirs = version_of(*nccl_h); version != 0 && theirs != version)
    return Status::make(
        Code::kUnsupported,
        "the headers in {} are of NCCL {}, the library is NCCL {}: both must be of one release", folder,
        version_text(theirs), version_text(version));
  std::vector<Header> headers = {{"nccl.h", for_nvrtc("nccl.h", *nccl_h)}};
  for (const auto& entry : fs::recursive_directory_iterator(fs::path(folder) / "nccl_device", ignored)) {
    const std::string kind = entry.path().extension().string();
    if (kind != ".h" && kind != ".cuh") continue;
    const std::string name = fs::relative(entry.path(), folder, ignored).generic_string();
    WEFT_TRY_ASSIGN(std::string text, read(entry.path()));
    headers.push_back({name, for_nvrtc(name, std::move(text))});
  }
  std::ranges::sort(headers, {}, &Header::name);
  std::string all = kPrelude;
  for (const char* name : kIncluded) all += text("#include \"{}\"\n", name);
  headers.push_back({"weft_nccl.h", all + kAssertions});
  return headers;
}

std::vector<std::string> gin_options(GinBackend backend) {
  std::vector<std::string> options = {"-default-device", "--std=c++20"};
  const std::pair<const char*, int> backends[] = {{"PROXY", 2}, {"GDAKI", 3}, {"GPI", 4}, {"EFA_GDA", 5}};
  for (const auto& [name, number] : backends)
    options.push_back(text("-DNCCL_GIN_{}_ENABLE={}", name, number == static_cast<int>(backend) ? 1 : 0));
  return options;
}

std::string layout_probe() {
  return "template __global__ void weft_layout<sizeof(ncclDevComm), sizeof(ncclWindow_vidmem)>();\n";
}

// The mangled name of the instance has the numbers: _Z11weft_layoutIJLy240ELy88EEEvv.
Result<Layout> read_layout(const std::string& cubin) {
  static const std::regex name(R"(_Z11weft_layoutIJL[my](\d+)EL[my](\d+)EEEvv)");
  std::smatch found;
  if (!std::regex_search(cubin, found, name))
    return Status::make(Code::kSystem, "the compiled probe names no sizes of NCCL's structures");
  return Layout{std::strtoull(found[1].str().c_str(), nullptr, 10),
                std::strtoull(found[2].str().c_str(), nullptr, 10)};
}

}  // namespace weft::nccl_link
