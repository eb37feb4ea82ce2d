// SPDX-License-Identifier: Apache-2.0
//
// What libraries of tests share that stand in for NCCL and NVSHMEM on CPUs: memory that all ranks map, be they threads
// or processes, and barriers with a name.
//   Barrier barrier(name, ranks);  barrier.pass(limit_s)     // true once all ranks are there
//   void* at = map_shared(name, bytes);                      // the same bytes for every process that asks for the name
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

namespace stand_in {

inline void* map_shared(const std::string& name, size_t bytes) {
  const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (fd < 0) return nullptr;
  void* at = ftruncate(fd, static_cast<off_t>(bytes)) == 0
                 ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                 : MAP_FAILED;
  close(fd);
  return at == MAP_FAILED ? nullptr : at;
}

// Ranks pass together; may be passed again and again.
class Barrier {
 public:
  struct Counters {
    std::atomic<uint32_t> arrived, round;
  };
  Barrier(Counters* counters, uint32_t ranks) : counters_(counters), ranks_(ranks) {}

  bool pass(const std::atomic<bool>& is_aborted) {
    const uint32_t round = counters_->round.load();
    if (counters_->arrived.fetch_add(1) + 1 == ranks_) {
      counters_->arrived.store(0);
      counters_->round.fetch_add(1);
      return true;
    }
    while (counters_->round.load() == round) {
      if (is_aborted.load()) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
  }

 private:
  Counters* const counters_;
  const uint32_t ranks_;
};

}  // namespace stand_in
