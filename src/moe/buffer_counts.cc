// SPDX-License-Identifier: Apache-2.0
//
// The exchange of counts, and the calls that it is a part of: a dispatch along new routes, and a barrier.
#include <sched.h>

#include <algorithm>

#include "base/deadline.h"
#include "base/log.h"
#include "base/stream_order.h"
#include "moe/buffer.h"
#include "moe/layout_check.h"

namespace weft {
namespace {

constexpr double kAwake_s = 1;  // of a wait for counts

const RankCounts* rank_counts(const CountReport* report) {
  return reinterpret_cast<const RankCounts*>(report + 1);
}

// Nothing runs while a graph is captured.
Status check_waits_may_end(Device device, void* stream) {
  WEFT_TRY_ASSIGN(const bool is_captured, is_capturing(device, stream));
  if (!is_captured) return {};
  return Status::make(
      Code::kUnsupported,
      "dispatch while a CUDA graph is captured: got no num_worst_tokens and no handle, so the host would "
      "wait for counts, allowed: either of the two");
}

KernelKey key_of_notify(const HighThroughputShape&) {
  return notify_key();
}

}  // namespace

// Routes of a GPU are not looked at: the host would wait for them.
Status MoeBuffer::check_layout_of(const NewDispatchCall& call) const {
  if (!comm_->device().is_host()) return {};
  const NotifyCall& counts = call.counts;
  const bool has_ids = call.rows.topk_idx != nullptr;
  const uint64_t most_slots = has_ids ? uint64_t{counts.tokens} * counts.format.top_k : INT32_MAX;
  WEFT_TRY(check_slot_counts(counts.tokens_per_expert, counts.experts, most_slots));
  if (!has_ids) return {};
  return check_layout({call.rows.topk_idx, counts.tokens, counts.format.top_k, counts.format.id_bytes,
                       ranks(), counts.experts, experts_per_rank(counts.experts), 0, nullptr,
                       const_cast<uint8_t*>(counts.token_in_rank), nullptr});
}

Result<Dispatched> MoeBuffer::dispatch_new(const NewDispatchCall& call) {
  WEFT_TRY(check_layout_of(call));
  WEFT_TRY_ASSIGN(Notified notified, notify(call.counts));
  DispatchRoutes routes = routes_of(call.counts, notified);
  if (levels_) {
    const uint64_t messages = levels_->most_messages(routes.staging_rows, routes.rows);
    routes.memory.records =
        call.new_records(levels_->record_words(messages, routes.memory.sum_place != nullptr));
  }
  WEFT_TRY_ASSIGN(const Received received,
                  dispatch({call.rows, call.counts.format, routes, call.keep_weights, false, call.num_sms,
                            call.counts.order, call.more_room}));
  return Dispatched{received, routes, std::move(notified.tokens_per_local_expert)};
}

DispatchRoutes MoeBuffer::routes_of(const NotifyCall& call, const Notified& notified) const {
  DispatchRoutes routes{call.memory,         notified.handle_id,     call.tokens,
                        call.experts,        notified.received_rows, notified.sent_rows,
                        call.worst_rows != 0};
  if (!routes.counts_unknown) return routes;
  const uint32_t top_k = call.format.top_k;
  const uint64_t most_sent_rows = uint64_t{call.tokens} * (top_k ? std::min(ranks(), top_k) : ranks());
  routes.rows = call.worst_rows;
  routes.staging_rows = most_staging_rows(call.worst_rows, most_sent_rows, call.most_tokens);
  return routes;
}

Result<Notified> MoeBuffer::notify(const NotifyCall& call) {
  return tally_.count(notifies_, {0, call.tokens}, [&] { return run_notify(call); });
}

Result<Notified> MoeBuffer::run_notify(const NotifyCall& call) {
  WEFT_TRY(fault());
  if (levels_) WEFT_TRY(levels_->fits(call.format.row_bytes, call.format.scale_words, call.format.top_k));
  if (levels_) WEFT_TRY(levels_->fits(call.format.combine_row_bytes, 0, call.format.top_k));
  prepare(call.format);
  const bool waits = call.worst_rows == 0;
  if (waits) WEFT_TRY(check_waits_may_end(comm_->device(), call.order.after));
  if (!waits) WEFT_TRY(make_room_for_worst(call));
  const RowFormat& format = call.format;
  CountReport* report = waits ? awaited_report_ : unawaited_report();
  if (waits) store_relaxed(&report->epoch, uint64_t{0});
  NotifyArgs args{control(control_.notify_state), call.memory, call};
  args.mine = {format.row_bytes, format.scale_words, format.top_k,  call.experts, format.element, call.tokens,
               {0, 0},           heap_.largest(),    staging_bytes_};
  args.experts_per_rank = experts_per_rank(call.experts);
  args.report = report;
  args.host_waits = waits ? 1 : 0;
  WEFT_TRY(in_order(call.order, [&](const Place& place) {
    return levels_
               ? notify_on_levels(args, call.memory, false, place.stream)
               : launch(key_of_notify, plan_notify(ranks(), limits_), &args, sizeof(args), {}, place.stream);
  }));
  const uint64_t id = handle_id(handle_key_, ++dispatches_);
  if (!waits) unawaited_handle_ = id;
  return collect(call, report, id);
}

// Waits for the kernel's report, where the caller wants it, and grows the window where some rank lacks room.
Result<Notified> MoeBuffer::collect(const NotifyCall& call, const CountReport* report, uint64_t handle_id) {
  Notified notified;
  notified.handle_id = handle_id;
  if (call.worst_rows != 0) return notified;
  // The kernel itself gives up at timeout_s_ and says why; the second half is for a kernel that never starts.
  const uint64_t since_ns = tally_now_ns();
  const auto is_there = [&] {
    return load_acquire(&report->epoch) != 0 || load_acquire(&fault_->raised) != 0;
  };
  // Counts come after milliseconds of earlier work. The GPU then idles until the host has seen them, so it does not nap.
  const auto stays_awake = [awake = Deadline::after_s(kAwake_s)] {
    sched_yield();
    return !awake.passed();
  };
  const bool came = wait_until(Deadline::after_s(2 * timeout_s_), is_there, stays_awake);
  if (!comm_->device().is_host()) waited_for_peers_ns += tally_now_ns() - since_ns;  // else the kernel has
  WEFT_TRY(fault());
  if (!came)
    return logged(Status::make(Code::kPeerLost,
                               "rank {}, dispatch.counts, waited {} s for this rank's own kernel: "
                               "the stream has not reached it",
                               comm_->rank(), 2 * timeout_s_));
  WEFT_TRY(compare(*report));
  const RankCounts* counts = rank_counts(report);
  WEFT_TRY(make_room(call, counts));
  notified.received_rows = counts[comm_->rank()].received_rows;
  notified.sent_rows = counts[comm_->rank()].sent_rows;
  const auto* per_expert = reinterpret_cast<const int32_t*>(counts + comm_->size());
  const uint32_t each = experts_per_rank(call.experts);
  const uint32_t first = std::min(call.experts, each * static_cast<uint32_t>(comm_->rank()));
  notified.tokens_per_local_expert.assign(per_expert, per_expert + std::min(each, call.experts - first));
  return notified;
}

Status MoeBuffer::compare(const CountReport& report) const {
  if (report.disagreeing_word == kAgreedWords) return {};
  return logged(disagreement(report.disagreeing_word, comm_->rank(), report.mine, report.disagreeing_rank,
                             report.theirs));
}

Status MoeBuffer::barrier(const CallOrder& order) {
  return tally_.count(barriers_, {}, [&] { return run_barrier(order); });
}

// The exchange of counts, of no rows: no rank leaves it before all have come.
Status MoeBuffer::run_barrier(const CallOrder& order) {
  WEFT_TRY(fault());
  NotifyArgs args{control(control_.notify_state), {}, {}};
  args.prefix = reinterpret_cast<int32_t*>(window_->local() + control_.barrier_prefix);
  args.report = unawaited_report();
  GridPlan grid = plan_notify(ranks(), limits_);
  grid.blocks = 1;  // it has no tokens
  return in_order(order, [&](const Place& place) {
    return levels_ ? notify_on_levels(args, {}, true, place.stream)
                   : launch(key_of_notify, grid, &args, sizeof(args), {}, place.stream);
  });
}

}  // namespace weft
