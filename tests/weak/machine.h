// SPDX-License-Identifier: Apache-2.0
//
// The weak machine: ranks, blocks and lanes as fibers under one seeded scheduler, over a Memory that is as weak as PTX's
// model allows. One machine is one run: the same seed gives the same run.
//   Machine machine({.seed = 7});
//   machine.memory().share("window of rank 0", bytes, size);
//   machine.launch(0, {.name = "send", .rank = 0, .blocks = 2, .lanes = 8, .body = [&] { ring_send(...); }});
//   if (!machine.run()) puts(machine.report().c_str());
// Kernels reach it through the target (tests/weak/target), litmus tests by its calls. A failure ends the run: a race, a
// deadlock, bytes that nobody should see, or what fail() is told.
// It differs from PTX where Profile says so, and never executes a load late: load buffering does not occur.
#pragma once

#include <map>
#include <set>
#include <unordered_map>

#include "weak/parts.h"

namespace weft::weak {

// What kernels take for granted beyond PTX; `h200` is all of it, `ptx` none.
struct Profile {
  // Behind a branch on a strong load come its warp's later strong loads, all its stores, its bulk stores, and its bulk loads
  // behind a proxy fence. Votes, shuffles and syncs hand that on.
  bool branches_order = true;
  // 16 aligned bytes of one strong access are read from one write, and a line that eight lanes of a warp load or store
  // together.
  bool lines_are_atomic = true;
};
inline constexpr Profile kH200{}, kPtx{false, false};

// How a site of order is weakened.
enum class Change : uint8_t { kRelaxed, kGpuScope, kBlockScope, kDropped, kSourcesOnly, kOneMore };
const char* name_of(Change change);

struct Mutant {
  std::string file;  // as the compiler names it
  uint32_t line = 0;
  uint32_t column = 0;
  std::string call;
  Change change = Change::kRelaxed;
  auto operator<=>(const Mutant&) const = default;
};
std::string text_of(const Mutant& mutant);

struct Settings {
  uint64_t seed = 0;
  Profile profile = kH200;
  bool finds_races = true;
  bool keeps_events = false;            // for the report: slower
  const Mutant* mutant = nullptr;       // the one site that is weakened
  std::set<Mutant>* mutants = nullptr;  // takes every site that the run comes by, each way
};

// The order of an access.
struct Order {
  bool is_strong = false;
  Scope scope = Scope::kSystem;
  bool acquires = false, releases = false;
  uint32_t whole = 4;
};

class Machine {
 public:
  explicit Machine(const Settings& settings);
  ~Machine();
  Machine(const Machine&) = delete;

  Memory& memory() { return memory_; }
  // Launches of one stream run one after the other, each at some time.
  void launch(uint32_t stream, Launch launch);
  // Runs all. False: it failed, and report() says how.
  bool run();
  // After run(), as a host that has synchronised with all streams: false where it would see more than one value.
  bool read_at_end(const void* at, uint64_t bytes, void* out);
  void fail(const std::string& what);
  const std::string& report() const { return report_; }

  // Of the lane that runs: its accesses.
  void load(const void* at, uint32_t bytes, void* out, Order order, Origin origin);
  void store(void* at, uint32_t bytes, const void* in, Order order, Origin origin);
  // An atomic operation of 4 or 8 bytes: returns what was there.
  uint64_t update(void* at, uint32_t bytes, Order order, Origin origin,
                  const std::function<uint64_t(uint64_t)>& next);
  // 16 bytes of a line of 128, which the lanes of a warp access with one instruction, eight neighbours each.
  void take_line(void* at, void* part, bool is_store, Origin origin);
  void fence(Scope scope, Origin origin);
  void fence_sequential(Origin origin);  // litmus tests alone: kernels have none
  void plain_store_follows(void* at, uint64_t bytes, const void* code);
  void pause();

  // Groups.
  const Place& place() const;
  const Launch& launched() const;
  std::byte* shared() const;
  void sync_block(Origin origin);
  void sync_warp(Origin origin);
  // Every lane gives 8 bytes; returns those of all lanes. Orders nothing.
  const uint64_t* exchange(uint64_t value);

