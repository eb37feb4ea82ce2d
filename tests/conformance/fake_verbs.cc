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
  ibv_sge part;
};
struct FakeCq : ibv_cq {
  std::deque<ibv_wc> entries;
};
struct FakeSrq : ibv_srq {
  std::deque<Received> receives;
};
struct FakeQp : ibv_qp {
  int type = 0;
  int state = 0;
  uint32_t peer = 0;
  uint32_t qkey = 0;
  uint16_t pkey_index = 0;  // those of another partition do not hear each other
  std::deque<Received> receives;
};
struct FakePd {
  ibv_context* context;
};

bool lose_every_third(uint32_t datagram) {
  return datagram % 3 == 1;
}

struct Wire {
  std::mutex mutex;
  std::map<uint32_t, FakeQp*> qps;
  std::map<uint32_t, ibv_mr*> keys;
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

void complete(ibv_cq* cq, uint64_t wr_id, int status, int opcode, uint32_t bytes, uint32_t qp,
              uint32_t imm = 0) {
  ibv_wc wc{};
  wc.wr_id = wr_id;
  wc.status = status;
  wc.opcode = opcode;
  wc.byte_len = bytes;
  wc.qp_num = qp;
  wc.imm_data = imm;
  static_cast<FakeCq*>(cq)->entries.push_back(wc);
}

bool is_reachable(const ibv_send_wr& wr, const ibv_sge& part, int wanted) {
  const auto found = wire().keys.find(wr.wr.rdma.rkey);
  if (found == wire().keys.end() || !(wire().access[wr.wr.rdma.rkey] & wanted)) return false;
  const uint64_t base = reinterpret_cast<uint64_t>(found->second->addr), at = wr.wr.rdma.remote_addr;
  return at >= base && part.length <= found->second->length &&
         at - base <= found->second->length - part.length;
}

int send_datagram(FakeQp& from, const ibv_send_wr& wr) {
  if (from.state != IBV_QPS_RTS) {
    complete(from.send_cq, wr.wr_id, IBV_WC_WR_FLUSH_ERR, IBV_WR_SEND, 0, from.qp_num);
    return 0;
  }
  complete(from.send_cq, wr.wr_id, 0, IBV_WR_SEND, 0, from.qp_num);
  const auto to = wire().qps.find(wr.wr.ud.remote_qpn);
  if (wire().is_lost(++wire().datagrams) || to == wire().qps.end() || to->second->receives.empty() ||
      wr.wr.ud.remote_qkey != to->second->qkey || from.pkey_index != to->second->pkey_index)
    return 0;  // lost
  const Received receive = to->second->receives.front();
  to->second->receives.pop_front();
  std::memcpy(reinterpret_cast<char*>(receive.part.addr) + 40, reinterpret_cast<void*>(wr.sg_list->addr),
              wr.sg_list->length);
  complete(to->second->recv_cq, receive.wr_id, 0, IBV_WC_RECV, 40 + wr.sg_list->length, to->second->qp_num);
  return 0;
}

int send_reliable(FakeQp& from, const ibv_send_wr& wr) {
  if (from.state == IBV_QPS_ERR) {  // a NIC takes it, and gives it back
    complete(from.send_cq, wr.wr_id, IBV_WC_WR_FLUSH_ERR, wr.opcode, 0, from.qp_num);
    return 0;
  }
  if (from.state != IBV_QPS_RTS) return EINVAL;
  const ibv_sge part = wr.num_sge ? *wr.sg_list : ibv_sge{};
  auto fail = [&](int status) {
    from.state = IBV_QPS_ERR;
    complete(from.send_cq, wr.wr_id, status, wr.opcode, 0, from.qp_num);
    return 0;
  };
  const auto found = wire().qps.find(from.peer);
  if (found == wire().qps.end() || found->second->state < IBV_QPS_RTR ||
      found->second->state == IBV_QPS_ERR || found->second->peer != from.qp_num ||
      found->second->pkey_index != from.pkey_index)
    return fail(IBV_WC_RETRY_EXC_ERR);
  const FakeVerbsCut cut = wire().cut ? wire().cut(++wire().operations) : FakeVerbsCut::kNone;
  if (cut == FakeVerbsCut::kBefore) return fail(IBV_WC_RETRY_EXC_ERR);
  FakeQp& to = *found->second;
  if (part.length && wire().keys.count(part.lkey) == 0) return fail(4);
  std::deque<Received>& receives = static_cast<FakeSrq*>(to.srq)->receives;
  const bool takes_receive = wr.opcode == IBV_WR_SEND || wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  if (takes_receive && receives.empty()) return ENOMEM;
  void* here = reinterpret_cast<void*>(part.addr);
  if (wr.opcode != IBV_WR_SEND && part.length) {
    const bool is_read = wr.opcode == IBV_WR_RDMA_READ;
    if (!is_reachable(wr, part, is_read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE)) return fail(10);
    void* there = reinterpret_cast<void*>(wr.wr.rdma.remote_addr);
    std::memcpy(is_read ? here : there, is_read ? there : here, part.length);
  }
  if (takes_receive) {
    const Received receive = receives.front();
    receives.pop_front();
    if (cut == FakeVerbsCut::kReceive) {
      to.state = IBV_QPS_ERR;
      complete(to.recv_cq, receive.wr_id, IBV_WC_LOC_LEN_ERR, IBV_WC_RECV, 0, to.qp_num);
      return fail(kWcRemoteInvalid);
    }
    if (wr.opcode == IBV_WR_SEND && part.length)
      std::memcpy(reinterpret_cast<void*>(receive.part.addr), here, part.length);
    complete(to.recv_cq, receive.wr_id, 0, wr.opcode == IBV_WR_SEND ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM,
             part.length, to.qp_num, wr.imm_data);
  }
  if (cut == FakeVerbsCut::kAfter) return fail(IBV_WC_RETRY_EXC_ERR);
  complete(from.send_cq, wr.wr_id, 0, wr.opcode, part.length, from.qp_num);
  return 0;
}

int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) {
  std::lock_guard lock(wire().mutex);
  FakeQp& from = *static_cast<FakeQp*>(qp);
  const int error = from.type == IBV_QPT_UD ? send_datagram(from, *wr) : send_reliable(from, *wr);
  if (error) *bad = wr;
  return error;
}

