// SPDX-License-Identifier: Apache-2.0
#include "jit/notice.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <set>

#include "base/log.h"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMostNames = 4;

std::atomic<bool> may_use_terminal{true};

// What is compiled at this time, from the first of it to the last.
struct Work {
  std::mutex mutex;
  int under_way = 0;
  size_t kernels = 0;
  std::set<std::string> names, targets;
  Clock::time_point began;
};

Work& work() {
  static auto* once = new Work;  // never freed: compilers may outlive static destruction
  return *once;
}

std::string listed(const std::set<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  return list;
}

std::string what(const Work& now) {
  const std::string names =
      now.names.size() <= kMostNames ? listed(now.names) : text("{} kernels", now.kernels);
  return names + " for " + listed(now.targets);
}

bool is_on_terminal() {
  return may_use_terminal.load(std::memory_order_relaxed) && log_enabled(LogLevel::kWarn) &&
         !log_enabled(LogLevel::kInfo) && isatty(STDERR_FILENO);
}

// Over what the line said before.
void say(const std::string& line, const char* end) {
  std::fprintf(stderr, "\r\033[Kweft: %s%s", line.c_str(), end);
  std::fflush(stderr);
}

}  // namespace

CompileNotice::CompileNotice(const std::string& kernel, const std::string& target) {
  Work& now = work();
  std::lock_guard lock(now.mutex);
  if (now.under_way++ == 0) {
    now.kernels = 0;
    now.names.clear();
    now.targets.clear();
    now.began = Clock::now();
  }
  ++now.kernels;
  now.names.insert(kernel);
  now.targets.insert(target);
  if (is_on_terminal()) say("compiling " + what(now) + ", once", "");
}

CompileNotice::~CompileNotice() {
  Work& now = work();
  std::lock_guard lock(now.mutex);
  if (--now.under_way > 0) return;
  const double seconds = std::chrono::duration<double>(Clock::now() - now.began).count();
  char took[32];
  std::snprintf(took, sizeof took, "%.1f s", seconds);
  const std::string line = "compiled " + what(now) + " in " + took;
  if (is_on_terminal()) say(line, "\n");
  log_info("jit: {}", line);
}

void CompileNotice::keep_off_terminal() {
  may_use_terminal = false;
}

}  // namespace weft
