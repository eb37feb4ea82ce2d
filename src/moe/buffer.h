// SPDX-License-Identifier: Apache-2.0
//
// MoeBuffer is the host side of expert-parallel dispatch and combine. Where ranks do not all map each other's windows,
// other kernels run (TwoLevel), and handles keep more.
//   WEFT_TRY_ASSIGN(auto buffer, MoeBuffer::create(comm, options));
//   WEFT_TRY_ASSIGN(Dispatched came, buffer->dispatch_new(call));       // in this rank's window until give_back()
//   WEFT_TRY_ASSIGN(Received again, buffer->dispatch(call_of_handle));  // other rows along the same routes
//   WEFT_TRY(buffer->combine(combine_call));
// Pointers are memory of this rank's device; nothing is checked here that Python has checked. Calls are
// collective and in the same order on all ranks. On CUDA they enqueue on streams that CallOrder names; on the host they return
// when they are done. Threads: one caller at a time; give_back() from any thread. Errors: kPeerLost names the
// silent rank, after which every call fails: the ranks no longer agree on epochs. Where ranks disagree about
// a call, kInvalid on all of them, and the next call may succeed.
#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include "base/stream_order.h"
#include "base/tally.h"
#include "comm/window.h"
#include "jit/jit.h"
#include "kernels/moe/high_throughput_args.h"
#include "memory/heap.h"
#include "memory/host_visible.h"
#include "moe/fault_text.h"
#include "moe/handle_id.h"
#include "moe/kernel_keys.h"
#include "moe/low_latency.h"
#include "moe/returned_pieces.h"
#include "moe/two_level.h"
#include "plan/high_throughput.h"

namespace weft {

struct MoeOptions {
  uint64_t heap_bytes;         // for rows in flight and received; grows when a dispatch needs more
  uint64_t low_latency_bytes;  // set aside for low-latency mode; with port peers, more: see create()
  double timeout_s;            // 0 takes the communicator's
  // No rank is in a domain with another one, so no rows are summed before they return.
  bool single_rank_domains = false;
};

// Room in the heap with which a dispatch of `rows` rows at most and its combine, of `staging_rows`, need not grow the
// window.
uint64_t worst_case_bytes(const RowFormat& format, uint64_t rows, uint64_t staging_rows);

// The memory that a dispatch's handle keeps. Among ranks that do not all map each other also routes
// i32[MoeBuffer::route_words()], and from the dispatch on records i32[MoeBuffer::record_words()].
struct HandleMemory : RoutePlaces {
  int32_t* routes = nullptr;
  int32_t* records = nullptr;
};

// The routes of a dispatch: all that repeats and combines of it go by.
struct DispatchRoutes {
  HandleMemory memory;
  uint64_t id;  // names this dispatch on all ranks: see handle_id.h
  uint32_t tokens;
  uint32_t experts;
  uint64_t rows;          // to make room for here
  uint64_t staging_rows;  // sent rows that combine will get back, at most
  bool counts_unknown;    // num_worst_tokens: fill the tail, and stop if ranks disagree
};

// The streams of a call; nothing to order on the host. Calls run one after another, on whatever streams they are. One that
// waits and joins runs on `after` itself, which saves the events, unless a graph captures that.
struct CallOrder {
  void* stream = nullptr;  // that it runs on otherwise
  void* after = nullptr;   // the caller's
  bool waits = false;      // `stream` waits for `after` first
  bool joins = false;      // `after` waits for `stream` then
};

// A call: its tensors, as the kernel's arguments have them, and what they are planned from.
struct NotifyCall : NotifyTensors {
  RowFormat format;
  HandleMemory memory;
  uint32_t tokens;
  uint32_t experts;
  uint64_t worst_rows;  // 0: block until the counts are known; else the same on all ranks, and nothing waits
  CallOrder order;
  uint64_t most_tokens = 0;  // no rank has more; the same on all ranks; 0: not known. Only with worst_rows
};

struct Notified {
  uint64_t handle_id = 0;      // DispatchRoutes::id
  uint64_t received_rows = 0;  // these only where the host waited for counts
  uint64_t sent_rows = 0;      // that combine will get back here: sent ones, or those that a rail peer adds
  std::vector<int32_t> tokens_per_local_expert;
};

// Frees pieces of the window that streams still use, once they are done; whether there were any. None: there are none.
using MoreRoom = std::function<bool()>;

struct DispatchCall : DispatchTensors {
  RowFormat format;
  DispatchRoutes routes;
  bool keep_weights;  // also those of slots whose expert is elsewhere
  bool is_one_piece;  // rows and the rest in one piece, where there is room for one
  uint32_t num_sms;
  CallOrder order;
  MoreRoom more_room = {};  // where there is no other
};

// Pieces of this rank's window, each to be given back: rows and scales; ids, weights, origins. One piece, with
// the latter behind the former, where they were asked for so.
struct Received {
  uint64_t rows_at;
  uint64_t meta_at;
  bool is_one_piece;
  bool is_captured;  // in a graph, which fills them again at every replay
  ReceiveLayout layout;
};

// A dispatch along new routes: its counts, and what its rows add.
struct NewDispatchCall {
  NotifyCall counts;
  DispatchTensors rows;
  bool keep_weights;  // the rest as in DispatchCall
  uint32_t num_sms;
  MoreRoom more_room = {};
  // Makes HandleMemory::records of so many words, which stay as long as the handle. Asked only where ranks do not all
  // map each other.
  std::function<int32_t*(uint64_t words)> new_records = {};
};

struct Dispatched {
  Received received;
  DispatchRoutes routes;
  std::vector<int32_t> tokens_per_local_expert;  // empty with worst_rows
};

struct CombineCall : CombineTensors {
  uint32_t row_bytes;
  uint32_t top_k;
  int64_t element;  // kElementBf16 or kElementFp32
  DispatchRoutes routes;
  uint32_t num_sms;
  CallOrder order;
  MoreRoom more_room = {};
};

inline uint32_t piece_bytes_of(const HighThroughputShape& shape) {
  return static_cast<uint32_t>(shape.piece_bytes);
}

// Arguments with the roles that a plan gives to warps.
inline DispatchArgs in_roles(DispatchArgs args, const GridPlan& grid) {
  args.row_warps = grid.first_role;
  args.meta_warps = grid.second_role;
  return args;
}
inline CombineArgs in_roles(CombineArgs args, const GridPlan& grid) {
  args.push_warps = grid.first_role;
  args.sum_warps = grid.second_role;
  args.watch_warps = grid.watch_role;
  args.sum_slots = grid.sum_slots;
  return args;
}

class MoeBuffer {
  using KeyOf = KernelKey (*)(const HighThroughputShape& shape);
  // What calls of one shape run, so that nobody looks for it by its names again.
  struct KnownKernel {
    KeyOf key_of;  // which kernel it is
    HighThroughputShape shape;
    uint32_t threads_per_block;
    const Kernel* kernel;
  };