int post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr**) {
  std::lock_guard lock(wire().mutex);
  static_cast<FakeQp*>(qp)->receives.push_back({wr->wr_id, *wr->sg_list});
  return 0;
}

int post_srq_recv(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr**) {
  std::lock_guard lock(wire().mutex);
  static_cast<FakeSrq*>(srq)->receives.push_back({wr->wr_id, *wr->sg_list});
  return 0;
}

int poll_cq(ibv_cq* cq, int max, ibv_wc* out) {
  std::lock_guard lock(wire().mutex);
  std::deque<ibv_wc>& entries = static_cast<FakeCq*>(cq)->entries;
  int count = 0;
  for (; count < max && !entries.empty(); ++count) {
    out[count] = entries.front();
    entries.pop_front();
  }
  return count;
}

ibv_context* open_device(ibv_device* device) {
  auto* context = new ibv_context{};
  context->device = device;
  context->ops.poll_cq = poll_cq;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->ops.post_srq_recv = post_srq_recv;
  return context;
}

ibv_mr* reg_mr(ibv_pd* pd, void* address, size_t bytes, int access) {
  std::lock_guard lock(wire().mutex);
  auto* mr = new ibv_mr{};
  mr->pd = pd;
  mr->addr = address;
  mr->length = bytes;
  mr->lkey = mr->rkey = wire().next++;
  wire().keys[mr->rkey] = mr;
  wire().access[mr->rkey] = access;
  return mr;
}

