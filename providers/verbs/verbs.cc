// SPDX-License-Identifier: Apache-2.0
#include "providers/verbs/verbs.h"

#include <arpa/inet.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <unordered_map>

#include "base/config.h"
#include "base/cuda_driver.h"
#include "base/log.h"
#include "base/random.h"
#include "providers/verbs/library.h"

namespace weft::provider {
namespace {

using ib::Gid;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kReceives = 512;  // shared by messages and immediates
constexpr uint32_t kMessageBytes = 4096;
constexpr uint32_t kGreetings = 64;         // datagram receives, and as many sends
constexpr uint32_t kRouteHeaderBytes = 40;  // in front of every datagram
constexpr uint32_t kSendDepth = 512;
constexpr uint32_t kQkey = 0x57454654;
constexpr uint8_t kRnrRetriesForEver = 7, kReadDepth = 16, kHopLimit = 255;
constexpr int64_t kRoceServiceLevel = 3, kRoceTrafficClass = 104;
constexpr auto kGreetFirst = std::chrono::milliseconds(5), kGreetLast = std::chrono::milliseconds(200);
constexpr auto kJoinFor = std::chrono::seconds(60);    // a link that the engine never asked for
constexpr uint64_t kGreetingSent = uint64_t{1} << 32;  // wr_id of datagram sends, plus the buffer

// Where a rail is reached: what address() returns.
struct Place {
  char tag[4] = {'i', 'b', 'v', '1'};
  uint32_t greeter_qpn = 0;  // of its datagram queue pair
  Gid gid{};
  uint16_t lid = 0;
  uint8_t mtu = 0;
  uint8_t is_ethernet = 0;
  uint32_t unused = 0;  // places are compared byte by byte: no gap that nobody wrote
  uint64_t life = 0;    // another process at the same place has another one
  bool same_as(const Place& o) const { return std::memcmp(this, &o, sizeof *this) == 0; }
};
static_assert(sizeof(Place) == 40);

// The datagram of the handshake. It may be lost, and it may wait to be read until its sender's link is long
// gone.
struct Greeting {
  char tag[4] = {'w', 'g', 'r', '3'};
  uint32_t is_answer = 0;
  Place from;
  uint32_t qpn = 0;
  uint32_t psn = 0;
  uint32_t number = 0;     // of the sender's link: a later one has a higher number
  uint32_t heard_qpn = 0;  // the sender's queue pair takes what comes from this one; 0: from none yet
};

uint8_t given_or(int64_t given, int64_t usual) {
  return static_cast<uint8_t>(given >= 0 ? given : usual);
}

// kUp: our queue pair is connected, but theirs may not be yet, so that nothing may be sent.
enum class LinkState { kGreeting, kUp, kConnected, kBroken };

bool is_joining(LinkState state) {
  return state == LinkState::kGreeting || state == LinkState::kUp;
}

struct Link {
  LinkState state = LinkState::kGreeting;
  bool is_used = false;  // by the engine, through resolve()
  Place there;
  ib::Qp* qp = nullptr;
  ib::Ah* ah = nullptr;
  uint32_t psn = 0;
  uint32_t number = 0;
  uint32_t their_qpn = 0;  // 0: joined to none yet
  uint32_t their_number = 0;
  uint32_t under_way = 0;    // posted and not come back
  bool owes_answer = false;  // to their greeting
  bool answers_again = false;
  Clock::time_point next_answer{};
  Clock::time_point made = Clock::now();
  Clock::time_point next_greeting{};
  Clock::duration pause = kGreetFirst;
};

class VerbsRail : public Rail {
 public:
  VerbsRail(ib::Library library, Nic nic) : ib_(std::move(library)), nic_(std::move(nic)) {}

  ~VerbsRail() override {
    for (Link& link : links_) {
      if (link.qp) ib_.destroy_qp(link.qp);
      if (link.ah) ib_.destroy_ah(link.ah);
    }
    if (greeter_) ib_.destroy_qp(greeter_);
    if (srq_) ib_.destroy_srq(srq_);
    if (cq_) ib_.destroy_cq(cq_);
    if (arena_mr_) ib_.dereg_mr(arena_mr_);
    if (pd_) ib_.dealloc_pd(pd_);
    if (context_) ib_.close_device(context_);
  }