 public:
  // With port peers low-latency mode gets low_latency_bytes_with_ports(). Errors: kUnsupported where it gets none then.
  static Result<std::unique_ptr<MoeBuffer>> create(std::shared_ptr<Communicator> comm,
                                                   const MoeOptions& options);

  // Ranks and experts_per_rank are filled in here, and counts need not be zero.
  Status layout(const LayoutArgs& call, void* stream);
  // Exchanges counts, waits for them unless the call names worst_rows, takes room for the rows and sends them.
  Result<Dispatched> dispatch_new(const NewDispatchCall& call);
  Result<Received> dispatch(const DispatchCall& call);
  Status combine(const CombineCall& call);
  // What streams got before it, on every rank, is done before what they get after it; hosts go on. Collective.
  Status barrier(const CallOrder& order);
  // Collective, for a handle of another buffer of the same ranks, which this window has not grown for: makes
  // room for `rows` received rows and `staging_rows` that come back on every rank. Hosts meet; not to be
  // captured.
  Status make_room_for(const RowFormat& format, uint64_t rows, uint64_t staging_rows);
  // Words of HandleMemory::routes for T tokens; 0 where all ranks map each other. is_ordered: the handle has a sum_place.
  uint64_t route_words(uint64_t tokens, bool is_ordered) const {
    return levels_ ? levels_->route_words(tokens, is_ordered) : 0;
  }
  // The domain of each rank (TwoLevel), where there are several.
  std::vector<uint32_t> domains() const {
    return levels_ ? levels_->domains().domain : std::vector<uint32_t>();
  }
  // handle_buffer() of the ids of this buffer's dispatches.
  uint64_t handle_buffer_key() const { return handle_buffer(handle_id(handle_key_, 0)); }

