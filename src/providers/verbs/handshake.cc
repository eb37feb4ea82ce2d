// SPDX-License-Identifier: Apache-2.0
//
// How two rails connect: each sends handshakes to the other's datagram queue pair until it is answered, and joins
// its queue pair to the one that the handshake names.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/config.h"
#include "base/log.h"
#include "providers/verbs/connect.h"
#include "providers/verbs/rail.h"

namespace weft::provider {
namespace {

constexpr uint32_t kQkeyMax = 0x7fffffff;                    // those above are the operating system's
constexpr auto kJoinFor = std::chrono::seconds(60);          // a link that the engine never asked for
constexpr auto kQuietRound = std::chrono::milliseconds(10);  // while no link has anything to do
constexpr auto kHandshakePauseLast = std::chrono::milliseconds(200);

// Whether its sender takes what this link sends.
bool has_heard(const Handshake& handshake, const Link& link) {
  return handshake.heard_qpn == link.qpn() && handshake.heard_nonce == link.nonce;
}

}  // namespace

Status VerbsRail::open_handshake_qp() {
  ibv_qp_init_attr init{nullptr, cq_, cq_, nullptr, {kHandshakes, kHandshakes, 1, 1, 0}, IBV_QPT_UD, 1};
  handshake_qp_ = ib_.create_qp(pd_, &init);
  if (!handshake_qp_)
    return logged(Status::from_errno(errno, "verbs: making the datagram queue pair on {}", nic_.name));
  place_.qkey = static_cast<uint32_t>(random_key()) & kQkeyMax;  // for good: it is a part of the address
  if (!start_handshake_qp())
    return logged(Status::from_errno(errno, "verbs: starting the datagram queue pair on {}", nic_.name));
  place_.handshake_qpn = handshake_qp_->qp_num;
  return {};
}

bool VerbsRail::start_handshake_qp() {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = port_.port;
  attr.pkey_index = port_.pkey_index;
  attr.qkey = place_.qkey;
  bool worked =
      ib_.modify_qp(handshake_qp_, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0;
  attr.qp_state = IBV_QPS_RTR;
  worked = worked && ib_.modify_qp(handshake_qp_, &attr, IBV_QP_STATE) == 0;
  attr.qp_state = IBV_QPS_RTS;
  attr.sq_psn = static_cast<uint32_t>(random_key()) & 0xffffff;
  worked = worked && ib_.modify_qp(handshake_qp_, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0;
  free_handshakes_.clear();
  for (uint32_t i = 0; i < kHandshakes && worked; ++i) {
    worked = repost_handshake(i);
    free_handshakes_.push_back(kHandshakes + i);
  }
  return worked;
}

Proof VerbsRail::prove_handshake(const Handshake& handshake, const Place& to) const {
  const auto said = std::string_view(reinterpret_cast<const char*>(&handshake), offsetof(Handshake, proof));
  return prove(secret_, "verbs", {said, {reinterpret_cast<const char*>(&to), sizeof to}});
}

bool VerbsRail::repost_handshake(uint32_t i) {
  ibv_sge part{reinterpret_cast<uint64_t>(handshake_buffer(i)), kRouteHeaderBytes + sizeof(Handshake),
               arena_mr_->lkey};
  ibv_recv_wr wr{i, nullptr, &part, 1}, *bad = nullptr;
  return context_->ops.post_recv(handshake_qp_, &wr, &bad) == 0;
}

ibv_ah_attr VerbsRail::route_to(const Place& there) const {
  return ib::route_to(port_.port, port_.gid_index, {there.gid, there.lid, there.mtu, there.is_ethernet != 0});
}

Link* VerbsRail::live_link(const Place& there) {
  for (Link& link : links_)
    if (link.state != LinkState::kBroken && link.there.same_as(there)) return &link;
  return nullptr;
}

Result<size_t> VerbsRail::link_to(const Place& there) {
  for (size_t i = 0; i < links_.size(); ++i)
    if (links_[i].state != LinkState::kBroken && links_[i].there.same_as(there)) return i;
  Link link;
  link.there = there;
  link.nonce = random_nonce();
  link.line.dial(ib::socket_address_of(there.gid, there.line_port));
  ibv_ah_attr ah = route_to(there);
  link.ah = ib_.create_ah(pd_, &ah);
  if (!link.ah || !make_queue_pair(link)) {
    Status status = Status::from_errno(errno, "verbs: making a queue pair on {}", nic_.name);
    if (link.ah) ib_.destroy_ah(link.ah);
    return logged(std::move(status));
  }
  size_t index = 0;
  while (index < links_.size() && (links_[index].state != LinkState::kBroken || links_[index].is_used))
    ++index;
  if (index == links_.size()) links_.emplace_back();
  by_qp_[link.qp->qp_num] = index;
  are_links_quiet_ = false;
  links_[index] = std::move(link);
  return index;
}

bool VerbsRail::make_queue_pair(Link& link) {
  link.psn = static_cast<uint32_t>(random_key()) & 0xffffff;
  link.number = ++links_made_;
  ibv_qp_init_attr init{nullptr, cq_, cq_, srq_, {kSendDepth, 0, 1, 1, 0}, IBV_QPT_RC, 1};
  ibv_qp* const qp = ib_.create_qp(pd_, &init);
  if (!qp) return false;
  if (!to_init(qp)) {
    ib_.destroy_qp(qp);
    return false;
  }
  link.qp = qp;
  return true;
}

Link* VerbsRail::link_of(uint32_t qpn) {
  const auto found = by_qp_.find(qpn);
  return found == by_qp_.end() ? nullptr : &links_[found->second];
}

bool VerbsRail::to_init(ibv_qp* qp) {
  return ib::to_init(ib_, qp, port_, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
}

bool VerbsRail::join(Link& link, const Handshake& handshake) {
  if (link.state == LinkState::kUp) {  // to one that has been given up since
    if (!start_over(link.qp)) return false;
    link.state = LinkState::kHandshaking;
  }
  if (!bring_up(link, handshake.qpn, handshake.psn)) {
    const int error = errno;
    start_over(link.qp);  // it may be half-way
    errno = error;
    return false;
  }
  link.state = LinkState::kUp;
  link.their_qpn = handshake.qpn;
  link.their_number = handshake.number;
  link.their_nonce = handshake.nonce;
  return confirm(link, handshake.received);
}

bool VerbsRail::start_over(ibv_qp* qp) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RESET;
  return ib_.modify_qp(qp, &attr, IBV_QP_STATE) == 0 && to_init(qp);
}

bool VerbsRail::bring_up(Link& link, uint32_t qpn, uint32_t psn) {
  return ib::to_ready(ib_, link.qp, route_to(link.there), std::min(place_.mtu, link.there.mtu),
                      {qpn, psn, link.psn, std::min(reads_out_, link.there.reads_taken), place_.reads_taken});
}

bool VerbsRail::send_handshake(Link& link, bool is_answer) {
  if (free_handshakes_.empty()) return false;
  const uint32_t index = free_handshakes_.back();
  Handshake handshake;
  handshake.is_answer = is_answer;
  handshake.from = place_;
  handshake.qpn = link.qp->qp_num;
  handshake.psn = link.psn;
  handshake.number = link.number;
  handshake.heard_qpn = link.their_qpn;
  handshake.above = link.their_over;
  handshake.received = link.received;
  handshake.nonce = link.nonce;
  handshake.heard_nonce = link.their_nonce;
  handshake.proof = prove_handshake(handshake, link.there);
  char* buffer = handshake_buffer(index);
  std::memcpy(buffer, &handshake, sizeof handshake);
  ibv_sge part{reinterpret_cast<uint64_t>(buffer), sizeof handshake, arena_mr_->lkey};
  ibv_send_wr wr{}, *bad = nullptr;
  wr.wr_id = kHandshakeSent + index;
  wr.sg_list = &part;
  wr.num_sge = 1;
  wr.opcode = IBV_WR_SEND;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.wr.ud.ah = link.ah;
  wr.wr.ud.remote_qpn = link.there.handshake_qpn;
  wr.wr.ud.remote_qkey = link.there.qkey;
  if (context_->ops.post_send(handshake_qp_, &wr, &bad) != 0) return false;
  free_handshakes_.pop_back();
  return true;
}

void VerbsRail::send_handshakes() {
  const auto now = Clock::now();
  if (are_links_quiet_ && now < next_round_) return;
  are_links_quiet_ = true;
  next_round_ = now + kQuietRound;
  for (size_t i = 0; i < links_.size(); ++i) {
    Link& link = links_[i];
    if (link.state != LinkState::kBroken && link.line.is_over(now)) lose_process(i);
    if (link.state == LinkState::kConnected && link.posted < link.sent.size()) repeat(link);
    if (link.owes_answer && send_handshake(link, true)) link.owes_answer = false;
    if (link.answers_again && now >= link.next_answer && send_handshake(link, true))
      link.answers_again = false;
    if (is_joining(link.state)) ask_again(link, now);
    are_links_quiet_ = are_links_quiet_ && !has_something_to_do(link);
  }
}

void VerbsRail::ask_again(Link& link, Clock::time_point now) {
  if (!link.is_used && now - link.made > kJoinFor) return break_link(link, "nobody has asked for it");
  if (now < link.next_handshake || !send_handshake(link, false)) return;
  link.next_handshake = now + some_time(link.pause);
  link.pause = std::min<Clock::duration>(link.pause * 2, kHandshakePauseLast);
}

bool VerbsRail::has_something_to_do(const Link& link) {
  return is_joining(link.state) || link.owes_answer || link.answers_again ||
         (link.state == LinkState::kConnected && link.posted < link.sent.size());
}

Clock::duration VerbsRail::some_time(Clock::duration usual) {
  return usual / 2 + usual * static_cast<int64_t>(random_()) / static_cast<int64_t>(random_.max());
}

void VerbsRail::on_handshake(const ibv_wc& wc) {
  const uint32_t i = static_cast<uint32_t>(wc.wr_id);
  Handshake handshake;
  const bool is_complete = wc.byte_len >= kRouteHeaderBytes + sizeof handshake;
  if (is_complete)
    std::memcpy(static_cast<void*>(&handshake), handshake_buffer(i) + kRouteHeaderBytes, sizeof handshake);
  repost_handshake(i);
  if (!is_complete || std::memcmp(handshake.tag, Handshake().tag, 4) != 0 ||
      std::memcmp(handshake.from.tag, Place().tag, 4) != 0)
    return;
  if (!is_same(handshake.proof, prove_handshake(handshake, place_)))
    return refusals_.warn("verbs: {} drops a handshake whose sender does not know the job's secret",
                          nic_.name);
  if (Link* const link = link_for(handshake)) heed(*link, handshake);
}

Link* VerbsRail::link_for(const Handshake& handshake) {
  Link* const known = live_link(handshake.from);
  if (handshake.is_answer && (!known || !has_heard(handshake, *known))) return nullptr;
  if (known && handshake.number < known->their_number) return nullptr;
  const bool is_other = known && known->their_nonce != Nonce{} && known->their_nonce != handshake.nonce;
  const bool has_joined = known && known->their_qpn;
  if (is_other && (known->state > LinkState::kUp || known->next_number || known->received)) {
    break_link(*known, "the peer has made its connection anew");  // the engine hears of it by their hello
  } else if (known && !is_other && is_over(*known, handshake)) {
    return nullptr;
  } else if (has_joined && !is_other && handshake.qpn != known->their_qpn) {
    recover(*known, "the peer makes its connection again");
    return nullptr;
  }
  const auto found = link_to(handshake.from);
  return found.ok() ? &links_[*found] : nullptr;
}

// Whether a handshake is of a connection that is over, or for one: then another one has to come first.
bool VerbsRail::is_over(Link& link, const Handshake& handshake) {
  if (link.state == LinkState::kDraining || handshake.number <= link.their_over) return true;
  if (link.number > handshake.above) return false;
  recover(link, "the peer makes its connection again");
  return true;
}

void VerbsRail::heed(Link& link, const Handshake& handshake) {
  are_links_quiet_ = false;
  if (link.their_qpn != handshake.qpn &&
      !join(link, handshake)) {  // a link that is down, perhaps: it is said again
    if (link.why.empty()) link.why = text("joining the peer's queue pair: {}", std::strerror(errno));
    return;
  }
  if (has_heard(handshake, link)) be_connected(link);
  if (handshake.is_answer) return;
  link.owes_answer = !send_handshake(link, true);
  link.answers_again = random_() % 2 == 0;
  link.next_answer = Clock::now() + some_time(kHandshakePauseFirst);
}

}  // namespace weft::provider