  Status open(ib::Device* device, uint8_t port, int gid_index) {
    auto step = [&](const char* what, bool worked) {
      return worked ? Status() : logged(Status::from_errno(errno, "verbs: {} on {}", what, nic_.name));
    };
    WEFT_TRY(config_status());
    port_ = port;
    gid_index_ = gid_index;
    log_info("verbs: {} port {}, GID {} ({})", nic_.name, static_cast<int>(port), gid_index,
             gid_index < 0 ? "none" : ib_.gid_type(nic_.name, port, gid_index));
    context_ = ib_.open_device(device);
    WEFT_TRY(step("ibv_open_device", context_));
    ib::PortAttr attr{};
    WEFT_TRY(step("ibv_query_port", ib_.query_port(context_, port, &attr) == 0));
    pd_ = ib_.alloc_pd(context_);
    WEFT_TRY(step("ibv_alloc_pd", pd_));
    cq_ = ib_.create_cq(context_, static_cast<int>(nic_.caps.cq_depth), nullptr, nullptr, 0);
    WEFT_TRY(step("ibv_create_cq", cq_));
    ib::SrqInitAttr srq{nullptr, kReceives, 1, 0};
    srq_ = ib_.create_srq(pd_, &srq);
    WEFT_TRY(step("ibv_create_srq", srq_));
    place_.lid = attr.lid;
    place_.mtu = static_cast<uint8_t>(attr.active_mtu);
    place_.is_ethernet = attr.link_layer == ib::kLinkEthernet;
    place_.life = random_key();
    if (gid_index >= 0)
      WEFT_TRY(step("ibv_query_gid", ib_.query_gid(context_, port, gid_index, &place_.gid) == 0));
    const size_t arena_bytes =
        size_t{kReceives} * kMessageBytes + 2 * kGreetings * (kRouteHeaderBytes + sizeof(Greeting));
    arena_ = std::make_unique<char[]>(arena_bytes);
    arena_mr_ = ib_.reg_mr(pd_, arena_.get(), arena_bytes, ib::kAccessLocalWrite);
    WEFT_TRY(step("ibv_reg_mr", arena_mr_));
    WEFT_TRY(open_greeter());
    for (uint32_t i = 0; i < kReceives; ++i) WEFT_TRY(step("ibv_post_srq_recv", repost(i)));
    for (uint32_t i = 0; i < kGreetings; ++i) {
      WEFT_TRY(step("ibv_post_recv", repost_greeting(i)));
      free_greetings_.push_back(kGreetings + i);
    }
    return {};
  }

  const Caps& caps() const override { return nic_.caps; }
  const Nic& nic() const override { return nic_; }
  std::string address() const override {
    return std::string(reinterpret_cast<const char*>(&place_), sizeof place_);
  }

  Result<Route> resolve(std::string_view address) override {
    Place there;
    if (address.size() != sizeof there || address.substr(0, 4) != std::string_view(there.tag, 4))
      return Status::invalid("address: got {} bytes that no verbs rail made, allowed: {}", address.size(),
                             sizeof there);
    std::memcpy(static_cast<void*>(&there), address.data(), sizeof there);
    WEFT_TRY_ASSIGN(const size_t index, link_to(there));
    links_[index].is_used = true;
    return Route{index};
  }

  void forget(Route route) override {
    Link& link = links_[route];
    link.is_used = false;
    break_link(link);
  }

  Result<Registration> enroll(const Range& range, uint32_t access) override {
    int flags = ib::kAccessLocalWrite;
    if (access & kRemoteRead) flags |= ib::kAccessRemoteRead;
    if (access & kRemoteWrite) flags |= ib::kAccessRemoteWrite;
    ib::Mr* mr = range.kind == MemoryKind::kCuda ? enroll_cuda(range, flags) : nullptr;
    const bool is_dmabuf = mr != nullptr;
    if (!mr && ib_.reg_mr_iova2)
      mr = ib_.reg_mr_iova2(pd_, range.data, range.bytes, reinterpret_cast<uint64_t>(range.data),
                            static_cast<unsigned>(flags | ib::kAccessRelaxedOrdering));
    if (!mr) mr = ib_.reg_mr(pd_, range.data, range.bytes, flags);
    if (!mr)
      return logged(Status::from_errno(errno, "verbs: registering {} bytes on {}", range.bytes, nic_.name));
    Registration made;
    made.handle = mr;
    made.lkey = reinterpret_cast<void*>(static_cast<uintptr_t>(mr->lkey));
    made.base = reinterpret_cast<uint64_t>(range.data);
    made.rkey = mr->rkey;
    made.is_dmabuf = is_dmabuf;
    return made;
  }

