// SPDX-License-Identifier: Apache-2.0
//
// Tells when another process of this host ends, and how.
//   FileDescriptor process = open_process(pid);              // while it is open, it names this process
//   auto watch = ProcessWatch::shared();                     // one thread of ours, while somebody holds it
//   uint64_t number = watch->add(process.get(), [] { ... });
//   ProcessEnd end = process_end(process.get());
// Threads: every function from any. A forked child has none of its parent's watches, and leaves them alone.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/file_descriptor.h"
#include "base/owner_process.h"

namespace weft {

// A descriptor that names a process, and can be sent to others. Not open where the kernel is older than 5.3.
FileDescriptor open_process(pid_t pid);

struct ProcessEnd {
  enum class How { kRuns, kExited, kKilled, kUnknown };
  How how = How::kRuns;
  int number = 0;  // of the exit status, or of the signal
};

// How a process ended; kUnknown where its parent has forgotten it already and the kernel is older than 6.15.
ProcessEnd process_end(int process);

// "was killed by signal 9", "exited with status 7", "is running", "died".
std::string to_words(const ProcessEnd& end);

// When a process started, in clock ticks after the host's start; 0 where it is no more.
uint64_t process_start(pid_t pid);

// The id of a process as this one sees it, 0 once its parent has forgotten it; and whether a signal stopped
// it.
pid_t process_id(int process);
bool is_stopped(int process);

class ProcessWatch {
 public:
  static std::shared_ptr<ProcessWatch> shared();
  ~ProcessWatch();

  // Calls `ended` once, from the watch's thread, when the process ends. It must not call this object.
  uint64_t add(int process, std::function<void()> ended);
  // After it returns, `ended` does not run any more. It must not be called inside `ended`.
  void remove(uint64_t number);

 private:
  struct Watched {
    int process;
    std::function<void()> ended;
  };
  ProcessWatch();
  void run();
  void wake() const;
  bool is_of_this_process() const { return owner_.is_this(); }

  const OwnerProcess owner_;
  FileDescriptor wake_;
  std::mutex mutex_;
  std::map<uint64_t, Watched> watched_;
  uint64_t next_ = 0;
  bool stops_ = false;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace weft
