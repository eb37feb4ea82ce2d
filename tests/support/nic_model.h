// SPDX-License-Identifier: Apache-2.0
//
// A model of mlx5 NICs, in threads of this process: it reads entries, doorbell records and doorbells from memory, moves
// bytes between the memory that was enrolled, and writes completions, as late and in as odd an order as a NIC may.
//   NicModel model({.seed = 7});
//   ibgda::set_nic_source(&model);  ... the transport ibgda ...
//   EXPECT_EQ(model.failures(), "");        // what the NIC was asked for that it would not understand, with the seed
// It is strict: a reserved bit that is set, a doorbell before its record, an entry that changes once the NIC was told
// of it are failures. What it cannot show: docs/ibgda.md.
// Threads: any.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "support/far_memory.h"
#include "transports/ibgda/nic.h"
#include "transports/ibgda/queue_room.h"
#include "transports/ibgda/wire.h"

namespace weft::testing {

// What the NICs do to their users. Chances are of each turn in which a queue is looked at.
struct NicPlan {
  uint64_t seed = 1;
  double passes = 0.3;             // passes a queue over
  double stalls = 0;               // a queue stands still for
  double stall_s = 1;              // so long
  double recovers = 0.1;           // believes the doorbell record alone
  bool shares_completion = false;  // all completions of a queue go to one place; some are left out
  bool is_rung_by_host = false;
  bool ignores_overrun = true;  // of completions
  uint32_t put_shift = 30;
  double retry_s = 0.05;  // asks a peer that does not answer for so long
  bool keeps_sources =
      false;  // a source that changes before its completion is a failure, not only before arrival
  uint32_t threads = 2;
  // Null: queues lie in memory of the host. Else in memory of the device, which the model copies from and to: it would not
  // notice that an entry changes once the NIC was told of it.
  std::function<Result<std::unique_ptr<ibgda::QueueRooms>>(Device)> rooms;
  // How windows in memory of the device are reached. Null: they are not, and lie in memory of the host.
  std::function<Result<std::shared_ptr<FarMemory>>(Device)> windows;
};

// Of an enrolled range: what peers may do.
enum NicAccess : uint32_t { kAccessWrite = 1, kAccessAtomic = 2, kAccessRead = 4 };

// A queue in memory of a device, and how the host gets there; the model's own memory is a copy. Null: there is none.
struct FarQueue {
  std::shared_ptr<ibgda::QueueRoom> room;
  ibgda::QueueMemory at;
};

class ModelQueue;
class ModelNic;
struct NicShared;

class NicModel : public ibgda::NicSource {
 public:
  explicit NicModel(NicPlan plan = {});
  ~NicModel() override;

  ibgda::NicFinding find(Device device) override;
  Result<std::unique_ptr<ibgda::Nic>> open(Device device) override;
  // The same, with what only tests ask for.
  std::unique_ptr<ModelNic> open_model(Device device = {});

  // Empty, or one line for each failure, the seed first.
  std::string failures() const;
  // The next entry that the queue carries out is refused so.
  void refuse_next(uint32_t queue, ibgda::Syndrome why);
  // So many completions of the queue have been taken: beyond that and its size is an overrun, unless those are ignored.
  void set_taken(uint32_t queue, uint64_t completions);
  // The NIC that the queue belongs to does nothing any more and answers nobody.
  void kill_nic_of(uint32_t queue);
  // While it holds, queues take doorbells and carry out nothing.
  void hold(bool holds);
  // What went through all queues so far. A doorbell counts once its entries are known.
  uint64_t doorbells() const;
  uint64_t entries() const;
  void set_missing(const std::string& why);  // what find() says from now on

 private:
  std::shared_ptr<NicShared> shared_;
  std::string missing_;
};

class ModelNic : public ibgda::Nic {
 public:
  struct Memory {
    std::byte* data;
    uint64_t bytes, base;
    uint32_t access, domain;
    std::shared_ptr<FarMemory> far;  // null: `data` is an address of this process; else a place in it
  };
  struct Core;  // what queues keep of it

  ModelNic(std::shared_ptr<NicShared> shared, Device device);
  const std::string& name() const override { return name_; }
  Result<std::unique_ptr<ibgda::QueuePair>> create_queue(uint32_t blocks) override;
  // With another number of completions than blocks.
  std::unique_ptr<ibgda::QueuePair> create_queue(uint32_t blocks, uint32_t completions);
  // In memory that `held` keeps; its number is the model's. Who gives it has filled it.
  std::unique_ptr<ibgda::QueuePair> create_queue_in(ibgda::QueueMemory at, std::shared_ptr<const void> held);
  Result<ibgda::Enrolled> enroll(std::byte* data, uint64_t bytes, Device place) override;
  // All queues are in protection domain 0: none reaches memory of another one.
  ibgda::Enrolled enroll_for(std::byte* data, uint64_t bytes, uint32_t access, uint32_t domain = 0);
  // ... under an address that the caller chooses.
  ibgda::Enrolled enroll_at(std::byte* data, uint64_t bytes, uint32_t access, uint64_t base,
                            uint32_t domain = 0, std::shared_ptr<FarMemory> far = nullptr);
  void release(ibgda::Enrolled& enrolled) override;
  uint32_t put_shift() const override;

 private:
  uint64_t draw_base();
  std::unique_ptr<ibgda::QueuePair> add_queue(ibgda::QueueMemory at, std::shared_ptr<const void> held,
                                              bool fills, FarQueue far = {});
  Result<FarQueue> far_from(const ibgda::QueueMemory& at);

  const std::shared_ptr<NicShared> shared_;
  const std::shared_ptr<Core> core_;
  const Device device_;
  const std::string name_ = "model";
};

// ---- for the model's own files

struct ModelNic::Core {
  std::atomic<bool> is_alive{true};
  std::mutex atomics;                        // of all its queues
  std::shared_mutex keys;                    // held while memory is read or written: release() waits
  std::map<uint32_t, Memory> local, remote;  // by key
};

struct NicShared {
  NicPlan plan;
  std::mutex mutex;
  std::map<uint32_t, std::shared_ptr<ModelQueue>> queues;  // by number
  std::atomic<uint64_t> version{1};                        // of queues
  uint64_t drawn = 0;
  std::string failures;
  std::atomic<uint64_t> doorbells{0}, entries{0};
  std::atomic<bool> holds{false};
  std::atomic<bool> stops{false};
  std::vector<std::thread> threads;

  void fail(const std::string& what);
  uint64_t draw();  // under mutex
  std::shared_ptr<ModelQueue> find(uint32_t queue);
};

}  // namespace weft::testing
