// SPDX-License-Identifier: Apache-2.0
//
// What Weft uses of libmlx5 of rdma-core 44: names and layouts of its headers.
// Written by tools/abi_headers.py, not to be edited. Functions are declared for their types alone: the library is opened
// at run time (docs/decisions/0008-providers-open-their-libraries-at-run-time.md).
//
// Copyright (c) 2017 Mellanox Technologies, Inc.  All rights reserved.
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

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace weft {
// clang-format off

constexpr int MLX5DV_UAR_ALLOC_TYPE_NC = 1;
// mlx5dv_context_attr_flags
constexpr int MLX5DV_CONTEXT_FLAGS_DEVX = 1;
// mlx5dv_devx_umem_in_mask
constexpr int MLX5DV_UMEM_MASK_DMABUF = 1;
// mlx5dv_obj_type
constexpr int MLX5DV_OBJ_QP = 1;
constexpr int MLX5DV_OBJ_CQ = 2;
constexpr int MLX5DV_OBJ_AH = 32;
constexpr int MLX5DV_OBJ_PD = 64;

struct mlx5_wqe_av {
  union {
    struct {
      uint32_t qkey, reserved;
    } qkey;
    uint64_t dc_key;
  } key;
  uint32_t dqp_dct;
  uint8_t stat_rate_sl, fl_mlid;
  uint16_t rlid;
  uint8_t reserved0[4], rmac[6], tclass, hop_limit;
  uint32_t grh_gid_fl;
  uint8_t rgid[16];
};

struct mlx5dv_ah {
  struct mlx5_wqe_av* av;
  uint64_t comp_mask;
};

struct mlx5dv_context_attr {
  uint32_t flags;
  uint64_t comp_mask;
};

struct mlx5dv_cq {
  void* buf;
  uint32_t* dbrec;
  uint32_t cqe_cnt, cqe_size;
  void* cq_uar;
  uint32_t cqn;
  uint64_t comp_mask;
};

struct mlx5dv_cq_init_attr {
  uint64_t comp_mask;
  uint8_t cqe_comp_res_format;
  uint32_t flags;
  uint16_t cqe_size;
};

struct mlx5dv_devx_uar {
  void* reg_addr;
  void* base_addr;
  uint32_t page_id;
  off_t mmap_off;
  uint64_t comp_mask;
};

struct mlx5dv_devx_umem {
  uint32_t umem_id;
};

struct mlx5dv_devx_umem_in {
  void* addr;
  size_t size;
  uint32_t access;
  uint64_t pgsz_bitmap, comp_mask;
  int dmabuf_fd;
};

struct mlx5dv_dm {
  void* buf;
  uint64_t length, comp_mask, remote_va;
};

struct mlx5dv_obj {
  struct {
    struct ibv_qp* in;
    struct mlx5dv_qp* out;
  } qp;
  struct {
    struct ibv_cq* in;
    struct mlx5dv_cq* out;
  } cq;
  struct {
    struct ibv_srq* in;
    struct mlx5dv_srq* out;
  } srq;
  struct {
    struct ibv_wq* in;
    struct mlx5dv_rwq* out;
  } rwq;
  struct {
    struct ibv_dm* in;
    struct mlx5dv_dm* out;
  } dm;
  struct {
    struct ibv_ah* in;
    struct mlx5dv_ah* out;
  } ah;
  struct {
    struct ibv_pd* in;
    struct mlx5dv_pd* out;
  } pd;
};

struct mlx5dv_pd {
  uint32_t pdn;
  uint64_t comp_mask;
};

struct mlx5dv_qp {
  uint32_t* dbrec;
  struct {
    void* buf;
    uint32_t wqe_cnt, stride;
  } sq;
  struct {
    void* buf;
    uint32_t wqe_cnt, stride;
  } rq;
  struct {
    void* reg;
    uint32_t size;
  } bf;
  uint64_t comp_mask;
  off_t uar_mmap_offset;
  uint32_t tirn, tisn, rqn, sqn;
  uint64_t tir_icm_addr;
};

struct mlx5dv_rwq {
  void* buf;
  uint32_t* dbrec;
  uint32_t wqe_cnt, stride;
  uint64_t comp_mask;
};

struct mlx5dv_srq {
  void* buf;
  uint32_t* dbrec;
  uint32_t stride, head, tail;
  uint64_t comp_mask;
  uint32_t srqn;
};

struct ibv_cq_ex* mlx5dv_create_cq(struct ibv_context* context, struct ibv_cq_init_attr_ex* cq_attr,
    struct mlx5dv_cq_init_attr* mlx5_cq_attr);
struct mlx5dv_devx_uar* mlx5dv_devx_alloc_uar(struct ibv_context* context, uint32_t flags);
void mlx5dv_devx_free_uar(struct mlx5dv_devx_uar* devx_uar);
struct mlx5dv_devx_obj* mlx5dv_devx_obj_create(struct ibv_context* context, const void* in, size_t inlen,
    void* out, size_t outlen);
int mlx5dv_devx_obj_destroy(struct mlx5dv_devx_obj* obj);
int mlx5dv_devx_obj_modify(struct mlx5dv_devx_obj* obj, const void* in, size_t inlen, void* out,
    size_t outlen);
int mlx5dv_devx_query_eqn(struct ibv_context* context, uint32_t vector, uint32_t* eqn);
int mlx5dv_devx_umem_dereg(struct mlx5dv_devx_umem* umem);
struct mlx5dv_devx_umem* mlx5dv_devx_umem_reg_ex(struct ibv_context* ctx,
    struct mlx5dv_devx_umem_in* umem_in);
int mlx5dv_init_obj(struct mlx5dv_obj* obj, uint64_t obj_type);
bool mlx5dv_is_supported(struct ibv_device* device);
struct ibv_context* mlx5dv_open_device(struct ibv_device* device, struct mlx5dv_context_attr* attr);

// clang-format on
}  // namespace weft
