// SPDX-License-Identifier: Apache-2.0
#include <sys/uio.h>

#include <cerrno>

#include "base/config.h"
#include "base/log.h"
#include "collective/runner_parts.h"

namespace weft {
namespace {

// Why the system lets this process read nothing of another one, as errno's number: EPERM or, once it is gone,
// ESRCH. 0 where it would. Rights are looked at before addresses, so that of nothing does.
int refusal_to_read(uint32_t process) {
  std::byte byte{};
  const iovec here{&byte, 1}, there{nullptr, 1};
  if (process_vm_readv(static_cast<pid_t>(process), &here, 1, &there, 1, 0) >= 0 || errno == EFAULT) return 0;
  return errno;
}

}  // namespace

Result<int> CollectiveRunner::wait_for_sender(int first) {
  if (const Status why = fault(); !why.ok()) return refused("recv from any rank", why);
  if (first < 0 || first >= comm_->size())
    return Status::invalid("first: got {}, allowed: 0 to {}", first, comm_->size() - 1);
  int sender = -1;
  wait_until(Deadline::after_s(timeout_s_), [&] {
    sender = call_log_->unreceived_sender(first);
    return sender >= 0 || is_stopped();
  });
  if (sender >= 0) return sender;
  WEFT_TRY(fault());
  return logged(Status::make(Code::kPeerLost, "rank {}, recv from any rank, waited {} s: no rank sent",
                             comm_->rank(), timeout_s_));
}

Status CollectiveRunner::compare_calls() {
  if (!config().check) return {};
  const Status status = call_log_->compare(Deadline::after_s(timeout_s_), [this] { return is_stopped(); });
  if (status.code() == Code::kClosed) return fault();
  return status.ok() ? status : logged(status);
}

bool CollectiveRunner::is_stopped() const {
  return load_acquire(&visible_->at<FaultBox>(0)->raised) != 0;
}

Status CollectiveRunner::fault() {
  const FaultBox& box = *visible_->at<FaultBox>(0);
  if (broken_.ok() && load_acquire(&box.raised) != 0) {
    broken_ = logged(fault_status());
    const bool names_peer = broken_.code() == Code::kPeerLost && box.peer != box.self;
    if (names_peer) tally_.lost(box.peer);
    if (names_peer && box.site == Site::kCollective) comm_->peers().give_up(static_cast<int>(box.peer));
  }
  return broken_;
}

Status CollectiveRunner::refused(std::string_view call, const Status& why) {
  const bool diverged = why.code() == Code::kInvalid;
  return Status(why.code(), text("{}: not made, as {} before: {}", call,
                                 diverged ? "the calls of the ranks diverged" : "these collectives failed",
                                 why.message()));
}

Status CollectiveRunner::fault_status() const {
  const FaultBox& box = *visible_->at<FaultBox>(0);
  if (box.site == Site::kPeerWindow) return Status(Code::kClosed, sentence());
  // Nobody is lost: this process has lost the right to read others.
  if (box.site == Site::kPeerMemory && refusal_to_read(process_of(box.peer)) == EPERM)
    return Status(Code::kSystem, sentence());
  // A rank that left may have done so because of the difference.
  const bool may_differ =
      box.site == Site::kCollective || box.site == Site::kCollectiveCall || box.site == Site::kPeerDied;
  if (!may_differ) return Status(Code::kPeerLost, sentence());
  if (const std::string words = call_log_->mismatch(); !words.empty())
    return Status::invalid("rank {}, {}", comm_->rank(), words);
  if (box.site == Site::kCollectiveCall) return another_call();
  if (box.peer == box.self || box.site == Site::kPeerDied) return Status(Code::kPeerLost, sentence());
  return Status(Code::kPeerLost, sentence() + "; " + call_log_->progress(static_cast<int>(box.peer)));
}

// A message of another call has come, and the logs know of no difference: the sender went on without this rank, where
// it has ended since.
Status CollectiveRunner::another_call() const {
  PeerWatch& peers = comm_->peers();
  const int sender = static_cast<int>(visible_->at<FaultBox>(0)->peer);
  const bool is_over = peers.is_over(sender);
  const std::string lost = peers.lost();
  if (lost.empty() && !is_over) return Status(Code::kInvalid, sentence());
  return Status(Code::kPeerLost, text("{}; {}", sentence(), lost.empty() ? peers.fate(sender) : lost));
}

uint32_t CollectiveRunner::process_of(uint32_t peer) const {
  const DirectTables tables = direct_tables(static_cast<uint64_t>(comm_->size()), true);
  return direct_->at<uint32_t>(tables.processes_at)[peer];
}

void CollectiveRunner::stop() {
  const auto self = static_cast<uint32_t>(comm_->rank());
  raise(visible_->at<FaultBox>(0), Site::kNone, self, self, 0, 0, 0);
}

std::string CollectiveRunner::sentence() const {
  const FaultBox& box = *visible_->at<FaultBox>(0);
  PeerWatch& peers = comm_->peers();
  const char* last_program = last_program_;
  if (box.site == Site::kPeerDied)
    return text("rank {}, collective {}: {}", box.self, last_program, peers.lost());
  if (box.site == Site::kPeerMemory) {
    const int refusal = refusal_to_read(process_of(box.peer));
    return text(
        "rank {}, collective {}, block {}, step {}: {} bytes of rank {}'s memory cannot be read any "
        "more{}{}; {}",
        box.self, last_program, box.detail >> 16, box.detail & 0xffff, box.expected, box.peer,
        refusal ? ": " : "", refusal ? strerror(refusal) : "",
        peers.fates({static_cast<int>(box.peer)}, "is running"));
  }
  if (box.site == Site::kPeerWindow)
    return text(
        "rank {}, collective {}, block {}, step {}: rank {} passed memory of window {}, which this rank has "
        "destroyed, allowed: windows that all ranks still have",
        box.self, last_program, box.detail >> 16, box.detail & 0xffff, box.peer, box.expected);
  if (box.site == Site::kCollectiveCall)
    return text(
        "rank {}, collective {}, block {}, step {}: a message of rank {} is of another call, allowed: the "
        "same call on all ranks",
        box.self, last_program, box.detail >> 16, box.detail & 0xffff, box.peer);
  if (box.site == Site::kNone) return text("rank {}, collective {}: stopped", box.self, last_program);
  if (box.site == Site::kGaveUp)
    return text("rank {}, collective {}: an earlier call gave up waiting, allowed: a new communicator",
                box.self, last_program);
  // A rank that takes back what it offered may have seen another's end a moment sooner: in its memory.
  const std::string lost = box.site == Site::kTakenBack ? peers.lost_by_now() : peers.lost();
  if (box.site == Site::kTakenBack)
    return text("rank {}, collective {}, block {}, step {}: rank {} had given up this call{}{}", box.self,
                last_program, box.detail >> 16, box.detail & 0xffff, box.peer, lost.empty() ? "" : "; ",
                lost);
  const auto peer = static_cast<int>(box.peer);
  const bool is_own = box.peer == box.self;
  const std::string whom = is_own ? "another block of its own" : text("rank {}", box.peer);
  std::string fate = lost.empty() && !is_own ? peers.fate(peer) : lost;
  // This rank may have stood still until the others had enough: it is the first of its blocks to look that comes here.
  if (lost.empty() && (is_own || peers.is_given_up_by(peer)))
    fate += (fate.empty() ? "" : "; ") + peers.given_up_by();
  // A message may have several slices, some of which are there.
  const std::string progress = box.expected == box.seen
                                   ? text("message {} has begun, and not all of it came", box.expected)
                                   : text("expected message {}, saw {}", box.expected, box.seen);
  return text("rank {}, collective {}, block {}, step {}, waited {} s for {}: {}{}{}", box.self, last_program,
              box.detail >> 16, box.detail & 0xffff, static_cast<double>(box.waited_ns / 100'000'000) / 10,
              whom, progress, fate.empty() ? "" : "; ", fate);
}

}  // namespace weft
