// SPDX-License-Identifier: Apache-2.0
//
// What Weft uses of libibverbs of rdma-core 44: names and layouts of its headers.
// Written by tools/abi_headers.py, not to be edited. Functions are declared for their types alone: the library is opened
// at run time (docs/decisions/0008-providers-open-their-libraries-at-run-time.md).
//
// Copyright (c) 2004, 2005 Topspin Communications.  All rights reserved.
// Copyright (c) 2004, 2011-2012 Intel Corporation.  All rights reserved.
// Copyright (c) 2005, 2006, 2007 Cisco Systems, Inc.  All rights reserved.
// Copyright (c) 2005 PathScale, Inc.  All rights reserved.
// Copyright (c) 2020 Intel Corporation.  All rights reserved.
//
// This software is available to you under a choice of one of two
// licenses.  You may choose to be licensed under the terms of the GNU
// General Public License (GPL) Version 2, available from the file
// COPYING in the main directory of this source tree, or the
// OpenIB.org BSD license below:
//
//     Redistribution and use in source and binary forms, with or
//     without modification, are permitted provided that the following
//     conditions are met:
//
//      - Redistributions of source code must retain the above
//        copyright notice, this list of conditions and the following
//        disclaimer.
//
//      - Redistributions in binary form must reproduce the above
//        copyright notice, this list of conditions and the following
//        disclaimer in the documentation and/or other materials
//        provided with the distribution.
//
// THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND,
// EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF
// MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
// NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS
// BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN
// ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN
// CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
// SOFTWARE.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace weft {
// clang-format off

using ibv_mw_type = int;
using ibv_wc_status = int;
using ibv_wc_opcode = int;
using ibv_node_type = int;
using ibv_transport_type = int;
using ibv_atomic_cap = int;
using ibv_port_state = int;
using ibv_mtu = int;
using ibv_qp_state = int;
using ibv_qp_type = int;
using ibv_mig_state = int;
using ibv_wr_opcode = int;

constexpr int IBV_LINK_LAYER_ETHERNET = 2;
// ibv_access_flags
constexpr int IBV_ACCESS_LOCAL_WRITE = 1;
constexpr int IBV_ACCESS_REMOTE_WRITE = 2;
constexpr int IBV_ACCESS_REMOTE_READ = 4;
constexpr int IBV_ACCESS_REMOTE_ATOMIC = 8;
constexpr int IBV_ACCESS_RELAXED_ORDERING = 1048576;
// ibv_cq_init_attr_mask
constexpr int IBV_CQ_INIT_ATTR_MASK_FLAGS = 1;
// ibv_create_cq_attr_flags
constexpr int IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN = 2;
// ibv_port_state
constexpr int IBV_PORT_ACTIVE = 4;
// ibv_qp_attr_mask
constexpr int IBV_QP_STATE = 1;
constexpr int IBV_QP_ACCESS_FLAGS = 8;
constexpr int IBV_QP_PKEY_INDEX = 16;
constexpr int IBV_QP_PORT = 32;
constexpr int IBV_QP_QKEY = 64;
constexpr int IBV_QP_AV = 128;
constexpr int IBV_QP_PATH_MTU = 256;
constexpr int IBV_QP_TIMEOUT = 512;
constexpr int IBV_QP_RETRY_CNT = 1024;
constexpr int IBV_QP_RNR_RETRY = 2048;
constexpr int IBV_QP_RQ_PSN = 4096;
constexpr int IBV_QP_MAX_QP_RD_ATOMIC = 8192;
constexpr int IBV_QP_MIN_RNR_TIMER = 32768;
constexpr int IBV_QP_SQ_PSN = 65536;
constexpr int IBV_QP_MAX_DEST_RD_ATOMIC = 131072;
constexpr int IBV_QP_DEST_QPN = 1048576;
// ibv_qp_state
constexpr int IBV_QPS_RESET = 0;
constexpr int IBV_QPS_INIT = 1;
constexpr int IBV_QPS_RTR = 2;
constexpr int IBV_QPS_RTS = 3;
constexpr int IBV_QPS_ERR = 6;
// ibv_qp_type
constexpr int IBV_QPT_RC = 2;
constexpr int IBV_QPT_UD = 4;
// ibv_send_flags
constexpr int IBV_SEND_SIGNALED = 2;
// ibv_wc_opcode
constexpr int IBV_WC_RECV = 128;
constexpr int IBV_WC_RECV_RDMA_WITH_IMM = 129;
// ibv_wc_status
constexpr int IBV_WC_LOC_LEN_ERR = 1;
constexpr int IBV_WC_LOC_PROT_ERR = 4;
constexpr int IBV_WC_WR_FLUSH_ERR = 5;
constexpr int IBV_WC_LOC_ACCESS_ERR = 8;
constexpr int IBV_WC_REM_ACCESS_ERR = 10;
constexpr int IBV_WC_RETRY_EXC_ERR = 12;
constexpr int IBV_WC_RNR_RETRY_EXC_ERR = 13;
// ibv_wr_opcode
constexpr int IBV_WR_RDMA_WRITE = 0;
constexpr int IBV_WR_RDMA_WRITE_WITH_IMM = 1;
constexpr int IBV_WR_SEND = 2;
constexpr int IBV_WR_RDMA_READ = 4;

