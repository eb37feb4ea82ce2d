// SPDX-License-Identifier: Apache-2.0
#include "transports/nccl/device_headers.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <regex>
#include <sstream>
#include <tuple>
#include <vector>

#include "base/config.h"
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

// Only these: the rest are collectives, with many types of numbers.
constexpr const char* kIncluded = R"(#include "nccl_device/coop.h"
#include "nccl_device/impl/core__funcs.h"
#include "nccl_device/impl/comm__funcs.h"
#include "nccl_device/impl/ptr__funcs.h"
#include "nccl_device/impl/gin__funcs.h"
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
#if defined(WEFT_NCCL_DEV_COMM_BYTES)
static_assert(sizeof(ncclDevComm) == WEFT_NCCL_DEV_COMM_BYTES, "ncclDevComm, as the library fills it");
#endif
template <unsigned long long... bytes>
__global__ void weft_layout() {}
)";

bool is_word_char(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}
size_t skip_space(std::string_view text, size_t at) {
  while (at < text.size() && std::isspace(static_cast<unsigned char>(text[at]))) ++at;
  return at;
}
bool is_at(std::string_view text, size_t at, std::string_view what) {
  return text.substr(std::min(at, text.size())).starts_with(what);
}
// The next place of `word`, not within a longer one.
size_t find_word(std::string_view text, std::string_view word, size_t from) {
  for (size_t at = from; (at = text.find(word, at)) != std::string_view::npos; at += word.size()) {
    const size_t end = at + word.size();
    if ((at == 0 || !is_word_char(text[at - 1])) && (end == text.size() || !is_word_char(text[end])))
      return at;
  }
  return std::string_view::npos;
}

std::string changed_lines(std::string_view text,
                          const std::function<std::string(const std::string&)>& change) {
  std::string out;
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) out += change(line) + '\n';
  return out;
}

// Drops includes of the system, for which the prelude stands; spells NCCL's own from the folder's root, as headers in
// memory have one name each.
std::string plain_include(const std::string& name, const std::string& line) {
  static const std::regex include(R"re(^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"].*$)re");
  std::smatch found;
  if (!std::regex_match(line, found, include)) return line;
  std::string what = found[2];
  if (found[1] == "<") {
    if (what == "nccl.h") return "#include \"nccl.h\"";
    return what.starts_with("cuda/") ? line : "";
  }
  if (!what.starts_with("nccl_device/") && what != "nccl.h" && what != "nccl_device.h")
    what = (fs::path(name).parent_path() / what).lexically_normal().generic_string();
  return "#include \"" + what + "\"";
}

std::string with_typeof(const std::string& line) {
  static const std::regex define(R"(^([ \t]*#[ \t]*define[ \t]+\w*TYPEOF\(x\)).*$)");
  static const std::regex use(R"(\b(__typeof__|typeof)\s*\()");
  static const std::regex copy(R"(\b__builtin_memcpy\b)");
  // In a union whose other branches are larger; no element is no array here.
  static const std::regex empty(R"(\[(sizeof\(T\) ?/ ?\d+)\])");
  std::string out = line;
  if (out.find("TYPEOF(x)") != std::string::npos) out = std::regex_replace(out, define, "$1 WEFT_TYPEOF(x)");
  if (out.find("typeof") != std::string::npos) out = std::regex_replace(out, use, "WEFT_TYPEOF(");
  if (out.find("__builtin_memcpy") != std::string::npos) out = std::regex_replace(out, copy, "memcpy");
  if (out.find("[sizeof(T)") != std::string::npos) out = std::regex_replace(out, empty, "[$1 ? $1 : 1]");
  return out;
}

// The end of the attributes that begin at `at`; `at` where there are none.
size_t end_of_attributes(std::string_view text, size_t at) {
  size_t end = at;
  while (is_at(text, end = skip_space(text, end), "__attribute__")) {
    size_t inner = skip_space(text, end + std::string_view("__attribute__").size());
    int depth = 0;
    do {
      if (inner >= text.size()) return at;
      depth += (text[inner] == '(') - (text[inner] == ')');
      ++inner;
    } while (depth > 0);
    at = end = inner;
  }
  return at;
}