  void release(Registration& registration) override {
    if (registration.handle) ib_.dereg_mr(static_cast<ib::Mr*>(registration.handle));
    registration = {};
  }

  Posted post_write(const RmaOp& op) override {
    return post_rma(op, op.has_imm ? ib::kOpWriteImm : ib::kOpWrite);
  }
  Posted post_read(const RmaOp& op) override { return post_rma(op, ib::kOpRead); }

  Posted post_send(Route to, const void* data, uint64_t bytes, void* lkey, Context* context) override {
    ib::Sge part{reinterpret_cast<uint64_t>(data), static_cast<uint32_t>(bytes), key_of(lkey)};
    ib::SendWr wr{};
    wr.opcode = ib::kOpSend;
    return post(links_[to], wr, part, context);
  }

  Posted post_recv(void* data, uint64_t bytes, void*, Context* context) override {
    receives_.push_back({data, bytes, context});
    return Posted::kOk;
  }

  std::string refusal() const override { return refusal_; }
  bool is_route_broken() const override { return is_route_broken_; }

  size_t poll(Event* events, size_t max) override {
    greet();
    size_t made = 0;
    while (made < max && !messages_.empty() && !receives_.empty()) {
      deliver(messages_.front(), events[made++]);
      messages_.pop_front();
    }
    ib::Wc entries[16];
    const int room = static_cast<int>(std::min<size_t>(max - made, 16));
    const int count = room ? context_->ops.poll_cq(cq_, room, entries) : 0;
    for (int i = 0; i < count; ++i)
      if (take(entries[i], events[made])) ++made;
    return made;
  }

 private:
  struct Receive {
    void* data;
    uint64_t bytes;
    Context* context;
  };

  static uint32_t key_of(void* lkey) { return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(lkey)); }
  char* greeting_buffer(uint32_t i) {  // the first half is for receiving
    return arena_.get() + size_t{kReceives} * kMessageBytes + i * (kRouteHeaderBytes + sizeof(Greeting));
  }

  Status open_greeter() {
    ib::QpInitAttr init{nullptr, cq_, cq_, nullptr, {kGreetings, kGreetings, 1, 1, 0}, ib::kTypeUd, 1};
    greeter_ = ib_.create_qp(pd_, &init);
    if (!greeter_)
      return logged(Status::from_errno(errno, "verbs: making the datagram queue pair on {}", nic_.name));
    ib::QpAttr attr{};
    attr.qp_state = ib::kStateInit;
    attr.port_num = port_;
    attr.qkey = kQkey;
    bool worked =
        ib_.modify_qp(greeter_, &attr, ib::kMaskState | ib::kMaskPkey | ib::kMaskPort | ib::kMaskQkey) == 0;
    attr.qp_state = ib::kStateRtr;
    worked = worked && ib_.modify_qp(greeter_, &attr, ib::kMaskState) == 0;
    attr.qp_state = ib::kStateRts;
    attr.sq_psn = static_cast<uint32_t>(random_key()) & 0xffffff;
    worked = worked && ib_.modify_qp(greeter_, &attr, ib::kMaskState | ib::kMaskSqPsn) == 0;
    if (!worked)
      return logged(Status::from_errno(errno, "verbs: starting the datagram queue pair on {}", nic_.name));
    place_.greeter_qpn = greeter_->qp_num;
    return {};
  }

  bool repost(uint32_t i) {
    ib::Sge part{reinterpret_cast<uint64_t>(arena_.get() + size_t{i} * kMessageBytes), kMessageBytes,
                 arena_mr_->lkey};
    ib::RecvWr wr{i, nullptr, &part, 1}, *bad = nullptr;
    return context_->ops.post_srq_recv(srq_, &wr, &bad) == 0;
  }

