// SPDX-License-Identifier: Apache-2.0
//
// The binary interface of libmlx5 that is used here, and of libibverbs' extended completion queues.
// tests/unit/ibgda_mlx5_test.cc compares it with rdma-core's own headers where they are installed.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "providers/verbs/verbs.h"

namespace weft::ibgda::mlx5 {

namespace ib = provider::ib;

struct CqInitAttr {
  uint32_t entries;
  void* cq_context;
  void* channel;
  uint32_t vector;
  uint64_t wc_flags;
  uint32_t comp_mask, flags;
  ib::Pd* parent_domain;
};
constexpr uint32_t kCqMaskFlags = 1, kCqIgnoreOverrun = 1 << 1;

struct DirectQp {
  uint32_t* record;
  struct Ring {
    void* buffer;
    uint32_t blocks, stride;
  } sends, receives;
  struct {
    void* reg;
    uint32_t size;
  } doorbell;
  uint64_t comp_mask;
  int64_t mmap_offset;
  uint32_t numbers[4];
  uint64_t tir_address;
};
struct DirectCq {
  void* buffer;
  uint32_t* record;
  uint32_t entries, entry_bytes;
  void* uar;
  uint32_t number;
  uint64_t comp_mask;
};
struct Object {
  struct {
    void *in, *out;
  } qp, cq, others[5];
};
constexpr uint64_t kObjectQp = 1, kObjectCq = 2;

// The entry points in use; a test puts its own functions here.
struct Library {
  bool (*is_supported)(ib::Device*) = nullptr;
  ib::Cq* (*create_cq)(ib::Context*, CqInitAttr*, void* mlx5_attr) = nullptr;
  int (*init_obj)(Object*, uint64_t type) = nullptr;
};
// libmlx5, opened at run time and kept open. kUnsupported with the loader's words where there is none.
Result<Library> open_library();

}  // namespace weft::ibgda::mlx5