// Moves the attributes of `struct S {...} __attribute__((packed)) name;` behind `struct`: NVRTC drops those at the end
// without a word.
std::string attributes_in_front(std::string text) {
  for (size_t close = 0; (close = text.find('}', close)) != std::string::npos; ++close) {
    const size_t end = end_of_attributes(text, close + 1);
    if (end == close + 1) continue;
    const size_t stop = text.find_first_of(";{}", end);
    if (stop == std::string::npos || text[stop] != ';') continue;
    size_t open = close;
    for (int depth = 1; depth > 0 && open > 0;) {
      --open;
      depth += (text[open] == '}') - (text[open] == '{');
    }
    const std::string_view before = std::string_view(text).substr(0, open);
    size_t keyword = std::string_view::npos;
    for (const std::string_view word : {std::string_view("struct"), std::string_view("union")}) {
      const size_t at = before.rfind(word);
      if (at == std::string_view::npos) continue;
      const size_t after = at + word.size();
      if (keyword == std::string_view::npos || after > keyword) keyword = after;
    }
    if (keyword == std::string_view::npos) continue;
    std::string attributes = text.substr(close + 1, end - close - 1);
    std::ranges::replace_if(attributes, [](char c) { return c == '\n' || c == '\t'; }, ' ');
    text.replace(close + 1, end - close - 1, 1, ' ');
    text.insert(keyword, " " + attributes + " ");
    close += attributes.size() + 2;
  }
  return text;
}

// Functions of the host have no place here; their prototypes would be errors.
std::string without_host_prototypes(std::string text) {
  for (size_t at = 0; (at = find_word(text, "__host__", at)) != std::string::npos;) {
    const size_t after = at + std::string_view("__host__").size();
    const size_t stop = text.find_first_of(";{}", after);
    if (is_at(text, skip_space(text, after), "__device__") || stop == std::string::npos ||
        text[stop] != ';') {
      at = after;
      continue;
    }
    size_t begin = at;
    while (begin > 0 && std::isspace(static_cast<unsigned char>(text[begin - 1]))) --begin;
    for (const std::string_view word : {std::string_view("NCCL_EXTERN_C"), std::string_view("NCCL_API")})
      if (begin >= word.size() && is_at(text, begin - word.size(), word)) {
        begin -= word.size();
        break;
      }
    text.erase(begin, stop + 1 - begin);
    at = begin;
  }
  return text;
}

// The part of nccl.h that device code uses; all of it takes the compiler seconds.
std::string short_nccl_h(std::string_view text) {
  static const std::regex kept(
      R"(^#\s*define\s+NCCL_((MAJOR|MINOR|PATCH|SUFFIX|VERSION_CODE)\b|VERSION\(|WIN_).*$)");
  static const std::regex handle(R"(^typedef\s+struct\s+\w+\s*\*\s*nccl(Comm|Window)_t;.*$)");
  std::string out = "#pragma once\n";
  out += changed_lines(text, [](const std::string& line) {
    return std::regex_match(line, kept) || std::regex_match(line, handle) ? line : std::string();
  });
  const size_t end = text.find("ncclResult_t;");
  const size_t begin = end == std::string_view::npos ? end : text.rfind("typedef", end);
  if (begin != std::string_view::npos)
    out += std::string(text.substr(begin, end - begin)) + "ncclResult_t;\n";
  return out;
}

Result<std::string> read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  if (!file || !text) return Status::make(Code::kSystem, "{} cannot be read", path.string());
  return std::move(text).str();
}

bool has_headers(const fs::path& folder) {
  std::error_code ignored;
  return fs::is_regular_file(folder / "nccl.h", ignored) && fs::is_directory(folder / "nccl_device", ignored);
}

Result<int> version_of(const fs::path& folder) {
  WEFT_TRY_ASSIGN(const std::string text, read_text(folder / "nccl.h"));
  static const std::regex number(R"(^#\s*define\s+NCCL_(MAJOR|MINOR|PATCH)\s+(\d+).*$)");
  int version = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::smatch found;
    if (!std::regex_match(line, found, number)) continue;
    version += std::stoi(found[2]) * (found[1] == "MAJOR" ? 10000 : found[1] == "MINOR" ? 100 : 1);
  }
  return version;
}

