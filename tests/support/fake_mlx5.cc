// SPDX-License-Identifier: Apache-2.0
#include "support/fake_mlx5.h"

#include <unistd.h>

#include <bit>
#include <cerrno>
#include <map>
#include <mutex>

#include "conformance/fake_verbs.h"

namespace weft::testing {
namespace {

namespace ib = provider::ib;
namespace mlx5 = ibgda::mlx5;

struct FakePd {
  std::unique_ptr<ModelNic> nic;
  uint32_t number = 0;
};
struct FakeCq : ibv_cq {
  uint32_t entries = 0;
};
struct FakeQp : ibv_qp {
  std::unique_ptr<ibgda::QueuePair> pair;
  FakeCq* cq = nullptr;
  int state = IBV_QPS_RESET;
  uint32_t sends_from = 0, expects_from = 0, peer = 0;  // sequence numbers
};
struct FakeMr : ibv_mr {
  ModelNic* nic = nullptr;
  ibgda::Enrolled enrolled;
};

struct State {
  std::mutex mutex;
  FakeMlx5* fake = nullptr;
  std::map<uint32_t, FakeQp*> qps;
  std::map<uint32_t, FakePd*> pds;
  uint32_t pds_made = 0x030200;
  size_t cqs = 0, mrs = 0, far_mrs = 0;
  std::string failures;
};
State& state() {
  static State one;
  return one;
}

}  // namespace

struct FakeMlx5Calls {
  static void fail(const std::string& what) { state().failures += what + "\n"; }

  static ibv_pd* alloc_pd(ibv_context*) {
    std::lock_guard lock(state().mutex);
    auto* pd = new FakePd{state().fake->model_.open_model(), ++state().pds_made};
    state().pds[pd->number] = pd;
    return reinterpret_cast<ibv_pd*>(pd);
  }
  static int dealloc_pd(ibv_pd* pd) {
    std::lock_guard lock(state().mutex);
    auto* fake = reinterpret_cast<FakePd*>(pd);
    state().pds.erase(fake->number);
    delete fake;
    return 0;
  }

  static ibv_mr* reg_mr(ibv_pd* pd, void* at, size_t bytes, int access) {
    return make_mr(pd, at, bytes, reinterpret_cast<uint64_t>(at), access, nullptr);
  }
  // What the file has at the offset; the model reaches it through the file alone.
  static ibv_mr* reg_dmabuf_mr(ibv_pd* pd, uint64_t offset, size_t bytes, uint64_t iova, int fd, int access) {
    if (const int refusal = state().fake->devx_.refuses_window(); refusal != 0) {
      errno = refusal;
      return nullptr;
    }
    return make_mr(pd, reinterpret_cast<void*>(offset), bytes, iova, access,
                   file_memory(FileDescriptor(dup(fd))));
  }
  static ibv_mr* make_mr(ibv_pd* pd, void* at, size_t bytes, uint64_t iova, int access,
                         std::shared_ptr<FarMemory> far) {
    std::lock_guard lock(state().mutex);
    const int all =
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    if (access != all) fail(text("registered with access {}", access));
    state().far_mrs += far != nullptr;
    auto* mr = new FakeMr{};
    mr->nic = reinterpret_cast<FakePd*>(pd)->nic.get();
    mr->enrolled = mr->nic->enroll_at(static_cast<std::byte*>(at), bytes,
                                      kAccessRead | kAccessWrite | kAccessAtomic, iova, 0, std::move(far));
    mr->lkey = mr->enrolled.local_key;
    mr->rkey = mr->enrolled.remote_key;
    ++state().mrs;
    return mr;
  }
  static int dereg_mr(ibv_mr* mr) {
    std::lock_guard lock(state().mutex);
    auto* fake = static_cast<FakeMr*>(mr);
    fake->nic->release(fake->enrolled);
    delete fake;
    --state().mrs;
    return 0;
  }

  static ibv_cq_ex* create_cq(ibv_context*, ibv_cq_init_attr_ex* attr, mlx5dv_cq_init_attr*) {
    std::lock_guard lock(state().mutex);
    const bool is_asked =
        attr->comp_mask == IBV_CQ_INIT_ATTR_MASK_FLAGS && attr->flags == IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
    if (!is_asked) fail("a completion queue that minds overrun");
    if (!state().fake->takes_overrun_flag_) {
      errno = EOPNOTSUPP;
      return nullptr;
    }
    auto* cq = new FakeCq{};
    cq->entries = std::bit_ceil(attr->cqe + 1);
    ++state().cqs;
    return reinterpret_cast<ibv_cq_ex*>(static_cast<ibv_cq*>(cq));
  }
  static int destroy_cq(ibv_cq* cq) {
    std::lock_guard lock(state().mutex);
    for (const auto& [number, qp] : state().qps)
      if (qp->cq == cq) fail("a completion queue went before its queue pair");
    delete static_cast<FakeCq*>(cq);
    --state().cqs;
    return 0;
  }

  // The ring has twice the room that was asked for, as entries could be larger.
  static ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* init) {
    std::lock_guard lock(state().mutex);
    if (init->qp_type != IBV_QPT_RC || init->cap.max_send_wr == 0) fail("a queue pair of another type");
    auto* qp = new FakeQp{};
    qp->cq = static_cast<FakeCq*>(init->send_cq);
    qp->pair = reinterpret_cast<FakePd*>(pd)->nic->create_queue(std::bit_ceil(init->cap.max_send_wr) * 2,
                                                                qp->cq->entries);
    qp->qp_num = qp->pair->memory().number;
    state().qps[qp->qp_num] = qp;
    return qp;
  }
  static int destroy_qp(ibv_qp* qp) {
    std::lock_guard lock(state().mutex);
    state().qps.erase(qp->qp_num);
    delete static_cast<FakeQp*>(qp);
    return 0;
  }

