// SPDX-License-Identifier: Apache-2.0
#include "jit/source.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>

#include "base/config.h"
#include "jit/host_kernels.h"

namespace weft {
namespace {

// The names that `text` includes between `open` and `close`, in order. A line inside a comment or a false #if
// counts too: a header too many in the cache key does no harm.
std::vector<std::string> included_names(std::string_view text, char open, char close) {
  std::vector<std::string> names;
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    std::string_view rest = line;
    auto skip_spaces = [&] { rest.remove_prefix(std::min(rest.find_first_not_of(" \t"), rest.size())); };
    skip_spaces();
    if (!rest.starts_with('#')) continue;
    rest.remove_prefix(1);
    skip_spaces();
    if (!rest.starts_with("include")) continue;
    rest.remove_prefix(7);
    skip_spaces();
    const size_t end = rest.find(close, 1);
    if (rest.starts_with(open) && end != std::string_view::npos) names.emplace_back(rest.substr(1, end - 1));
  }
  return names;
}

std::atomic<bool> blocks_only{false};

}  // namespace

std::string entry_point(const KernelKey& key) {
  return "weft_" + key.name;
}

void trace_blocks_only(bool is_on) {
  blocks_only = is_on;
}
Traced what_is_traced() {
  if (config().trace_spans <= 0) return Traced::kNothing;
  return blocks_only ? Traced::kBlocks : Traced::kAll;
}

std::string kernel_source(const KernelKey& key, size_t args_bytes, size_t mesh_bytes) {
  std::ostringstream out;
  if (const Traced traced = what_is_traced(); traced != Traced::kNothing)
    out << (traced == Traced::kBlocks ? "#define WEFT_TRACE_BLOCKS\n" : "#define WEFT_TRACE\n");
  out << "#include \"" << key.file << "\"\n";
  for (const std::string_view header : mesh_headers(key.mesh_type)) out << "#include \"" << header << "\"\n";
  out << key.prelude << "struct Shape {\n";
  for (const auto& [name, value] : key.shape)
    out << "  static constexpr int64_t " << name << " = " << value << ";\n";
  out << "};\n";
  const auto assert_bytes = [&](const std::string& type, size_t bytes) {
    if (bytes > 0) out << "static_assert(sizeof(weft::" << type << ") == " << bytes << ");\n";
  };
  assert_bytes(key.args_type, args_bytes);
  assert_bytes(key.mesh_type, mesh_bytes);
  out << "extern \"C\" __global__ void __launch_bounds__(" << key.threads_per_block << ", "
      << key.blocks_per_sm << ")\n"
      << entry_point(key) << "(const __grid_constant__ weft::" << key.args_type << " args,\n"
      << "            const __grid_constant__ weft::" << key.mesh_type << " mesh) {\n"
      << (key.sources ? "  mesh.attend();\n" : "") << "  weft::" << key.name << "<weft::" << key.mesh_type
      << ", Shape>(args, mesh, Shape{});\n"
      << "}\n";
  return out.str();
}

Result<std::string> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  if (!file || !text) return Status::from_errno(errno, "reading {}", path);
  return std::move(text).str();
}

std::vector<NvrtcHeader> headers_of(const std::string& source, const std::string& root) {
  std::vector<NvrtcHeader> found;
  std::set<std::string> seen;
  auto add_includes_of = [&](const std::string& text) {
    for (std::string& name : included_names(text, '"', '"')) {
      if (!seen.insert(name).second) continue;
      if (Result<std::string> file = read_file(root + "/" + name); file.ok())
        found.push_back({std::move(name), std::move(*file)});
    }
  };
  add_includes_of(source);
  // `found` grows while it is walked: the includes of each header go to its end.
  for (size_t next = 0; next < found.size(); ++next) add_includes_of(std::string(found[next].text));
  return found;
}

std::vector<std::string> system_headers_of(const std::vector<NvrtcHeader>& headers) {
  std::set<std::string> names;
  for (const NvrtcHeader& header : headers)
    for (std::string& name : included_names(header.text, '<', '>')) names.insert(std::move(name));
  return {names.begin(), names.end()};
}

}  // namespace weft
