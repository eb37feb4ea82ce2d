// SPDX-License-Identifier: Apache-2.0
//
// log_warn("fabric: provider {} is missing", name) writes one line to standard error, or to the sink that
// Python sets. Threads: any. The level comes from WEFT_LOG.
#pragma once

#include <functional>
#include <string>

#include "base/status.h"

namespace weft {

enum class LogLevel { kError = 0, kWarn, kInfo, kDebug };

using LogSink = std::function<void(LogLevel, const std::string&)>;

void set_log_sink(LogSink sink);  // an empty sink restores standard error
bool log_enabled(LogLevel level);
void log_line(LogLevel level, const std::string& line);

template <class... Args>
void log_at(LogLevel level, std::string_view pattern, const Args&... args) {
  if (log_enabled(level)) log_line(level, text(pattern, args...));
}
template <class... Args>
void log_warn(std::string_view pattern, const Args&... args) {
  log_at(LogLevel::kWarn, pattern, args...);
}
template <class... Args>
void log_info(std::string_view pattern, const Args&... args) {
  log_at(LogLevel::kInfo, pattern, args...);
}
template <class... Args>
void log_debug(std::string_view pattern, const Args&... args) {
  log_at(LogLevel::kDebug, pattern, args...);
}

// Logs a failure where its cause is first known, and hands it on.
Status logged(Status status);

}  // namespace weft
