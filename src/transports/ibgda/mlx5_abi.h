// SPDX-License-Identifier: Apache-2.0
//
// The binary interface of libmlx5 that is used here, and of libibverbs' extended completion queues.
// tests/unit/ibgda_mlx5_test.cc compares it with rdma-core's own headers where they are installed.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

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
struct DirectPd {
  uint32_t number;
  uint64_t comp_mask;
};
struct AddressVector {
  uint8_t unused[20];
  uint8_t mac[6];
  uint8_t traffic_class, hop_limit;
  uint32_t gid_and_flow;
  uint8_t gid[16];
};
struct DirectAh {
  AddressVector* vector;
  uint64_t comp_mask;
};
struct Object {
  struct {
    void *in, *out;
  } qp, cq, others[3], ah, pd;
};
constexpr uint64_t kObjectQp = 1, kObjectCq = 2, kObjectAh = 32, kObjectPd = 64;

struct ContextAttr {
  uint32_t flags;
  uint64_t comp_mask;
};
constexpr uint32_t kContextDevx = 1;
struct UmemIn {
  void* at;  // of a DMA-BUF: where in it
  size_t bytes;
  uint32_t access;
  uint64_t page_sizes;
  uint64_t comp_mask;
  int dmabuf;
};
constexpr uint64_t kUmemDmabuf = 1;
struct Umem {
  uint32_t number;
};
struct Uar {
  void *reg, *base;
  uint32_t page;
  off_t mmap_offset;
  uint64_t comp_mask;
};
constexpr uint32_t kUarNonCached = 1;
struct DevxObject;

// Commands that libmlx5 hands on to the NIC (DevX). All null where the library or a test lacks one.
struct Devx {
  ib::Context* (*open_device)(ib::Device*, ContextAttr*) = nullptr;
  Umem* (*umem_reg)(ib::Context*, UmemIn*) = nullptr;
  int (*umem_dereg)(Umem*) = nullptr;
  Uar* (*alloc_uar)(ib::Context*, uint32_t flags) = nullptr;
  void (*free_uar)(Uar*) = nullptr;
  int (*query_eqn)(ib::Context*, uint32_t vector, uint32_t* eqn) = nullptr;
  DevxObject* (*obj_create)(ib::Context*, const void* in, size_t, void* out, size_t) = nullptr;
  int (*obj_modify)(DevxObject*, const void* in, size_t, void* out, size_t) = nullptr;
  int (*obj_destroy)(DevxObject*) = nullptr;
};

// The entry points in use; a test puts its own functions here.
struct Library {
  bool (*is_supported)(ib::Device*) = nullptr;
  ib::Cq* (*create_cq)(ib::Context*, CqInitAttr*, void* mlx5_attr) = nullptr;
  int (*init_obj)(Object*, uint64_t type) = nullptr;
  Devx devx{};
  std::string lacks_devx{};  // which of those
};
// libmlx5, opened at run time and kept open. kUnsupported with the loader's words where there is none.
Result<Library> open_library();

}  // namespace weft::ibgda::mlx5
