// SPDX-License-Identifier: Apache-2.0
#include "base/process_name.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>

#include "base/process_watch.h"
#include "base/text.h"

namespace weft {
namespace {

uint64_t read_host_mark() {
  std::string mark;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), mark);
  char link[64] = {};
  if (readlink("/proc/self/ns/pid", link, sizeof link - 1) > 0) mark += link;
  const uint64_t hash = std::hash<std::string>()(mark);
  return hash ? hash : 1;
}

}  // namespace

uint64_t host_mark() {
  static const uint64_t mark = read_host_mark();
  return mark;
}

ProcessName this_process_name() {
  ProcessName name;
  name.host = host_mark();
  name.pid = getpid();
  name.started = process_start(name.pid);
  gethostname(name.machine, sizeof name.machine - 1);
  return name;
}

NamedProcess::NamedProcess(const ProcessName& name) : name_(name) {
  if (name.host != host_mark() || name.pid <= 0 || name.pid == getpid()) return;
  auto process = std::make_shared<FileDescriptor>(open_process(name.pid));
  is_gone_ = !process->is_open() && errno == ESRCH;
  if (!process->is_open()) return;
  // The descriptor holds the number: who has it now is asked after it was opened.
  if (process_start(name.pid) != name.started)
    is_gone_ = true;
  else
    process_ = std::move(process);
}

bool NamedProcess::has_ended() const {
  return is_gone_ || (process_ && process_end(process_->get()).how != ProcessEnd::How::kRuns);
}

bool NamedProcess::was_killed() const {
  return process_ && process_end(process_->get()).how == ProcessEnd::How::kKilled;
}

// Anybody may have written the name of the machine.
std::string NamedProcess::who() const {
  std::string machine(name_.machine, strnlen(name_.machine, sizeof name_.machine));
  for (char& letter : machine)
    if (letter < ' ' || letter > '~') letter = '?';
  return text("pid {} on {}", name_.pid, machine);
}

std::string NamedProcess::fate() const {
  if (is_gone_) return "died";
  if (!process_) return "";
  const ProcessEnd end = process_end(process_->get());
  if (end.how != ProcessEnd::How::kRuns) return to_words(end);
  return is_stopped(process_->get()) ? "is stopped" : to_words(end);
}

}  // namespace weft
