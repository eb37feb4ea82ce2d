// SPDX-License-Identifier: Apache-2.0
//
// A library that stands in for NVSHMEM on CPUs: processes of one host, a symmetric heap of shared memory whose blocks are
// made by all together. NVSHMEM's own words, as nvshmem_free() being collective, hold here, too.
#include <cstring>
#include <map>
#include <string>

#include "support/stand_in.h"
#include "transports/nvshmem/library.h"

using weft::nvshmem_link::InitAttributes;
using weft::nvshmem_link::UniqueId;
using weft::nvshmem_link::version_of;

namespace {

struct Shared {
  stand_in::Meeting::Board board;
};

std::string session;
Shared* shared = nullptr;
int my_rank = -1, all_ranks = 0, block_count = 0;
const std::atomic<bool> never{false};
std::map<const void*, std::map<int, void*>> parts;  // by own address, by rank

std::string name_of(int block, int rank) {
  return session + "-" + std::to_string(block) + "-" + std::to_string(rank);
}

void meet() {
  (void)stand_in::Meeting(&shared->board, static_cast<uint32_t>(all_ranks)).pass(never);
}

}  // namespace

extern "C" {

int weftStandsInForNvshmem() {
  return 1;
}

void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {
  *major = STAND_IN_MAJOR;
  *minor = 7;
  *patch = 2;
}

int nvshmemx_get_uniqueid(UniqueId* id) {
  if (id->version != version_of(sizeof *id)) return 1;
  snprintf(id->internal, sizeof id->internal, "/weft-nvshmem-%d", getpid());
  return 0;
}

int nvshmemx_set_attr_uniqueid_args(int rank, int ranks, const UniqueId* id, InitAttributes* attributes) {
  if (attributes->version != version_of(sizeof *attributes)) return 1;
  attributes->args.unique_id.id = const_cast<UniqueId*>(id);
  attributes->args.unique_id.my_rank = rank;
  attributes->args.unique_id.ranks = ranks;
  return 0;
}

int nvshmemx_hostlib_init_attr(unsigned flags, InitAttributes* attributes) {
  if (flags != weft::nvshmem_link::kInitWithUniqueId || shared) return 1;
  session = attributes->args.unique_id.id->internal;
  my_rank = attributes->args.unique_id.my_rank;
  all_ranks = attributes->args.unique_id.ranks;
  shared = static_cast<Shared*>(stand_in::map_shared(session, sizeof(Shared)));
  meet();
  shm_unlink(session.c_str());
  return 0;
}

void nvshmemx_hostlib_finalize() {
  meet();
}
int nvshmemx_init_status() {
  return shared ? weft::nvshmem_link::kIsInitialized : 0;
}
int nvshmem_my_pe() {
  return my_rank;
}
int nvshmem_n_pes() {
  return all_ranks;
}
void nvshmem_barrier_all() {
  meet();
}
int nvshmemx_cumodule_init(void*) {
  return 0;
}
int nvshmemx_cumodule_finalize(void*) {
  return 0;
}

void* nvshmem_align(size_t alignment, size_t bytes) {
  if (bytes % alignment != 0) return nullptr;
  const int block = block_count++;
  void* own = stand_in::map_shared(name_of(block, my_rank), bytes);
  if (own) std::memset(own, 0x5a, bytes);  // memory of NVSHMEM is not zero
  meet();
  for (int rank = 0; own && rank < all_ranks; ++rank)
    parts[own][rank] = rank == my_rank ? own : stand_in::map_shared(name_of(block, rank), bytes);
  meet();
  shm_unlink(name_of(block, my_rank).c_str());
  return own;
}

void nvshmem_free(void*) {
  meet();
}

void* nvshmem_ptr(const void* own, int rank) {
  const auto known = parts.find(own);
  return known == parts.end() ? nullptr : known->second[rank];
}

}  // extern "C"
