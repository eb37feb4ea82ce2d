// SPDX-License-Identifier: Apache-2.0
#include "base/config.h"

#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <span>
#include <utility>

#include "base/deep_ep_variables.h"
#include "base/text.h"

namespace weft {
namespace {

std::string variable_name(std::string_view option) {
  std::string name = "WEFT_";
  for (const char c : option) name += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

struct Unit {
  std::string_view name;
  double factor;
};
constexpr Unit kTimeUnits[] = {{"us", 1e-6}, {"ms", 1e-3}, {"s", 1}, {"min", 60}, {"h", 3600}};
constexpr Unit kByteUnits[] = {{"B", 1},           {"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30},
                               {"TiB", 1ll << 40}, {"KB", 1e3},      {"kB", 1e3},      {"MB", 1e6},
                               {"GB", 1e9},        {"TB", 1e12}};

// What an option counts, by its name.
std::span<const Unit> units_of(std::string_view option) {
  if (option.ends_with("_s")) return kTimeUnits;
  if (option.ends_with("_bytes") || option.find("_bytes_") != option.npos) return kByteUnits;
  return {};
}

// The factor of a unit; 1 without one; 0 for what is no unit.
double factor_of(std::string_view unit, std::span<const Unit> units) {
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  for (const Unit& known : units)
    if (unit == known.name) return known.factor;
  return unit.empty() ? 1 : 0;
}

struct Option {
  std::string_view name;
  Rule rule;
};

bool parse(const char* given, const Option& option, std::string& out) {
  const auto& words = option.rule.words;
  if (!words.empty() && std::find(words.begin(), words.end(), given) == words.end()) return false;
  out = given;
  return true;
}
bool parse(const char* given, const Option& option, int64_t& out) {
  char* end = nullptr;
  errno = 0;
  const bool is_hex = std::string_view(given).starts_with("0x");
  const long long count = std::strtoll(given, &end, is_hex ? 16 : 10);
  if (end == given || errno) return false;
  const auto factor = static_cast<int64_t>(factor_of(end, units_of(option.name)));
  int64_t value = 0;
  if (factor == 0 || __builtin_mul_overflow(static_cast<int64_t>(count), factor, &value)) return false;
  if (value < option.rule.least || value > option.rule.most) return false;
  out = value;
  return true;
}
bool parse(const char* given, const Option& option, double& out) {
  char* end = nullptr;
  const double value = std::strtod(given, &end) * factor_of(end, units_of(option.name));
  if (end == given || !(value > 0)) return false;
  out = value;
  return true;
}

std::string allowed(const Option& option, const std::string&) {
  std::string words;
  for (const std::string_view word : option.rule.words) {
    if (!words.empty()) words += word == option.rule.words.back() ? " or " : ", ";
    words += word;
  }
  return words.empty() ? "text" : words;
}
std::string allowed(const Option& option, int64_t) {
  const bool is_open = option.rule.most == std::numeric_limits<int64_t>::max();
  const std::string range =
      is_open ? text("{} or more", option.rule.least) : text("{} to {}", option.rule.least, option.rule.most);
  const bool counts_bytes = !units_of(option.name).empty();
  return counts_bytes ? text("bytes, {}, also with a unit: 64KiB, 1GiB, 2GB", range)
                      : text("whole number, {}", range);
}
std::string allowed(const Option& option, double) {
  return units_of(option.name).empty() ? "number above 0"
                                       : "seconds above 0, also with a unit: 500ms, 5s, 2min";
}

// Reads one option. A value that does not parse keeps the default, says so in its row and adds to `refused`.
template <class T>
OptionRow read_option(const Option& option, const char* help, T& value, std::string& refused) {
  OptionRow row{variable_name(option.name), allowed(option, value), text("{}", value), "", "default", help,
                option.rule.is_shared};
  if (const char* given = std::getenv(row.variable.c_str()); given && *given) {
    const bool is_taken = parse(given, option, value);
    row.source = is_taken ? "environment" : text("environment (refused: '{}')", given);
    if (!is_taken) refused += text("{}: got '{}', allowed: {}\n", row.variable, given, row.type);
  }
  row.value = text("{}", value);
  return row;
}

// How many letters have to be put in, left out or replaced to get from one name to the other.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = std::exchange(row[j], std::min({replaced, row[j] + 1, row[j - 1] + 1}));
    }
  }
  return row[b.size()];
}

// Variables of Weft's name that tools read, not the library.
constexpr std::string_view kOthers[] = {"WEFT_CXX"};

void refuse_unknown(const std::vector<OptionRow>& rows, std::string& refused) {
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string_view whole = *entry, name = whole.substr(0, whole.find('='));
    const auto is_it = [&](const OptionRow& row) { return row.variable == name; };
    if (!name.starts_with("WEFT_") ||
        std::find(std::begin(kOthers), std::end(kOthers), name) != std::end(kOthers) ||
        std::any_of(rows.begin(), rows.end(), is_it))
      continue;
    const auto nearer = [&](const OptionRow& a, const OptionRow& b) {
      return edit_distance(name, a.variable) < edit_distance(name, b.variable);
    };
    const OptionRow& nearest = *std::min_element(rows.begin(), rows.end(), nearer);
    const bool may_be_secret = name.find("SECRET") != std::string_view::npos;
    const std::string_view given = whole.substr(std::min(name.size() + 1, whole.size()));
    refused += text("{}: got '{}', but there is no such setting; the nearest is {} ({})\n", name,
                    may_be_secret ? "(hidden)" : given, nearest.variable, nearest.type);
  }
}

