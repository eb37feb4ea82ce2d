// SPDX-License-Identifier: Apache-2.0
//
// The object that an ncclComm_t points to: Weft's communicator, and a shadow of it in the real library for
// calls that Weft does not serve. Every decision between the two uses only facts that all ranks agreed on
// when the communicator was made, or arguments that NCCL requires to be the same on all ranks: else ranks
// would choose differently and wait for each other.
//   auto comm = std::make_unique<ncclComm>(device);
//   WEFT_TRY(comm->init(ids, rank, size, config));          // collective
//   WEFT_TRY(comm->run(operations));                        // what a group holds for this communicator
// Threads: run() and split() one at a time; stop(), async_error() from any.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/cuda_driver.h"
#include "base/owner_process.h"
#include "base/stream_order.h"
#include "bootstrap/tcp_bootstrap.h"
#include "collective/program_book.h"
#include "collective/runner.h"
#include "compat/nccl/nccl.h"
#include "compat/nccl/operation.h"

namespace weft::nccl {

// A reduction made by ncclRedOpCreatePreMulSum.
struct PreMulSum {
  ncclDataType_t type;
  const void* pointer;  // the scalar is read when a call runs; null: it is `bits`
  uint64_t bits;
  ncclRedOp_t real;  // the same operation of the real library
  bool is_alive;
};

// The last group of sends and receives that was one round: an equal group takes its plan.
struct KnownRound {
  struct Message {
    Function function;
    int peer;
    ncclDataType_t type;
    size_t count;
    uint64_t offset;  // offset in bytes from the lowest address of all sends, or of all receives

    bool operator==(const Message&) const = default;
  };
  std::vector<Message> messages;  // in the group's order; none: there was no such round
  size_t lowest_send = 0, lowest_recv = 0;
  const CollectiveRunner::PlannedRun* planned = nullptr;

  // Whether these differ from the group in the addresses of their memory alone.
  bool is_like(std::span<const Operation> operations) const;
};

// The device that a new communicator of this thread works on: the current CUDA device, or the host.
Device current_device();

}  // namespace weft::nccl

struct ncclComm {
 public:
  explicit ncclComm(weft::Device device) : device_(device) {}
  ~ncclComm();

  // Collective over the ranks of the rendezvous that the id names. Errors: kUnsupported when neither Weft nor
  // the real library can serve; kPeerLost.
  weft::Status init(const ncclUniqueId& id, int rank, int size, const ncclConfig_t* config);
  // The same over the ranks of this one with the same color. Collective over this one; null for no color.
  weft::Result<ncclUniqueId> split(int color, int key, int& rank, int& size);
  // A communicator that only the real library knows.
  void adopt(ncclComm_t real);

  // Notes what went wrong by itself: when it returns, another thread's abort may have ended the communicator.
  weft::Status run(std::span<const weft::nccl::Operation> operations);
  // Whether run() can return without another rank of this process being in the call. True for one launch of a plan
  // that has run before, so that no memory is allocated and no kernel loaded beside a kernel that waits, and only
  // if neither the real library nor hosts of other ranks take part.
  bool starts_at_once(std::span<const weft::nccl::Operation> operations);

  // Makes everything that waits give up soon, on this rank; nothing works afterwards.
  void stop();
  ncclResult_t async_error();
  void note(const weft::Status& status);

  weft::Result<ncclRedOp_t> add_op(const weft::nccl::PreMulSum& op);
  weft::nccl::PreMulSum* find_op(ncclRedOp_t op);

  int rank() const { return rank_; }
  int size() const { return size_; }
  weft::Device device() const { return device_; }
  ncclComm_t real() const { return real_; }
  // False where this is a communicator of the real library.
  bool is_ours() const { return magic_ == kMagic; }
  const std::string& last_error() const { return last_error_; }
  // kInvalid in a forked child. Communicators of the real library have no owner here.
  weft::Status check_owner() const { return is_ours() ? owner_.check("comm") : weft::Status(); }

 private:
  using Operation = weft::nccl::Operation;
  using Status = weft::Status;
  using PlannedRun = weft::CollectiveRunner::PlannedRun;
  using PlannedExchange = weft::CollectiveRunner::PlannedExchange;
  using PlannedCall = std::variant<PlannedRun, PlannedExchange>;
  // The data that goes to each rank, and that comes from each.
  using Round = std::pair<std::vector<weft::ChunkSpan>, std::vector<weft::ChunkSpan>>;
  struct Buffers {
    std::byte *input, *output;
  };
  struct RoundOrder {
    bool operator()(const Round& a, const Round& b) const;
  };

