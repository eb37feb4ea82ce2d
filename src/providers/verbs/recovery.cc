// SPDX-License-Identifier: Apache-2.0
//
// How a link outlives its connection. A reliable connection executes what was posted in its order, and breaks when a
// repeated packet is not answered: then nobody here knows which of the operations under way have been executed. So both
// sides count the messages and immediates that they receive over a link. When a connection is over, each side
//   1. moves its queue pair to the error state and takes in what had come until then,
//   2. makes another queue pair, and says in its handshakes how many it has received,
//   3. drops from its list what the peer has received, and everything before the last of that but reads,
//   4. posts the rest of the list again, in its order, before anything new.
// A write without an immediate may so be executed twice. That is not seen: its completion has not been reported, and
// whoever waits for an immediate behind it gets that once.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/log.h"
#include "providers/verbs/rail.h"

namespace weft::provider {
namespace {

// After the queue pair has stopped: for what the NIC, or a kernel that stands in for one, is in the middle of.
constexpr auto kDrainFor = std::chrono::milliseconds(20);
constexpr auto kRestartPause = std::chrono::milliseconds(50);
// An operation that breaks the connection so often is refused: it is wrong, and not the way to the peer.
constexpr uint32_t kFailuresMax = 3;

// Whether a status says for certain that the operation is wrong: another connection would not help it.
bool is_operation_wrong(int status) {
  switch (status) {
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
    case IBV_WC_REM_ACCESS_ERR:
      return true;
    default:
      return false;
  }
}

// Whether a status says for certain that it is the connection which is broken.
bool is_connection_broken(int status) {
  return status == IBV_WC_WR_FLUSH_ERR || status == IBV_WC_RETRY_EXC_ERR ||
         status == IBV_WC_RNR_RETRY_EXC_ERR;
}

}  // namespace

// The first operation of a link has failed; those behind it are flushed.
void VerbsRail::take_failure(Link& link, const ibv_wc& wc, Event& event) {
  Sent& first = link.sent.front();
  const std::string why = describe(wc);
  const bool is_wrong =
      is_operation_wrong(wc.status) || (!is_connection_broken(wc.status) && ++first.failures >= kFailuresMax);
  if (is_wrong) {
    event.kind = EventKind::kFailed;
    event.context = first.context;
    event.text = why;
    link.sent.pop_front();
    --link.posted;
  }
  recover(link, why);
}

std::string VerbsRail::describe(const ibv_wc& wc) const {
  return text("{} (status {}, vendor {})", ib_.wc_status_str(wc.status), wc.status, wc.vendor_err);
}

void VerbsRail::recover(Link& link, const std::string& why) {
  if (link.state == LinkState::kDraining || link.state == LinkState::kBroken) return;
  log_info("verbs: {}: a connection is made again: {}", nic_.name, why);
  if (link.why.empty()) link.why = why;  // the first cause
  link.state = LinkState::kDraining;
  link.drain_from = Clock::now();
  link.owes_answer = link.answers_again = false;
  ++draining_;
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_ERR;
  ib_.modify_qp(link.qp, &attr, IBV_QP_STATE);
}

void VerbsRail::renew_drained() {
  const auto now = Clock::now();
  for (size_t i = 0; i < links_.size() && draining_; ++i) {
    Link& link = links_[i];
    if (link.state != LinkState::kDraining || now - link.drain_from < kDrainFor) continue;
    if (link.qp) {  // what it leaves in the completion queue is taken in until the queue is empty again
      link.qp_gone = link.qp->qp_num;
      ib_.destroy_qp(link.qp);
      link.qp = nullptr;
      continue;
    }
    if (!make_queue_pair(link)) {
      if (link.why.empty()) link.why = text("making a queue pair: {}", std::strerror(errno));
      link.drain_from = now;
      continue;
    }
    forget_number(link.qp_gone, link);
    by_qp_[link.qp->qp_num] = i;
    --draining_;
    link.posted = 0;
    link.their_over = link.their_number;
    link.their_qpn = 0;
    link.state = LinkState::kHandshaking;
    are_links_quiet_ = false;
    link.next_handshake = {};
    link.pause = kHandshakePauseFirst;
  }
}

// The device may have given a number that is free again to another link.
void VerbsRail::forget_number(uint32_t qpn, const Link& link) {
  if (link_of(qpn) == &link) by_qp_.erase(qpn);
}

bool VerbsRail::confirm(Link& link, uint32_t received) {
  uint32_t left = received - link.confirmed;
  const auto counted = std::ranges::count_if(link.sent, [](const Sent& sent) { return sent.is_counted(); });
  if (left > static_cast<uint64_t>(counted)) {
    break_link(link, text("the peer says that it has received {} messages, of {} that were sent", received,
                          link.confirmed + counted));
    return false;
  }
  for (auto at = link.sent.begin(); left > 0 && at != link.sent.end();) {
    const bool is_counted = at->is_counted();
    if (at->opcode == IBV_WR_RDMA_READ) {  // executed, but its answer may not have come
      ++at;
      continue;
    }
    Event event;
    event.kind = EventKind::kDone;
    event.context = at->context;
    event.bytes = at->part.length;
    ready_.push_back(std::move(event));
    link.confirmed += is_counted;
    left -= is_counted;
    at = link.sent.erase(at);
  }
  return true;
}

bool VerbsRail::repeat(Link& link) {
  while (link.posted < link.sent.size()) {
    const int error = post_now(link, link.sent[link.posted]);
    if (error == ENOMEM || error == EAGAIN) return false;
    if (error != 0) {
      break_link(link, text("posting again: {}", std::strerror(error)));
      return false;
    }
    ++link.posted;
  }
  return true;
}

void VerbsRail::break_link(Link& link, const std::string& why) {
  if (link.state == LinkState::kBroken) return;
  if (link.state == LinkState::kDraining) --draining_;
  if (link.why.empty()) link.why = why;
  link.line = {};
  link.state = LinkState::kBroken;
  link.owes_answer = link.answers_again = false;
  forget_number(link.qpn(), link);
  if (link.qp) ib_.destroy_qp(link.qp);
  ib_.destroy_ah(link.ah);
  link.qp = nullptr;
  link.ah = nullptr;
  for (const Sent& sent : link.sent) {
    Event event;
    event.kind = EventKind::kFailed;
    event.peer_gone = true;
    event.context = sent.context;
    event.text = link.why;
    ready_.push_back(std::move(event));
  }
  link.sent.clear();
  link.posted = 0;
}

void VerbsRail::be_connected(Link& link) {
  link.state = LinkState::kConnected;
  are_links_quiet_ = false;  // it may have something to repeat
  link.why.clear();
}

void VerbsRail::lose_process(size_t index) {
  Event event;
  event.kind = EventKind::kGone;
  event.from = index;
  event.text = kLineIsOver;
  ready_.push_back(std::move(event));
  break_link(links_[index], kLineIsOver);
}

void VerbsRail::restart_handshakes() {
  const auto now = Clock::now();
  if (!are_handshakes_stopped_ || now < next_restart_) return;
  next_restart_ = now + kRestartPause;
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RESET;
  are_handshakes_stopped_ = ib_.modify_qp(handshake_qp_, &attr, IBV_QP_STATE) != 0 || !start_handshake_qp();
}

}  // namespace weft::provider
