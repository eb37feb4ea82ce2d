// SPDX-License-Identifier: Apache-2.0
//
// CollectiveRunner runs collective programs on the ranks of a communicator, through mapped memory and ports.
//   WEFT_TRY_ASSIGN(auto runner, CollectiveRunner::create(comm, options));
//   WEFT_TRY_ASSIGN(uint32_t id, runner->load(text));       // this rank's part of a verified program
//   WEFT_TRY(runner->run(call));
//   WEFT_TRY_ASSIGN(auto planned, runner->plan(call));      // once for calls that differ in addresses only
//   WEFT_TRY(runner->run(planned, input, output, stream));
// Programs are verified before they come here (weft.collectives.verifier); load() checks only what memory
// safety needs. All ranks load and run the same programs in the same order. On CUDA run() enqueues on
// `stream`. Runs on several streams run one after another, except runs of pairs, which only wait for the others. On
// the host it returns when it is done. All protocol state is in device memory, so a captured run may be replayed; the
// graph's order counts then. Threads: one caller at a time, with one exception: a program that reduces nothing,
// uses no scratch and only sends, or only receives, may run while others run, if none of those has the same peers.
// Buffers in windows of the communicator are read and written by peers directly, and so is other host memory where the
// system lets processes read each other: one copy instead of two. So are buffers of ranks of one process, in no window
// (shared_addresses.h). A window must not be destroyed on some ranks while others still pass memory in it. Errors:
// kPeerLost names the silent rank; kClosed names the window that this rank no longer has and the rank that used it;
// kInvalid says which rank called what where calls differ. After any of them every call fails, because the ranks no
// longer agree on message numbers. Ranks whose calls differ exchange no data: program_args.h says how. If no rank
// waits in such a call, as for two broadcasts with different roots, the next call fails. Under WEFT_CHECK ranks
// compare calls first; a call that differs then fails on all ranks, and nothing has moved.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/stream_order.h"
#include "base/tally.h"
#include "collective/call_log.h"
#include "collective/shared_addresses.h"
#include "comm/window.h"
#include "jit/jit.h"
#include "memory/host_visible.h"
#include "memory/huge_pages.h"
#include "memory/local_memory.h"
#include "plan/collective.h"
#include "transports/mapped/channel.cuh"

namespace weft {

struct RunnerOptions {
  uint32_t channels = 4;
  uint64_t simple_slot_bytes = 0;  // 0: chosen for the device
  uint64_t ll_slot_bytes = 0;
  double timeout_s = 0;       // 0 takes the communicator's
  uint64_t direct_bytes = 0;  // least message that may bypass its slot; 0: chosen for the device
  bool has_exchanges = true;  // room for exchange(), tens of MiB on GPUs
  // Whether calls on several streams run one after another by themselves; false: the caller orders them. In graphs
  // the graph's own order counts.
  bool orders_streams = true;
};

// One rank's program, as weft.collectives.executor flattens it.
struct ProgramText {
  std::string name;
  std::vector<ProgramBlock> blocks;
  std::vector<ProgramStep> steps;
  std::vector<ProgramWait> waits;
  uint32_t scratch_chunks = 0;
  // Every message, of every rank, may be referred to, and nothing is reduced. The same on all ranks.
  bool refers_only = false;
  std::string call;          // what a user calls it: "all_reduce"; empty: the name
  int32_t root = -1;         // -1: none
  bool is_reduction = true;  // for messages: it has an operation
  // A value that all ranks' parts of a program share, and no other program has.
  uint64_t fingerprint = 0;
  // One or more messages between pairs of ranks: not a call of all ranks, so it has no call number.
  bool is_of_pairs = false;
};

struct RunCall {
  uint32_t program;
  Element element;
  Reduction reduction;
  Protocol protocol;
  std::byte* input;
  std::byte* output;
  uint64_t part_elems;
  uint32_t per_part;      // chunks of a part
  bool has_exact_chunks;  // part_elems divides by per_part, and chunk c starts at c * part_elems / per_part
  // Programs whose parts have sizes of their own: what goes to each rank, and what comes from each, with its true
  // Element as mark; part_elems is then of no account. Else empty.
  std::vector<ChunkSpan> input_table;
  std::vector<ChunkSpan> output_table;
  uint32_t slice_bytes;  // 0: what a slot holds
  uint32_t num_sms;      // 0: one per block of the program
  void* stream;
  bool is_compiled = false;  // by the program's own kernel (compiled.h), where it can be compiled
  int32_t tag = 0;           // of a message of pairs: the same at both ends
};

// A collective as one kernel (kernels/collective/exchange.cuh) instead of a program.
struct ExchangeCall {
  Exchange kind;
  Element element;
  Reduction reduction;
  std::byte* input;
  std::byte* output;
  uint64_t part_elems;  // what goes from one rank to another; all_reduce, broadcast, reduce: the whole buffer
  bool is_one_shot;     // all_reduce: everyone sends everything to everyone
  // kPlaces: in place where all ranks' buffers are aligned and lie in windows, else by stages.
  ExchangeWay way;
  uint32_t num_sms;  // 0: as many as suit the size
  void* stream;
  // In broadcast and scatter only the root's input is used, in reduce and gather only the root's output: other ranks
  // may pass anything there.
  int32_t root = 0;
};

class CollectiveRunner {
 public:
  // Collective. Errors: those of Window::create.
  static Result<std::unique_ptr<CollectiveRunner>> create(std::shared_ptr<Communicator> comm,
                                                          const RunnerOptions& options);