  static int modify_qp(ibv_qp* base, ibv_qp_attr* attr, int mask) {
    std::lock_guard lock(state().mutex);
    auto& qp = *static_cast<FakeQp*>(base);
    int needs = IBV_QP_STATE;
    if (attr->qp_state == IBV_QPS_INIT) needs |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    if (attr->qp_state == IBV_QPS_RTR)
      needs |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
               IBV_QP_MIN_RNR_TIMER;
    if (attr->qp_state == IBV_QPS_RTS)
      needs |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
    if (mask != needs || attr->qp_state != qp.state + 1) {
      fail(text("state {} to {} with attributes {}", qp.state, attr->qp_state, mask));
      return errno = EINVAL;
    }
    qp.state = attr->qp_state;
    if (qp.state == IBV_QPS_INIT && !(attr->qp_access_flags & IBV_ACCESS_REMOTE_ATOMIC))
      fail("a queue pair without atomics");
    if (qp.state == IBV_QPS_RTR) return join(qp, *attr);
    if (qp.state == IBV_QPS_RTS) qp.sends_from = attr->sq_psn;
    const auto peer = state().qps.find(qp.peer);
    if (qp.state == IBV_QPS_RTS && peer != state().qps.end() && peer->second->state >= IBV_QPS_RTR &&
        peer->second->expects_from != qp.sends_from)
      fail("the ends do not agree about where they begin");
    return 0;
  }
  static int join(FakeQp& qp, const ibv_qp_attr& attr) {
    const auto peer = state().qps.find(attr.dest_qp_num);
    if (peer == state().qps.end() || attr.path_mtu == 0 || !attr.ah_attr.is_global ||
        attr.ah_attr.port_num != 2) {
      fail(text("queue {} is to be joined to {}", qp.qp_num, attr.dest_qp_num));
      return errno = EINVAL;
    }
    qp.peer = attr.dest_qp_num;
    qp.expects_from = attr.rq_psn;
    return qp.pair->connect(peer->second->pair->address()).ok() ? 0 : (errno = EINVAL);
  }

  static int init_obj(mlx5dv_obj* object, uint64_t type) {
    std::lock_guard lock(state().mutex);
    if (type == MLX5DV_OBJ_AH) return FakeDevx::init_ah(object);
    if (type == MLX5DV_OBJ_PD) {
      static_cast<mlx5dv_pd*>(object->pd.out)->pdn = reinterpret_cast<FakePd*>(object->pd.in)->number;
      return 0;
    }
    if (type != (MLX5DV_OBJ_QP | MLX5DV_OBJ_CQ)) return EINVAL;
    const auto* qp = static_cast<FakeQp*>(object->qp.in);
    const ibgda::QueueMemory& memory = qp->pair->memory();
    auto* direct = static_cast<mlx5dv_qp*>(object->qp.out);
    direct->dbrec = memory.record;
    direct->sq = {memory.ring, memory.blocks, ibgda::kBlockBytes};
    direct->bf = {memory.doorbell, 0};
    auto* completions = static_cast<mlx5dv_cq*>(object->cq.out);
    completions->buf = memory.completions;
    completions->cqe_cnt = memory.entries;
    completions->cqe_size = ibgda::kBlockBytes;
    return 0;
  }
  static ModelNic* nic_of(uint32_t pd) {
    std::lock_guard lock(state().mutex);
    const auto found = state().pds.find(pd);
    return found == state().pds.end() ? nullptr : found->second->nic.get();
  }
  static bool is_supported(ibv_device*) { return state().fake->is_mlx5_; }
};

FakeMlx5::FakeMlx5(NicPlan plan) : model_(plan), devx_(FakeMlx5Calls::nic_of) {
  state().fake = this;
  state().failures.clear();
  state().far_mrs = 0;
}
FakeMlx5::~FakeMlx5() {
  state().fake = nullptr;
}

provider::ib::Library FakeMlx5::verbs() const {
  ib::Library library = transfer::testing::fake_verbs_library();
  library.alloc_pd = FakeMlx5Calls::alloc_pd;
  library.dealloc_pd = FakeMlx5Calls::dealloc_pd;
  library.reg_mr = FakeMlx5Calls::reg_mr;
  library.reg_dmabuf_mr = FakeMlx5Calls::reg_dmabuf_mr;
  library.dereg_mr = FakeMlx5Calls::dereg_mr;
  library.destroy_cq = FakeMlx5Calls::destroy_cq;
  library.create_qp = FakeMlx5Calls::create_qp;
  library.modify_qp = FakeMlx5Calls::modify_qp;
  library.destroy_qp = FakeMlx5Calls::destroy_qp;
  library.create_ah = FakeDevx::create_ah;
  library.destroy_ah = FakeDevx::destroy_ah;
  return library;
}
ibgda::mlx5::Library FakeMlx5::mlx5() const {
  return {FakeMlx5Calls::is_supported, FakeMlx5Calls::create_cq, FakeMlx5Calls::init_obj, FakeDevx::calls(),
          ""};
}
// The device queues lock what is theirs first and ask here for their NIC, so they are asked before the lock.
std::string FakeMlx5::failures() const {
  const std::string of_queues = devx_.failures();
  std::lock_guard lock(state().mutex);
  return state().failures + of_queues;
}
size_t FakeMlx5::windows_exported() const {
  std::lock_guard lock(state().mutex);
  return state().far_mrs;
}
size_t FakeMlx5::left_over() const {
  const size_t of_queues = devx_.left_over();
  std::lock_guard lock(state().mutex);
  return state().qps.size() + state().cqs + state().mrs + state().pds.size() + of_queues;
}

}  // namespace weft::testing
