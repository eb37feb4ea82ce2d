// SPDX-License-Identifier: Apache-2.0
//
// The binary interface of libibverbs that the verbs provider uses (symbol version IBVERBS_1.1 and the tables
// that hang in a context). tests/unit/transfer_verbs_test.cc compares it with libibverbs' own headers where
// they are installed. Why this exists: docs/decisions/0008-providers-open-their-libraries-at-run-time.md.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft::provider::ib {

struct Device;
struct Pd;
struct Ah;
using Slot = void (*)();

struct alignas(8) Gid {
  uint8_t raw[16];
};
struct Sge {
  uint64_t addr;
  uint32_t length, lkey;
};
struct SendWr {
  uint64_t wr_id;
  SendWr* next;
  Sge* sg_list;
  int num_sge;
  int opcode;
  unsigned send_flags;
  uint32_t imm_data;  // network order
  union {
    struct {
      uint64_t remote_addr;
      uint32_t rkey;
    } rdma;
    struct {
      Ah* ah;
      uint32_t remote_qpn, remote_qkey;
    } ud;
    uint64_t room[4];
  } wr;
  uint64_t tail[7];
};
struct RecvWr {
  uint64_t wr_id;
  RecvWr* next;
  Sge* sg_list;
  int num_sge;
};
struct Wc {
  uint64_t wr_id;
  int status, opcode;
  uint32_t vendor_err, byte_len, imm_data, qp_num, src_qp;
  unsigned wc_flags;
  uint16_t pkey_index, slid;
  uint8_t sl, dlid_path_bits;
};

struct Cq;
struct Srq;
struct Qp;
struct Context {
  Device* device;
  struct Ops {
    Slot before_poll[11];
    int (*poll_cq)(Cq*, int entries, Wc*);
    Slot before_srq[8];
    int (*post_srq_recv)(Srq*, RecvWr*, RecvWr** bad);
    Slot before_send[4];
    int (*post_send)(Qp*, SendWr*, SendWr** bad);
    int (*post_recv)(Qp*, RecvWr*, RecvWr** bad);
    Slot after[5];
  } ops;
};
struct Cq {
  Context* context;
};
struct Srq {
  Context* context;
};
struct Qp {
  Context* context;
  void* qp_context;
  Pd* pd;
  Cq *send_cq, *recv_cq;
  Srq* srq;
  uint32_t handle, qp_num;
};
struct Mr {
  Context* context;
  Pd* pd;
  void* addr;
  size_t length;
  uint32_t handle, lkey, rkey;
};

struct GlobalRoute {
  Gid dgid;
  uint32_t flow_label;
  uint8_t sgid_index, hop_limit, traffic_class;
};
struct AhAttr {
  GlobalRoute grh;
  uint16_t dlid;
  uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};
struct QpCap {
  uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};
struct QpInitAttr {
  void* qp_context;
  Cq *send_cq, *recv_cq;
  Srq* srq;
  QpCap cap;
  int qp_type, sq_sig_all;
};
struct QpAttr {
  int qp_state, cur_qp_state, path_mtu, path_mig_state;
  uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
  unsigned qp_access_flags;
  QpCap cap;
  AhAttr ah_attr, alt_ah_attr;
  uint16_t pkey_index, alt_pkey_index;
  uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num,
      timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout;
  uint32_t rate_limit;
};
struct SrqInitAttr {
  void* srq_context;
  uint32_t max_wr, max_sge, srq_limit;
};
struct DeviceAttr {
  char fw_ver[64];
  uint64_t node_guid, sys_image_guid, max_mr_size, page_size_cap;
  uint32_t vendor_id, vendor_part_id, hw_ver;
  int max_qp, max_qp_wr;
  unsigned device_cap_flags;
  int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom,
      max_qp_init_rd_atom;
  int after[16];
  uint16_t max_pkeys;
  uint8_t local_ca_ack_delay, phys_port_cnt;
};
struct PortAttr {
  int state, max_mtu, active_mtu, gid_tbl_len;
  uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
  uint16_t pkey_tbl_len, lid, sm_lid;
  uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state,
      link_layer, flags;
  uint16_t port_cap_flags2;
};

constexpr int kOpWrite = 0, kOpWriteImm = 1, kOpSend = 2, kOpRead = 4;
constexpr unsigned kSendSignaled = 2, kSendInline = 8;
constexpr int kWcRecv = 128, kWcRecvWriteImm = 129;
constexpr int kWcLengthError = 1, kWcProtectionError = 4, kWcFlushed = 5, kWcAccessError = 8,
              kWcRemoteAccessError = 10, kWcRetryExceeded = 12, kWcRnrExceeded = 13;
constexpr int kStateReset = 0, kStateInit = 1, kStateRtr = 2, kStateRts = 3, kStateError = 6;
constexpr int kTypeRc = 2, kTypeUd = 4;
constexpr int kAccessLocalWrite = 1, kAccessRemoteWrite = 2, kAccessRemoteRead = 4, kAccessRemoteAtomic = 8,
              kAccessRelaxedOrdering = 1 << 20;
constexpr int kPortActive = 4;
constexpr uint8_t kLinkEthernet = 2;
constexpr int kMaskState = 1, kMaskAccess = 1 << 3, kMaskPkey = 1 << 4, kMaskPort = 1 << 5,
              kMaskQkey = 1 << 6, kMaskAv = 1 << 7, kMaskMtu = 1 << 8, kMaskTimeout = 1 << 9,
              kMaskRetry = 1 << 10, kMaskRnrRetry = 1 << 11, kMaskRqPsn = 1 << 12, kMaskRdAtomic = 1 << 13,
              kMaskRnrTimer = 1 << 15, kMaskSqPsn = 1 << 16, kMaskDestRdAtomic = 1 << 17,
              kMaskDestQpn = 1 << 20;

}  // namespace weft::provider::ib