  // Frees what a dispatch returned. On CUDA: when every use on any stream is ordered before the next
  // dispatch.
  void give_back(uint64_t offset) { heap_.give(offset); }
  // Bytes that the next dispatch could take in one piece.
  uint64_t largest_piece() const { return heap_.largest(); }
  // What the largest dispatch along new routes took here: results that are kept leave so much in one piece.
  uint64_t most_rows_bytes() const { return most_rows_bytes_[static_cast<size_t>(comm_->rank())]; }
  // Frees pieces by itself once streams are done: see ReturnedPieces. Calls reclaim first.
  ReturnedPieces& returned_pieces() { return returned_; }
  // Frees what was given back: `stream` waits for it, and later calls for `stream`. Not while a graph captures that.
  Status reclaim(void* stream);
  // Later calls come after what `stream` has got so far.
  Status follow(void* stream);
  // Makes `stream` wait for what `first` has got so far.
  Status wait(void* stream, void* first) { return order_.wait(stream, first); }
  // What a kernel gave up for since the last look: see take_fault().
  Status fault() {
    if (load_relaxed(&fault_->raised) != 0 && fault_->peer != fault_->self) tally_.lost(fault_->peer);
    return take_fault(*fault_, comm_->peers());
  }
  CallTally& tally() { return tally_; }
  // A rank that dies is no fault from now on: low-latency calls leave out who stays silent.
  void outlive_peers() { on_death_ = {}; }

  Status check_owner() const { return comm_->check_owner("buffer"); }
  const std::shared_ptr<Communicator>& communicator() const { return comm_; }
  Window& window() { return *window_; }
  uint64_t low_latency_begin() const { return low_latency_begin_; }
  uint64_t low_latency_end() const { return low_latency_end_; }
  FaultBox* fault_box() { return fault_; }
  uint32_t* silent() { return silent_; }  // LowLatencyWaits::silent
  // Where kernels note what took how long, and its bytes: null and 0 unless the option trace_spans asks for
  // it.
  TraceLog* trace() const;
  // WaitRule::gave_up of all kernels.
  uint32_t* gave_up() const;
  uint64_t trace_bytes() const { return trace_bytes_; }
  const ComputeLimits& limits() const { return limits_; }
  // Of calls whose caller names no number: plan_num_sms(). On the host it means nothing.
  uint32_t planned_sms() const { return planned_sms_; }
  uint32_t planned_combine_sms() const { return planned_combine_sms_; }  // plan_combine_num_sms()
  const LowLatencyTerms& low_latency_terms() const { return low_latency_terms_; }
  double timeout_s() const { return timeout_s_; }
  WaitRule wait_rule() const;

 private:
  MoeBuffer(std::shared_ptr<Communicator> comm, std::unique_ptr<Window> window,
            std::unique_ptr<HostVisible> visible, const MoeOptions& options,
            const HighThroughputControl& control, std::unique_ptr<TwoLevel> levels);