  bool repost_greeting(uint32_t i) {
    ib::Sge part{reinterpret_cast<uint64_t>(greeting_buffer(i)), kRouteHeaderBytes + sizeof(Greeting),
                 arena_mr_->lkey};
    ib::RecvWr wr{i, nullptr, &part, 1}, *bad = nullptr;
    return context_->ops.post_recv(greeter_, &wr, &bad) == 0;
  }

  // Device memory by DMA-BUF; null when that does not work, and the caller tries peer memory.
  ib::Mr* enroll_cuda(const Range& range, int flags) {
    if (!ib_.reg_dmabuf_mr) return nullptr;
    const auto driver = cuda_driver();
    auto entered = CudaContext::enter(range.device);
    if (!driver.ok() || !entered.ok()) return nullptr;
    const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uint64_t at = reinterpret_cast<uint64_t>(range.data), begin = at / page * page;
    const uint64_t bytes = (at + range.bytes - begin + page - 1) / page * page;
    int fd = -1;
    if ((*driver)->cuMemGetHandleForAddressRange(&fd, begin, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0) !=
        CUDA_SUCCESS)
      return nullptr;
    ib::Mr* mr = ib_.reg_dmabuf_mr(pd_, at - begin, range.bytes, at, fd, flags);
    ::close(fd);
    return mr;
  }

  ib::AhAttr route_to(const Place& there) const {
    ib::AhAttr ah{};
    ah.port_num = port_;
    ah.dlid = there.lid;
    ah.sl = given_or(config().service_level, there.is_ethernet ? kRoceServiceLevel : 0);
    ah.is_global = gid_index_ >= 0 && (there.is_ethernet || there.lid == 0);
    if (ah.is_global) {
      ah.grh.dgid = there.gid;
      ah.grh.sgid_index = static_cast<uint8_t>(gid_index_);
      ah.grh.hop_limit = kHopLimit;
      ah.grh.traffic_class = given_or(config().traffic_class, there.is_ethernet ? kRoceTrafficClass : 0);
    }
    return ah;
  }

  Link* live_link(const Place& there) {
    for (Link& link : links_)
      if (link.state != LinkState::kBroken && link.there.same_as(there)) return &link;
    return nullptr;
  }

  // The live link to a place, made if there is none. Errors: kSystem.
  Result<size_t> link_to(const Place& there) {
    if (const Link* known = live_link(there)) return by_qp_.at(known->qp->qp_num);
    Link link;
    link.there = there;
    link.psn = static_cast<uint32_t>(random_key()) & 0xffffff;
    link.number = ++links_made_;
    ib::AhAttr ah = route_to(there);
    link.ah = ib_.create_ah(pd_, &ah);
    ib::QpInitAttr init{nullptr, cq_, cq_, srq_, {kSendDepth, 0, 1, 1, 0}, ib::kTypeRc, 1};
    if (link.ah) link.qp = ib_.create_qp(pd_, &init);
    if (!link.qp || !to_init(link.qp)) {
      Status status = Status::from_errno(errno, "verbs: making a queue pair on {}", nic_.name);
      if (link.qp) ib_.destroy_qp(link.qp);
      if (link.ah) ib_.destroy_ah(link.ah);
      return logged(std::move(status));
    }
    size_t index = 0;
    while (index < links_.size() &&
           (links_[index].state != LinkState::kBroken || links_[index].is_used || links_[index].qp))
      ++index;
    if (index == links_.size()) links_.emplace_back();
    links_[index] = link;
    by_qp_[link.qp->qp_num] = index;
    return index;
  }

  Link* link_of(uint32_t qpn) {
    const auto found = by_qp_.find(qpn);
    return found == by_qp_.end() ? nullptr : &links_[found->second];
  }

  bool to_init(ib::Qp* qp) {
    ib::QpAttr attr{};
    attr.qp_state = ib::kStateInit;
    attr.port_num = port_;
    attr.qp_access_flags = ib::kAccessRemoteRead | ib::kAccessRemoteWrite;
    return ib_.modify_qp(qp, &attr, ib::kMaskState | ib::kMaskPkey | ib::kMaskPort | ib::kMaskAccess) == 0;
  }

