// SPDX-License-Identifier: Apache-2.0
//
// gin.cuh: the calls of NCCL's GIN that the channel makes, each by one thread. On GPUs these are NCCL's own, from the headers
// of the library that is loaded (device_headers.h). Where a kernel is compiled without them there is no GIN, and on CPUs
// a library that stands in for it.
//   const Gin gin(comm, context_of(comm, self, peer));
// Apart: each is some hundred instructions, and kernels call them in many places.
#pragma once

#include "transports/nccl/wire.h"

#if defined(WEFT_NCCL_HEADERS)
#include "weft_nccl.h"
#endif

namespace weft::nccl_gin {

struct Queue {
  uint32_t room;  // 0: there is none
  uint32_t done;
};

#if defined(WEFT_NCCL_HEADERS)

using DevComm = ncclDevComm;

WEFT_DEVICE uint32_t rank_of(const DevComm& comm) {
  return static_cast<uint32_t>(comm.rank);
}
WEFT_DEVICE uint32_t ranks_of(const DevComm& comm) {
  return static_cast<uint32_t>(comm.nRanks);
}
WEFT_DEVICE uint32_t contexts_of(const DevComm& comm) {
  return static_cast<uint32_t>(comm.ginContextCount);
}

// The bytes of the source, which other threads may have written: at system scope, as peers may have, too.
WEFT_APART void put(const DevComm& comm, uint32_t context, uint32_t peer, void* dst_window, uint64_t dst,
                    void* src_window, uint64_t src, uint64_t bytes, uint32_t counter) {
  const ncclGin gin(comm, static_cast<int>(context));
#if NCCL_VERSION_CODE >= 23005
  const ncclGin_WeakCounterInc done{counter};
#else
  const ncclGin_CounterInc done{counter};
#endif
  gin.put(ncclTeamWorld(comm), static_cast<int>(peer), static_cast<ncclWindow_t>(dst_window), dst,
          static_cast<ncclWindow_t>(src_window), src, bytes, ncclGin_None{}, done, ncclCoopThread{},
          ncclGin_None{}, cuda::thread_scope_thread, cuda::thread_scope_system);
}

// A word with nothing to publish besides the bytes of earlier calls.
WEFT_APART void put_value(const DevComm& comm, uint32_t context, uint32_t peer, void* window, uint64_t dst,
                          uint64_t value, int64_t strong_signal) {
  const ncclGin gin(comm, static_cast<int>(context));
  const auto to = static_cast<ncclWindow_t>(window);
  const int who = static_cast<int>(peer);
#if NCCL_VERSION_CODE >= 23005
  using SignalAdd = ncclGin_StrongSignalAdd;
#else
  using SignalAdd = ncclGin_SignalAdd;
#endif
  if (strong_signal < 0)
    gin.putValue(ncclTeamWorld(comm), who, to, dst, value, ncclGin_None{}, ncclCoopThread{}, ncclGin_None{},
                 cuda::thread_scope_system, cuda::thread_scope_system);
  else
    gin.putValue(ncclTeamWorld(comm), who, to, dst, value,
                 SignalAdd{static_cast<ncclGinSignal_t>(strong_signal), 1}, ncclCoopThread{}, ncclGin_None{},
                 cuda::thread_scope_system, cuda::thread_scope_system);
}

WEFT_APART void signal_add(const DevComm& comm, uint32_t context, uint32_t peer, uint32_t signal,
                           uint64_t n) {
  const ncclGin gin(comm, static_cast<int>(context));
#if NCCL_VERSION_CODE >= 23005
  using SignalAdd = ncclGin_WeakSignalAdd;
#else
  using SignalAdd = ncclGin_SignalAdd;
#endif
  gin.signal(ncclTeamWorld(comm), static_cast<int>(peer), SignalAdd{signal, n});
}

WEFT_APART void get(const DevComm& comm, uint32_t context, uint32_t peer, void* window, uint64_t dst,
                    uint64_t src, uint64_t bytes) {
  const ncclGin gin(comm, static_cast<int>(context));
  const auto both = static_cast<ncclWindow_t>(window);
  gin.get(ncclTeamWorld(comm), static_cast<int>(peer), both, src, both, dst, bytes);
}
// Waits for earlier gets, whose bytes are then visible; before NCCL 2.31 without a deadline.
WEFT_APART void settle_gets(const DevComm& comm, uint32_t context, uint32_t peer) {
  const ncclGin gin(comm, static_cast<int>(context));
  ncclGinRequest_t request;
  gin.flushAsync(ncclTeamWorld(comm), peer, &request);
  gin.wait(request);
}

// NCCL's queue to a peer: how many descriptors it holds, and how many NCCL is done with, modulo 2^32. A back end that writes
// a NIC's queue has none: its waits end with the NIC's completions.
WEFT_APART Queue queue_to(const DevComm& comm, uint32_t context, uint32_t peer) {
#if NCCL_GIN_PROXY_ENABLE
  const ncclGin gin(comm, static_cast<int>(context));
  const auto& proxy = static_cast<const ncclGinProxyGpuCtx_t*>(gin._ginHandle)[gin.contextId];
  return {proxy.queueSize, load_relaxed(&proxy.cis[peer])};
#else
  return {0, 0};
#endif
}

WEFT_APART uint64_t read_signal(const DevComm& comm, uint32_t context, uint32_t signal) {
  return ncclGin(comm, static_cast<int>(context)).readSignal(signal);
}
WEFT_APART uint64_t read_counter(const DevComm& comm, uint32_t context, uint32_t counter) {
  return ncclGin(comm, static_cast<int>(context)).readCounter(counter);
}

#else

using DevComm = HostGin;

WEFT_DEVICE uint32_t rank_of(const DevComm& comm) {
  return comm.rank;
}
WEFT_DEVICE uint32_t ranks_of(const DevComm& comm) {
  return comm.ranks;
}
WEFT_DEVICE uint32_t contexts_of(const DevComm& comm) {
  return comm.contexts;
}
WEFT_DEVICE void put(const DevComm& comm, uint32_t context, uint32_t peer, void* dst_window, uint64_t dst,
                     void* src_window, uint64_t src, uint64_t bytes, uint32_t counter) {
  comm.put(comm.self, context, peer, dst_window, dst, src_window, src, bytes, counter);
}
WEFT_DEVICE void put_value(const DevComm& comm, uint32_t context, uint32_t peer, void* window, uint64_t dst,
                           uint64_t value, int64_t strong_signal) {
  comm.put_value(comm.self, context, peer, window, dst, value, strong_signal);
}
WEFT_DEVICE void signal_add(const DevComm& comm, uint32_t context, uint32_t peer, uint32_t signal,
                            uint64_t n) {
  comm.signal_add(comm.self, context, peer, signal, n);
}
WEFT_DEVICE void get(const DevComm& comm, uint32_t context, uint32_t peer, void* window, uint64_t dst,
                     uint64_t src, uint64_t bytes) {
  comm.get(comm.self, context, peer, window, dst, src, bytes);
}
WEFT_DEVICE void settle_gets(const DevComm&, uint32_t, uint32_t) {}
WEFT_DEVICE Queue queue_to(const DevComm& comm, uint32_t context, uint32_t peer) {
  return {comm.queue_room, comm.queue_done(comm.self, context, peer)};
}
WEFT_DEVICE uint64_t read_signal(const DevComm& comm, uint32_t context, uint32_t signal) {
  return comm.read_signal(comm.self, context, signal);
}
WEFT_DEVICE uint64_t read_counter(const DevComm& comm, uint32_t context, uint32_t counter) {
  return comm.read_counter(comm.self, context, counter);
}

#endif

// Order holds within a context, and each has signals of its own. Both ranks of a pair count alike, so all between them goes
// through one.
WEFT_DEVICE uint32_t context_of(const DevComm& comm, uint32_t one, uint32_t other) {
  return (one + other) % contexts_of(comm);
}

}  // namespace weft::nccl_gin
