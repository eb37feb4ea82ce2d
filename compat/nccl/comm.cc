// SPDX-License-Identifier: Apache-2.0
#include "compat/nccl/comm.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "base/config.h"
#include "base/log.h"
#include "compat/nccl/machine.h"
#include "compat/nccl/real.h"

using weft::Code;
using weft::Result;
using weft::Status;

namespace weft::nccl {
namespace {

constexpr uint64_t kSlotBytes = 128 << 10, kUnusedSlotBytes = 4 << 10;

// What a rank tells the others first. All run the same build, which the id's magic and `bytes` check.
struct RankDescriptor {
  uint64_t bytes = sizeof(RankDescriptor);
  uint64_t has_real = 0;
  uint64_t is_host = 0;
  char forward[512] = {};
  ncclUniqueId real_id = {};  // of rank 0
};

// By Function: what WEFT_NCCL_FORWARD names; "all" means every one.
std::vector<bool> forwarded_functions() {
  std::vector<bool> is_forwarded(kFunctions);
  std::istringstream names(config().nccl_forward);
  for (std::string name; std::getline(names, name, ',');)
    for (int i = 0; i < kFunctions; ++i)
      if (name == "all" || name == kFunctionNames[i]) is_forwarded[i] = true;
  return is_forwarded;
}

// Older programs give a shorter struct; the real library reads what `size` covers. Ours blocks: a
// communicator of Weft is ready when init returns, so its shadow has to be.
ncclConfig_t blocking(const ncclConfig_t* given) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  if (given) std::memcpy(static_cast<void*>(&config), given, std::min(given->size, sizeof config));
  config.blocking = 1;
  return config;
}

}  // namespace

Device current_device() {
  const auto driver = config().nccl_device == "cpu" ? Result<const CudaDriver*>(nullptr) : cuda_driver();
  if (!driver.ok() || !*driver) return {};
  CUdevice ordinal = 0;
  CUcontext context = nullptr;
  if ((*driver)->cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context ||
      (*driver)->cuCtxGetDevice(&ordinal) != CUDA_SUCCESS)
    ordinal = 0;
  return {Device::Kind::kCuda, ordinal};
}

}  // namespace weft::nccl

ncclComm::~ncclComm() {
  // After stop() another thread's call may still be on its way out.
  std::lock_guard lock(mutex_);
}

Status ncclComm::init(const ncclUniqueId& id, int rank, int size, const ncclConfig_t* config) {
  rank_ = rank;
  size_ = size;
  is_forwarded_ = weft::nccl::forwarded_functions();
  ncclUniqueId real_id{};
  bool all_have_real = false;
  WEFT_TRY(meet(id, real_id, all_have_real));
  const Status weft_status = size_ > 1 ? make_runners() : Status();
  if (weft_status.code() == Code::kPeerLost) return weft_status;
  WEFT_TRY_ASSIGN(is_weft_, agree(weft_status.ok()));
  if (!is_weft_) {
    collectives_.reset();
    pairs_.reset();
    const std::string why = weft_status.ok() ? "another rank cannot" : weft_status.message();
    if (!all_have_real)
      return weft::logged(
          Status::make(Code::kUnsupported,
                       "Weft cannot serve this communicator ({}), and there is no real NCCL on all "
                       "ranks",
                       why));
    weft::log_warn("nccl: the real library serves this communicator: {}", why);
  }
  if (!all_have_real) return {};
  return make_shadow(real_id, config);
}

// Tells everybody what this rank has, and learns the id of the shadow.
Status ncclComm::meet(const ncclUniqueId& id, ncclUniqueId& real_id, bool& all_have_real) {
  const auto until = weft::Deadline::after_s(weft::config().timeout_s);
  weft::UniqueId unique_id;
  std::memcpy(&unique_id, id.internal, sizeof unique_id);
  if (!unique_id.is_valid())
    return Status::invalid("commId: got bytes that ncclGetUniqueId of this library did not make");
  WEFT_TRY_ASSIGN(bootstrap_, weft::join_rendezvous(unique_id, rank_, size_, until));
  weft::nccl::RankDescriptor mine;
  mine.is_host = device_.is_host();
  const std::string& forward = weft::config().nccl_forward;
  std::memcpy(mine.forward, forward.data(), std::min(forward.size(), sizeof mine.forward - 1));
  mine.has_real = !device_.is_host() && !weft::nccl::real_path().empty();
  if (rank_ == 0 && mine.has_real) {
    const auto get_id = weft::nccl::real<decltype(&ncclGetUniqueId)>("ncclGetUniqueId");
    mine.has_real = get_id && get_id(&mine.real_id) == ncclSuccess;
  }
  WEFT_TRY_ASSIGN(
      const std::vector<std::string> all,
      bootstrap_->all_gather(std::string(reinterpret_cast<const char*>(&mine), sizeof mine), until));
  all_have_real = true;
  for (int rank = 0; rank < size_; ++rank) {
    weft::nccl::RankDescriptor theirs;
    if (all[rank].size() != sizeof theirs)
      return Status::invalid("rank {} runs another version of Weft", rank);
    std::memcpy(static_cast<void*>(&theirs), all[rank].data(), sizeof theirs);
    if (rank == 0) real_id = theirs.real_id;
    if (std::strcmp(theirs.forward, mine.forward) != 0 || theirs.is_host != mine.is_host)
      return weft::logged(
          Status::invalid("rank {} has another WEFT_NCCL_FORWARD or WEFT_NCCL_DEVICE than rank {}, allowed: "
                          "the same on all ranks",
                          rank, rank_));
    all_have_real = all_have_real && theirs.has_real;
  }
  return {};
}