struct Loaded {
  Config config;
  std::vector<OptionRow> rows;
  std::string refused;  // a line for each variable
  bool secret_is_auto = false;
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

constexpr size_t kSecretLeast = 16;

// Errors and tables do not show it.
void hide_secret(std::string& secret, OptionRow& row, std::string& refused) {
  row.type = text("text of {} characters or more, or auto", kSecretLeast);
  if (secret.empty()) return;
  if (secret == "auto") return secret.clear();
  row.value = "(hidden)";
  if (secret.size() >= kSecretLeast) return;
  refused += text("{}: got {} characters, allowed: {}\n", row.variable, secret.size(), row.type);
  row.source = "environment (refused)";
  row.value = secret = "";
}

Loaded load() {
  Loaded loaded;
#define WEFT_OPTION(name, type, initial, help, ...) \
  loaded.rows.push_back(read_option({#name, Rule(__VA_ARGS__)}, help, loaded.config.name, loaded.refused));
  WEFT_OPTIONS(WEFT_OPTION)
  WEFT_EXTRA_OPTIONS(WEFT_OPTION)
#undef WEFT_OPTION
  refuse_unknown(loaded.rows, loaded.refused);
  for (OptionRow& row : loaded.rows) {
    if (row.variable == "WEFT_ALGORITHM_DIR") take_msccl_variables(loaded.config.algorithm_dir, row);
    if (row.variable != "WEFT_JOB_SECRET") continue;
    loaded.secret_is_auto = row.value == "auto";
    hide_secret(loaded.config.job_secret, row, loaded.refused);
  }
  return loaded;
}

Loaded& loaded() {
  static Loaded once = load();
  return once;
}

// Gives the option of a row a value that is not its own variable's. False, and nothing changes, where it does not parse.
bool give(Loaded& to, OptionRow& row, const std::string& given, std::string_view from) {
  bool is_taken = false;
#define WEFT_OPTION(name, type, initial, help, ...)                                    \
  if (row.variable == variable_name(#name)) {                                          \
    is_taken = parse(given.c_str(), Option{#name, Rule(__VA_ARGS__)}, to.config.name); \
    row.value = text("{}", to.config.name);                                            \
  }
  WEFT_OPTIONS(WEFT_OPTION)
  WEFT_EXTRA_OPTIONS(WEFT_OPTION)
#undef WEFT_OPTION
  if (is_taken) row.source = text("environment ({})", from);
  return is_taken;
}

struct UcclVariable {
  std::string_view name;
  std::string_view ours;  // the variable of Weft that says the same, or
  std::string_view why;   // why there is none
};
constexpr UcclVariable kUcclVariables[] = {
    {"UCCL_SOCKET_IFNAME", "WEFT_INTERFACE", ""},
    {"UCCL_IB_GID_INDEX", "WEFT_GID_INDEX", ""},
    {"UCCL_IB_MAX_INFLIGHT_BYTES", "WEFT_PROXY_BYTES_IN_FLIGHT", ""},
    {"UCCL_IB_MAX_INFLIGHT_NORMAL", "WEFT_PROXY_WRITES_IN_FLIGHT", ""},
    {"UCCL_IB_MAX_INFLIGHT_LOW_LATENCY", "WEFT_PROXY_WRITES_IN_FLIGHT", ""},
    {"UCCL_IB_SL", "WEFT_SERVICE_LEVEL", ""},
    {"UCCL_IB_TC", "WEFT_TRAFFIC_CLASS", ""},
    {"UCCL_EP_CPU_TIMEOUT_SECS", "WEFT_TIMEOUT_S", ""},
    {"UCCL_IB_HCA", "", "WEFT_PROXY_NICS names NICs, in full"},
    {"UCCL_RDMA_ADAPTIVE_SLEEP", "", "proxy threads without work always sleep, see WEFT_PROXY_IDLE_S"},
    {"UCCL_EP_ENABLE_AGGRESSIVE_ATOMIC", "", "kernels are compiled for the GPU at hand"},
};
constexpr std::string_view kUcclPrefix = "UCCL_";

const UcclVariable& uccl_variable(std::string_view name) {
  static constexpr UcclVariable kUnknown = {"", "", "Weft has no such setting"};
  const auto* found = std::ranges::find(kUcclVariables, name, &UcclVariable::name);
  return found == std::end(kUcclVariables) ? kUnknown : *found;
}

// Why a variable that has a counterpart is not used, or nothing where it now is. `row` is the counterpart's.
std::string take_as(Loaded& to, OptionRow& row, std::string_view name, const std::string& given) {
  const bool is_from_uccl = row.source.find(kUcclPrefix) != std::string::npos;
  if (row.source != "default" && !is_from_uccl) return text("{}={} is set", row.variable, row.value);
  if (row.variable == "WEFT_INTERFACE" && given.find_first_of("^=,") != std::string::npos)
    return text("{} is one name in full", row.variable);
  // Two variables may mean one option, as Weft paces both modes alike. Then the stricter one wins.
  const OptionRow other = row;
  const int64_t writes = to.config.proxy_writes_in_flight;
  if (!give(to, row, given, name)) return text("{} allows {}", row.variable, row.type);
  if (!is_from_uccl || row.variable != "WEFT_PROXY_WRITES_IN_FLIGHT" || other.source == row.source) return "";
  if (to.config.proxy_writes_in_flight <= writes) return "";
  to.config.proxy_writes_in_flight = writes;
  row = other;
  return text("{} is one bound for both modes, and {} of the other is stricter", row.variable, writes);
}

}  // namespace

const Config& config() {
  return loaded().config;
}
std::vector<OptionRow> config_table() {
  return loaded().rows;
}
Status config_status() {
  const std::string& refused = loaded().refused;
  if (refused.empty()) return Status();
  return Status::invalid("{}", std::string_view(refused).substr(0, refused.size() - 1));
}
void config_reload() {
  loaded() = load();
}

void use_job_secret(const std::string& secret) {
  if (loaded().config.job_secret.empty()) loaded().config.job_secret = secret;
}

bool awaits_job_secret() {
  return loaded().secret_is_auto && loaded().config.job_secret.empty();
}

std::vector<ForeignVariable> take_uccl_variables() {
  std::vector<std::string> given;
  for (char** entry = environ; entry && *entry; ++entry)
    if (std::string_view(*entry).starts_with(kUcclPrefix)) given.emplace_back(*entry);
  std::ranges::sort(given);
  std::vector<ForeignVariable> made;
  const auto take = [&](const std::string& entry) {
    const size_t equals = entry.find('=');
    const std::string name = entry.substr(0, equals), value = entry.substr(equals + 1);
    const UcclVariable& known = uccl_variable(name);
    const auto row = std::ranges::find(loaded().rows, known.ours, &OptionRow::variable);
    const std::string why = value.empty()                ? "it is empty"
                            : row == loaded().rows.end() ? std::string(known.why)
                                                         : take_as(loaded(), *row, name, value);
    made.push_back(
        {why.empty() ? text("{} is {}", entry, known.ours) : text("{} is not used: {}", entry, why),
         why.empty()});
  };
  std::ranges::for_each(given, take);
  made.clear();  // a later one may have been stricter than an earlier one, so that words come of a second look
  std::ranges::for_each(given, take);
  return made;
}

std::vector<ForeignVariable> deep_ep_variables() {
  const std::string& chosen = loaded().config.transport;
  const bool takes_gin = chosen.find("nccl") != std::string::npos;
  static constexpr const char* kBackend = "DEEP_EP_BACKEND";
  struct Known {
    const char* name;
    const char* as_is;  // the value that asks for what Weft does anyway
    std::string why;
  };
  const Known known[] = {
      {kBackend, "auto",
       text("WEFT_TRANSPORT chooses ({}); nccl asks for windows in NCCL's memory, and for GIN between nodes",
            chosen)},
      {"EP_DISABLE_GIN", takes_gin ? "0" : "1",
       takes_gin ? "WEFT_TRANSPORT=nccl goes through GIN between nodes"
                 : "nothing of Weft's goes through GIN; between nodes it takes WEFT_PROXY_PROVIDER"},
      {"NCCL_GIN_TYPE", "",
       takes_gin ? "NCCL itself reads it, and Weft takes what NCCL has"
                 : "NCCL itself reads it; nothing of Weft's goes through GIN"},
  };
  std::vector<ForeignVariable> made;
  for (const Known& one : known) {
    const char* given = std::getenv(one.name);
    if (!given || !*given) continue;
    const std::string_view value = given;
    if (one.name == kBackend && value.starts_with("nccl") && chosen == "nccl") {
      made.push_back({text("{}={} is WEFT_TRANSPORT=nccl", one.name, value), true});
      continue;
    }
    const bool is_so = value == one.as_is;
    made.push_back({is_so ? text("{}={} is what Weft does", one.name, value)
                          : text("{}={} is not used: {}", one.name, value, one.why),
                    is_so});
  }
  return made;
}

std::string shared_settings() {
  std::string lines;
  for (const OptionRow& row : loaded().rows)
    if (row.is_shared) lines += text("{}={}\n", row.variable, row.value);
  return lines;
}

VariableWhile::VariableWhile(const char* name, const std::string& value)
    : name_(name), is_ours_(!std::getenv(name)) {
  if (is_ours_) setenv(name, value.c_str(), 0);
}
VariableWhile::~VariableWhile() {
  if (is_ours_) unsetenv(name_);
}

std::string expand_home(std::string_view path) {
  if (!path.starts_with("~/")) return std::string(path);
  const char* home = std::getenv("HOME");
  if (!home || !*home)
    if (const passwd* user = getpwuid(getuid())) home = user->pw_dir;
  return std::string(home && *home ? home : "/tmp") + std::string(path.substr(1));
}

}  // namespace weft
