// SPDX-License-Identifier: Apache-2.0
#include "base/config.h"

#include <pwd.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>

#include "base/text.h"

namespace weft {
namespace {

std::string variable_name(const char* option) {
  std::string name = "WEFT_";
  for (const char* c = option; *c; ++c)
    name += static_cast<char>(std::toupper(static_cast<unsigned char>(*c)));
  return name;
}

bool parse(const char* given, std::string& out) {
  out = given;
  return true;
}
bool parse(const char* given, int64_t& out) {
  char* end = nullptr;
  const long long value = std::strtoll(given, &end, 0);
  if (end == given || *end || value < 0) return false;
  out = value;
  return true;
}
bool parse(const char* given, double& out) {
  char* end = nullptr;
  const double value = std::strtod(given, &end);
  if (end == given || *end || !(value > 0)) return false;
  out = value;
  return true;
}

const char* type_name(const std::string&) {
  return "text";
}
const char* type_name(int64_t) {
  return "whole number, 0 or more";
}
const char* type_name(double) {
  return "number above 0";
}

// Reads one option; a value that does not parse keeps the default and says so in its row.
template <class T>
OptionRow read_option(const char* option, const char* help, T& value) {
  OptionRow row{variable_name(option), type_name(value), text("{}", value), "", "default", help};
  if (const char* given = std::getenv(row.variable.c_str()); given && *given) {
    row.source = parse(given, value) ? "environment"
                                     : text("environment (ignored: '{}' is not a {})", given, row.type);
  }
  row.value = text("{}", value);
  return row;
}

struct Loaded {
  Config config;
  std::vector<OptionRow> rows;
};

// MSCCL's own variables name algorithms, too, where WEFT_ALGORITHM_DIR does not.
void take_msccl_variables(std::string& algorithm_dir, OptionRow& row) {
  for (const char* name : {"NCCL_MSCCL_ENABLE", "RCCL_MSCCL_ENABLE"})
    if (const char* given = std::getenv(name); given && std::string_view(given) == "0") return;
  for (const char* name : {"MSCCL_ALGO_DIR", "MSCCL_XML_FILES", "MSCCL_CONFIG"}) {
    const char* given = std::getenv(name);
    if (!algorithm_dir.empty() || !given || !*given) continue;
    algorithm_dir = row.value = given;
    row.source = text("environment ({})", name);
  }
}

Loaded load() {
  Loaded loaded;
#define WEFT_OPTION(name, type, initial, help) \
  loaded.rows.push_back(read_option(#name, help, loaded.config.name));
  WEFT_OPTIONS(WEFT_OPTION)
#undef WEFT_OPTION
  for (OptionRow& row : loaded.rows)
    if (row.variable == "WEFT_ALGORITHM_DIR") take_msccl_variables(loaded.config.algorithm_dir, row);
  return loaded;
}

Loaded& loaded() {
  static Loaded once = load();
  return once;
}

}  // namespace

const Config& config() {
  return loaded().config;
}
std::vector<OptionRow> config_table() {
  return loaded().rows;
}
void config_reload() {
  loaded() = load();
}

std::string expand_home(std::string_view path) {
  if (!path.starts_with("~/")) return std::string(path);
  const char* home = std::getenv("HOME");
  if (!home || !*home)
    if (const passwd* user = getpwuid(getuid())) home = user->pw_dir;
  return std::string(home && *home ? home : "/tmp") + std::string(path.substr(1));
}

}  // namespace weft
