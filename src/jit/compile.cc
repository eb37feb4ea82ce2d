// SPDX-License-Identifier: Apache-2.0
#include "jit/compile.h"

#include "base/digest.h"
#include "base/log.h"
#include "jit/host_kernels.h"
#include "jit/source.h"
#include "jit/toolchain.h"

namespace weft {
namespace {

std::vector<std::string> options_for(const std::string& architecture, const Toolchain& tools) {
  std::vector<std::string> options{"--gpu-architecture=" + architecture, "--std=c++20", "-default-device",
                                   "--ptxas-options=-v"};
  for (const std::string& folder : tools.include_dirs) options.push_back("-I" + folder);
  return options;
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

// Folders stand in the key by their content only, so that one cache serves several environments.
std::string cache_name(const KernelKey& key, const std::string& source,
                       const std::vector<NvrtcHeader>& headers, const std::vector<std::string>& options,
                       const Nvrtc& nvrtc, const Toolchain& tools) {
  Digest digest;
  digest.add(nvrtc.identity()).add(source);
  for (const std::string& option : options)
    if (!option.starts_with("-I")) digest.add(option);
  for (const NvrtcHeader& header : headers) digest.add(header.name).add(header.text);
  add_system_headers(digest, headers, tools);
  return key.name + "-" + digest.hex().substr(0, 40);
}

}  // namespace

std::string architecture(int major, int minor) {
  return text("sm_{}{}{}", major, minor, major >= 9 ? "a" : "");
}

Result<Compiled> compile_kernel(const KernelKey& key, const std::string& architecture,
                                const KernelCache* cache) {
  WEFT_TRY_ASSIGN(const Nvrtc* nvrtc, Nvrtc::open());
  const Toolchain tools = toolchain();
  const KernelRow* row = find_kernel(key.name, key.mesh_type);
  Compiled out;
  out.source = kernel_source(key, row ? row->args_bytes : 0, row ? row->mesh_bytes : 0);
  const std::vector<NvrtcHeader> headers = headers_of(out.source, tools.device_dir);
  const std::vector<std::string> options = options_for(architecture, tools);
  out.cache_name = cache_name(key, out.source, headers, options, *nvrtc, tools);

  if (std::optional<std::string> cubin = cache ? cache->load(out.cache_name) : std::nullopt) {
    out.cubin = std::move(*cubin);
    out.is_cached = true;
    return out;
  }
  Result<NvrtcOutput> compiled = nvrtc->compile(out.source, headers, options);
  if (!compiled.ok())
    return Status::make(compiled.status().code(), "compiling {} for {}: {}\nsource:\n{}", key.name,
                        architecture, compiled.status().message(), out.source);
  out.cubin = std::move(compiled->cubin);
  out.log = std::move(compiled->log);
  log_info("jit: compiled {} for {} with {}", out.cache_name, architecture, nvrtc->path());
  if (cache) cache->store(out.cache_name, out.cubin);
  return out;
}

}  // namespace weft