  Status launch(KeyOf key_of, const GridPlan& grid, const void* args, size_t args_bytes,
                const HighThroughputShape& shape, void* stream);
  Status run_layout(LayoutArgs args, void* stream);
  Status check_layout_of(const NewDispatchCall& call) const;
  Result<Notified> notify(const NotifyCall& call);
  Result<Notified> run_notify(const NotifyCall& call);
  DispatchRoutes routes_of(const NotifyCall& call, const Notified& notified) const;
  Result<Received> run_dispatch(const DispatchCall& call);
  Status run_combine(const CombineCall& call);
  Status run_barrier(const CallOrder& order);
  void count_rows(const DispatchRoutes& routes, bool comes_back, uint64_t row_bytes);
  CallControl control(uint64_t state) const;
  void prepare(const RowFormat& format);
  // Where ranks do not all map each other: buffer_levels.cc.
  Status notify_on_levels(const NotifyArgs& args, const HandleMemory& memory, bool is_barrier, void* stream);
  Status dispatch_on_levels(const DispatchArgs& args, const DispatchCall& call, void* stream);
  Status combine_on_levels(const CombineArgs& args, const CombineCall& call, void* stream);
  uint32_t ranks() const { return static_cast<uint32_t>(comm_->size()); }
  Result<const Kernel*> find_kernel(KeyOf key_of, const HighThroughputShape& shape, const Launch& how);
  // Where a call runs.
  struct Place {
    void* stream;
    bool is_captured;  // in a graph, whose order is the caller's
  };
  Result<Place> begin(const CallOrder& order);
  Status end(const CallOrder& order, const Place& place);
  template <class Run>
  std::invoke_result_t<Run, const Place&> in_order(const CallOrder& order, Run run);
  // Runs a call, again where it found no room and more could be made, and `refuse` where there is still none.
  template <class Run, class Refuse>
  std::invoke_result_t<Run> with_room(const MoreRoom& more_room, Run run, Refuse refuse);
  Result<Received> send_rows(const DispatchCall& call, const Place& place);
  Status send_sums(const CombineCall& call, void* stream);
  // Launch the kernels. Where `lacking_` says that this rank has no room no row moves, and peers raise why.
  Status start_rows(const DispatchCall& call, const Received& received, const Place& place);
  Status start_sums(const CombineCall& call, void* stream);
  Status refuse(const DispatchCall& call);
  Status refuse(const CombineCall& call);
  Status take_pieces(const DispatchCall& call, Received& received);
  Status open_trace();
  // Of calls whose counts the host does not wait for: near the kernels, which read it for themselves.
  CountReport* unawaited_report() const;
  Result<Notified> collect(const NotifyCall& call, const CountReport* report, uint64_t handle_id);
  Status compare(const CountReport& report) const;
  Status make_room(const NotifyCall& call, const RankCounts* counts);
  Status make_room_for_worst(const NotifyCall& call);
  // Rows that combine gets back at most, with num_worst_tokens, so many sent ones, and NotifyCall::most_tokens.
  uint64_t most_staging_rows(uint64_t worst_rows, uint64_t most_sent_rows, uint64_t most_tokens) const {
    return levels_ ? levels_->most_staging_rows(worst_rows, most_tokens) : most_sent_rows;
  }
  Status grow(uint64_t bytes);
  Status ensure_staging(uint64_t bytes, const char* what);
  Result<uint64_t> take(uint64_t bytes, const char* what);
  uint32_t experts_per_rank(uint32_t experts) const;

  std::shared_ptr<Communicator> comm_;
  std::unique_ptr<Window> window_;
  std::unique_ptr<HostVisible> visible_;
  HighThroughputControl control_;
  std::unique_ptr<TwoLevel> levels_;  // null where all ranks map each other
  ComputeLimits limits_{};
  uint32_t planned_sms_ = 1;
  uint32_t planned_combine_sms_ = 1;
  LowLatencyTerms low_latency_terms_;
  std::unique_ptr<LocalMemory> gave_up_,
      trace_memory_;  // where the window is no memory of the device; else null
  double timeout_s_;
  uint64_t low_latency_begin_;
  uint64_t low_latency_end_;
  Heap heap_;
  ReturnedPieces returned_;
  StreamOrder order_;
  StreamMark last_call_;
  std::vector<KnownKernel> kernels_;
  FaultBox* fault_;
  uint32_t* silent_;
  CountReport* awaited_report_;
  uint64_t handle_key_;
  CallTally tally_;
  TallyOperation &layouts_, &notifies_, &dispatches_counted_, &combines_, &barriers_;
  uint64_t dispatches_ = 0;
  uint64_t unawaited_handle_ = 0;  // of the dispatch that unawaited_report() is about
  RowFormat prepared_{};           // the last whose kernels were asked for ahead
  uint64_t trace_at_ = 0;
  uint64_t trace_bytes_ = 0;
  uint64_t staging_at_ = 0;
  uint64_t staging_bytes_ = 0;
  Lacking lacking_;  // of the call under way
  std::vector<uint64_t>
      most_rows_bytes_;  // by rank: of dispatches whose counts were known, alike on all ranks
  PeerWatch::Alarm on_death_;
};

// A call that fails keeps its place, too: the next one may take memory that this one has waited for.
template <class Run>
std::invoke_result_t<Run, const MoeBuffer::Place&> MoeBuffer::in_order(const CallOrder& order, Run run) {
  WEFT_TRY_ASSIGN(const Place place, begin(order));
  auto result = run(place);
  const Status ended = end(order, place);
  if (result.ok() && !ended.ok()) return ended;
  return result;
}

}  // namespace weft