struct _ibv_device_ops {
  struct ibv_context* (*_dummy1)(struct ibv_device*, int);
  void (*_dummy2)(struct ibv_context*);
};

struct ibv_ah {
  struct ibv_context* context;
  struct ibv_pd* pd;
  uint32_t handle;
};

union ibv_gid {
  uint8_t raw[16];
  struct {
    uint64_t subnet_prefix, interface_id;
  } global;
};

struct ibv_global_route {
  union ibv_gid dgid;
  uint32_t flow_label;
  uint8_t sgid_index, hop_limit, traffic_class;
};

struct ibv_ah_attr {
  struct ibv_global_route grh;
  uint16_t dlid;
  uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};

struct ibv_comp_channel {
  struct ibv_context* context;
  int fd, refcnt;
};

struct ibv_context_ops {
  int (*_compat_query_device)(struct ibv_context*, struct ibv_device_attr*);
  int (*_compat_query_port)(struct ibv_context*, uint8_t, struct _compat_ibv_port_attr*);
  void* (*_compat_alloc_pd)(void);
  void* (*_compat_dealloc_pd)(void);
  void* (*_compat_reg_mr)(void);
  void* (*_compat_rereg_mr)(void);
  void* (*_compat_dereg_mr)(void);
  struct ibv_mw* (*alloc_mw)(struct ibv_pd*, ibv_mw_type);
  int (*bind_mw)(struct ibv_qp*, struct ibv_mw*, struct ibv_mw_bind*);
  int (*dealloc_mw)(struct ibv_mw*);
  void* (*_compat_create_cq)(void);
  int (*poll_cq)(struct ibv_cq*, int, struct ibv_wc*);
  int (*req_notify_cq)(struct ibv_cq*, int);
  void* (*_compat_cq_event)(void);
  void* (*_compat_resize_cq)(void);
  void* (*_compat_destroy_cq)(void);
  void* (*_compat_create_srq)(void);
  void* (*_compat_modify_srq)(void);
  void* (*_compat_query_srq)(void);
  void* (*_compat_destroy_srq)(void);
  int (*post_srq_recv)(struct ibv_srq*, struct ibv_recv_wr*, struct ibv_recv_wr**);
  void* (*_compat_create_qp)(void);
  void* (*_compat_query_qp)(void);
  void* (*_compat_modify_qp)(void);
  void* (*_compat_destroy_qp)(void);
  int (*post_send)(struct ibv_qp*, struct ibv_send_wr*, struct ibv_send_wr**);
  int (*post_recv)(struct ibv_qp*, struct ibv_recv_wr*, struct ibv_recv_wr**);
  void* (*_compat_create_ah)(void);
  void* (*_compat_destroy_ah)(void);
  void* (*_compat_attach_mcast)(void);
  void* (*_compat_detach_mcast)(void);
  void* (*_compat_async_event)(void);
};

struct ibv_context {
  struct ibv_device* device;
  struct ibv_context_ops ops;
  int cmd_fd, async_fd, num_comp_vectors;
  pthread_mutex_t mutex;
  void* abi_compat;
};

struct ibv_cq {
  struct ibv_context* context;
  struct ibv_comp_channel* channel;
  void* cq_context;
  uint32_t handle;
  int cqe;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t comp_events_completed, async_events_completed;
};

