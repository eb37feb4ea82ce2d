// SPDX-License-Identifier: Apache-2.0
//
// LowLatency is the host side of low-latency dispatch and combine: validate, plan, launch.
//   LowLatency mode(window, begin, end, limits, {fault, timeout_s, false}, terms);
//   WEFT_TRY_ASSIGN(const PlannedDispatch plan, mode.plan(facts));          // once for calls of one signature
//   const uint32_t call_slot = mode.next_call_slot();
//   WEFT_TRY(mode.launch(plan, memory, call slot, kPhaseSend, stream));       // then x may be reused
//   WEFT_TRY(mode.launch(plan, memory, call slot, kPhaseReceive, stream));    // then outputs are there
// [begin, end) is the same range of every rank's window, zero at first, and used by nobody else. Calls are
// collective and in the same order on all ranks, on one stream or on streams that the caller orders; two
// calls may be outstanding between their phases. Pointers are memory of this rank's device; what Python has
// checked is not checked again. On CUDA calls enqueue on `stream`, never wait, and can be captured in a
// graph; on the host they return when done. Threads: one caller at a time. Lifetime: must not outlive the
// window. Errors: kCapacity where the region is too small for the sizes, kInvalid for sizes out of range; on
// the host also what fault() says. Nothing is launched then.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "base/status.h"
#include "base/stream_order.h"
#include "base/tally.h"
#include "comm/window.h"
#include "jit/jit.h"
#include "kernels/moe/low_latency_args.h"
#include "memory/local_memory.h"
#include "moe/fault_text.h"
#include "plan/expert_traffic.h"
#include "plan/low_latency.h"
#include "plan/two_level.h"

namespace weft {

struct LowLatencyWaits {
  FaultBox* fault;  // memory that host and device see
  double timeout_s;
  bool may_mask;  // a silent peer is masked and left out from then on, instead of a fault; the host logs it
  uint32_t* silent;  // u32[R], zero, memory that host and device see: 1 for peers that a call has masked
  TraceLog* trace = nullptr;
  uint32_t* gave_up = nullptr;  // as in a WaitRule; of no use where peers may be masked
};

// A call has facts, which many calls share and which are planned once, and memory of its own, which is a part of
// the kernel's arguments (kernels/moe/low_latency_args.h).
// R ranks, T tokens, M = max_tokens, K = top_k, H channels, Le experts per rank (rounded up).
struct LowLatencyDispatchFacts {
  uint32_t max_tokens = 0;
  uint32_t tokens = 0;
  uint32_t top_k = 0;
  uint32_t experts = 0;
  uint32_t id_bytes = 8;
  int64_t payload = kPayloadCopy;
  uint32_t row_bytes = 0;            // of a row in messages and in `out`: a multiple of 16; with FP8, of 128
  uint32_t scale_bytes = 0;          // of its scales in messages: a multiple of 4
  bool has_weights = false;          // topk_weights travel. On all ranks or on none
  uint64_t scale_expert_stride = 0;  // of out_scales, in words
  uint64_t scale_row_stride = 0;
  uint64_t scale_word_stride = 0;
  bool tiled_scales = false;  // instead of the last two strides: see tiled_row()
  // Outputs other than [Le][R * M] rows: so many for each expert, or, with a padding, so many of all together, packed.
  uint32_t expert_rows = 0;  // 0: R * M
  uint32_t padding = 0;
  uint32_t max_rows = 0;
  uint32_t grid_sms = 0;  // that each phase takes at most, so that other kernels find some; 0: all
};

struct LowLatencyCombineFacts {
  uint32_t max_tokens = 0;
  uint32_t tokens = 0;
  uint32_t top_k = 0;
  uint32_t experts = 0;
  uint32_t id_bytes = 8;
  int64_t reply = kReplyReduced;
  uint32_t row_bytes = 0;  // of x, a multiple of 16; with LogFMT, of 256
  bool has_weights =
      false;  // else those that went with the dispatch count, and its ids, with a reduced reply
  bool saved_weights =
      false;  // those that the routes keep of the dispatch, by its slots, instead of topk_weights
  bool dispatch_had_weights = false;
  uint32_t sent_id_bytes = sizeof(int32_t);  // of sent_idx; without these, of what the routes keep
  // When rows of x are there: see LowLatencyCombineArgs.
  uint32_t signal_value = 0;
  uint32_t signals_per_expert = 0;
  uint32_t signal_rows = 0;
  uint32_t num_sms = 0;                // that the send phase may take; 0: all
  int64_t element = kElementBf16;      // of x; with LogFMT, as out_element, bf16
  int64_t out_element = kElementBf16;  // of combined
  bool accumulate = false;             // combined is added to
  uint32_t grid_sms =
      0;  // that each phase takes at most; 0: all. Replies are cut by it: the same on all ranks
};

// What calls of one plan have in common. Its kernels are compiled; a launch fills in memory, call slot and
// phases.
struct PlannedDispatch {
  LowLatencyDispatchFacts facts;
  LowLatencyDispatchShape shape;
  LowLatencyDispatchArgs args;
  Launch how;
  const Kernel* kernel;
};

struct PlannedCombine {
  LowLatencyCombineFacts facts;
  LowLatencyCombineShape shape;
  LowLatencyCombineArgs args;
  struct Grid {
    Launch how;
    Divisor receive_splits;
    Divisor piece_splits;
  };
  Grid sends;  // also where both phases run at once: no more SMs than the facts allow
  Grid receives;
  const Kernel* kernel;
};

// Where a call runs both phases.
struct LowLatencyRun {
  void* stream;
  void* joined;  // waits for `stream` afterwards
  bool is_captured;
};

// What all ranks of a buffer know alike.
struct LowLatencyTerms {
  uint32_t line_tokens =
      0;  // of a rank that may travel as lines (core/line.cuh); 0 where links do not keep these whole
  DomainPlan domains = {};  // none where all ranks map each other
  LinkFigures links = {};   // between domains, the least of any rank: what their planner goes by
  std::shared_ptr<LocalMemory> page =
      {};  // of make_low_latency_page(): this rank's; null: kernels look at the window
  bool is_watched =
      false;  // a block polls for the others, as with a control page; the window has a host part
};
// The control page of a region of `region_bytes` of a rank with port peers (low_latency_watch.cuh). It lives as long as
// the region, and what serves the same region gets the same. Errors: kSystem where the device has no room.
Result<std::shared_ptr<LocalMemory>> make_low_latency_page(const Communicator& comm, uint64_t region_bytes,
                                                           const DomainPlan& domains);
// All ranks call it together, with the domains that they have found. Errors: kInvalid where the setting of lines is out
// of range or ranks differ; those of Communicator::show().
Result<LowLatencyTerms> agree_on_low_latency(Communicator& comm, DomainPlan domains);

// Whether ids [count] in host memory are empty or of experts: kInvalid with the first that is not. A combine takes any id
// below 0 for empty, as DeepEP does.
enum class EmptyIds { kMinusOne, kBelowZero };
Status check_expert_ids(const void* ids, uint32_t id_bytes, uint64_t count, uint32_t experts,
                        EmptyIds empty = EmptyIds::kMinusOne);

class LowLatency {
 public:
  // `terms`: of agree_on_low_latency().
  ~LowLatency();  // takes back its masks
  LowLatency(const LowLatency&) = delete;
  LowLatency& operator=(const LowLatency&) = delete;
  LowLatency(Window& window, uint64_t begin, uint64_t end, const ComputeLimits& limits,
             const LowLatencyWaits& waits, LowLatencyTerms terms);

