// SPDX-License-Identifier: Apache-2.0
#include "base/process_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "base/text.h"

namespace weft {
namespace {

// Linux 6.15 and later tell how a process ended, also when nobody can ask its parent any more. Older headers
// do not have these.
struct PidfdInfo {
  uint64_t mask;
  uint64_t cgroup;
  uint32_t ids[11];
  int32_t exit_code;
};
static_assert(sizeof(PidfdInfo) == 64);
constexpr unsigned long kPidfdGetInfo = _IOWR(0xFF, 11, PidfdInfo);
constexpr uint64_t kPidfdInfoExit = 1 << 3;

constexpr int kLookEvery_ms = 100;  // where nobody can wake the thread: no descriptor was left

ProcessEnd from_wait_status(int status) {
  if (WIFSIGNALED(status)) return {ProcessEnd::How::kKilled, WTERMSIG(status)};
  return {ProcessEnd::How::kExited, WEXITSTATUS(status)};
}

// The fields of /proc/PID/stat from the third on, the state; empty where the process is no more.
std::vector<std::string> stat_fields(pid_t pid) {
  std::string line;
  if (pid > 0) std::getline(std::ifstream(text("/proc/{}/stat", pid)), line);
  const size_t name_end = line.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return {};
  std::istringstream rest(line.substr(name_end + 1));
  std::vector<std::string> fields;
  for (std::string field; rest >> field;) fields.push_back(field);
  return fields;
}

bool has_ended(int process) {
  pollfd entry{process, POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

// How a process ended whose parent has asked for it, where the kernel keeps that; else unknown.
ProcessEnd reaped_end(int process) {
  PidfdInfo info{};
  info.mask = kPidfdInfoExit;
  if (ioctl(process, kPidfdGetInfo, &info) == 0 && (info.mask & kPidfdInfoExit) != 0)
    return from_wait_status(info.exit_code);
  return {ProcessEnd::How::kUnknown, 0};
}

}  // namespace

FileDescriptor open_process(pid_t pid) {
#ifdef SYS_pidfd_open
  return FileDescriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
#else
  return FileDescriptor(static_cast<int>(syscall(434, pid, 0)));
#endif
}

ProcessEnd process_end(int process) {
  if (!has_ended(process)) return {};
  const ProcessEnd end = reaped_end(process);
  if (end.how != ProcessEnd::How::kUnknown) return end;
  // Until its parent asks, the process is a zombie: the last field of its line is what the parent will hear.
  const std::vector<std::string> fields = stat_fields(process_id(process));
  constexpr size_t kExitCode = 52 - 3;
  if (fields.size() > kExitCode && (fields[0] == "Z" || fields[0] == "X"))
    return from_wait_status(std::stoi(fields[kExitCode]));
  return reaped_end(process);  // its parent has asked since
}

std::string to_words(const ProcessEnd& end) {
  switch (end.how) {
    case ProcessEnd::How::kRuns:
      return "is running";
    case ProcessEnd::How::kExited:
      return text("exited with status {}", end.number);
    case ProcessEnd::How::kKilled:
      return text("was killed by signal {}", end.number);
    case ProcessEnd::How::kUnknown:
      break;
  }
  return "died";
}

uint64_t process_start(pid_t pid) {
  const std::vector<std::string> fields = stat_fields(pid);
  constexpr size_t kStart = 22 - 3;
  return fields.size() > kStart ? std::stoull(fields[kStart]) : 0;
}

pid_t process_id(int process) {
  std::ifstream info(text("/proc/self/fdinfo/{}", process));
  for (std::string word; info >> word;) {
    pid_t pid = 0;
    if (word == "Pid:" && info >> pid) return pid > 0 ? pid : 0;
  }
  return 0;
}

bool is_stopped(int process) {
  const std::vector<std::string> fields = stat_fields(process_id(process));
  return !fields.empty() && (fields[0] == "T" || fields[0] == "t");
}

std::shared_ptr<ProcessWatch> ProcessWatch::shared() {
  struct Shared {
    std::mutex mutex;
    std::weak_ptr<ProcessWatch> watch;
  };
  static OnePerProcess<Shared> one;
  Shared& ours = one.get();
  std::lock_guard lock(ours.mutex);
  std::shared_ptr<ProcessWatch> watch = ours.watch.lock();
  if (!watch) {
    watch.reset(new ProcessWatch);
    ours.watch = watch;
  }
  return watch;
}

ProcessWatch::ProcessWatch() : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  // Signals are for the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::make_unique<std::thread>([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

ProcessWatch::~ProcessWatch() {
  if (!is_of_this_process()) {
    (void)thread_.release();  // not a thread of this process
    return;
  }
  {
    std::lock_guard lock(mutex_);
    stops_ = true;
  }
  wake();
  thread_->join();
}

uint64_t ProcessWatch::add(int process, std::function<void()> ended) {
  std::lock_guard lock(mutex_);
  watched_[next_] = {process, std::move(ended)};
  wake();
  return next_++;
}

void ProcessWatch::remove(uint64_t number) {
  if (!is_of_this_process()) return;
  std::lock_guard lock(mutex_);
  watched_.erase(number);
}

void ProcessWatch::wake() const {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);
}

void ProcessWatch::run() {
  while (true) {
    std::vector<pollfd> entries{{wake_.get(), POLLIN, 0}};
    std::vector<uint64_t> numbers{0};
    {
      std::lock_guard lock(mutex_);
      if (stops_) return;
      for (const auto& [number, watched] : watched_) {
        entries.push_back({watched.process, POLLIN, 0});
        numbers.push_back(number);
      }
    }
    ::poll(entries.data(), entries.size(), wake_.is_open() ? -1 : kLookEvery_ms);
    uint64_t count = 0;
    if (entries[0].revents) (void)!read(wake_.get(), &count, sizeof count);
    std::lock_guard lock(mutex_);
    for (size_t i = 1; i < entries.size(); ++i) {
      const auto found = entries[i].revents ? watched_.find(numbers[i]) : watched_.end();
      if (found == watched_.end()) continue;
      found->second.ended();
      watched_.erase(found);
    }
  }
}

}  // namespace weft