  // Joins a link on which nothing was posted yet to the queue pair of a greeting.
  bool join(Link& link, const Greeting& greeting) {
    if (link.state == LinkState::kUp) {  // to one that has been given up since
      ib::QpAttr attr{};
      attr.qp_state = ib::kStateReset;
      if (ib_.modify_qp(link.qp, &attr, ib::kMaskState) != 0 || !to_init(link.qp)) return false;
    }
    link.state = LinkState::kUp;
    link.their_qpn = greeting.qpn;
    link.their_number = greeting.number;
    return bring_up(link, greeting.qpn, greeting.psn);
  }

  bool bring_up(Link& link, uint32_t qpn, uint32_t psn) {
    ib::QpAttr attr{};
    attr.qp_state = ib::kStateRtr;
    attr.path_mtu = std::min(place_.mtu, link.there.mtu);
    attr.dest_qp_num = qpn;
    attr.rq_psn = psn;
    attr.max_dest_rd_atomic = kReadDepth;
    attr.min_rnr_timer = static_cast<uint8_t>(config().rnr_timer);
    attr.ah_attr = route_to(link.there);
    int mask = ib::kMaskState | ib::kMaskAv | ib::kMaskMtu | ib::kMaskDestQpn | ib::kMaskRqPsn |
               ib::kMaskDestRdAtomic | ib::kMaskRnrTimer;
    if (ib_.modify_qp(link.qp, &attr, mask) != 0) return false;
    attr = {};
    attr.qp_state = ib::kStateRts;
    attr.timeout = static_cast<uint8_t>(config().rc_timeout);
    attr.retry_cnt = static_cast<uint8_t>(config().rc_retry);
    attr.rnr_retry = kRnrRetriesForEver;  // a receiver that is behind is not an error
    attr.sq_psn = link.psn;
    attr.max_rd_atomic = kReadDepth;
    mask = ib::kMaskState | ib::kMaskTimeout | ib::kMaskRetry | ib::kMaskRnrRetry | ib::kMaskSqPsn |
           ib::kMaskRdAtomic;
    return ib_.modify_qp(link.qp, &attr, mask) == 0;
  }

  void break_link(Link& link) {
    link.state = LinkState::kBroken;
    link.owes_answer = link.answers_again = false;
    ib::QpAttr attr{};
    attr.qp_state = ib::kStateError;
    if (link.qp) ib_.modify_qp(link.qp, &attr, ib::kMaskState);  // what is under way comes back flushed
    retire(link);
  }

  // Gives a broken link's queue pair back once nothing is under way on it.
  void retire(Link& link) {
    if (link.state != LinkState::kBroken || link.under_way || !link.qp) return;
    by_qp_.erase(link.qp->qp_num);
    ib_.destroy_qp(link.qp);
    ib_.destroy_ah(link.ah);
    link.qp = nullptr;
    link.ah = nullptr;
  }

  // ---- handshake

  // False when there is no room now.
  bool send_greeting(Link& link, bool is_answer) {
    if (free_greetings_.empty()) return false;
    const uint32_t index = free_greetings_.back();
    Greeting greeting;
    greeting.is_answer = is_answer;
    greeting.from = place_;
    greeting.qpn = link.qp->qp_num;
    greeting.psn = link.psn;
    greeting.number = link.number;
    greeting.heard_qpn = link.their_qpn;
    char* buffer = greeting_buffer(index);
    std::memcpy(buffer, &greeting, sizeof greeting);
    ib::Sge part{reinterpret_cast<uint64_t>(buffer), sizeof greeting, arena_mr_->lkey};
    ib::SendWr wr{}, *bad = nullptr;
    wr.wr_id = kGreetingSent + index;
    wr.sg_list = &part;
    wr.num_sge = 1;
    wr.opcode = ib::kOpSend;
    wr.send_flags = ib::kSendSignaled;
    wr.wr.ud.ah = link.ah;
    wr.wr.ud.remote_qpn = link.there.greeter_qpn;
    wr.wr.ud.remote_qkey = kQkey;
    if (context_->ops.post_send(greeter_, &wr, &bad) != 0) return false;
    free_greetings_.pop_back();
    return true;
  }

