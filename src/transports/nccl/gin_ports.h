// SPDX-License-Identifier: Apache-2.0
//
// The host half of ports through NCCL's GIN: the structures that kernels get beside NCCL's own (wire.h), and the faults
// of kernels. NCCL's calls are the link's (connection.cc).
//   WEFT_TRY_ASSIGN(auto ports, GinPorts::create(device, rank, ranks, records, timeout_s));
//   WEFT_TRY(ports->set_comm(filled_by_nccl, bytes));
//   offer = *ports->offer(number);  WEFT_TRY(ports->accept(view, offers));  NcclMesh mesh = ports->mesh(view, window);
// Threads: one at a time, but for help().
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "memory/host_visible.h"
#include "memory/local_memory.h"
#include "transports/nccl/channel.cuh"
#include "transports/nccl/library.h"
#include "transports/transport.h"

namespace weft::nccl_link {

// Why GIN cannot be compiled for or called with a library; empty where it can. `folder`: where its headers are.
std::string why_no_gin(const Library& nccl, std::string* folder = nullptr);

class GinPorts {
 public:
  static Result<std::unique_ptr<GinPorts>> create(Device device, int rank, int ranks, uint32_t records,
                                                  double timeout_s);
  ~GinPorts();

  // The requirements on the device communicator for these ports, and the bytes of an inbox.
  Requirements requirements(const Properties& properties) const;
  uint64_t inbox_bytes() const { return uint64_t{ranks_} * records_ * sizeof(nccl_gin::Record); }

  // The device communicator that NCCL has filled in, and the inbox: its window and this rank's part. From now on
  // arriving records are applied; on CPUs by a thread.
  Status start(const void* dev_comm, uint64_t bytes, void* inbox_window, std::byte* inbox);

  // Stops applying records: NCCL's structures are about to go.
  void stop();

  // A window is named by a slot here and a number of its use. Errors: kCapacity where no slot is free.
  Result<std::string> offer(int window);
  Status accept(const WindowView& view, const std::vector<std::string>& offers);
  // Records for it are dropped from now on. Waits for kernels that may have looked it up.
  void forget(int window);
  NcclMesh mesh(const WindowView& view, void* window) const;

  // On CPUs: applies the records that have arrived. Threads: any.
  bool help();
  // Why a kernel gave up; ok where none did.
  Status status() const;
  // The same for mistakes in a kernel's calls; a lost peer is no mistake.
  Status fault() const;
  // The peer of a fault that says it is lost; -1.
  int lost_peer() const;

 private:
  struct Known {
    uint32_t slot = 0, use = 0;
    std::unique_ptr<LocalMemory> places;
  };
  GinPorts(Device device, int rank, int ranks, uint32_t records, double timeout_s);
  NcclMesh of_no_window() const;  // for taking in what has come
  Status write_window(uint32_t slot, const nccl_gin::KnownWindow& window);

  const Device device_;
  const uint32_t rank_, ranks_, records_;
  const double timeout_s_;
  std::unique_ptr<HostVisible> fault_;
  std::unique_ptr<LocalMemory> comm_, outgoing_, incoming_, table_;
  void* inbox_window_ = nullptr;
  std::byte* inbox_ = nullptr;
  std::map<int, Known> windows_;  // by number
  std::vector<bool> is_used_;     // slots
  std::vector<uint32_t> uses_;    // of each slot so far
  std::mutex helping_;            // on CPUs: the table is not written while records are taken in
  std::jthread helper_;
};

}  // namespace weft::nccl_link
