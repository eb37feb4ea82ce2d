// SPDX-License-Identifier: Apache-2.0
#include "jit/record.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/config.h"
#include "base/file_descriptor.h"
#include "base/log.h"

namespace weft {
namespace {

std::string quoted(const std::string& words) {
  std::string out = "\"";
  for (const char c : words) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", c);
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string json(const KernelKey& key, const std::string& target) {
  std::string shape;
  for (const auto& [name, value] : key.shape)
    shape += text("{}[{}, {}]", shape.empty() ? "" : ", ", quoted(name), value);
  std::string line =
      text("\"target\": {}, \"file\": {}, \"name\": {}, \"args_type\": {}, \"mesh_type\": {}, ",
           quoted(target), quoted(key.file), quoted(key.name), quoted(key.args_type), quoted(key.mesh_type));
  line += text("\"shape\": [{}], \"threads_per_block\": {}, \"blocks_per_sm\": {}, \"prelude\": {}", shape,
               key.threads_per_block, key.blocks_per_sm, quoted(key.prelude));
  return "{" + line + "}\n";
}

}  // namespace

void record_kernel(const KernelKey& key, const std::string& target) {
  if (config().record_kernels.empty()) return;
  const std::string path = expand_home(config().record_kernels);
  const std::string line = json(key, target);
  const FileDescriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  // One write: lines of several processes do not mix.
  if (file.get() >= 0 && write(file.get(), line.data(), line.size()) == static_cast<ssize_t>(line.size()))
    return;
  static std::atomic<bool> was_said{false};
  if (!was_said.exchange(true)) log_warn("jit: WEFT_RECORD_KERNELS: {}: {}", path, std::strerror(errno));
}

}  // namespace weft
