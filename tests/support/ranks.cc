// SPDX-License-Identifier: Apache-2.0
#include "support/ranks.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>

namespace weft::testing {
namespace {

struct Slot {
  static constexpr size_t kMaxBytes = 4096;
  std::atomic<uint64_t> posted;  // rounds for which bytes stood here
  std::atomic<uint64_t> read;    // rounds of which this rank has read everyone's bytes
  size_t size;
  char bytes[kMaxBytes];
};

class ForkBootstrap : public Bootstrap {
 public:
  ForkBootstrap(int rank, int size, Slot* slots) : rank_(rank), size_(size), slots_(slots) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Result<std::vector<std::string>> all_gather(const std::string& mine, Deadline until) override {
    ++round_;
    Slot& own = slots_[rank_];
    if (mine.size() > sizeof own.bytes) return Status::invalid("too long for this bootstrap");
    WEFT_TRY(wait_for(&Slot::read, round_ - 1, until));
    std::memcpy(own.bytes, mine.data(), mine.size());
    own.size = mine.size();
    own.posted.store(round_, std::memory_order_release);
    WEFT_TRY(wait_for(&Slot::posted, round_, until));
    std::vector<std::string> all;
    for (int rank = 0; rank < size_; ++rank) all.emplace_back(slots_[rank].bytes, slots_[rank].size);
    own.read.store(round_, std::memory_order_release);
    return all;
  }

 private:
  Status wait_for(std::atomic<uint64_t> Slot::* counter, uint64_t value, Deadline until) {
    for (int rank = 0; rank < size_; ++rank) {
      const auto reached = [&] { return (slots_[rank].*counter).load(std::memory_order_acquire) >= value; };
      if (!wait_until(until, reached))
        return Status::make(Code::kPeerLost, "rank {}, bootstrap.all_gather, waited for rank {}", rank_,
                            rank);
    }
    return Status();
  }

  const int rank_, size_;
  Slot* const slots_;
  uint64_t round_ = 0;
};

}  // namespace

ForkRendezvous::ForkRendezvous(int ranks)
    : ranks_(ranks),
      area_(mmap(nullptr, sizeof(Slot) * ranks, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {}

ForkRendezvous::~ForkRendezvous() {
  munmap(area_, sizeof(Slot) * ranks_);
}

std::shared_ptr<Bootstrap> ForkRendezvous::bootstrap(int rank) const {
  return std::make_shared<ForkBootstrap>(rank, ranks_, static_cast<Slot*>(area_));
}

void run_thread_ranks(int ranks, const RankBody& body) {
  std::vector<std::shared_ptr<Bootstrap>> bootstraps = thread_bootstraps(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back([&, rank] { body(bootstraps[rank]); });
  for (std::thread& thread : threads) thread.join();
}

void run_process_ranks(int ranks, const RankBody& body) {
  ForkRendezvous rendezvous(ranks);
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      body(rendezvous.bootstrap(rank));
      std::fflush(nullptr);
      _exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    children.push_back(child);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    int state = 0;
    waitpid(children[rank], &state, 0);
    EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0)
        << "rank " << rank << " failed, wait status " << state;
  }
}

}  // namespace weft::testing
