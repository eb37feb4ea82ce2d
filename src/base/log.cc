// SPDX-License-Identifier: Apache-2.0
#include "base/log.h"

#include <algorithm>
#include <cstdio>
#include <mutex>

#include "base/config.h"

namespace weft {
namespace {

struct Sink {
  std::mutex mutex;
  LogSink sink;
};

Sink& sink() {
  static Sink once;
  return once;
}

LogLevel level_from_config() {
  const std::string& name = config().log;
  if (name == "error") return LogLevel::kError;
  if (name == "info") return LogLevel::kInfo;
  if (name == "debug") return LogLevel::kDebug;
  return LogLevel::kWarn;
}

const char* label(LogLevel level) {
  switch (level) {
    case LogLevel::kError:
      return "error";
    case LogLevel::kWarn:
      return "warning";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kDebug:
      return "debug";
  }
  return "?";
}

// A name in a line may be a peer's: no control character of it reaches the terminal.
std::string without_controls(std::string line) {
  const auto is_control = [](char letter) {
    const auto byte = static_cast<unsigned char>(letter);
    return (byte < 0x20 && letter != '\n' && letter != '\t') || byte == 0x7f;
  };
  std::replace_if(line.begin(), line.end(), is_control, '?');
  return line;
}

}  // namespace

void set_log_sink(LogSink replacement) {
  std::lock_guard lock(sink().mutex);
  sink().sink = std::move(replacement);
}

bool log_enabled(LogLevel level) {
  return level <= level_from_config();
}

void log_line(LogLevel level, const std::string& line) {
  std::lock_guard lock(sink().mutex);
  if (sink().sink) return sink().sink(level, line);
  const std::string whole = text("weft {}: {}\n", label(level), without_controls(line));
  std::fwrite(whole.data(), 1, whole.size(), stderr);
}

Status logged(Status status) {
  if (!status.ok()) log_at(LogLevel::kInfo, "{}: {}", to_string(status.code()), status.message());
  return status;
}

}  // namespace weft
