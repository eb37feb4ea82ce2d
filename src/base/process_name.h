// SPDX-License-Identifier: Apache-2.0
//
// The name that a process gives others, by which processes of its host can see how it ends.
//   send(this_process_name());                       // there
//   NamedProcess process(name);                      // here; holds on to it from now on
//   if (process.has_ended()) text("rank 3 ({}) {}", process.who(), process.fate());
// A name is a process number with the time of the process's start, because numbers are used again. A process on
// another host or in another process namespace, and this process itself, cannot be watched: has_ended() stays
// false for it.
// Threads: const methods from any.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/file_descriptor.h"

namespace weft {

// Plain bytes, to be copied as they are.
struct ProcessName {
  uint64_t host = 0;     // the same in two processes that can name each other by number; 0: no process
  uint64_t started = 0;  // clock ticks after the host's start
  int32_t pid = 0;
  char machine[44] = {};  // for people
};
static_assert(sizeof(ProcessName) == 64);

ProcessName this_process_name();
// The same in processes that can name each other by number: one boot of one kernel, one process namespace.
uint64_t host_mark();

class NamedProcess {
 public:
  NamedProcess() = default;
  explicit NamedProcess(const ProcessName& name);

  bool is_named() const { return name_.host != 0; }
  bool is_known() const { return is_gone_ || (process_ && process_->is_open()); }
  bool has_ended() const;
  bool was_killed() const;  // by a signal
  // "pid 4711 on node7".
  std::string who() const;
  // "was killed by signal 9", "exited with status 1", "is stopped", "is running"; empty where it is not known.
  std::string fate() const;

 private:
  ProcessName name_;
  std::shared_ptr<FileDescriptor> process_;
  bool is_gone_ = false;  // it had ended before this object was made
};

}  // namespace weft
