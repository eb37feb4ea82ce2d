// SPDX-License-Identifier: Apache-2.0
//
// A library that stands in for NVSHMEM on CPUs: processes of one host, a symmetric heap of shared memory whose blocks are
// made by all together. NVSHMEM's own words, as nvshmem_free() being collective, hold here, too. Ranks of other nodes
// (WEFT_RANKS_PER_NODE) have no address, as behind a NIC: device calls reach them (stand_in_shmem.h).
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "support/stand_in.h"
#include "support/stand_in_shmem.h"
#include "transports/nvshmem/library.h"

using stand_in::FakeShmem;
using weft::nvshmem_link::InitAttributes;
using weft::nvshmem_link::UniqueId;
using weft::nvshmem_link::version_of;

namespace {

struct Shared {
  stand_in::Barrier::Counters counters;
};

std::string session;
Shared* shared = nullptr;
int my_rank = -1, all_ranks = 0, block_count = 0;
const std::atomic<bool> never{false};
struct Block {
  size_t bytes = 0;
  std::map<int, std::byte*> parts;  // by rank
};
std::map<const std::byte*, Block> blocks;  // by own address
std::mutex blocks_mutex;
FakeShmem* worker = nullptr;

std::string name_of(int block, int rank) {
  return session + "-" + std::to_string(block) + "-" + std::to_string(rank);
}

void meet() {
  (void)stand_in::Barrier(&shared->counters, static_cast<uint32_t>(all_ranks)).pass(never);
}

// Where a place of the own heap is at a peer.
std::byte* at_peer(const void* own, uint32_t peer) {
  std::lock_guard lock(blocks_mutex);
  const auto* place = static_cast<const std::byte*>(own);
  auto after = blocks.upper_bound(place);
  if (after == blocks.begin()) std::abort();  // NVSHMEM would write somewhere
  const auto& [base, block] = *--after;
  if (place >= base + block.bytes) std::abort();
  return block.parts.at(static_cast<int>(peer)) + (place - base);
}

bool is_near(int rank) {
  const char* per_node = std::getenv("WEFT_RANKS_PER_NODE");
  const int ranks = per_node ? std::atoi(per_node) : 0;
  return ranks == 0 || rank / ranks == my_rank / ranks;
}

const weft::shmem::HostCalls calls = {
    .put =
        [](std::byte* dst, const std::byte* src, uint64_t bytes, uint32_t peer) {
          worker->ask({.peer = peer, .dst = at_peer(dst, peer), .src = src, .bytes = bytes});
        },
    .get = [](std::byte* dst, const std::byte* src, uint64_t bytes,
              uint32_t peer) { std::memcpy(dst, at_peer(src, peer), bytes); },
    .fence = [] { worker->fence(); },
    .set = [](uint64_t* word, uint64_t value,
              uint32_t peer) { worker->ask({.peer = peer, .dst = at_peer(word, peer), .value = value}); },
    .add =
        [](uint64_t* word, uint64_t n, uint32_t peer) {
          worker->ask({.peer = peer, .dst = at_peer(word, peer), .value = n, .is_add = true});
        },
    .quiet = [] { worker->quiet(); },
};

}  // namespace

extern "C" {

const weft::shmem::HostCalls* weftStandsInForNvshmem() {
  return &calls;
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
  worker = new FakeShmem(static_cast<uint32_t>(my_rank));
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
  {
    std::lock_guard lock(blocks_mutex);
    Block& made = blocks[static_cast<const std::byte*>(own)];
    made.bytes = bytes;
    for (int rank = 0; own && rank < all_ranks; ++rank)
      made.parts[rank] =
          static_cast<std::byte*>(rank == my_rank ? own : stand_in::map_shared(name_of(block, rank), bytes));
  }
  meet();
  shm_unlink(name_of(block, my_rank).c_str());
  return own;
}

void nvshmem_free(void*) {
  meet();
}

void* nvshmem_ptr(const void* own, int rank) {
  std::lock_guard lock(blocks_mutex);
  const auto known = blocks.find(static_cast<const std::byte*>(own));
  return known == blocks.end() || !is_near(rank) ? nullptr : known->second.parts[rank];
}

}  // extern "C"
