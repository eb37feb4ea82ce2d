// SPDX-License-Identifier: Apache-2.0
#include "tests/conformance/fake_verbs.h"

#include <arpa/inet.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

namespace weft::transfer::testing {
namespace {

namespace ib = provider::ib;

constexpr int kWcRemoteInvalid = 9;
constexpr std::array<uint16_t, 2> kPartitions{0xffff, 0x8001};

struct Received {
  uint64_t wr_id;
  ib::Sge part;
};
struct FakeCq : ib::Cq {
  std::deque<ib::Wc> entries;
};
struct FakeSrq : ib::Srq {
  std::deque<Received> receives;
};
struct FakeQp : ib::Qp {
  int type = 0;
  int state = 0;
  uint32_t peer = 0;
  uint32_t qkey = 0;
  uint16_t pkey_index = 0;  // those of another partition do not hear each other
  std::deque<Received> receives;
};
struct FakePd {
  ib::Context* context;
};

bool lose_every_third(uint32_t datagram) {
  return datagram % 3 == 1;
}

struct Wire {
  std::mutex mutex;
  std::map<uint32_t, FakeQp*> qps;
  std::map<uint32_t, ib::Mr*> keys;
  std::map<uint32_t, int> access;
  uint32_t next = 100;
  uint32_t datagrams = 0;
  std::function<bool(uint32_t)> is_lost = lose_every_third;
  uint32_t operations = 0;
  int refused_state = -1;
  std::function<FakeVerbsCut(uint32_t)> cut;
  const char* names[2] = {"fake0", "fake1"};
};
Wire& wire() {
  static Wire one;
  return one;
}

void complete(ib::Cq* cq, uint64_t wr_id, int status, int opcode, uint32_t bytes, uint32_t qp,
              uint32_t imm = 0) {
  ib::Wc wc{};
  wc.wr_id = wr_id;
  wc.status = status;
  wc.opcode = opcode;
  wc.byte_len = bytes;
  wc.qp_num = qp;
  wc.imm_data = imm;
  static_cast<FakeCq*>(cq)->entries.push_back(wc);
}

bool is_reachable(const ib::SendWr& wr, const ib::Sge& part, int wanted) {
  const auto found = wire().keys.find(wr.wr.rdma.rkey);
  if (found == wire().keys.end() || !(wire().access[wr.wr.rdma.rkey] & wanted)) return false;
  const uint64_t base = reinterpret_cast<uint64_t>(found->second->addr), at = wr.wr.rdma.remote_addr;
  return at >= base && part.length <= found->second->length &&
         at - base <= found->second->length - part.length;
}

int send_datagram(FakeQp& from, const ib::SendWr& wr) {
  if (from.state != ib::kStateRts) {
    complete(from.send_cq, wr.wr_id, ib::kWcFlushed, ib::kOpSend, 0, from.qp_num);
    return 0;
  }
  complete(from.send_cq, wr.wr_id, 0, ib::kOpSend, 0, from.qp_num);
  const auto to = wire().qps.find(wr.wr.ud.remote_qpn);
  if (wire().is_lost(++wire().datagrams) || to == wire().qps.end() || to->second->receives.empty() ||
      wr.wr.ud.remote_qkey != to->second->qkey || from.pkey_index != to->second->pkey_index)
    return 0;  // lost
  const Received receive = to->second->receives.front();
  to->second->receives.pop_front();
  std::memcpy(reinterpret_cast<char*>(receive.part.addr) + 40, reinterpret_cast<void*>(wr.sg_list->addr),
              wr.sg_list->length);
  complete(to->second->recv_cq, receive.wr_id, 0, ib::kWcRecv, 40 + wr.sg_list->length, to->second->qp_num);
  return 0;
}

int send_reliable(FakeQp& from, const ib::SendWr& wr) {
  if (from.state == ib::kStateError) {  // a NIC takes it, and gives it back
    complete(from.send_cq, wr.wr_id, ib::kWcFlushed, wr.opcode, 0, from.qp_num);
    return 0;
  }
  if (from.state != ib::kStateRts) return EINVAL;
  const ib::Sge part = wr.num_sge ? *wr.sg_list : ib::Sge{};
  auto fail = [&](int status) {
    from.state = ib::kStateError;
    complete(from.send_cq, wr.wr_id, status, wr.opcode, 0, from.qp_num);
    return 0;
  };
  const auto found = wire().qps.find(from.peer);
  if (found == wire().qps.end() || found->second->state < ib::kStateRtr ||
      found->second->state == ib::kStateError || found->second->peer != from.qp_num ||
      found->second->pkey_index != from.pkey_index)
    return fail(ib::kWcRetryExceeded);
  const FakeVerbsCut cut = wire().cut ? wire().cut(++wire().operations) : FakeVerbsCut::kNone;
  if (cut == FakeVerbsCut::kBefore) return fail(ib::kWcRetryExceeded);
  FakeQp& to = *found->second;
  if (part.length && wire().keys.count(part.lkey) == 0) return fail(4);
  std::deque<Received>& receives = static_cast<FakeSrq*>(to.srq)->receives;
  const bool takes_receive = wr.opcode == ib::kOpSend || wr.opcode == ib::kOpWriteImm;
  if (takes_receive && receives.empty()) return ENOMEM;
  void* here = reinterpret_cast<void*>(part.addr);
  if (wr.opcode != ib::kOpSend && part.length) {
    const bool is_read = wr.opcode == ib::kOpRead;
    if (!is_reachable(wr, part, is_read ? ib::kAccessRemoteRead : ib::kAccessRemoteWrite)) return fail(10);
    void* there = reinterpret_cast<void*>(wr.wr.rdma.remote_addr);
    std::memcpy(is_read ? here : there, is_read ? there : here, part.length);
  }
  if (takes_receive) {
    const Received receive = receives.front();
    receives.pop_front();
    if (cut == FakeVerbsCut::kReceive) {
      to.state = ib::kStateError;
      complete(to.recv_cq, receive.wr_id, ib::kWcLengthError, ib::kWcRecv, 0, to.qp_num);
      return fail(kWcRemoteInvalid);
    }
    if (wr.opcode == ib::kOpSend && part.length)
      std::memcpy(reinterpret_cast<void*>(receive.part.addr), here, part.length);
    complete(to.recv_cq, receive.wr_id, 0, wr.opcode == ib::kOpSend ? ib::kWcRecv : ib::kWcRecvWriteImm,
             part.length, to.qp_num, wr.imm_data);
  }
  if (cut == FakeVerbsCut::kAfter) return fail(ib::kWcRetryExceeded);
  complete(from.send_cq, wr.wr_id, 0, wr.opcode, part.length, from.qp_num);
  return 0;
}

int post_send(ib::Qp* qp, ib::SendWr* wr, ib::SendWr** bad) {
  std::lock_guard lock(wire().mutex);
  FakeQp& from = *static_cast<FakeQp*>(qp);
  const int error = from.type == ib::kTypeUd ? send_datagram(from, *wr) : send_reliable(from, *wr);
  if (error) *bad = wr;
  return error;
}

int post_recv(ib::Qp* qp, ib::RecvWr* wr, ib::RecvWr**) {
  std::lock_guard lock(wire().mutex);
  static_cast<FakeQp*>(qp)->receives.push_back({wr->wr_id, *wr->sg_list});
  return 0;
}

int post_srq_recv(ib::Srq* srq, ib::RecvWr* wr, ib::RecvWr**) {
  std::lock_guard lock(wire().mutex);
  static_cast<FakeSrq*>(srq)->receives.push_back({wr->wr_id, *wr->sg_list});
  return 0;
}

int poll_cq(ib::Cq* cq, int max, ib::Wc* out) {
  std::lock_guard lock(wire().mutex);
  std::deque<ib::Wc>& entries = static_cast<FakeCq*>(cq)->entries;
  int count = 0;
  for (; count < max && !entries.empty(); ++count) {
    out[count] = entries.front();
    entries.pop_front();
  }
  return count;
}

ib::Context* open_device(ib::Device* device) {
  auto* context = new ib::Context{};
  context->device = device;
  context->ops.poll_cq = poll_cq;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->ops.post_srq_recv = post_srq_recv;
  return context;
}

ib::Mr* reg_mr(ib::Pd* pd, void* address, size_t bytes, int access) {
  std::lock_guard lock(wire().mutex);
  auto* mr = new ib::Mr{};
  mr->pd = pd;
  mr->addr = address;
  mr->length = bytes;
  mr->lkey = mr->rkey = wire().next++;
  wire().keys[mr->rkey] = mr;
  wire().access[mr->rkey] = access;
  return mr;
}

int dereg_mr(ib::Mr* mr) {
  std::lock_guard lock(wire().mutex);
  wire().keys.erase(mr->rkey);
  delete mr;
  return 0;
}

ib::Qp* create_qp(ib::Pd* pd, ib::QpInitAttr* init) {
  std::lock_guard lock(wire().mutex);
  auto* qp = new FakeQp{};
  qp->context = reinterpret_cast<FakePd*>(pd)->context;
  qp->pd = pd;
  qp->send_cq = init->send_cq;
  qp->recv_cq = init->recv_cq;
  qp->srq = init->srq;
  qp->type = init->qp_type;
  qp->qp_num = wire().next++;
  wire().qps[qp->qp_num] = qp;
  return qp;
}

// The transitions and the attributes that a device insists on.
int modify_qp(ib::Qp* base, ib::QpAttr* attr, int mask) {
  std::lock_guard lock(wire().mutex);
  FakeQp& qp = *static_cast<FakeQp*>(base);
  const bool is_rc = qp.type == ib::kTypeRc;
  const int to_rtr = ib::kMaskAv | ib::kMaskMtu | ib::kMaskDestQpn | ib::kMaskRqPsn | ib::kMaskDestRdAtomic |
                     ib::kMaskRnrTimer;
  const int to_rts =
      ib::kMaskTimeout | ib::kMaskRetry | ib::kMaskRnrRetry | ib::kMaskSqPsn | ib::kMaskRdAtomic;
  int needs = ib::kMaskState;
  if (attr->qp_state == ib::kStateInit)
    needs |= ib::kMaskPkey | ib::kMaskPort | (is_rc ? ib::kMaskAccess : ib::kMaskQkey);
  if (attr->qp_state == ib::kStateRtr && is_rc) needs |= to_rtr;
  if (attr->qp_state == ib::kStateRts) needs |= is_rc ? to_rts : ib::kMaskSqPsn;
  const bool is_next = attr->qp_state == qp.state + 1 || attr->qp_state == ib::kStateError ||
                       attr->qp_state == ib::kStateReset;
  const bool are_reads_too_many = attr->max_rd_atomic > 4 || attr->max_dest_rd_atomic > 16;
  if (attr->qp_state == wire().refused_state) {
    wire().refused_state = -1;
    return errno = EHOSTUNREACH;
  }
  if (mask != needs || !is_next || are_reads_too_many || attr->pkey_index >= kPartitions.size()) {
    errno = EINVAL;
    return EINVAL;
  }
  qp.state = attr->qp_state;
  if (qp.state == ib::kStateReset) qp.receives.clear();
  if (qp.state == ib::kStateInit) qp.pkey_index = attr->pkey_index;
  if (qp.state == ib::kStateInit && !is_rc) qp.qkey = attr->qkey;
  if (qp.state == ib::kStateRtr) qp.peer = attr->dest_qp_num;
  return 0;
}

int destroy_qp(ib::Qp* qp) {
  std::lock_guard lock(wire().mutex);
  wire().qps.erase(qp->qp_num);
  delete static_cast<FakeQp*>(qp);
  return 0;
}

int query_port(ib::Context*, uint8_t port, ib::PortAttr* attr) {
  if (port > 2) return EINVAL;
  *attr = {};
  attr->state = port == 2 ? ib::kPortActive : 1;  // the first port is down
  attr->active_mtu = 5;
  attr->gid_tbl_len = 4;
  attr->pkey_tbl_len = kPartitions.size();
  attr->max_msg_sz = 1u << 30;
  attr->link_layer = ib::kLinkEthernet;
  return 0;
}

int query_pkey(ib::Context*, uint8_t, int index, uint16_t* big_endian) {
  *big_endian = htons(kPartitions.at(static_cast<size_t>(index)));
  return 0;
}

int query_gid(ib::Context*, uint8_t, int index, ib::Gid* gid) {
  *gid = {};
  if (index == 0) gid->raw[0] = 0xfe, gid->raw[1] = 0x80, gid->raw[15] = 1;
  if (index >= 2) gid->raw[10] = gid->raw[11] = 0xff, gid->raw[12] = 127, gid->raw[15] = 1;
  return 0;
}

}  // namespace

ib::Library fake_verbs_library() {
  ib::Library library;
  library.get_device_list = [](int* count) {
    *count = 2;
    auto** list = new ib::Device*[2];
    for (int i = 0; i < 2; ++i) list[i] = reinterpret_cast<ib::Device*>(&wire().names[i]);
    return list;
  };
  library.free_device_list = [](ib::Device** list) { delete[] list; };
  library.get_device_name = [](ib::Device* device) { return *reinterpret_cast<const char**>(device); };
  library.open_device = open_device;
  library.close_device = [](ib::Context* context) {
    delete context;
    return 0;
  };
  library.alloc_pd = [](ib::Context* context) { return reinterpret_cast<ib::Pd*>(new FakePd{context}); };
  library.dealloc_pd = [](ib::Pd* pd) {
    delete reinterpret_cast<FakePd*>(pd);
    return 0;
  };
  library.reg_mr = reg_mr;
  library.dereg_mr = dereg_mr;
  library.create_cq = [](ib::Context* context, int, void*, void*, int) -> ib::Cq* {
    auto* cq = new FakeCq{};
    cq->context = context;
    return cq;
  };
  library.destroy_cq = [](ib::Cq* cq) {
    delete static_cast<FakeCq*>(cq);
    return 0;
  };
  library.create_srq = [](ib::Pd*, ib::SrqInitAttr*) -> ib::Srq* { return new FakeSrq{}; };
  library.destroy_srq = [](ib::Srq* srq) {
    delete static_cast<FakeSrq*>(srq);
    return 0;
  };
  library.create_qp = create_qp;
  library.modify_qp = modify_qp;
  library.destroy_qp = destroy_qp;
  library.create_ah = [](ib::Pd*, ib::AhAttr*) { return reinterpret_cast<ib::Ah*>(new char); };
  library.destroy_ah = [](ib::Ah* ah) {
    delete reinterpret_cast<char*>(ah);
    return 0;
  };
  library.query_device = [](ib::Context*, ib::DeviceAttr* attr) {
    *attr = {};
    attr->max_qp_rd_atom = 16;
    attr->max_qp_init_rd_atom = 4;
    attr->max_cqe = 32767;
    return 0;
  };
  library.query_port = query_port;
  library.query_gid = query_gid;
  library.query_pkey = query_pkey;
  library.wc_status_str = [](int) { return "fake status"; };
  library.gid_type = [](const std::string&, int, int index) {
    return std::string(index == 3 ? "RoCE v2" : "IB/RoCE v1");
  };
  return library;
}

FakeVerbsLoss::FakeVerbsLoss(std::function<bool(uint32_t)> is_lost) {
  std::lock_guard lock(wire().mutex);
  wire().is_lost = std::move(is_lost);
}
FakeVerbsLoss::~FakeVerbsLoss() {
  std::lock_guard lock(wire().mutex);
  wire().is_lost = lose_every_third;
}

FakeVerbsCuts::FakeVerbsCuts(std::function<FakeVerbsCut(uint32_t)> cut) {
  std::lock_guard lock(wire().mutex);
  wire().cut = std::move(cut);
}
FakeVerbsCuts::~FakeVerbsCuts() {
  std::lock_guard lock(wire().mutex);
  wire().cut = nullptr;
}

void fake_verbs_refuse_once(int state) {
  std::lock_guard lock(wire().mutex);
  wire().refused_state = state;
}

void fake_verbs_stop() {
  std::lock_guard lock(wire().mutex);
  for (auto& [number, qp] : wire().qps) {
    if (qp->state == ib::kStateReset) continue;
    qp->state = ib::kStateError;
    for (const Received& receive : qp->receives)
      complete(qp->recv_cq, receive.wr_id, ib::kWcFlushed, ib::kWcRecv, 0, number);
    qp->receives.clear();
  }
}

size_t fake_verbs_queue_pairs() {
  std::lock_guard lock(wire().mutex);
  return wire().qps.size();
}

std::shared_ptr<provider::Provider> make_fake_verbs() {
  return provider::make_verbs(fake_verbs_library());
}

}  // namespace weft::transfer::testing
