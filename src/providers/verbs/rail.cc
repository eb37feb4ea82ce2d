// SPDX-License-Identifier: Apache-2.0
//
// What a rail does once it is open: memory, posts, completions.
#include "providers/verbs/rail.h"

#include <arpa/inet.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/config.h"
#include "base/cuda_driver.h"
#include "base/log.h"
#include "providers/verbs/connect.h"

namespace weft::provider {

namespace {

// Of what a device has refused. Memory that it may reach is locked, and few systems let users lock much.
Status failure(const std::string& what) {
  const int error = errno;
  rlimit locked{};
  const bool is_memory = error == ENOMEM || error == EAGAIN || error == EPERM;
  if (is_memory && getrlimit(RLIMIT_MEMLOCK, &locked) == 0 && locked.rlim_cur != RLIM_INFINITY)
    return Status::from_errno(error, "verbs: {} (ulimit -l: {} KiB of locked memory)", what,
                              locked.rlim_cur / 1024);
  return Status::from_errno(error, "verbs: {}", what);
}

}  // namespace

VerbsRail::~VerbsRail() {
  for (Link& link : links_) {
    if (link.qp) ib_.destroy_qp(link.qp);
    if (link.ah) ib_.destroy_ah(link.ah);
  }
  if (handshake_qp_) ib_.destroy_qp(handshake_qp_);
  if (srq_) ib_.destroy_srq(srq_);
  if (cq_) ib_.destroy_cq(cq_);
  if (arena_mr_) ib_.dereg_mr(arena_mr_);
  if (pd_) ib_.dealloc_pd(pd_);
  if (context_) ib_.close_device(context_);
}

Status VerbsRail::open(ibv_device* device, const ib::PortChoice& chosen) {
  auto step = [&](const char* what, bool worked) {
    return worked ? Status() : logged(failure(text("{} on {}", what, nic_.name)));
  };
  WEFT_TRY(config_status());
  port_ = chosen;
  const uint8_t port = chosen.port;
  const int gid_index = chosen.gid_index;
  log_info("verbs: {} port {}, GID {} ({}), P_Key {} of its table", nic_.name, static_cast<int>(port),
           gid_index, gid_index < 0 ? "none" : ib_.gid_type(nic_.name, port, gid_index), chosen.pkey_index);
  context_ = ib_.open_device(device);
  WEFT_TRY(step("ibv_open_device", context_));
  ibv_device_attr device_attr{};
  WEFT_TRY(step("ibv_query_device", ib_.query_device(context_, &device_attr) == 0));
  place_.reads_taken = ib::reads_of(device_attr.max_qp_rd_atom);
  reads_out_ = ib::reads_of(device_attr.max_qp_init_rd_atom);
  ibv_port_attr attr{};
  WEFT_TRY(step("ibv_query_port", ib_.query_port(context_, port, &attr) == 0));
  pd_ = ib_.alloc_pd(context_);
  WEFT_TRY(step("ibv_alloc_pd", pd_));
  cq_ = ib_.create_cq(context_, static_cast<int>(nic_.caps.cq_depth), nullptr, nullptr, 0);
  WEFT_TRY(step("ibv_create_cq", cq_));
  ibv_srq_init_attr srq{nullptr, kReceives, 1, 0};
  srq_ = ib_.create_srq(pd_, &srq);
  WEFT_TRY(step("ibv_create_srq", srq_));
  place_.lid = attr.lid;
  place_.mtu = static_cast<uint8_t>(attr.active_mtu);
  place_.is_ethernet = attr.link_layer == IBV_LINK_LAYER_ETHERNET;
  place_.life = random_key();
  if (gid_index >= 0)
    WEFT_TRY(step("ibv_query_gid", ib_.query_gid(context_, port, gid_index, &place_.gid) == 0));
  if (place_.is_ethernet) lifelines_ = Listener::at(ib::socket_address_of(place_.gid, 0));
  place_.line_port = lifelines_.port();
  const size_t arena_bytes =
      size_t{kReceives} * kMessageBytes + 2 * kHandshakes * (kRouteHeaderBytes + sizeof(Handshake));
  arena_ = std::make_unique<char[]>(arena_bytes);
  arena_mr_ = ib_.reg_mr(pd_, arena_.get(), arena_bytes, IBV_ACCESS_LOCAL_WRITE);
  WEFT_TRY(step("ibv_reg_mr", arena_mr_));
  WEFT_TRY(open_handshake_qp());
  for (uint32_t i = 0; i < kReceives; ++i) WEFT_TRY(step("ibv_post_srq_recv", repost(i)));
  return {};
}

std::string VerbsRail::address() const {
  return std::string(reinterpret_cast<const char*>(&place_), sizeof place_);
}

Result<Route> VerbsRail::resolve(std::string_view address) {
  Place there;
  if (address.size() != sizeof there || address.substr(0, 4) != std::string_view(there.tag, 4))
    return Status::invalid("address: got {} bytes that no verbs rail made, allowed: {}", address.size(),
                           sizeof there);
  std::memcpy(static_cast<void*>(&there), address.data(), sizeof there);
  WEFT_TRY_ASSIGN(const size_t index, link_to(there));
  links_[index].is_used = true;
  return Route{index};
}

void VerbsRail::forget(Route route) {
  Link& link = links_[route];
  link.is_used = false;
  std::erase_if(ready_, [route](const Event& event) { return event.is_gone(route); });
  break_link(link, "it was given up");
}

Result<Registration> VerbsRail::enroll(const Range& range, uint32_t access) {
  int flags = access & kReadOnly ? 0 : IBV_ACCESS_LOCAL_WRITE;
  if (access & kRemoteRead) flags |= IBV_ACCESS_REMOTE_READ;
  if (access & kRemoteWrite) flags |= IBV_ACCESS_REMOTE_WRITE;
  ibv_mr* mr = range.kind == MemoryKind::kCuda ? enroll_cuda(range, flags) : nullptr;
  const bool is_dmabuf = mr != nullptr;
  if (!mr && ib_.reg_mr_iova2)
    mr = ib_.reg_mr_iova2(pd_, range.data, range.bytes, reinterpret_cast<uint64_t>(range.data),
                          static_cast<unsigned>(flags | IBV_ACCESS_RELAXED_ORDERING));
  if (!mr) mr = ib_.reg_mr(pd_, range.data, range.bytes, flags);
  if (!mr) return logged(failure(text("registering {} bytes on {}", range.bytes, nic_.name)));
  Registration made;
  made.handle = mr;
  made.lkey = reinterpret_cast<void*>(static_cast<uintptr_t>(mr->lkey));
  made.base = reinterpret_cast<uint64_t>(range.data);
  made.rkey = mr->rkey;
  made.is_dmabuf = is_dmabuf;
  return made;
}

void VerbsRail::release(Registration& registration) {
  if (registration.handle) ib_.dereg_mr(static_cast<ibv_mr*>(registration.handle));
  registration = {};
}

Posted VerbsRail::post_write(const RmaOp& op) {
  return post_rma(op, op.has_imm ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE);
}

Posted VerbsRail::post_send(Route to, const void* data, uint64_t bytes, void* lkey, Context* context) {
  Sent sent;
  sent.opcode = IBV_WR_SEND;
  sent.part = {reinterpret_cast<uint64_t>(data), static_cast<uint32_t>(bytes), key_of(lkey)};
  sent.context = context;
  return post(links_[to], sent);
}

Posted VerbsRail::post_recv(void* data, uint64_t bytes, void*, Context* context) {
  receives_.push_back({data, bytes, context});
  return Posted::kOk;
}

size_t VerbsRail::poll(Event* events, size_t max) {
  send_handshakes();
  size_t made = 0;
  for (; made < max && !ready_.empty(); ready_.pop_front()) events[made++] = std::move(ready_.front());
  while (made < max && !messages_.empty() && !receives_.empty()) {
    deliver(messages_.front(), events[made++]);
    messages_.pop_front();
  }
  ibv_wc entries[16];
  const int room = static_cast<int>(std::min<size_t>(max - made, 16));
  const int count = room ? context_->ops.poll_cq(cq_, room, entries) : 0;
  for (int i = 0; i < count; ++i)
    if (take(entries[i], events[made])) ++made;
  if (count < room && (draining_ || are_handshakes_stopped_)) {
    renew_drained();
    restart_handshakes();
  }
  return made;
}

bool VerbsRail::repost(uint32_t i) {
  ibv_sge part{reinterpret_cast<uint64_t>(arena_.get() + size_t{i} * kMessageBytes), kMessageBytes,
               arena_mr_->lkey};
  ibv_recv_wr wr{i, nullptr, &part, 1}, *bad = nullptr;
  return context_->ops.post_srq_recv(srq_, &wr, &bad) == 0;
}

ibv_mr* VerbsRail::enroll_cuda(const Range& range, int flags) {
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
  ibv_mr* mr = ib_.reg_dmabuf_mr(pd_, at - begin, range.bytes, at, fd, flags);
  ::close(fd);
  return mr;
}

Posted VerbsRail::post_rma(const RmaOp& op, int opcode) {
  Sent sent;
  sent.opcode = opcode;
  sent.imm = htonl(static_cast<uint32_t>(op.imm));
  sent.part = {reinterpret_cast<uint64_t>(op.piece.local), static_cast<uint32_t>(op.piece.bytes),
               key_of(op.piece.lkey)};
  sent.remote = op.piece.remote;
  sent.rkey = static_cast<uint32_t>(op.piece.rkey);
  sent.context = op.context;
  return post(links_[op.to], sent);
}

Posted VerbsRail::post(Link& link, Sent sent) {
  if (link.state == LinkState::kBroken) {
    refusal_ = text("verbs: the connection on {} is broken: {}", nic_.name, link.why);
    is_route_broken_ = true;
    return Posted::kFatal;
  }
  if (link.state != LinkState::kConnected || link.posted < link.sent.size()) return Posted::kAgain;
  sent.number = link.next_number;
  const int error = post_now(link, sent);
  if (error == 0) {
    ++link.next_number;
    ++link.posted;
    link.sent.push_back(sent);
    return Posted::kOk;
  }
  if (error == ENOMEM || error == EAGAIN) return Posted::kAgain;
  refusal_ = text("verbs: posting on {}: {}", nic_.name, std::strerror(error));
  is_route_broken_ = false;
  return Posted::kFatal;
}

int VerbsRail::post_now(Link& link, Sent& sent) {
  ibv_send_wr wr{}, *bad = nullptr;
  wr.wr_id = kOperation + sent.number;
  wr.sg_list = &sent.part;
  wr.num_sge = sent.part.length ? 1 : 0;
  wr.opcode = sent.opcode;
  wr.send_flags = IBV_SEND_SIGNALED;
  wr.imm_data = sent.imm;
  wr.wr.rdma.remote_addr = sent.remote;
  wr.wr.rdma.rkey = sent.rkey;
  return context_->ops.post_send(link.qp, &wr, &bad);
}

bool VerbsRail::take(const ibv_wc& wc, Event& event) {
  event.peer_gone = false;
  if (wc.wr_id >= kOperation) return take_sent(wc, event);
  if (wc.wr_id >= kHandshakeSent) {
    free_handshakes_.push_back(static_cast<uint32_t>(wc.wr_id - kHandshakeSent));
    are_handshakes_stopped_ = are_handshakes_stopped_ || wc.status != 0;
    return false;
  }
  if (wc.qp_num == handshake_qp_->qp_num) {
    if (wc.status == 0) on_handshake(wc);
    are_handshakes_stopped_ = are_handshakes_stopped_ || wc.status != 0;
    return false;
  }
  Link* const link = link_of(wc.qp_num);
  // That ended the connection. What was to be sent over it will only say that it has ended.
  if (link && wc.status != 0 && wc.status != IBV_WC_WR_FLUSH_ERR) recover(*link, describe(wc));
  if (!link || wc.status != 0) {  // nobody counts it any more, so it is sent again where it matters
    repost(static_cast<uint32_t>(wc.wr_id));
    return false;
  }
  if (link->state == LinkState::kUp) be_connected(*link);  // who sends is up
  ++link->received;
  event.from = by_qp_.at(wc.qp_num);
  return take_receive(wc, event);
}

// The end of what was sent. A link's operations end in their order, so it is that of the first one, but where the
// connection has broken since.
bool VerbsRail::take_sent(const ibv_wc& wc, Event& event) {
  Link* const link = link_of(wc.qp_num);
  if (!link || link->posted == 0 || link->sent.front().number != wc.wr_id - kOperation) return false;
  if (wc.status != 0) {
    if (link->state == LinkState::kDraining) return false;  // it is to be repeated
    const size_t before = link->sent.size();
    take_failure(*link, wc, event);
    return link->sent.size() < before;
  }
  event.context = link->sent.front().context;
  event.kind = EventKind::kDone;
  event.bytes = wc.byte_len;
  link->confirmed += link->sent.front().is_counted();
  link->sent.pop_front();
  --link->posted;
  return true;
}

bool VerbsRail::take_receive(const ibv_wc& wc, Event& event) {
  const uint32_t i = static_cast<uint32_t>(wc.wr_id);
  if (wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
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

void VerbsRail::deliver(const std::string& message, Event& event) {
  const Receive receive = receives_.front();
  receives_.pop_front();
  event.kind = EventKind::kReceived;
  event.peer_gone = false;
  event.context = receive.context;
  event.bytes = std::min<uint64_t>(message.size(), receive.bytes);
  std::memcpy(receive.data, message.data(), event.bytes);
}

}  // namespace weft::provider