  // Keeps a program; its number counts from 0. Errors: kInvalid for peers, channels or waits out of range.
  Result<uint32_t> load(ProgramText text);
  Status run(const RunCall& call);
  // For runners that has_exchanges. Every rank passes the same but for input, output and stream. In place as
  // in MSCCL, all_to_all not. Errors: kInvalid for a root that is no rank; kUnsupported where some ranks are
  // reached through ports.
  Status exchange(const ExchangeCall& call);

  // The plan of all calls that differ only in input, output and stream; plan() ignores these three of its
  // call. Valid as long as this runner lives. The kernel is compiled; nothing runs.
  struct PlannedRun;
  struct PlannedExchange;
  Result<PlannedRun> plan(const RunCall& call);
  Result<PlannedExchange> plan(const ExchangeCall& call) const;
  Status run(const PlannedRun& planned, std::byte* input, std::byte* output, void* stream);
  Status run(const PlannedExchange& planned, std::byte* input, std::byte* output, void* stream);
  // Makes the links from this rank slow in later runs, for tests (kernels/collective/link_delays.h): one delay
  // for each rank; none: as fast as they are. Then run() takes Simple programs alone, and exchange() nothing.
  // Errors: kUnsupported on GPUs; kInvalid for another number of delays.
  Status delay_links(std::vector<LinkDelay> links);
  // Waits for a rank that has begun to send to this one and is not received from yet, looked for in circular
  // order from rank `first`; returns it. Called where receives are made. Errors: kPeerLost, kClosed.
  Result<int> wait_for_sender(int first);
  // Bound of every wait of later calls, in seconds, above 0.
  void set_timeout_s(double timeout_s) { timeout_s_ = timeout_s; }
  double timeout_s() const { return timeout_s_; }
  // args.data[0, elems) *= the factor, in stream order.
  Status scale(Element element, const ScaleArgs& args, void* stream);

  // Reports a fault that a kernel raised since, and then for good.
  Status fault();
  // Makes runs under way give up soon, as if a peer were lost; every later call fails. From any thread.
  void stop();
  uint32_t channels() const { return rings_.channels; }
  // The most that one message of a protocol carries.
  uint64_t payload_bytes(Protocol protocol) const { return slot_payload_bytes(rings_, protocol); }
  const std::shared_ptr<Communicator>& communicator() const { return comm_; }
  Status check_owner() const { return comm_->check_owner("collectives"); }