  Status meet(const ncclUniqueId& id, ncclUniqueId& real_id, bool& all_have_real);
  Status make_runners();
  Status make_scaler();
  Status make_shadow(const ncclUniqueId& real_id, const ncclConfig_t* config);
  // Whether all ranks say yes; errors: kPeerLost.
  weft::Result<bool> agree(bool mine);

  Status run_on_device(std::span<const Operation> operations);
  Status run_in_order(std::span<const Operation> operations);
  bool serves(const Operation& operation);
  Status serve(const Operation& operation);
  Status serve_one_rank(const Operation& operation);
  Status forward(const std::vector<const Operation*>& operations);
  Status forward_one(const Operation& operation);
  const weft::BookChoice* exchange_for(const Operation& operation) const;
  weft::Result<const PlannedCall*> plan_of(const Operation& operation);
  weft::Result<PlannedExchange> plan_exchange(const Operation& operation, const weft::BookChoice& choice);
  weft::Result<PlannedRun> plan_program(const Operation& operation);
  weft::Result<Buffers> buffers_of(const Operation& operation);
  weft::Result<const std::byte*> premultiplied(const Operation& operation, uint64_t elems);
  Status multiply(std::byte* data, uint64_t elems, const Operation& operation);
  Status exchange(const std::vector<const Operation*>& operations);
  // Gives the plan that it ran.
  weft::Result<const PlannedRun*> exchange_round(const std::vector<const Operation*>& sends,
                                                 const std::vector<const Operation*>& recvs,
                                                 cudaStream_t stream);
  weft::Result<const PlannedRun*> plan_round(std::vector<weft::ChunkSpan> out,
                                             std::vector<weft::ChunkSpan> in);
  Status run_last_round(std::span<const Operation> operations);
  std::vector<Operation> as_transfers(const Operation& operation) const;
  weft::Result<uint32_t> load(weft::CollectiveRunner& runner, weft::BookCollective collective,
                              uint32_t program, int root);
  Status copy(void* dst, const void* src, uint64_t bytes, cudaStream_t stream);
  weft::Result<std::byte*> staging(uint64_t bytes);
  Status enter_stream(cudaStream_t stream);
  Status leave_stream(cudaStream_t stream);
  bool is_capturing(cudaStream_t stream) const;

  static constexpr uint64_t kMagic = 0x5745465443434f4d;
  static constexpr size_t kCachedPlans = 1024;  // of each kind
  const uint64_t magic_ = kMagic;  // first, where the real library's communicators have another number
  const weft::OwnerProcess owner_;
  const weft::Device device_;
  int rank_ = 0, size_ = 1;
  bool is_weft_ = false;                         // Weft serves; agreed
  std::map<std::array<int, 4>, size_t> served_;  // the most elements, by function, type, operator, and peer
  std::vector<bool> is_forwarded_;               // by Function: what WEFT_NCCL_FORWARD names
  std::shared_ptr<weft::Bootstrap> bootstrap_;
  std::shared_ptr<weft::Communicator> comm_;
  std::unique_ptr<weft::ProgramBook> book_;
  std::unique_ptr<weft::CollectiveRunner> collectives_, pairs_;
  std::unique_ptr<weft::CollectiveRunner> scaler_;                // of one rank, if there are operators
  std::map<std::pair<uint32_t, int>, uint32_t> loaded_;           // by (program of the book, root)
  std::map<std::pair<uint64_t, uint64_t>, PlannedCall> planned_;  // by form_of()
  std::map<Round, PlannedRun, RoundOrder> planned_rounds_;
  weft::nccl::KnownRound last_round_;
  std::vector<std::unique_ptr<weft::LocalMemory>> staging_;
  weft::StreamMark last_call_{device_};
  ncclComm_t real_ = nullptr;
  std::vector<weft::nccl::PreMulSum> ops_;
  std::mutex mutex_;
  std::atomic<bool> is_stopped_{false};
  std::atomic<ncclResult_t> async_error_{ncclSuccess};
  std::string last_error_;
};
