// SPDX-License-Identifier: Apache-2.0
//
// NCCL's part towards libnccl-rma-weft.so: loads the built library by its exported tables, makes a communicator of each
// rank's, and runs one thread per communicator that puts, asks and calls for progress in the order in which NCCL 2.30.7
// does (src/gin/gin_host_proxy.cc).
//   Library library("ncclRmaPlugin_v14"); Communicator comm(library, bootstrap);
//   Registered window = comm.enroll(data, bytes); comm.open(channels);
//   comm.push({.rank = 1, .channel = 0, ...});       // as a kernel does; waits while its ring is full
//   comm.quiet();                                    // everything that was pushed is done
// Threads: push() from one thread per channel; the rest from the rank's own.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "compat/nccl_rma/rma.h"
#include "support/ranks.h"

namespace weft::nccl_rma::testing {

// One table, whichever its version: what NCCL makes of version 13 (src/plugin/rma/rma_v13.cc) for itself.
class Library {
 public:
  explicit Library(const std::string& symbol);
  bool is_loaded() const { return v13_ || v14_; }
  const RmaV14& table() const { return table_; }
  NcclResult create_context(void* team, ConfigV14 config, void** context) const;
  NcclResult enroll(void* team, void* data, size_t bytes, int kind, uint64_t flags, void** memory) const;
  NcclResult put_signal(void* context, int channel, uint64_t src_offset, void* src, size_t bytes,
                        uint64_t dst_offset, void* dst, uint32_t rank, uint64_t signal_offset, void* signal,
                        uint64_t value, uint32_t op, bool is_strong, void** request) const;
  static std::vector<std::string> lines();  // that the plug-in has logged as warnings in this process

 private:
  const RmaV13* v13_ = nullptr;
  const RmaV14* v14_ = nullptr;
  RmaV14 table_{};
};

struct Operation {
  uint32_t rank = 0;
  uint32_t channel = 0;
  void* src = nullptr;
  uint64_t src_offset = 0;
  uint64_t bytes = 0;
  void* dst = nullptr;
  uint64_t dst_offset = 0;
  void* signal = nullptr;  // null: none
  uint64_t signal_offset = 0;
  uint64_t value = 0;
  uint32_t op = kSignalAdd;
  bool is_get = false;  // src is the rank's, dst is here
  bool is_strong = true;
};

class Communicator {
 public:
  Communicator(const Library& library, std::shared_ptr<Bootstrap> bootstrap);
  ~Communicator() { close(); }

  int rank() const { return bootstrap_->rank(); }
  int ranks() const { return bootstrap_->size(); }
  bool is_connected() const { return team_ != nullptr; }
  void* team() const { return team_; }
  void* context() const { return context_; }
  const Library& library() const { return library_; }

  void* enroll(void* data, size_t bytes, uint64_t flags = 0);
  // Creates the context and starts the progress thread.
  void open(int channels, int stride = 1);
  void push(const Operation& operation);
  // False where the progress thread has stopped, or `seconds` have passed.
  bool quiet(double seconds = 60);
  uint64_t pushed() const { return pushed_.load(); }
  // What stopped the progress thread; success while it runs.
  NcclResult failure() const { return failure_.load(); }
  void barrier();
  // Ends the context; the team stays.
  void shut();
  void close();

 private:
  static constexpr size_t kRing = size_t{kMaxRequests} * 32;
  struct Ring {
    std::mutex mutex;
    std::deque<Operation> operations;
    std::atomic<size_t> held{0};  // pushed and not done
    std::deque<void*> requests;   // of the progress thread
  };
  Ring& ring(uint32_t channel, uint32_t rank) {
    return *rings_[channel * static_cast<uint32_t>(ranks()) + rank];
  }
  NcclResult round();
  NcclResult post(const Operation& operation, void** request);

  const Library& library_;
  std::shared_ptr<Bootstrap> bootstrap_;
  void *instance_ = nullptr, *team_ = nullptr, *context_ = nullptr;
  std::vector<std::unique_ptr<Ring>> rings_;
  std::vector<void*> memory_;
  std::atomic<uint64_t> pushed_{0};
  std::atomic<NcclResult> failure_{kNcclSuccess};
  std::atomic<bool> stops_{false};
  std::thread progress_;
};

}  // namespace weft::nccl_rma::testing