 private:
  // The amount that a run sends to a peer, in chunks or bytes.
  struct Share {
    int peer;
    uint64_t amount;
  };
  struct Program {
    std::string name;
    std::unique_ptr<LocalMemory> memory;
    ProgramArgs args;  // its tables and progress; the rest is filled per call
    uint32_t scratch_chunks;
    bool refers_only;
    bool stores;              // some step may store into a peer's buffer
    std::string source;       // of its own kernel; empty where it has too many steps
    uint64_t used_chunks[2];  // of input and output, up to the last that some step touches
    CallRecord record;        // what is the same in all its calls
    bool is_of_pairs;
    bool is_reduction;
    bool reduces;                         // some step adds
    std::vector<int> receivers, senders;  // whom this rank sends to and receives from
    std::vector<Share> chunks_sent;
    TallyOperation* counted;
  };
  struct ChunkTable {
    std::unique_ptr<LocalMemory> memory;
    std::vector<ChunkSpan> held;  // what it has, in the order of the stream; empty: nobody knows
  };
  CollectiveRunner(std::shared_ptr<Communicator> comm, std::unique_ptr<Window> window);
  static std::string name_of(const PlannedRun& planned);
  Status start(const PlannedRun& planned, std::byte* input, std::byte* output, void* stream);
  Status start(const PlannedExchange& planned, std::byte* input, std::byte* output, void* stream);
  void count_sent(const std::vector<Share>& bytes);
  Status check(const ProgramText& text) const;
  Status probe_process_reads();
  uint64_t message_bytes(const Program& program, Protocol protocol, bool has_sizes) const;
  Result<DirectRule> direct_rule();
  Communicator::WindowPlace find_place(const std::byte* memory) const;
  void place(BufferLayout& layout, bool is_stored_to) const;
  void ask_huge_pages(const PlannedRun& planned, std::byte* input, std::byte* output);
  bool takes_temporary(uint64_t message_bytes) const;
  std::vector<uint32_t> register_buffers(const PlannedRun& planned, ProgramArgs& args) const;
  static ProgramShape shape_of(const Program& program, const RunCall& call);
  const Program* find(uint32_t number);
  Status announce(const PlannedRun& planned);
  Status announce_messages(const PlannedRun& planned);
  Status compare_calls();
  bool is_stopped() const;
  // The error of a call that is not made, since an earlier one failed: `why` is fault().
  static Status refused(std::string_view call, const Status& why);
  Status launch(const Kernel& kernel, Launch how, const void* args, size_t args_bytes, const void* shape,
                void* stream, bool is_of_pairs = false);
  Status bring_up_windows();
  uint64_t descriptor(std::byte* memory, std::byte* const** bases) const;
  Result<std::byte*> scratch(uint64_t bytes);
  Result<const ChunkSpan*> table(const std::vector<ChunkSpan>& entries, ChunkTable& table, void* stream);
  WaitRule wait_rule() const;
  Status fault_status() const;
  Status another_call() const;
  std::string sentence() const;
  // Of a peer on the CPU whose memory this rank reads.
  uint32_t process_of(uint32_t peer) const;

  std::shared_ptr<Communicator> comm_;
  std::unique_ptr<Window> window_;
  CallTally tally_;
  TallyOperation* exchanges_[kExchanges];
  std::unique_ptr<HostVisible> visible_;
  std::unique_ptr<CallLog> call_log_;
  std::unique_ptr<LocalMemory> counters_;  // sent, received, calls, WaitRule::gave_up
  std::unique_ptr<LocalMemory> exchange_states_;
  std::unique_ptr<LocalMemory> direct_;  // windows, processes, readers and the bounce buffer of DirectRule
  SharedAddresses addresses_;
  std::vector<std::byte* const*> known_windows_;  // what direct_ holds
  uint64_t windows_version_ = 0;                  // that this is of
  std::vector<std::unique_ptr<LocalMemory>>
      scratch_;  // the last one is in use; captured graphs may use earlier ones
  ChunkTable input_table_, output_table_;
  std::vector<std::unique_ptr<LocalMemory>> old_tables_;  // too small; runs under way may read them
  std::deque<std::vector<ChunkSpan>> captured_tables_;    // that graphs copy from; addresses stay
  std::mutex programs_mutex_;
  std::deque<Program> programs_;  // addresses stay
  HugePages huge_pages_;
  RingLayout rings_{};
  ExchangeLayout exchange_{};
  ComputeLimits limits_{};
  double timeout_s_ = 0;
  uint64_t direct_bytes_ = 0;
  bool all_read_all_ = false;     // every process can read every other's memory; agreed
  std::vector<LinkDelay> links_;  // empty: none is delayed
  std::vector<HeldSignal> held_;
  LinkDelays delays_{};
  std::atomic<const char*> last_program_ = "";  // the name of a program, or a constant
  Status broken_;
  bool orders_streams_ = true;
  StreamMark last_run_;  // of all but pairs
  PeerWatch::Alarm on_death_;
};

struct CollectiveRunner::PlannedRun {
  RunCall call;
  const Program* program;
  ProgramArgs args;                      // without buffers and wait
  std::vector<ChunkSpan> input, output;  // chunks of the call's tables
  uint64_t scratch_elems;
  CallRecord record;
  ProgramShape shape;
  Launch how;
  const Kernel* kernel;
  CallFacts facts;
  std::vector<Share> bytes_sent;
};

struct CollectiveRunner::PlannedExchange {
  ExchangeArgs args;  // without buffers and wait
  CallRecord record;
  ExchangeShape shape;
  Launch how;
  const Kernel* kernel;
  CallFacts facts;
  std::vector<Share> bytes_sent;
};

}  // namespace weft
