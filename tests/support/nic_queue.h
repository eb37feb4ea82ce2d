// SPDX-License-Identifier: Apache-2.0
//
// One queue of the model of a NIC (nic_model.h): what it was told of, fetched, carried out and completed.
// Threads: step() by the thread that serves it; the others by any.
#pragma once

#include <deque>
#include <optional>
#include <random>
#include <utility>

#include "support/nic_model.h"

namespace weft::testing {

// A 64-byte block's words, big-endian made native.
struct Decoded {
  uint32_t opcode = 0, flags = 0, blocks = 1;
  uint64_t remote = 0, local = 0, add = 0, compare = 0;
  uint32_t remote_key = 0, local_key = 0;
  uint64_t bytes = 0;
  bool has_remote = false, has_data = false;
  std::vector<std::byte> inline_bytes;
  bool is_signalled() const { return (flags >> 2 & 3) >= 2; }
  bool answers() const {  // something comes back for it
    using enum ibgda::Opcode;
    return opcode == static_cast<uint32_t>(kRead) || opcode == static_cast<uint32_t>(kFetchAdd) ||
           opcode == static_cast<uint32_t>(kCompareSwap);
  }
};

// Reads an entry of `units` blocks as a NIC does; an error names what is wrong.
std::string decode(const std::vector<std::byte>& entry, uint64_t index, uint32_t queue, Decoded& out);

class ModelQueue {
 public:
  ModelQueue(std::shared_ptr<NicShared> shared, std::shared_ptr<ModelNic::Core> nic,
             std::shared_ptr<const void> held, const ibgda::QueueMemory& at, bool fills, uint64_t seed,
             FarQueue far);

  const ibgda::QueueMemory& memory() const { return far_.room ? far_.at : at_; }
  // Of memory of a device, as the host sees and writes it.
  uint32_t posted();
  ibgda::Completion completion(uint32_t index);
  Status put_entry(uint32_t index, const ibgda::Entry& entry);
  const ModelNic::Core& nic() const { return *nic_; }
  void kill() { nic_->is_alive.store(false); }
  std::string address();
  Status connect(std::string_view address);
  void reset();
  void refuse_next(ibgda::Syndrome why);
  void set_taken(uint64_t completions);
  void ring(uint64_t doorbell);
  // A turn; whether anything came of it.
  bool step();

 private:
  using Clock = std::chrono::steady_clock;
  enum class State { kReset, kReady, kError };

  struct Flight {
    uint64_t index = 0;
    Decoded entry;
    std::vector<std::byte> payload;
    std::vector<std::pair<uint64_t, uint64_t>> pieces;  // place and bytes, in the order in which they move
    bool is_sent = false, is_executed = false, is_done = false;
    ibgda::Syndrome error{};
    std::optional<Clock::time_point> gives_up;
  };

  bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(random_) < p; }
  void fail(const std::string& what);
  void fill();
  bool look_at_doorbell();
  void accept(uint64_t bound);
  void copy_from_device(void* to, uint64_t bytes);
  void copy_to_device(const void* from, uint64_t bytes);
  uint64_t hash_of(uint64_t block) const;
  bool fetch();
  bool carry_out();
  bool carry_out(Flight& flight);
  bool reach_peer(Flight& flight, std::shared_ptr<ModelQueue>& peer);
  void send_piece(Flight& flight, ModelQueue& peer);
  void execute_atomic(Flight& flight, ModelQueue& peer);
  bool answer();
  void answer(Flight& flight);
  bool retire();
  void retire_blocks(const Flight& flight);
  void complete(uint64_t index, const Decoded& entry, uint32_t opcode, ibgda::Syndrome error);
  void flush();
  // A range of enrolled memory. Under keys.
  struct Found {
    std::byte* at;
    FarMemory* far;
  };
  // None where it may not be reached.
  static std::optional<Found> find(const std::map<uint32_t, ModelNic::Memory>& keys, uint32_t key,
                                   uint64_t address, uint64_t bytes, uint32_t access);
  std::vector<std::byte> read(const Found& from, uint64_t bytes);
  void write(const Found& to, uint64_t offset, const std::byte* from, uint64_t bytes);

  const std::shared_ptr<NicShared> shared_;
  const std::shared_ptr<ModelNic::Core> nic_;
  const std::shared_ptr<const void> held_;  // the memory
  const bool fills_;                        // it when the queue is reset; else who made it did
  ibgda::QueueMemory at_;                   // memory of the host
  const FarQueue far_;
  std::mutex mutex_;
  std::mt19937_64 random_;
  State state_ = State::kReset;
  uint64_t bound_ = 0, fetched_ = 0, retired_ = 0, completions_ = 0, taken_ = 0;  // blocks; completions
  uint64_t doorbell_seen_ = 0;
  uint64_t rung_ = 0;  // by the host
  std::vector<uint64_t> hashes_;
  std::deque<Flight> flights_;
  uint32_t psn_ = 0, generation_ = 0, peer_ = 0;
  std::optional<ibgda::Syndrome> refuses_;
  Clock::time_point stands_until_{};
  std::atomic<uint64_t> accepts_{0};  // the peer's number and sequence number, once it is connected
};

}  // namespace weft::testing