int dereg_mr(ibv_mr* mr) {
  std::lock_guard lock(wire().mutex);
  wire().keys.erase(mr->rkey);
  delete mr;
  return 0;
}

ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* init) {
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
int modify_qp(ibv_qp* base, ibv_qp_attr* attr, int mask) {
  std::lock_guard lock(wire().mutex);
  FakeQp& qp = *static_cast<FakeQp*>(base);
  const bool is_rc = qp.type == IBV_QPT_RC;
  const int to_rtr = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  const int to_rts =
      IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
  int needs = IBV_QP_STATE;
  if (attr->qp_state == IBV_QPS_INIT)
    needs |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | (is_rc ? IBV_QP_ACCESS_FLAGS : IBV_QP_QKEY);
  if (attr->qp_state == IBV_QPS_RTR && is_rc) needs |= to_rtr;
  if (attr->qp_state == IBV_QPS_RTS) needs |= is_rc ? to_rts : IBV_QP_SQ_PSN;
  const bool is_next =
      attr->qp_state == qp.state + 1 || attr->qp_state == IBV_QPS_ERR || attr->qp_state == IBV_QPS_RESET;
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
  if (qp.state == IBV_QPS_RESET) qp.receives.clear();
  if (qp.state == IBV_QPS_INIT) qp.pkey_index = attr->pkey_index;
  if (qp.state == IBV_QPS_INIT && !is_rc) qp.qkey = attr->qkey;
  if (qp.state == IBV_QPS_RTR) qp.peer = attr->dest_qp_num;
  return 0;
}

int destroy_qp(ibv_qp* qp) {
  std::lock_guard lock(wire().mutex);
  wire().qps.erase(qp->qp_num);
  delete static_cast<FakeQp*>(qp);
  return 0;
}

int query_port(ibv_context*, uint8_t port, ibv_port_attr* attr) {
  if (port > 2) return EINVAL;
  *attr = {};
  attr->state = port == 2 ? IBV_PORT_ACTIVE : 1;  // the first port is down
  attr->active_mtu = 5;
  attr->gid_tbl_len = 4;
  attr->pkey_tbl_len = kPartitions.size();
  attr->max_msg_sz = 1u << 30;
  attr->link_layer = IBV_LINK_LAYER_ETHERNET;
  return 0;
}

int query_pkey(ibv_context*, uint8_t, int index, uint16_t* big_endian) {
  *big_endian = htons(kPartitions.at(static_cast<size_t>(index)));
  return 0;
}

int query_gid(ibv_context*, uint8_t, int index, ibv_gid* gid) {
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
    auto** list = new ibv_device*[2];
    for (int i = 0; i < 2; ++i) list[i] = reinterpret_cast<ibv_device*>(&wire().names[i]);
    return list;
  };
  library.free_device_list = [](ibv_device** list) { delete[] list; };
  library.get_device_name = [](ibv_device* device) { return *reinterpret_cast<const char**>(device); };
  library.open_device = open_device;
  library.close_device = [](ibv_context* context) {
    delete context;
    return 0;
  };
  library.alloc_pd = [](ibv_context* context) { return reinterpret_cast<ibv_pd*>(new FakePd{context}); };
  library.dealloc_pd = [](ibv_pd* pd) {
    delete reinterpret_cast<FakePd*>(pd);
    return 0;
  };
  library.reg_mr = reg_mr;
  library.dereg_mr = dereg_mr;
  library.create_cq = [](ibv_context* context, int, void*, ibv_comp_channel*, int) -> ibv_cq* {
    auto* cq = new FakeCq{};
    cq->context = context;
    return cq;
  };
  library.destroy_cq = [](ibv_cq* cq) {
    delete static_cast<FakeCq*>(cq);
    return 0;
  };
  library.create_srq = [](ibv_pd*, ibv_srq_init_attr*) -> ibv_srq* { return new FakeSrq{}; };
  library.destroy_srq = [](ibv_srq* srq) {
    delete static_cast<FakeSrq*>(srq);
    return 0;
  };
  library.create_qp = create_qp;
  library.modify_qp = modify_qp;
  library.destroy_qp = destroy_qp;
  library.create_ah = [](ibv_pd*, ibv_ah_attr*) { return reinterpret_cast<ibv_ah*>(new char); };
  library.destroy_ah = [](ibv_ah* ah) {
    delete reinterpret_cast<char*>(ah);
    return 0;
  };
  library.query_device = [](ibv_context*, ibv_device_attr* attr) {
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
    if (qp->state == IBV_QPS_RESET) continue;
    qp->state = IBV_QPS_ERR;
    for (const Received& receive : qp->receives)
      complete(qp->recv_cq, receive.wr_id, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, 0, number);
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