  Status check_owner() const { return comm_->check_owner("buffer"); }
  // Errors: kInvalid, kCapacity where sizes do not fit; those of Jit::get.
  Result<PlannedDispatch> plan(const LowLatencyDispatchFacts& facts) const;
  Result<PlannedCombine> plan(const LowLatencyCombineFacts& facts) const;
  // `phases`: kPhaseSend, then kPhaseReceive with the same memory and call slot; or both at once.
  Status launch(const PlannedDispatch& plan, const LowLatencyDispatchMemory& memory, uint32_t call_slot,
                uint32_t phases, void* stream);
  Status launch(const PlannedCombine& plan, const LowLatencyCombineMemory& memory, uint32_t call_slot,
                uint32_t phases, void* stream);
  // On CUDA ids are not looked at: it would stall the stream.
  Status check_ids(const void* ids, uint32_t id_bytes, uint64_t count, uint32_t experts,
                   EmptyIds empty) const;
  // Ties the phases of one call. A call captured in a graph keeps its call slot in every replay.
  uint32_t next_call_slot() { return next_call_slot_++ % kCallSlots; }

  // Around every launch on `stream`. Launches run one after another, on whatever streams they are: kernels number calls
  // as they run, and each acknowledges what the one before it has read. Returns whether a graph captures the launch:
  // then the graph's order is the caller's.
  Result<bool> begin_phase(void* stream);
  Status end_phase(void* stream, bool is_captured);
  Result<bool> is_captured(void* stream) const;
  // Counts a call, from 1 on; 0 for one that a graph captures, which sends nothing yet.
  uint64_t count_call(bool is_captured) { return is_captured ? 0 : ++calls_; }
  uint64_t calls() const { return calls_; }

  // Sends that wait for their receive: its launch comes right before that of the receive, or before the next call's, whatever
  // comes first. So a kernel that waits for others of its process starts when these have been launched.
  void send_later(uint64_t number, std::function<Status()> send);
  Status send_up_to(uint64_t number = ~uint64_t{0});  // those of calls up to that one
  void forget_later(uint64_t number);                 // whose tensors are going

  // Ranks tell each other what they have received, and a call waits, on every rank, until all have received the call
  // before the last one. A receive that is forgotten would therefore stall everybody until the deadline, and then look
  // like a lost rank, or with masks mask this one. This rank alone can tell the difference, so callers note what they
  // sent, by the name of what receives it. late_receive() is the one that the next call would wait for, or null.
  void note_unreceived(uint64_t number, std::string receive);  // 0: of no call
  void note_received(uint64_t number);
  const std::string* late_receive() const;

