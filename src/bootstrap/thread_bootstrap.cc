// SPDX-License-Identifier: Apache-2.0
#include <mutex>
#include <optional>

#include "bootstrap/bootstrap.h"

namespace weft {
namespace {

// One all_gather: what each rank gave so far.
struct Round {
  explicit Round(int ranks) : given(ranks) {}
  std::vector<std::optional<std::string>> given;
  int arrived = 0;
};

// Where the threads meet. A complete round is replaced at once, so a fast rank can start the next one while
// slow ones still read this one.
class ThreadRendezvous {
 public:
  explicit ThreadRendezvous(int ranks) : ranks_(ranks), current_(std::make_shared<Round>(ranks)) {}

  std::shared_ptr<Round> arrive(int rank, const std::string& mine) {
    std::lock_guard lock(mutex_);
    std::shared_ptr<Round> round = current_;
    if (!round->given[rank]) ++round->arrived;
    round->given[rank] = mine;
    if (round->arrived == ranks_) current_ = std::make_shared<Round>(ranks_);
    return round;
  }
  bool is_complete(const Round& round) {
    std::lock_guard lock(mutex_);
    return round.arrived == ranks_;
  }
  std::string missing(const Round& round) {
    std::lock_guard lock(mutex_);
    std::string names;
    for (int rank = 0; rank < ranks_; ++rank)
      if (!round.given[rank]) names += text("{}rank {}", names.empty() ? "" : ", ", rank);
    return names;
  }

 private:
  const int ranks_;
  std::mutex mutex_;
  std::shared_ptr<Round> current_;
};

class ThreadBootstrap : public Bootstrap {
 public:
  ThreadBootstrap(int rank, int size, std::shared_ptr<ThreadRendezvous> rendezvous)
      : rank_(rank), size_(size), rendezvous_(std::move(rendezvous)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Result<std::vector<std::string>> all_gather(const std::string& mine, Deadline until) override {
    const double limit_s = until.left_s();
    const std::shared_ptr<Round> round = rendezvous_->arrive(rank_, mine);
    if (!wait_until(until, [&] { return rendezvous_->is_complete(*round); })) {
      return Status::make(Code::kPeerLost, "rank {}, bootstrap.all_gather, waited {} s for {}", rank_,
                          limit_s, rendezvous_->missing(*round));
    }
    std::vector<std::string> all;
    for (const auto& given : round->given) all.push_back(*given);
    return all;
  }

 private:
  const int rank_, size_;
  const std::shared_ptr<ThreadRendezvous> rendezvous_;
};

}  // namespace

std::vector<std::shared_ptr<Bootstrap>> thread_bootstraps(int ranks) {
  auto rendezvous = std::make_shared<ThreadRendezvous>(ranks);
  std::vector<std::shared_ptr<Bootstrap>> all;
  for (int rank = 0; rank < ranks; ++rank)
    all.push_back(std::make_shared<ThreadBootstrap>(rank, ranks, rendezvous));
  return all;
}

}  // namespace weft