  // Bulk copies.
  void fence_async(bool shared_only, Origin origin);
  void barrier_init(uint64_t* barrier, Origin origin);
  void bulk_load(std::byte* to, const std::byte* from, uint32_t bytes, uint64_t* barrier, Origin origin);
  void bulk_store(std::byte* to, const std::byte* from, uint32_t bytes, Origin origin);
  void bulk_commit();
  void wait_loaded(uint64_t* barrier, uint32_t parity, Origin origin);
  void wait_groups(uint32_t pending, bool sources_only, Origin origin);

  uint64_t steps() const { return step_; }
  const Profile& profile() const { return settings_.profile; }
  bool is_changed(const Origin& origin, Change change);
  bool runs_a_lane() const { return fiber_ != nullptr; }

 private:
  struct Stream {
    std::vector<Launch> launches;
    size_t started = 0;
    View view;
    View ending;  // of the launch that runs
    uint32_t alive = 0;
    std::vector<uint32_t> agents;
    uint64_t priority = 0;
  };
  struct Piece {
    Copy* copy;
    uint64_t offset;
    uint32_t bytes;
    std::vector<std::byte> held;  // empty: not read
  };
  // A strong load that took a write and learned nothing from it, though its writer knew something.
  struct Miss {
    const Write* write;
    Place reader;
    Origin origin;
    const char* why;
  };
  struct Event {
    uint32_t step;
    Place place;
    Origin origin;
    const void* at;
    uint32_t bytes;
    uint64_t value;
    bool is_write;
    uint32_t newer;  // writes of the word that were newer than what was read
  };

  void start(Stream& stream);
  void finish(Fiber& fiber);
  bool act();  // one step of anything; false: nothing can be done
  void step_copy(size_t index);
  void start_copy(Copy copy);
  void complete_if_due(Barrier& barrier);
  static void enter(uint32_t low, uint32_t high);
  void prepare(Fiber& fiber);
  void run_fiber(Fiber& fiber);
  void leave_fiber();
  void step();  // another may run now
  void take_plain_store();
  void block(const char* what, const Origin& origin);
  void wake(Fiber& fiber);
  void wake_all(std::vector<Fiber*>& fibers);
  void wake_readers(const std::byte* at, uint64_t bytes);
  enum class Meeting { kNothing, kVotes, kOrders };
  void meet(Rendezvous& group, Meeting meeting, const char* what, const Origin& origin);
  void gather(Rendezvous& group);
  void leave_group(Rendezvous& group);
  uint32_t new_agent();
  uint32_t agent_of(Stream& stream, uint32_t index);
  static void note_polled(Fiber& fiber, const std::byte* word);
  Access access_of(Fiber& fiber, bool is_strong, Scope scope, uint32_t whole, const Origin& origin,
                   bool is_store = false);
  void learn(Fiber& fiber, const Write* write, const Order& order, const Origin& origin);
  Write* written(Fiber& fiber, const Order& order, const Origin& origin);
  void on_race(const Race& race);
  static void race(const Race& race);
  void note(const void* at, uint32_t bytes, const void* value, bool is_write, const Origin& origin);

  // The report.
  std::string text_of(const Place& place) const;
  std::string text_of(const Origin& origin) const;
  std::string text_of(const Write* write) const;
  std::string word_of(const void* at);
  std::string newest_of(const void* at);
  std::string why_unordered(uint32_t agent, uint32_t time, Proxy proxy, const Access& access) const;
  std::string events_of(const void* at, const Place& one, const Place& other);

  Settings settings_;
  Memory memory_;
  std::map<uint32_t, Stream> streams_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> runnable_;
  std::vector<std::unique_ptr<BlockState>> blocks_;
  std::deque<Copy> copies_;
  std::vector<Piece> pieces_;
  std::unordered_map<const void*, Barrier> barriers_;
  std::vector<uint32_t> times_;                                         // of each agent
  std::unordered_map<const std::byte*, std::vector<Fiber*>> sleepers_;  // by the word that they wait for
  std::vector<Fiber*> copy_waiters_;
  Fiber* fiber_ = nullptr;
  ucontext_t scheduler_;
  uint32_t step_ = 0;
  uint32_t stays_ = 1;  // one step in so many lets another run; 0: by priorities
  std::set<uint32_t> change_points_;
  bool woke_ = false;
  bool failed_ = false;
  std::string report_;
  std::vector<Miss> misses_;
  std::deque<Event> events_;
  View sequential_;  // of fence_sequential()
};

// The machine that was made last in this thread.
Machine& machine();
bool is_in_a_lane();  // whether it is there, and one of its lanes runs

}  // namespace weft::weak