  // Where a call runs both phases: on `stream`, after what `after` has got. A call that joins `after` runs there, which
  // saves the events, outside of graphs. end_run() counts the call.
  Result<LowLatencyRun> begin_run(void* stream, void* after, bool joins);
  Status end_run(const LowLatencyRun& run);

  // Masks, in stream order. Errors: kInvalid for a rank that does not exist; kSystem from the driver.
  Status set_mask(uint32_t rank, bool masked, void* stream);
  Status clear_masks(void* stream);
  Status query_masks(int32_t* out, void* stream);  // i32[R], device memory

  // What a kernel gave up for since the last look: see take_fault().
  Status fault() {
    if (load_relaxed(&waits_.fault->raised) != 0 && waits_.fault->peer != waits_.fault->self)
      tally_.lost(waits_.fault->peer);
    return take_fault(*waits_.fault, peers());
  }

  // Whether a token of such calls crosses the network once for each node (low_latency_ports.h), and a sum of its replies.
  bool sends_once_per_domain(const LowLatencyDispatchFacts& facts) const;
  bool replies_once_per_domain(const LowLatencyCombineFacts& facts) const;
  LowLatencySizes sizes(uint32_t max_tokens, uint32_t top_k, uint32_t experts) const;
  uint64_t routes_words(uint32_t max_tokens, uint32_t top_k, uint32_t experts, bool has_weights) const {
    return low_latency_routes_words(sizes(max_tokens, top_k, experts), has_weights);
  }

 private:
  uint32_t ranks() const { return static_cast<uint32_t>(window_->communicator()->size()); }
  uint32_t rank() const { return static_cast<uint32_t>(window_->communicator()->rank()); }
  uint32_t* masks() const;
  uint64_t half_bytes() const { return low_latency_half_bytes(ranks(), end_ - begin_); }
  bool has_ports() const { return !window_->communicator()->why_not_all_mapped().empty(); }
  uint64_t lines_at() const { return low_latency_lines_at(ranks(), half_bytes(), has_ports()); }  // in a half
  // Whether a block watches for the others, and copies what ports tell to where they look.
  bool has_page() const { return has_ports() && (terms_.page != nullptr || terms_.is_watched); }
  // Of this rank's control area, where its kernels look.
  std::byte* control() const;
  LowLatencyPage page(uint64_t own_bytes) const;
  uint32_t* rail_tables() const;
  Status write_rail_tables() const;
  bool may_share_domains() const;
  uint32_t own_domain_ranks() const { return terms_.domains.size(terms_.domains.domain[rank()]); }
  ExpertTrafficShape traffic_shape(uint32_t max_tokens, uint32_t top_k, uint32_t experts) const;
  bool has_room_for_domains(const PortCombineLayout& at, Batches batches) const;
  Status check(const LowLatencySizes& sizes, uint32_t tokens, const LowLatencyPlan& plan) const;
  LowLatencyCall common(const LowLatencySizes& sizes, const LowLatencyPlan& plan, uint32_t tokens) const;
  // A call in one launch, or one of its two phases: each is an operation of its own.
  struct Counted {
    TallyOperation *whole, *send, *receive;
    TallyOperation& of(uint32_t phases) const {
      return (phases & kPhaseSend) == 0 ? *receive : (phases & kPhaseReceive) == 0 ? *send : *whole;
    }
  };
  Counted counted(const std::string& name);
  template <class Planned, class Memory>
  Status count_launch(const Counted& counted, const Planned& plan, const Memory& memory, uint32_t call_slot,
                      uint32_t phases, void* stream);
  Status start(const PlannedDispatch& plan, const LowLatencyDispatchMemory& memory, uint32_t call_slot,
               uint32_t phases, void* stream);
  Status start(const PlannedCombine& plan, const LowLatencyCombineMemory& memory, uint32_t call_slot,
               uint32_t phases, void* stream);
  LowLatencyCombineMemory filled(const PlannedCombine& plan, LowLatencyCombineMemory memory) const;
  Status launch(const Kernel& kernel, const Launch& how, const void* args, size_t args_bytes,
                const void* shape);
  PeerWatch& peers() { return window_->communicator()->peers(); }
  void note_silent();
  void forget_mask(uint32_t peer);
  Status own_mask();
  Status write_words(uint32_t* at, uint32_t value, uint64_t words, void* stream);

  Window* window_;
  std::shared_ptr<Communicator> comm_;  // of the window
  uint64_t begin_;
  uint64_t end_;
  ComputeLimits limits_;
  LowLatencyWaits waits_;
  const LowLatencyTerms terms_;
  uint32_t next_call_slot_ = 0;
  uint64_t calls_ = 0;
  std::vector<std::pair<uint64_t, std::string>> unreceived_;        // ascending
  std::deque<std::pair<uint64_t, std::function<Status()>>> later_;  // ascending
  CallTally tally_;
  const Counted dispatches_, combines_;
  StreamOrder order_;
  StreamMark last_phase_;
  std::vector<bool> known_masked_;  // on the host: by the caller, or told of
  const Status has_rail_tables_;    // whether rail tables could be written
};

}  // namespace weft