  // Datagrams may be lost: answers wait for room, greetings are repeated until the other side is known to be
  // up, and some answers are given twice, all at irregular times. Links in step would lose the same datagrams
  // again and again on a network that loses them in a pattern.
  void greet() {
    const auto now = Clock::now();
    for (Link& link : links_) {
      if (link.owes_answer && send_greeting(link, true)) link.owes_answer = false;
      if (link.answers_again && now >= link.next_answer && send_greeting(link, true))
        link.answers_again = false;
      if (!is_joining(link.state)) continue;
      if (!link.is_used && now - link.made > kJoinFor) {
        break_link(link);
      } else if (now >= link.next_greeting && send_greeting(link, false)) {
        link.next_greeting = now + some_time(link.pause);
        link.pause = std::min<Clock::duration>(link.pause * 2, kGreetLast);
      }
    }
  }

  // Half of it to one and a half.
  Clock::duration some_time(Clock::duration usual) {
    return usual / 2 + usual * static_cast<int64_t>(random_()) / static_cast<int64_t>(random_.max());
  }

  void on_greeting(const ib::Wc& wc) {
    const uint32_t i = static_cast<uint32_t>(wc.wr_id);
    Greeting greeting;
    const bool is_whole = wc.byte_len >= kRouteHeaderBytes + sizeof greeting;
    if (is_whole)
      std::memcpy(static_cast<void*>(&greeting), greeting_buffer(i) + kRouteHeaderBytes, sizeof greeting);
    repost_greeting(i);
    if (!is_whole || std::memcmp(greeting.tag, "wgr3", 4) != 0 ||
        std::memcmp(greeting.from.tag, "ibv1", 4) != 0)
      return;
    if (Link* const link = link_for(greeting)) heed(*link, greeting);
  }

  // Null: the greeting is of a link, or for one, that is gone.
  Link* link_for(const Greeting& greeting) {
    Link* const known = live_link(greeting.from);
    if (greeting.is_answer && (!known || greeting.heard_qpn != known->qp->qp_num)) return nullptr;
    if (known && greeting.number < known->their_number) return nullptr;
    if (known && known->state == LinkState::kConnected && greeting.qpn != known->their_qpn)
      break_link(*known);  // they start anew; the engine hears of it by their hello
    const auto found = link_to(greeting.from);
    return found.ok() ? &links_[*found] : nullptr;
  }

  void heed(Link& link, const Greeting& greeting) {
    if (link.their_qpn != greeting.qpn && !join(link, greeting)) return break_link(link);
    if (greeting.heard_qpn == link.qp->qp_num) link.state = LinkState::kConnected;
    if (greeting.is_answer) return;
    link.owes_answer = !send_greeting(link, true);
    link.answers_again = random_() % 2 == 0;
    link.next_answer = Clock::now() + some_time(kGreetFirst);
  }

  // ---- data

  Posted post_rma(const RmaOp& op, int opcode) {
    ib::Sge part{reinterpret_cast<uint64_t>(op.piece.local), static_cast<uint32_t>(op.piece.bytes),
                 key_of(op.piece.lkey)};
    ib::SendWr wr{};
    wr.opcode = opcode;
    wr.imm_data = htonl(op.imm);
    wr.wr.rdma.remote_addr = op.piece.remote;
    wr.wr.rdma.rkey = static_cast<uint32_t>(op.piece.rkey);
    return post(links_[op.to], wr, part, op.context);
  }

  Posted post(Link& link, ib::SendWr& wr, ib::Sge& part, Context* context) {
    if (is_joining(link.state)) return Posted::kAgain;
    if (link.state == LinkState::kBroken) {
      refusal_ = text("verbs: the connection on {} is broken", nic_.name);
      is_route_broken_ = true;
      return Posted::kFatal;
    }
    wr.wr_id = reinterpret_cast<uint64_t>(context);
    wr.sg_list = &part;
    wr.num_sge = part.length ? 1 : 0;
    wr.send_flags = ib::kSendSignaled;
    ib::SendWr* bad = nullptr;
    const int error = context_->ops.post_send(link.qp, &wr, &bad);
    if (error == 0) {
      ++link.under_way;
      return Posted::kOk;
    }
    if (error == ENOMEM || error == EAGAIN) return Posted::kAgain;
    refusal_ = text("verbs: posting on {}: {}", nic_.name, std::strerror(error));
    is_route_broken_ = false;
    return Posted::kFatal;
  }