// Weft's communicator, the book and the runners, with every program loaded that needs no root but 0: loading
// is not for a stream that is being captured.
Status ncclComm::make_runners() {
  if (!device_.is_host()) weft::nccl::find_toolchain();
  WEFT_TRY_ASSIGN(comm_, weft::Communicator::create(bootstrap_, device_));
  auto book = weft::nccl::find_book(device_, static_cast<uint32_t>(size_));
  const uint64_t digest = book.ok() ? book->digest() : 0;
  WEFT_TRY_ASSIGN(const std::vector<std::string> digests,
                  bootstrap_->all_gather(std::to_string(digest), comm_->deadline()));
  if (!book.ok()) return book.status();
  for (const std::string& other : digests)
    if (other != std::to_string(digest))
      return weft::logged(Status::invalid("program book: ranks read different ones"));
  book_ = std::make_unique<weft::ProgramBook>(std::move(*book));
  // enter_stream() and leave_stream() order the calls of both.
  weft::RunnerOptions whole{.channels = book_->channels(false), .orders_streams = false};
  weft::RunnerOptions pairs{
      .channels = book_->channels(true), .has_exchanges = false, .orders_streams = false};
  if (!device_.is_host()) {
    // Sixteen blocks a link, each with eight messages on their way: smaller ones keep the memory in bounds.
    whole.simple_slot_bytes = pairs.simple_slot_bytes = weft::nccl::kSlotBytes;
    pairs.ll_slot_bytes = weft::nccl::kUnusedSlotBytes;
  }
  WEFT_TRY_ASSIGN(collectives_, weft::CollectiveRunner::create(comm_, whole));
  WEFT_TRY_ASSIGN(pairs_, weft::CollectiveRunner::create(comm_, pairs));
  if (!book_->choose(weft::BookCollective::kExchange, 0))
    return Status::invalid("program book: has no exchange");
  for (const weft::BookChoice& choice : book_->choices()) {
    if (choice.mode != weft::BookMode::kProgram) continue;
    const bool is_exchange = choice.collective == weft::BookCollective::kExchange;
    WEFT_TRY(load(is_exchange ? *pairs_ : *collectives_, choice.collective, choice.program, 0).status());
  }
  return {};
}

// For one rank, which has no runners: what multiplies by the scalars of its operators.
Status ncclComm::make_scaler() {
  if (!device_.is_host()) weft::nccl::find_toolchain();
  WEFT_TRY_ASSIGN(comm_, weft::Communicator::create(bootstrap_, device_));
  WEFT_TRY_ASSIGN(scaler_,
                  weft::CollectiveRunner::create(comm_, {.channels = 1,
                                                         .simple_slot_bytes = weft::nccl::kUnusedSlotBytes,
                                                         .ll_slot_bytes = weft::nccl::kUnusedSlotBytes,
                                                         .has_exchanges = false,
                                                         .orders_streams = false}));
  return {};
}

// The real library works on the thread's current device, which in a thread of ours is the first one.
Status ncclComm::make_shadow(const ncclUniqueId& real_id, const ncclConfig_t* config) {
  WEFT_TRY_ASSIGN(weft::CudaContext context, weft::CudaContext::enter(device_.ordinal));
  const auto init = weft::nccl::real<decltype(&ncclCommInitRankConfig)>("ncclCommInitRankConfig");
  ncclConfig_t blocking = weft::nccl::blocking(config);
  const ncclResult_t result = init ? init(&real_, size_, real_id, rank_, &blocking) : ncclInvalidUsage;
  WEFT_TRY_ASSIGN(const bool all, agree(result == ncclSuccess));
  if (all) return {};
  real_ = nullptr;
  const Status status =
      Status::make(Code::kSystem, "the real NCCL's ncclCommInitRankConfig gave {} on rank {}",
                   static_cast<int>(result), rank_);
  if (!is_weft_) return weft::logged(status);
  weft::log_warn("nccl: nothing can be forwarded: {}", status.message());
  return {};
}

