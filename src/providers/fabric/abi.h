// SPDX-License-Identifier: Apache-2.0
//
// What Weft uses of libfabric 2.6.0: names and layouts of its headers.
// Written by tools/abi_headers.py, not to be edited. Functions are declared for their types alone: the library is opened
// at run time (docs/decisions/0008-providers-open-their-libraries-at-run-time.md).
//
// Copyright (c) 2013-2017 Intel Corporation. All rights reserved.
// Copyright (c) 2016 Cisco Systems, Inc. All rights reserved.
// (C) Copyright 2020 Hewlett Packard Enterprise Development LP
// Copyright (c) 2022 DataDirect Networks, Inc. All rights reserved.
//
// This software is available to you under a choice of one of two
// licenses.  You may choose to be licensed under the terms of the GNU
// General Public License (GPL) Version 2, available from the file
// COPYING in the main directory of this source tree, or the
// BSD license below:
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

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace weft {
// clang-format off

using fi_av_type = int;
using fi_bus_type = int;
using fi_cq_format = int;
using fi_wait_obj = int;
using fi_cq_wait_cond = int;
using fi_addr_t = uint64_t;
using fi_threading = int;
using fi_progress = int;
using fi_resource_mgmt = int;
using fi_ep_type = int;
using fid_t = struct fid*;
using fi_link_state = int;
using fi_hmem_iface = int;
using fi_datatype = int;
using fi_op = int;
using fi_collective_op = int;

constexpr uint64_t FI_ADDR_UNSPEC = 0xffffffffffffffff;
constexpr int FI_OPT_ENDPOINT = 0;
constexpr uint64_t FI_MSG = 0x2;
constexpr int FI_SOCKADDR_IN = 2;
constexpr int FI_SOCKADDR_IN6 = 3;
constexpr int FI_MR_LOCAL = 4;
constexpr uint64_t FI_RMA = 0x4;
constexpr int FI_ENABLE = 6;
constexpr int FI_OPT_CUDA_API_PERMITTED = 10;
constexpr int FI_OPT_SHARED_MEMORY_PERMITTED = 11;
constexpr int FI_MR_VIRT_ADDR = 16;
constexpr uint64_t FI_ORDER_WAW = 0x10;
constexpr int FI_MR_ALLOCATED = 32;
constexpr int FI_MR_PROV_KEY = 64;
constexpr uint64_t FI_READ = 0x100;
constexpr int FI_EAVAIL = 259;
constexpr int FI_MR_ENDPOINT = 512;
constexpr uint64_t FI_WRITE = 0x200;
constexpr int FI_TC_LOW_LATENCY = 513;
constexpr int FI_MR_HMEM = 1024;
constexpr uint64_t FI_RECV = 0x400;
constexpr uint64_t FI_SEND = 0x800;
constexpr uint64_t FI_REMOTE_READ = 0x1000;
constexpr uint64_t FI_REMOTE_WRITE = 0x2000;
constexpr uint64_t FI_REMOTE_CQ_DATA = 0x20000;
constexpr uint64_t FI_DELIVERY_COMPLETE = 0x10000000;
constexpr uint64_t FI_ORDER_RMA_WAW = 0x800000000;
constexpr uint64_t FI_HMEM = 0x800000000000;
constexpr uint64_t FI_CONTEXT2 = 0x10000000000000;
constexpr uint64_t FI_SOURCE = 0x200000000000000;
constexpr uint64_t FI_CONTEXT = 0x800000000000000;
// fi_av_type
constexpr int FI_AV_TABLE = 2;
// fi_bus_type
constexpr int FI_BUS_PCI = 1;
// fi_cq_format
constexpr int FI_CQ_FORMAT_DATA = 3;
// fi_ep_type
constexpr int FI_EP_RDM = 3;
// fi_hmem_iface
constexpr int FI_HMEM_CUDA = 1;
// fi_progress
constexpr int FI_PROGRESS_MANUAL = 2;
// fi_threading
constexpr int FI_THREAD_DOMAIN = 3;

struct fi_av_attr {
  fi_av_type type;
  int rx_ctx_bits;
  size_t count, ep_per_node;
  const char* name;
  void* map_addr;
  uint64_t flags;
};

struct fi_pci_attr {
  uint16_t domain_id;
  uint8_t bus_id, device_id, function_id;
};

struct fi_bus_attr {
  fi_bus_type bus_type;
  union {
    struct fi_pci_attr pci;
  } attr;
};

struct fi_cq_attr {
  size_t size;
  uint64_t flags;
  fi_cq_format format;
  fi_wait_obj wait_obj;
  int signaling_vector;
  fi_cq_wait_cond wait_cond;
  struct fid_wait* wait_set;
};

struct fi_cq_data_entry {
  void* op_context;
  uint64_t flags;
  size_t len;
  void* buf;
  uint64_t data;
};

struct fi_cq_err_entry {
  void* op_context;
  uint64_t flags;
  size_t len;
  void* buf;
  uint64_t data, tag;
  size_t olen;
  int err, prov_errno;
  void* err_data;
  size_t err_data_size;
  fi_addr_t src_addr;
};

struct fi_domain_attr {
  struct fid_domain* domain;
  char* name;
  fi_threading threading;
  fi_progress control_progress;
  union {
    fi_progress data_progress, progress;
  };
  fi_resource_mgmt resource_mgmt;
  fi_av_type av_type;
  int mr_mode;
  size_t mr_key_size, cq_data_size, cq_cnt, ep_cnt, tx_ctx_cnt, rx_ctx_cnt, max_ep_tx_ctx;
  size_t max_ep_rx_ctx, max_ep_stx_ctx, max_ep_srx_ctx, cntr_cnt, mr_iov_limit;
  uint64_t caps, mode;
  uint8_t* auth_key;
  size_t auth_key_size, max_err_data, mr_cnt;
  uint32_t tclass;
  size_t max_ep_auth_key;
  uint32_t max_group_id;
  uint64_t max_cntr_value, max_err_cntr_value;
};

struct fi_ep_attr {
  fi_ep_type type;
  uint32_t protocol, protocol_version;
  size_t max_msg_size, msg_prefix_size, max_order_raw_size, max_order_war_size, max_order_waw_size;
  uint64_t mem_tag_format;
  size_t tx_ctx_cnt, rx_ctx_cnt, auth_key_size;
  uint8_t* auth_key;
};

struct fi_fabric_attr {
  struct fid_fabric* fabric;
  char* name;
  char* prov_name;
  uint32_t prov_version, api_version;
};

struct fi_info {
  struct fi_info* next;
  uint64_t caps, mode;
  uint32_t addr_format;
  size_t src_addrlen, dest_addrlen;
  void* src_addr;
  void* dest_addr;
  fid_t handle;
  struct fi_tx_attr* tx_attr;
  struct fi_rx_attr* rx_attr;
  struct fi_ep_attr* ep_attr;
  struct fi_domain_attr* domain_attr;
  struct fi_fabric_attr* fabric_attr;
  struct fid_nic* nic;
};

struct fi_link_attr {
  char* address;
  size_t mtu, speed;
  fi_link_state state;
  char* network_type;
};

struct fi_mr_attr {
  union {
    const struct iovec* mr_iov;
    const struct fi_mr_dmabuf* dmabuf;
  };
  size_t iov_count;
  uint64_t access, offset, requested_key;
  void* context;
  size_t auth_key_size;
  uint8_t* auth_key;
  fi_hmem_iface iface;
  union {
    uint64_t reserved;
    int cuda, ze, neuron, synapseai, rocr;
  } device;
  void* hmem_data;
  size_t page_size;
  const struct fid_mr* base_mr;
  size_t sub_mr_cnt;
};

struct fi_msg_rma {
  const struct iovec* msg_iov;
  void** desc;
  size_t iov_count;
  fi_addr_t addr;
  const struct fi_rma_iov* rma_iov;
  size_t rma_iov_count;
  void* context;
  uint64_t data;
};

struct fi_ops {
  size_t size;
  int (*close)(struct fid*);
  int (*bind)(struct fid*, struct fid*, uint64_t);
  int (*control)(struct fid*, int, void*);
  int (*ops_open)(struct fid*, const char*, uint64_t, void**, void*);
  int (*tostr)(const struct fid*, char*, size_t);
  int (*ops_set)(struct fid*, const char*, uint64_t, void*, void*);
};

struct fi_ops_av {
  size_t size;
  int (*insert)(struct fid_av*, const void*, size_t, fi_addr_t*, uint64_t, void*);
  int (*insertsvc)(struct fid_av*, const char*, const char*, fi_addr_t*, uint64_t, void*);
  int (*insertsym)(struct fid_av*, const char*, size_t, const char*, size_t, fi_addr_t*, uint64_t, void*);
  int (*remove)(struct fid_av*, fi_addr_t*, size_t, uint64_t);
  int (*lookup)(struct fid_av*, fi_addr_t, void*, size_t*);
  const char* (*straddr)(struct fid_av*, const void*, char*, size_t*);
  int (*av_set)(struct fid_av*, struct fi_av_set_attr*, struct fid_av_set**, void*);
  int (*insert_auth_key)(struct fid_av*, const void*, size_t, fi_addr_t*, uint64_t);
  int (*lookup_auth_key)(struct fid_av*, fi_addr_t, void*, size_t*);
  int (*set_user_id)(struct fid_av*, fi_addr_t, fi_addr_t, uint64_t);
};

struct fi_ops_cm {
  size_t size;
  int (*setname)(fid_t, void*, size_t);
  int (*getname)(fid_t, void*, size_t*);
  int (*getpeer)(struct fid_ep*, void*, size_t*);
  int (*connect)(struct fid_ep*, const void*, const void*, size_t);
  int (*listen)(struct fid_pep*);
  int (*accept)(struct fid_ep*, const void*, size_t);
  int (*reject)(struct fid_pep*, fid_t, const void*, size_t);
  int (*shutdown)(struct fid_ep*, uint64_t);
  int (*join)(struct fid_ep*, const void*, uint64_t, struct fid_mc**, void*);
};

struct fi_ops_cq {
  size_t size;
  ssize_t (*read)(struct fid_cq*, void*, size_t);
  ssize_t (*readfrom)(struct fid_cq*, void*, size_t, fi_addr_t*);
  ssize_t (*readerr)(struct fid_cq*, struct fi_cq_err_entry*, uint64_t);
  ssize_t (*sread)(struct fid_cq*, void*, size_t, const void*, int);
  ssize_t (*sreadfrom)(struct fid_cq*, void*, size_t, fi_addr_t*, const void*, int);
  int (*signal)(struct fid_cq*);
  const char* (*strerror)(struct fid_cq*, int, const void*, char*, size_t);
};

struct fi_ops_domain {
  size_t size;
  int (*av_open)(struct fid_domain*, struct fi_av_attr*, struct fid_av**, void*);
  int (*cq_open)(struct fid_domain*, struct fi_cq_attr*, struct fid_cq**, void*);
  int (*endpoint)(struct fid_domain*, struct fi_info*, struct fid_ep**, void*);
  int (*scalable_ep)(struct fid_domain*, struct fi_info*, struct fid_ep**, void*);
  int (*cntr_open)(struct fid_domain*, struct fi_cntr_attr*, struct fid_cntr**, void*);
  int (*poll_open)(struct fid_domain*, struct fi_poll_attr*, struct fid_poll**);
  int (*stx_ctx)(struct fid_domain*, struct fi_tx_attr*, struct fid_stx**, void*);
  int (*srx_ctx)(struct fid_domain*, struct fi_rx_attr*, struct fid_ep**, void*);
  int (*query_atomic)(struct fid_domain*, fi_datatype, fi_op, struct fi_atomic_attr*, uint64_t);
  int (*query_collective)(struct fid_domain*, fi_collective_op, struct fi_collective_attr*, uint64_t);
  int (*endpoint2)(struct fid_domain*, struct fi_info*, struct fid_ep**, uint64_t, void*);
};

struct fi_ops_ep {
  size_t size;
  ssize_t (*cancel)(fid_t, void*);
  int (*getopt)(fid_t, int, int, void*, size_t*);
  int (*setopt)(fid_t, int, int, const void*, size_t);
  int (*tx_ctx)(struct fid_ep*, int, struct fi_tx_attr*, struct fid_ep**, void*);
  int (*rx_ctx)(struct fid_ep*, int, struct fi_rx_attr*, struct fid_ep**, void*);
  ssize_t (*rx_size_left)(struct fid_ep*);
  ssize_t (*tx_size_left)(struct fid_ep*);
};

struct fi_ops_fabric {
  size_t size;
  int (*domain)(struct fid_fabric*, struct fi_info*, struct fid_domain**, void*);
  int (*passive_ep)(struct fid_fabric*, struct fi_info*, struct fid_pep**, void*);
  int (*eq_open)(struct fid_fabric*, struct fi_eq_attr*, struct fid_eq**, void*);
  int (*wait_open)(struct fid_fabric*, struct fi_wait_attr*, struct fid_wait**);
  int (*trywait)(struct fid_fabric*, struct fid**, int);
  int (*domain2)(struct fid_fabric*, struct fi_info*, struct fid_domain**, uint64_t, void*);
};

struct fi_ops_mr {
  size_t size;
  int (*reg)(struct fid*, const void*, size_t, uint64_t, uint64_t, uint64_t, uint64_t, struct fid_mr**,
      void*);
  int (*regv)(struct fid*, const struct iovec*, size_t, uint64_t, uint64_t, uint64_t, uint64_t,
      struct fid_mr**, void*);
  int (*regattr)(struct fid*, const struct fi_mr_attr*, uint64_t, struct fid_mr**);
};

struct fi_ops_msg {
  size_t size;
  ssize_t (*recv)(struct fid_ep*, void*, size_t, void*, fi_addr_t, void*);
  ssize_t (*recvv)(struct fid_ep*, const struct iovec*, void**, size_t, fi_addr_t, void*);
  ssize_t (*recvmsg)(struct fid_ep*, const struct fi_msg*, uint64_t);
  ssize_t (*send)(struct fid_ep*, const void*, size_t, void*, fi_addr_t, void*);
  ssize_t (*sendv)(struct fid_ep*, const struct iovec*, void**, size_t, fi_addr_t, void*);
  ssize_t (*sendmsg)(struct fid_ep*, const struct fi_msg*, uint64_t);
  ssize_t (*inject)(struct fid_ep*, const void*, size_t, fi_addr_t);
  ssize_t (*senddata)(struct fid_ep*, const void*, size_t, void*, uint64_t, fi_addr_t, void*);
  ssize_t (*injectdata)(struct fid_ep*, const void*, size_t, uint64_t, fi_addr_t);
};

struct fi_ops_rma {
  size_t size;
  ssize_t (*read)(struct fid_ep*, void*, size_t, void*, fi_addr_t, uint64_t, uint64_t, void*);
  ssize_t (*readv)(struct fid_ep*, const struct iovec*, void**, size_t, fi_addr_t, uint64_t, uint64_t, void*);
  ssize_t (*readmsg)(struct fid_ep*, const struct fi_msg_rma*, uint64_t);
  ssize_t (*write)(struct fid_ep*, const void*, size_t, void*, fi_addr_t, uint64_t, uint64_t, void*);
  ssize_t (*writev)(struct fid_ep*, const struct iovec*, void**, size_t, fi_addr_t, uint64_t, uint64_t,
      void*);
  ssize_t (*writemsg)(struct fid_ep*, const struct fi_msg_rma*, uint64_t);
  ssize_t (*inject)(struct fid_ep*, const void*, size_t, fi_addr_t, uint64_t, uint64_t);
  ssize_t (*writedata)(struct fid_ep*, const void*, size_t, void*, uint64_t, fi_addr_t, uint64_t, uint64_t,
      void*);
  ssize_t (*injectdata)(struct fid_ep*, const void*, size_t, uint64_t, fi_addr_t, uint64_t, uint64_t);
};

struct fi_rma_iov {
  uint64_t addr;
  size_t len;
  uint64_t key;
};

struct fi_rx_attr {
  uint64_t caps, mode, op_flags, msg_order, comp_order;
  size_t total_buffered_recv, size, iov_limit;
};

struct fi_tx_attr {
  uint64_t caps, mode, op_flags, msg_order, comp_order;
  size_t inject_size, size, iov_limit, rma_iov_limit;
  uint32_t tclass;
};

struct fid {
  size_t fclass;
  void* context;
  struct fi_ops* ops;
};

struct fid_av {
  struct fid fid;
  struct fi_ops_av* ops;
};

struct fid_cq {
  struct fid fid;
  struct fi_ops_cq* ops;
};

struct fid_domain {
  struct fid fid;
  struct fi_ops_domain* ops;
  struct fi_ops_mr* mr;
};

struct fid_ep {
  struct fid fid;
  struct fi_ops_ep* ops;
  struct fi_ops_cm* cm;
  struct fi_ops_msg* msg;
  struct fi_ops_rma* rma;
  struct fi_ops_tagged* tagged;
  struct fi_ops_atomic* atomic;
  struct fi_ops_collective* collective;
};

struct fid_fabric {
  struct fid fid;
  struct fi_ops_fabric* ops;
  uint32_t api_version;
};

struct fid_mr {
  struct fid fid;
  void* mem_desc;
  uint64_t key;
};

struct fid_nic {
  struct fid fid;
  struct fi_device_attr* device_attr;
  struct fi_bus_attr* bus_attr;
  struct fi_link_attr* link_attr;
  void* prov_attr;
};

struct fi_info* fi_dupinfo(const struct fi_info* info);
int fi_fabric(struct fi_fabric_attr* attr, struct fid_fabric** fabric, void* context);
void fi_freeinfo(struct fi_info* info);
int fi_getinfo(uint32_t version, const char* node, const char* service, uint64_t flags,
    const struct fi_info* hints, struct fi_info** info);
const char* fi_strerror(int errnum);
uint32_t fi_version();

// clang-format on
}  // namespace weft