  bool take(const ib::Wc& wc, Event& event) {
    event.peer_gone = false;
    const bool is_receive = wc.status == 0 && (wc.opcode & ib::kWcRecv);
    if (wc.qp_num == greeter_->qp_num) {
      if (wc.wr_id >= kGreetingSent)
        free_greetings_.push_back(static_cast<uint32_t>(wc.wr_id - kGreetingSent));
      else if (is_receive)
        on_greeting(wc);
      return false;
    }
    Link* const link = link_of(wc.qp_num);
    if (is_receive) {
      if (link && link->state == LinkState::kUp) link->state = LinkState::kConnected;  // who sends is up
      return take_receive(wc, event);
    }
    if (wc.status != 0 && wc.wr_id < kReceives) return false;  // a receive that was flushed
    if (link) --link->under_way;
    event.context = reinterpret_cast<Context*>(wc.wr_id);
    event.kind = wc.status == 0 ? EventKind::kDone : EventKind::kFailed;
    event.bytes = wc.byte_len;
    if (wc.status == 0) {
      if (link) retire(*link);
      return true;
    }
    event.peer_gone =
        wc.status == ib::kWcRetryExceeded || wc.status == ib::kWcRnrExceeded || wc.status == ib::kWcFlushed;
    event.text = text("{} (status {}, vendor {})", ib_.wc_status_str(wc.status), wc.status, wc.vendor_err);
    if (link) break_link(*link);  // a queue pair is in error after any failure
    return true;
  }

  bool take_receive(const ib::Wc& wc, Event& event) {
    const uint32_t i = static_cast<uint32_t>(wc.wr_id);
    if (wc.opcode == ib::kWcRecvWriteImm) {
      repost(i);
      event.kind = EventKind::kImm;
      event.imm = ntohl(wc.imm_data);
      event.context = nullptr;
      return true;
    }
    std::string message(arena_.get() + size_t{i} * kMessageBytes, std::min(wc.byte_len, kMessageBytes));
    repost(i);
    if (receives_.empty() || !messages_.empty()) {
      messages_.push_back(std::move(message));
      return false;
    }
    deliver(message, event);
    return true;
  }

  void deliver(const std::string& message, Event& event) {
    const Receive receive = receives_.front();
    receives_.pop_front();
    event.kind = EventKind::kReceived;
    event.peer_gone = false;
    event.context = receive.context;
    event.bytes = std::min<uint64_t>(message.size(), receive.bytes);
    std::memcpy(receive.data, message.data(), event.bytes);
  }

  ib::Library ib_;
  Nic nic_;
  ib::Context* context_ = nullptr;
  ib::Pd* pd_ = nullptr;
  ib::Cq* cq_ = nullptr;
  ib::Srq* srq_ = nullptr;
  ib::Qp* greeter_ = nullptr;
  ib::Mr* arena_mr_ = nullptr;
  std::unique_ptr<char[]> arena_;
  uint8_t port_ = 1;
  int gid_index_ = -1;
  Place place_;
  std::vector<uint32_t> free_greetings_;  // buffers for sending
  std::minstd_rand random_{static_cast<uint32_t>(random_key())};
  std::deque<Link> links_;
  uint32_t links_made_ = 0;
  std::unordered_map<uint32_t, size_t> by_qp_;
  std::deque<Receive> receives_;
  std::deque<std::string> messages_;
  std::string refusal_;
  bool is_route_broken_ = false;  // what refusal_ says
};

class Verbs : public Provider {
 public:
  explicit Verbs(Result<ib::Library> library) : library_(std::move(library)) {}
  std::string name() const override { return "verbs"; }

  std::vector<Nic> probe() override {
    if (!library_.ok()) return {unusable("-", library_.status().message())};
    std::vector<Nic> nics;
    each_device([&](ib::Device*, const Nic& nic, uint8_t, int) { nics.push_back(nic); });
    if (nics.empty()) nics.push_back(unusable("-", "libibverbs finds no RDMA device"));
    return nics;
  }