Result<bool> ncclComm::agree(bool mine) {
  const auto until = weft::Deadline::after_s(weft::config().timeout_s);
  WEFT_TRY_ASSIGN(const std::vector<std::string> all, bootstrap_->all_gather(mine ? "1" : "0", until));
  return std::all_of(all.begin(), all.end(), [](const std::string& answer) { return answer == "1"; });
}

void ncclComm::adopt(ncclComm_t real) {
  real_ = real;
  const auto count = weft::nccl::real<decltype(&ncclCommCount)>("ncclCommCount");
  const auto user_rank = weft::nccl::real<decltype(&ncclCommUserRank)>("ncclCommUserRank");
  if (count) count(real, &size_);
  if (user_rank) user_rank(real, &rank_);
}

// Everybody says its color and key; the first of each color then opens a rendezvous for it.
Result<ncclUniqueId> ncclComm::split(int color, int key, int& rank, int& size) {
  std::lock_guard lock(mutex_);
  if (!bootstrap_)
    return Status::make(Code::kUnsupported, "ncclCommSplit of a communicator that Weft did not make");
  struct Wish {
    int color, key, rank;
  };
  const Wish mine{color, key, rank_};
  const auto until = weft::Deadline::after_s(weft::config().timeout_s);
  WEFT_TRY_ASSIGN(
      const std::vector<std::string> wishes,
      bootstrap_->all_gather(std::string(reinterpret_cast<const char*>(&mine), sizeof mine), until));
  std::vector<Wish> group;
  for (const std::string& bytes : wishes) {
    Wish wish{};
    std::memcpy(&wish, bytes.data(), std::min(bytes.size(), sizeof wish));
    if (wish.color == color) group.push_back(wish);
  }
  std::stable_sort(group.begin(), group.end(), [](const Wish& a, const Wish& b) { return a.key < b.key; });
  std::string unique_id;
  if (color != NCCL_SPLIT_NOCOLOR && group.front().rank == rank_) {
    WEFT_TRY_ASSIGN(const weft::UniqueId opened, weft::open_rendezvous(weft::config().nccl_interface));
    unique_id.assign(reinterpret_cast<const char*>(&opened), sizeof opened);
  }
  WEFT_TRY_ASSIGN(const std::vector<std::string> ids, bootstrap_->all_gather(unique_id, until));
  ncclUniqueId id{};
  if (color == NCCL_SPLIT_NOCOLOR) return id;
  const std::string& ours = ids[group.front().rank];
  std::memcpy(id.internal, ours.data(), std::min(ours.size(), sizeof id.internal));
  size = static_cast<int>(group.size());
  for (int at = 0; at < size; ++at)
    if (group[at].rank == rank_) rank = at;
  return id;
}

void ncclComm::stop() {
  is_stopped_ = true;
  if (collectives_) collectives_->stop();
  if (pairs_) pairs_->stop();
}

ncclResult_t ncclComm::async_error() {
  if (std::unique_lock lock(mutex_, std::try_to_lock); lock.owns_lock())
    for (auto* runner : {collectives_.get(), pairs_.get()})
      if (const Status status = runner ? runner->fault() : Status(); !status.ok()) {
        note(status);
        if (status.code() == Code::kInvalid) async_error_ = ncclInvalidUsage;  // calls differ
      }
  return async_error_;
}

void ncclComm::note(const Status& status) {
  if (status.ok()) return;
  last_error_ = status.message();
  if (status.code() == Code::kPeerLost) async_error_ = ncclRemoteError;
}

Result<ncclRedOp_t> ncclComm::add_op(const weft::nccl::PreMulSum& op) {
  std::lock_guard lock(mutex_);
  // Now, since it takes memory, which a call under capture cannot get.
  if (size_ == 1 && !real_ && !scaler_) WEFT_TRY(make_scaler());
  // PyTorch makes one for each call, and lets it go: its number is free again.
  auto place = std::ranges::find_if(ops_, [](const auto& known) { return !known.is_alive; });
  if (place == ops_.end())
    place = ops_.insert(place, op);
  else
    *place = op;
  return static_cast<ncclRedOp_t>(ncclNumOps + static_cast<int>(place - ops_.begin()));
}

weft::nccl::PreMulSum* ncclComm::find_op(ncclRedOp_t op) {
  const int at = static_cast<int>(op) - ncclNumOps;
  if (at < 0 || at >= static_cast<int>(ops_.size()) || !ops_[at].is_alive) return nullptr;
  return &ops_[at];
}
