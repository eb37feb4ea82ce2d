// SPDX-License-Identifier: Apache-2.0
#include "jit/compile.h"

#include <algorithm>
#include <iterator>

#include "base/config.h"
#include "base/digest.h"
#include "base/log.h"
#include "jit/host_kernels.h"
#include "jit/link.h"
#include "jit/notice.h"
#include "jit/source.h"
#include "jit/toolchain.h"
#include "transports/transport.h"

namespace weft {
namespace {

std::vector<std::string> options_for(const std::string& architecture, const Toolchain& tools) {
  std::vector<std::string> options{"--gpu-architecture=" + architecture, "--std=c++20", "-default-device",
                                   "--ptxas-options=-v"};
  for (const std::string& folder : tools.include_dirs) options.push_back("-I" + folder);
  return options;
}

// Of relocatable code the compiler bounds the kernel's registers by its threads, but not those of functions that stand apart:
// the linker would refuse what needs more than the kernel may have.
void add_relocatable(std::vector<std::string>& options, const KernelKey& key) {
  constexpr uint32_t kRegistersOfAnSm = 65536, kMost = 255, kGrain = 8;
  const uint32_t threads = std::max(1u, key.threads_per_block * key.blocks_per_sm);
  const uint32_t registers = std::min(kMost, kRegistersOfAnSm / threads / kGrain * kGrain);
  options.emplace_back("--relocatable-device-code=true");
  options.push_back(text("--maxrregcount={}", registers));
}

// The text of CUDA's headers that the kernel includes: another CUDA release beside the same NVRTC gives
// another key. What they include themselves is taken to be of the same release.
void add_system_headers(Digest& digest, const std::vector<NvrtcHeader>& headers, const Toolchain& tools) {
  for (const std::string& name : system_headers_of(headers)) {
    for (const std::string& folder : tools.include_dirs) {
      Result<std::string> file = read_file(folder + "/" + name);
      if (!file.ok()) continue;
      digest.add(name).add(*file);
      break;
    }
  }
}

// Weft's part of a kernel's sources. Folders stand in the key by their content only, so that one cache
// serves several environments.
std::string source_name(const KernelKey& key, const std::string& source,
                        const std::vector<NvrtcHeader>& headers, const std::vector<std::string>& options) {
  Digest digest;
  digest.add(source);
  for (const std::string& option : options)
    if (!option.starts_with("-I")) digest.add(option);
  for (const NvrtcHeader& header : headers) digest.add(header.name).add(header.text);
  return key.name + "-" + digest.hex().substr(0, 40) + "-";
}

std::string compiler_name(const std::vector<NvrtcHeader>& headers, const Nvrtc& nvrtc,
                          const Toolchain& tools) {
  Digest digest;
  digest.add(nvrtc.identity());
  add_system_headers(digest, headers, tools);
  return digest.hex().substr(0, 16);
}

Status not_compiled(const KernelKey& key, const std::string& architecture, const std::string& why) {
  std::string constants;
  for (const auto& [name, value] : key.shape) constants += text(" {}={}", name, value);
  return Status::make(Code::kUnsupported,
                      "kernel {} for {} ({} threads,{}) is in no cache, and {}; `weft warm` compiles ahead",
                      key.name, architecture, key.threads_per_block, constants, why);
}

bool take(std::optional<std::string> cubin, Compiled& out) {
  if (!cubin) return false;
  out.cubin = std::move(*cubin);
  out.is_cached = true;
  return true;
}

}  // namespace

std::string architecture(int major, int minor) {
  return text("sm_{}{}{}", major, minor, major >= 9 ? "a" : "");
}

Result<Compiled> compile_kernel(const KernelKey& key, const std::string& architecture,
                                const KernelCache* cache) {
  const Toolchain tools = toolchain();
  const KernelRow* row = find_kernel(key.name, key.mesh_type);
  const bool may_compile = config().compile == "auto";
  Compiled out;
  out.source = kernel_source(key, row ? row->args_bytes : 0, row ? row->mesh_bytes : 0);
  std::vector<NvrtcHeader> headers = headers_of(out.source, tools.device_dir);
  std::vector<std::string> options = options_for(architecture, tools);
  if (key.sources) {
    for (const auto& [name, text] : key.sources->headers) headers.push_back({name, text});
    std::ranges::copy(key.sources->options, std::back_inserter(options));
    if (!key.sources->archive.empty()) add_relocatable(options, key);
  }
  const std::string prefix = source_name(key, out.source, headers, options);
  Result<const Nvrtc*> opened = Nvrtc::open();
  if (!opened.ok()) {
    if (cache && take(cache->load_like(prefix), out)) return out;
    return may_compile ? opened.status() : not_compiled(key, architecture, opened.status().message());
  }
  const Nvrtc* nvrtc = *opened;
  out.cache_name = prefix + compiler_name(headers, *nvrtc, tools);
  if (cache && take(cache->load(out.cache_name), out)) return out;
  if (!may_compile) {
    if (cache && take(cache->load_like(prefix), out)) return out;
    return not_compiled(key, architecture, "WEFT_COMPILE is never");
  }

  const CompileNotice notice(key.name, architecture);
  Result<NvrtcOutput> compiled = nvrtc->compile(out.source, headers, options);
  if (!compiled.ok())
    return Status::make(compiled.status().code(), "compiling {} for {}: {}\nsource:\n{}", key.name,
                        architecture, compiled.status().message(), out.source);
  out.cubin = std::move(compiled->cubin);
  out.log = std::move(compiled->log);
  if (key.sources && !key.sources->archive.empty()) {
    Result<std::string> linked = link_kernel(out.cubin, *key.sources, architecture, *nvrtc, tools, cache);
    if (!linked.ok())
      return Status::make(linked.status().code(), "linking {} for {}: {}", key.name, architecture,
                          linked.status().message());
    out.cubin = std::move(*linked);
  }
  log_debug("jit: compiled {} for {} with {}", out.cache_name, architecture, nvrtc->path());
  if (cache) cache->store(out.cache_name, out.cubin);
  return out;
}

}  // namespace weft