  Result<std::unique_ptr<Rail>> open(const Nic& nic, const RailOptions&) override {
    WEFT_TRY(Status(library_.status()));
    Result<std::unique_ptr<Rail>> opened =
        Status::invalid("nic: got {}, which verbs does not have", nic.name);
    each_device([&](ib::Device* device, const Nic& found, uint8_t port, int gid_index) {
      if (found.name != nic.name || opened.ok()) return;
      auto rail = std::make_unique<VerbsRail>(*library_, found);
      Status status = found.usable() ? rail->open(device, port, gid_index)
                                     : Status(Code::kUnsupported, found.unusable_because);
      if (status.ok())
        opened = std::unique_ptr<Rail>(std::move(rail));
      else
        opened = status;
    });
    return opened;
  }

 private:
  static Nic unusable(const std::string& name, const std::string& why) {
    Nic nic;
    nic.provider = "verbs";
    nic.name = name;
    nic.unusable_because = why;
    return nic;
  }

  // Calls visit(device, nic, first active port, GID index) while the device list is held.
  template <class Visit>
  void each_device(Visit visit) {
    int count = 0;
    ib::Device** devices = library_->get_device_list(&count);
    for (int i = 0; devices && i < count; ++i) {
      const std::string name = library_->get_device_name(devices[i]);
      ib::Context* context = library_->open_device(devices[i]);
      if (!context) {
        visit(devices[i], unusable(name, "cannot be opened: " + std::string(std::strerror(errno))), 0, -1);
        continue;
      }
      uint8_t port = 0;
      int gid_index = -1;
      Nic nic = look_at(context, name, port, gid_index);
      library_->close_device(context);
      visit(devices[i], nic, port, gid_index);
    }
    if (devices) library_->free_device_list(devices);
  }

  Nic look_at(ib::Context* context, const std::string& name, uint8_t& port, int& gid_index) {
    ib::PortAttr attr{};
    const int64_t wanted = config().ib_port;
    for (port = 1; library_->query_port(context, port, &attr) == 0; ++port)
      if (attr.state == ib::kPortActive && (wanted == 0 || wanted == port)) break;
    if (library_->query_port(context, port, &attr) != 0 || attr.state != ib::kPortActive)
      return unusable(name, wanted ? text("port {} (WEFT_IB_PORT) is not active", wanted)
                                   : std::string("no port is active"));
    std::vector<ib::GidEntry> gids;
    for (int i = 0; i < attr.gid_tbl_len; ++i) {
      ib::GidEntry entry{i, {}, library_->gid_type(name, port, i)};
      if (library_->query_gid(context, port, i, &entry.gid) == 0) gids.push_back(entry);
    }
    gid_index = config().gid_index >= 0 ? static_cast<int>(config().gid_index) : ib::choose_gid(gids);
    if (gid_index >= attr.gid_tbl_len)
      return unusable(name, text("GID {} (WEFT_GID_INDEX) is beyond its {}", gid_index, attr.gid_tbl_len));
    if (gid_index < 0 && attr.link_layer == ib::kLinkEthernet)
      return unusable(name, "its port has no usable GID");
    Nic nic;
    nic.provider = "verbs";
    nic.name = name;
    nic.caps.ordered_writes = false;  // relaxed ordering is on
    nic.caps.device_memory = cuda_driver().ok();
    nic.caps.dmabuf = library_->reg_dmabuf_mr != nullptr;
    nic.caps.write_bytes_max = attr.max_msg_sz ? attr.max_msg_sz : 1u << 30;
    nic.caps.message_bytes_max = kMessageBytes;
    nic.caps.tx_depth = kSendDepth;
    nic.caps.cq_depth = 8192;
    return nic;
  }

  Result<ib::Library> library_;
};

}  // namespace

std::shared_ptr<Provider> make_verbs() {
  return std::make_shared<Verbs>(ib::open_library());
}
std::shared_ptr<Provider> make_verbs(const ib::Library& library) {
  return std::make_shared<Verbs>(library);
}

}  // namespace weft::provider