struct ibv_cq_ex {
  struct ibv_context* context;
  struct ibv_comp_channel* channel;
  void* cq_context;
  uint32_t handle;
  int cqe;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t comp_events_completed, async_events_completed, comp_mask;
  ibv_wc_status status;
  uint64_t wr_id;
  int (*start_poll)(struct ibv_cq_ex*, struct ibv_poll_cq_attr*);
  int (*next_poll)(struct ibv_cq_ex*);
  void (*end_poll)(struct ibv_cq_ex*);
  ibv_wc_opcode (*read_opcode)(struct ibv_cq_ex*);
  uint32_t (*read_vendor_err)(struct ibv_cq_ex*);
  uint32_t (*read_byte_len)(struct ibv_cq_ex*);
  uint32_t (*read_imm_data)(struct ibv_cq_ex*);
  uint32_t (*read_qp_num)(struct ibv_cq_ex*);
  uint32_t (*read_src_qp)(struct ibv_cq_ex*);
  unsigned int (*read_wc_flags)(struct ibv_cq_ex*);
  uint32_t (*read_slid)(struct ibv_cq_ex*);
  uint8_t (*read_sl)(struct ibv_cq_ex*);
  uint8_t (*read_dlid_path_bits)(struct ibv_cq_ex*);
  uint64_t (*read_completion_ts)(struct ibv_cq_ex*);
  uint16_t (*read_cvlan)(struct ibv_cq_ex*);
  uint32_t (*read_flow_tag)(struct ibv_cq_ex*);
  void (*read_tm_info)(struct ibv_cq_ex*, struct ibv_wc_tm_info*);
  uint64_t (*read_completion_wallclock_ns)(struct ibv_cq_ex*);
};

struct ibv_cq_init_attr_ex {
  uint32_t cqe;
  void* cq_context;
  struct ibv_comp_channel* channel;
  uint32_t comp_vector;
  uint64_t wc_flags;
  uint32_t comp_mask, flags;
  struct ibv_pd* parent_domain;
};

struct ibv_device {
  struct _ibv_device_ops _ops;
  ibv_node_type node_type;
  ibv_transport_type transport_type;
  char name[64], dev_name[64], dev_path[256], ibdev_path[256];
};

struct ibv_device_attr {
  char fw_ver[64];
  uint64_t node_guid, sys_image_guid, max_mr_size, page_size_cap;
  uint32_t vendor_id, vendor_part_id, hw_ver;
  int max_qp, max_qp_wr;
  unsigned int device_cap_flags;
  int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom;
  int max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom;
  ibv_atomic_cap atomic_cap;
  int max_ee, max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach;
  int max_total_mcast_qp_attach, max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge;
  uint16_t max_pkeys;
  uint8_t local_ca_ack_delay, phys_port_cnt;
};

struct ibv_mr {
  struct ibv_context* context;
  struct ibv_pd* pd;
  void* addr;
  size_t length;
  uint32_t handle, lkey, rkey;
};

struct ibv_mw_bind_info {
  struct ibv_mr* mr;
  uint64_t addr, length;
  unsigned int mw_access_flags;
};

struct ibv_pd {
  struct ibv_context* context;
  uint32_t handle;
};

struct ibv_port_attr {
  ibv_port_state state;
  ibv_mtu max_mtu, active_mtu;
  int gid_tbl_len;
  uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
  uint16_t pkey_tbl_len, lid, sm_lid;
  uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed;
  uint8_t phys_state, link_layer, flags;
  uint16_t port_cap_flags2;
};

struct ibv_qp {
  struct ibv_context* context;
  void* qp_context;
  struct ibv_pd* pd;
  struct ibv_cq* send_cq;
  struct ibv_cq* recv_cq;
  struct ibv_srq* srq;
  uint32_t handle, qp_num;
  ibv_qp_state state;
  ibv_qp_type qp_type;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t events_completed;
};