// Where headers of this library may lie: as a wheel has them, and as the system does.
std::vector<std::string> folders_next_to(const std::string& library_path) {
  std::vector<std::string> folders;
  const fs::path lib = fs::path(library_path).parent_path();
  folders.push_back((lib.parent_path() / "include").string());
  folders.push_back((lib.parent_path().parent_path() / "include").string());
  return folders;
}

}  // namespace

const char* to_string(GinType type) {
  switch (type) {
    case GinType::kNone:
      return "none";
    case GinType::kProxy:
      return "PROXY";
    case GinType::kGdaki:
      return "GDAKI";
    case GinType::kGpi:
      return "GPI";
    case GinType::kEfaGda:
      return "EFA_GDA";
  }
  return "unknown";
}

Result<std::string> find_headers(const std::string& library_path, int version) {
  const std::string& named = config().nccl_include;
  const std::vector<std::string> folders =
      named.empty() ? folders_next_to(library_path) : std::vector<std::string>{expand_home(named)};
  std::string tried;
  for (const std::string& folder : folders) {
    tried += (tried.empty() ? "" : ", ") + folder;
    if (!has_headers(folder)) continue;
    WEFT_TRY_ASSIGN(const int theirs, version_of(folder));
    if (theirs == version) return folder;
    return Status::make(Code::kUnsupported,
                        "{} has the headers of NCCL {}, the library {} is {}; kernels must be compiled with "
                        "its own (WEFT_NCCL_INCLUDE names another folder)",
                        folder, version_text(theirs), library_path, version_text(version));
  }
  return Status::make(Code::kUnsupported,
                      "no device headers (nccl.h, nccl_device) of NCCL {} for {}: looked at {}; "
                      "WEFT_NCCL_INCLUDE names another folder",
                      version_text(version), library_path, tried);
}

std::string for_nvrtc(const std::string& name, std::string_view text) {
  if (name == "nccl.h") return short_nccl_h(text);
  std::string out =
      changed_lines(text, [&](const std::string& line) { return with_typeof(plain_include(name, line)); });
  out = attributes_in_front(std::move(out));
  return name == "nccl_device/utility.h" ? out : without_host_prototypes(std::move(out));
}

Result<std::shared_ptr<const DeviceSources>> device_sources(const std::string& folder, GinType type,
                                                            uint64_t dev_comm_bytes) {
  // One object for each, so that kernels which were compiled with it are found again.
  static std::mutex mutex;
  static std::map<std::tuple<std::string, GinType, uint64_t>, std::shared_ptr<const DeviceSources>> made;
  std::lock_guard lock(mutex);
  std::shared_ptr<const DeviceSources>& known = made[{folder, type, dev_comm_bytes}];
  if (known) return known;
  const fs::path root(folder);
  if (!has_headers(root)) return Status::make(Code::kUnsupported, "{} has no device headers of NCCL", folder);
  std::vector<fs::path> paths{root / "nccl.h"};
  for (const auto& entry : fs::recursive_directory_iterator(root / "nccl_device"))
    if (entry.path().extension() == ".h" || entry.path().extension() == ".cuh") paths.push_back(entry.path());
  std::sort(paths.begin() + 1, paths.end());
  auto sources = std::make_shared<DeviceSources>();
  for (const fs::path& path : paths) {
    WEFT_TRY_ASSIGN(const std::string text, read_text(path));
    const std::string name = path.lexically_relative(root).generic_string();
    sources->headers.emplace_back(name, for_nvrtc(name, text));
  }
  sources->headers.emplace_back("weft_nccl.h", std::string(kPrelude) + kIncluded + kAssertions);
  for (const GinType one : {GinType::kProxy, GinType::kGdaki, GinType::kGpi, GinType::kEfaGda})
    sources->options.push_back(text("-DNCCL_GIN_{}_ENABLE={}", to_string(one), one == type ? 1 : 0));
  if (dev_comm_bytes > 0) sources->options.push_back(text("-DWEFT_NCCL_DEV_COMM_BYTES={}", dev_comm_bytes));
  for (const char* option : {"-DWEFT_NCCL_HEADERS", "-DWEFT_HELP_WHILE_WAITING"})
    sources->options.emplace_back(option);
  return known = std::move(sources);
}

}  // namespace weft::nccl_link
