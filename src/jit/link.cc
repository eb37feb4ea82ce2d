// SPDX-License-Identifier: Apache-2.0
#include "jit/link.h"

#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/nvjitlink.h"
#include "jit/notice.h"
#include "transports/transport.h"

namespace weft {
namespace {

// The library's calls as relocatable code. Threads that compile kernels at once share it: the second waits for the first.
Result<std::string> compile_unit(const DeviceUnit& unit, const std::string& architecture, const Nvrtc& nvrtc,
                                 const Toolchain& tools, const KernelCache* cache) {
  std::vector<std::string> options = unit.options;
  options.push_back("--gpu-architecture=" + architecture);
  Digest digest;
  digest.add(unit.text).add(nvrtc.identity());
  for (const std::string& option : options)
    if (!option.starts_with("-I")) digest.add(option);
  std::vector<NvrtcHeader> headers;
  for (const auto& [name, text] : unit.headers) {
    digest.add(name).add(text);
    headers.push_back({name, text});
  }
  static std::mutex mutex;
  static std::map<std::string, std::string> compiled;
  const std::string name = unit.name + "-" + digest.hex().substr(0, 40);
  std::lock_guard lock(mutex);
  if (const auto known = compiled.find(name); known != compiled.end()) return known->second;
  if (std::optional<std::string> cubin = cache ? cache->load(name) : std::nullopt)
    return compiled[name] = std::move(*cubin);
  const CompileNotice notice(unit.name, architecture);
  for (const std::string& folder : tools.include_dirs) options.push_back("-I" + folder);
  Result<NvrtcOutput> output = nvrtc.compile(unit.text, headers, options);
  if (!output.ok())
    return Status::make(output.status().code(), "compiling {} for {}: {}", unit.name, architecture,
                        output.status().message());
  if (cache) cache->store(name, output->cubin);
  return compiled[name] = std::move(output->cubin);
}

}  // namespace

Result<std::string> link_kernel(const std::string& kernel, const DeviceSources& sources,
                                const std::string& architecture, const Nvrtc& nvrtc, const Toolchain& tools,
                                const KernelCache* cache) {
  WEFT_TRY_ASSIGN(const NvJitLink* linker, open_nvjitlink());
  WEFT_TRY_ASSIGN(const std::string unit, compile_unit(sources.unit, architecture, nvrtc, tools, cache));
  return linker->link({kernel, unit}, sources.archive, architecture);
}

}  // namespace weft