struct ibv_qp_cap {
  uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

struct ibv_qp_attr {
  ibv_qp_state qp_state, cur_qp_state;
  ibv_mtu path_mtu;
  ibv_mig_state path_mig_state;
  uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
  unsigned int qp_access_flags;
  struct ibv_qp_cap cap;
  struct ibv_ah_attr ah_attr, alt_ah_attr;
  uint16_t pkey_index, alt_pkey_index;
  uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num;
  uint8_t timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout;
  uint32_t rate_limit;
};

struct ibv_qp_init_attr {
  void* qp_context;
  struct ibv_cq* send_cq;
  struct ibv_cq* recv_cq;
  struct ibv_srq* srq;
  struct ibv_qp_cap cap;
  ibv_qp_type qp_type;
  int sq_sig_all;
};

struct ibv_recv_wr {
  uint64_t wr_id;
  struct ibv_recv_wr* next;
  struct ibv_sge* sg_list;
  int num_sge;
};

struct ibv_send_wr {
  uint64_t wr_id;
  struct ibv_send_wr* next;
  struct ibv_sge* sg_list;
  int num_sge;
  ibv_wr_opcode opcode;
  unsigned int send_flags;
  union {
    uint32_t imm_data, invalidate_rkey;
  };
  union {
    struct {
      uint64_t remote_addr;
      uint32_t rkey;
    } rdma;
    struct {
      uint64_t remote_addr, compare_add, swap;
      uint32_t rkey;
    } atomic;
    struct {
      struct ibv_ah* ah;
      uint32_t remote_qpn, remote_qkey;
    } ud;
  } wr;
  union {
    struct {
      uint32_t remote_srqn;
    } xrc;
  } qp_type;
  union {
    struct {
      struct ibv_mw* mw;
      uint32_t rkey;
      struct ibv_mw_bind_info bind_info;
    } bind_mw;
    struct {
      void* hdr;
      uint16_t hdr_sz, mss;
    } tso;
  };
};

struct ibv_sge {
  uint64_t addr;
  uint32_t length, lkey;
};

struct ibv_srq {
  struct ibv_context* context;
  void* srq_context;
  struct ibv_pd* pd;
  uint32_t handle;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t events_completed;
};

struct ibv_srq_attr {
  uint32_t max_wr, max_sge, srq_limit;
};

struct ibv_srq_init_attr {
  void* srq_context;
  struct ibv_srq_attr attr;
};

struct ibv_wc {
  uint64_t wr_id;
  ibv_wc_status status;
  ibv_wc_opcode opcode;
  uint32_t vendor_err, byte_len;
  union {
    uint32_t imm_data, invalidated_rkey;
  };
  uint32_t qp_num, src_qp;
  unsigned int wc_flags;
  uint16_t pkey_index, slid;
  uint8_t sl, dlid_path_bits;
};

struct ibv_pd* ibv_alloc_pd(struct ibv_context* context);
int ibv_close_device(struct ibv_context* context);
struct ibv_ah* ibv_create_ah(struct ibv_pd* pd, struct ibv_ah_attr* attr);
struct ibv_cq* ibv_create_cq(struct ibv_context* context, int cqe, void* cq_context,
    struct ibv_comp_channel* channel, int comp_vector);
struct ibv_qp* ibv_create_qp(struct ibv_pd* pd, struct ibv_qp_init_attr* qp_init_attr);
struct ibv_srq* ibv_create_srq(struct ibv_pd* pd, struct ibv_srq_init_attr* srq_init_attr);
int ibv_dealloc_pd(struct ibv_pd* pd);
int ibv_dereg_mr(struct ibv_mr* mr);
int ibv_destroy_ah(struct ibv_ah* ah);
int ibv_destroy_cq(struct ibv_cq* cq);
int ibv_destroy_qp(struct ibv_qp* qp);
int ibv_destroy_srq(struct ibv_srq* srq);
void ibv_free_device_list(struct ibv_device** list);
struct ibv_device** ibv_get_device_list(int* num_devices);
const char* ibv_get_device_name(struct ibv_device* device);
int ibv_modify_qp(struct ibv_qp* qp, struct ibv_qp_attr* attr, int attr_mask);
struct ibv_context* ibv_open_device(struct ibv_device* device);
int ibv_query_device(struct ibv_context* context, struct ibv_device_attr* device_attr);
int ibv_query_gid(struct ibv_context* context, uint8_t port_num, int index, union ibv_gid* gid);
int ibv_query_pkey(struct ibv_context* context, uint8_t port_num, int index, uint16_t* pkey);
struct ibv_mr* ibv_reg_dmabuf_mr(struct ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd,
    int access);
struct ibv_mr* ibv_reg_mr(struct ibv_pd* pd, void* addr, size_t length, int access);
struct ibv_mr* ibv_reg_mr_iova2(struct ibv_pd* pd, void* addr, size_t length, uint64_t iova,
    unsigned int access);
const char* ibv_wc_status_str(ibv_wc_status status);

// clang-format on
}  // namespace weft
