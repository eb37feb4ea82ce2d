// SPDX-License-Identifier: Apache-2.0
#include "moe/buffer.h"

#include <algorithm>
#include <cstring>

#include "base/config.h"
#include "base/cuda_driver.h"
#include "base/log.h"
#include "jit/mesh_launch.h"
#include "jit/notice.h"
#include "kernels/core/carver.h"
#include "memory/device_memory.h"
#include "memory/huge_pages.h"
#include "moe/fault_text.h"
#include "moe/low_latency.h"
#include "moe/room.h"
#include "topology/gpus.h"

namespace weft {
namespace {

constexpr size_t kMostKernels = 64;  // of a buffer, to look through

uint64_t trace_bytes_of(int64_t spans) {
  return spans > 0 ? sizeof(TraceLog) + static_cast<uint64_t>(spans) * sizeof(TraceSpan) : 0;
}

KernelKey key_of_layout(const HighThroughputShape&) {
  return layout_key();
}

TallyCaller caller_of(const Communicator& comm, uint64_t key) {
  TallyCaller caller = comm.tally_caller();
  caller.key = key;
  return caller;
}

// On a GPU.
Status zero_words(int32_t* at, uint64_t words, void* stream) {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  return cuda_status(driver->cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(at), 0, words * sizeof(int32_t),
                                             static_cast<CUstream>(stream)),
                     "zero counts");
}

// Of the memory that the host and kernels see.
struct VisibleOffsets {
  explicit VisibleOffsets(uint32_t ranks) {
    Carver carver;
    fault = carver.take(sizeof(FaultBox));
    awaited_report = carver.take(report_bytes(ranks));
    silent = carver.take(ranks * sizeof(uint32_t));
    end = carver.end();
  }
  uint64_t fault, awaited_report, silent, end;
};

}  // namespace

MoeBuffer::MoeBuffer(std::shared_ptr<Communicator> comm, std::unique_ptr<Window> window,
                     std::unique_ptr<HostVisible> visible, const MoeOptions& options,
                     const HighThroughputControl& control, std::unique_ptr<TwoLevel> levels)
    : comm_(std::move(comm)),
      window_(std::move(window)),
      visible_(std::move(visible)),
      control_(control),
      levels_(std::move(levels)),
      timeout_s_(options.timeout_s > 0 ? std::min(options.timeout_s, kLongestWait_s) : comm_->timeout_s()),
      low_latency_begin_(round_up(levels_ ? levels_->end() : control.end, 4096)),
      low_latency_end_(low_latency_begin_ + round_up(options.low_latency_bytes, 4096)),
      heap_(low_latency_end_, window_->bytes()),
      returned_(comm_->device(), heap_),
      order_(comm_->device()),
      last_call_(comm_->device()),
      handle_key_(comm_->key() + static_cast<uint64_t>(window_->number())),
      tally_("buffer", caller_of(*comm_, handle_key_)),
      layouts_(tally_.operation("layout")),
      notifies_(tally_.operation("dispatch.counts")),
      dispatches_counted_(tally_.operation("dispatch")),
      combines_(tally_.operation("combine")),
      barriers_(tally_.operation("barrier")) {
  most_rows_bytes_.assign(ranks(), 0);
  const VisibleOffsets at(ranks());
  fault_ = visible_->at<FaultBox>(at.fault);
  awaited_report_ = visible_->at<CountReport>(at.awaited_report);
  silent_ = visible_->at<uint32_t>(at.silent);
  on_death_ = comm_->peers().alarm([box = fault_, self = static_cast<uint32_t>(comm_->rank())](int peer) {
    raise(box, Site::kPeerDied, self, static_cast<uint32_t>(peer), 0, 0, 0);
  });
}

Result<std::unique_ptr<MoeBuffer>> MoeBuffer::create(std::shared_ptr<Communicator> comm,
                                                     const MoeOptions& wanted) {
  const auto ranks = static_cast<uint32_t>(comm->size());
  MoeOptions options = wanted;
  WEFT_TRY_ASSIGN(ComputeLimits limits, compute_limits(*comm));
  HighThroughputControl control = plan_control(ranks);
  std::unique_ptr<TwoLevel> levels;
  uint64_t control_end = control.end;
  if (!comm->why_not_all_mapped().empty()) {
    WEFT_TRY_ASSIGN(DomainPlan domains, agree_on_domains(*comm, wanted.single_rank_domains));
    control = plan_control(ranks, domains.count);
    const auto rings = plan_two_level(control.end, control.offsets.record_words, domains, limits);
    levels = std::make_unique<TwoLevel>(std::move(domains), rings, static_cast<uint32_t>(comm->rank()));
    control_end = levels->end();
    if (wanted.low_latency_bytes > 0)
      options.low_latency_bytes = low_latency_bytes_with_ports(ranks, wanted.low_latency_bytes);
  }
  const uint64_t bytes = round_up(control_end, 4096) + round_up(options.low_latency_bytes, 4096) +
                         options.heap_bytes + heap_bytes_of(trace_bytes_of(config().trace_spans));
  WEFT_TRY_ASSIGN(auto visible, HostVisible::create(comm->device(), VisibleOffsets(ranks).end));
  WEFT_TRY_ASSIGN(auto window,
                  Window::create(comm, std::max<uint64_t>(bytes, config().window_bytes),
                                 round_up(control_end, 4096) + round_up(options.low_latency_bytes, 4096)));
  if (comm->rank() != 0) CompileNotice::keep_off_terminal();
  WEFT_TRY_ASSIGN(LowLatencyTerms terms,
                  agree_on_low_latency(*comm, levels ? levels->domains() : DomainPlan{}));
  terms.is_watched = limits.is_cuda && window->has_host_part();
  std::unique_ptr<LocalMemory> gave_up;
  if (levels && window->is_pinned()) {  // what kernels ask again and again is near
    WEFT_TRY_ASSIGN(gave_up, LocalMemory::create(comm->device(), sizeof(uint32_t)));
    if (options.low_latency_bytes > 0) {
      WEFT_TRY_ASSIGN(terms.page, make_low_latency_page(*comm, options.low_latency_bytes, terms.domains));
    }
  }
  if (levels) WEFT_TRY(levels->write_tables(*window));
  std::unique_ptr<MoeBuffer> buffer(new MoeBuffer(std::move(comm), std::move(window), std::move(visible),
                                                  options, control, std::move(levels)));
  buffer->limits_ = limits;
  buffer->low_latency_terms_ = std::move(terms);
  buffer->gave_up_ = std::move(gave_up);
  if (limits.is_cuda) {
    WEFT_TRY_ASSIGN(const GpuFacts gpu, gpu_facts(buffer->comm_->device().ordinal));
    buffer->planned_sms_ = plan_num_sms(gpu.nvlinks, gpu.compute_major, limits);
    const uint32_t ranks_that_sum = buffer->levels_ ? 1 : buffer->ranks();
    buffer->planned_combine_sms_ =
        plan_combine_num_sms(buffer->planned_sms_, ranks_that_sum, gpu.compute_major, limits);
  }
  WEFT_TRY(buffer->open_trace());
  return buffer;
}

Status MoeBuffer::open_trace() {
  trace_bytes_ = trace_bytes_of(config().trace_spans);
  if (trace_bytes_ == 0) return {};
  const TraceLog log{0, static_cast<uint32_t>(config().trace_spans), 0};
  if (levels_ && window_->is_pinned()) {
    WEFT_TRY_ASSIGN(trace_memory_, LocalMemory::create(comm_->device(), trace_bytes_));
    return trace_memory_->write(0, &log, sizeof log);
  }
  WEFT_TRY_ASSIGN(trace_at_, take(trace_bytes_, "trace"));
  if (!comm_->device().is_host())
    return copy_to_device(comm_->device().ordinal, window_->local() + trace_at_, &log, sizeof log);
  std::memcpy(window_->local() + trace_at_, &log, sizeof log);
  return {};
}

TraceLog* MoeBuffer::trace() const {
  if (trace_memory_) return trace_memory_->at<TraceLog>(0);
  return trace_bytes_ == 0 ? nullptr : reinterpret_cast<TraceLog*>(window_->local() + trace_at_);
}

CountReport* MoeBuffer::unawaited_report() const {
  return reinterpret_cast<CountReport*>(window_->local() + control_.unawaited_report);
}

WaitRule MoeBuffer::wait_rule() const {
  return {static_cast<uint64_t>(timeout_s_ * 1e9),
          fault_,
          static_cast<uint32_t>(comm_->rank()),
          0,
          trace(),
          gave_up()};
}

uint32_t* MoeBuffer::gave_up() const {
  return reinterpret_cast<uint32_t*>(gave_up_ ? gave_up_->data() : window_->local() + control_.gave_up);
}

uint32_t MoeBuffer::experts_per_rank(uint32_t experts) const {
  const auto ranks = static_cast<uint32_t>(comm_->size());
  return (experts + ranks - 1) / ranks;
}

Result<const Kernel*> MoeBuffer::find_kernel(KeyOf key_of, const HighThroughputShape& shape,
                                             const Launch& how) {
  for (const KnownKernel& known : kernels_)
    if (known.key_of == key_of && known.threads_per_block == how.threads_per_block &&
        std::memcmp(&known.shape, &shape, sizeof shape) == 0)
      return known.kernel;
  WEFT_TRY_ASSIGN(const Kernel* kernel, kernel_on_mesh(*window_, key_of(shape), how));
  if (kernels_.size() >= kMostKernels) kernels_.clear();
  kernels_.push_back({key_of, shape, how.threads_per_block, kernel});
  return kernel;
}

Status MoeBuffer::launch(KeyOf key_of, const GridPlan& grid, const void* args, size_t args_bytes,
                         const HighThroughputShape& shape, void* stream) {
  const Launch how{.blocks = grid.blocks,
                   .threads_per_block = grid.threads_per_block,
                   .shared_bytes = grid.shared_bytes,
                   .stream = stream,
                   .blocks_per_cluster = grid.blocks_per_cluster};
  WEFT_TRY_ASSIGN(const Kernel* kernel, find_kernel(key_of, shape, how));
  WEFT_TRY(launch_on_mesh(*window_, *kernel, how, args, args_bytes, &shape));
  return comm_->device().is_host() ? fault() : Status();
}

// A dispatch of new rows takes four kernels, its combine's included: compiled side by side.
void MoeBuffer::prepare(const RowFormat& format) {
  if (!limits_.is_cuda || levels_ || format == prepared_) return;
  prepared_ = format;
  prepare_on_mesh(*window_, high_throughput_keys(format, static_cast<uint32_t>(comm_->size()), limits_));
}

Result<MoeBuffer::Place> MoeBuffer::begin(const CallOrder& order) {
  WEFT_TRY_ASSIGN(const bool is_captured, is_capturing(comm_->device(), order.after));
  const Place place{order.waits && order.joins && !is_captured ? order.after : order.stream, is_captured};
  if (order.waits) WEFT_TRY(order_.wait(place.stream, order.after));
  if (is_captured) return place;
  WEFT_TRY(last_call_.wait(place.stream));
  WEFT_TRY(returned_.reclaim(place.stream).status());
  return place;
}

Status MoeBuffer::end(const CallOrder& order, const Place& place) {
  if (order.joins) WEFT_TRY(order_.wait(order.after, place.stream));
  return place.is_captured ? Status() : last_call_.note(place.stream);
}

Status MoeBuffer::reclaim(void* stream) {
  WEFT_TRY_ASSIGN(const bool any, returned_.reclaim(stream));
  return any ? follow(stream) : Status();
}

Status MoeBuffer::follow(void* stream) {
  WEFT_TRY(last_call_.wait(stream));
  return last_call_.note(stream);
}

template <class Run, class Refuse>
std::invoke_result_t<Run> MoeBuffer::with_room(const MoreRoom& more_room, Run run, Refuse refuse) {
  lacking_ = {};
  auto result = run();
  if (lacking_.bytes != 0 && more_room && more_room()) {
    lacking_ = {};
    result = run();
  }
  if (lacking_.bytes == 0) return result;
  const Status told = refuse();
  if (!told.ok()) return told;
  return result;
}

// Each call, counted; its bytes are those of rows that travel, as far as the host knows.
Status MoeBuffer::layout(const LayoutArgs& call, void* stream) {
  return tally_.count(layouts_, {0, call.tokens, -1, false}, [&] { return run_layout(call, stream); });
}

Result<Received> MoeBuffer::dispatch(const DispatchCall& call) {
  const CallFacts facts{call.routes.staging_rows * call.format.row_bytes, call.routes.tokens};
  auto received = with_room(
      call.more_room,
      [&] { return tally_.count(dispatches_counted_, facts, [&] { return run_dispatch(call); }); },
      [&] { return refuse(call); });
  if (received.ok()) count_rows(call.routes, false, call.format.row_bytes);
  return received;
}

Status MoeBuffer::combine(const CombineCall& call) {
  const CallFacts facts{call.routes.staging_rows * call.row_bytes, call.routes.tokens};
  const Status status = with_room(
      call.more_room, [&] { return tally_.count(combines_, facts, [&] { return run_combine(call); }); },
      [&] { return refuse(call); });
  if (status.ok()) count_rows(call.routes, true, call.row_bytes);
  return status;
}

// A GPU has the counts where the host cannot look without waiting.
void MoeBuffer::count_rows(const DispatchRoutes& routes, bool comes_back, uint64_t row_bytes) {
  if (!comm_->device().is_host()) return;
  const int ranks = comm_->size(), self = comm_->rank();
  if (levels_) {
    for (const auto& [peer, rows] : levels_->rows_sent(routes.memory, routes.tokens, comes_back))
      tally_.sent_to(peer, rows * row_bytes);
    return;
  }
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == self) continue;
    const int from = comes_back ? peer : self, to = comes_back ? self : peer;
    tally_.sent_to(static_cast<size_t>(peer),
                   rows_between(routes.memory.prefix, ranks, from, to) * row_bytes);
  }
}

CallControl MoeBuffer::control(uint64_t state) const {
  return {control_.offsets, wait_rule(), reinterpret_cast<GridState*>(window_->local() + state)};
}

Status MoeBuffer::run_layout(LayoutArgs args, void* stream) {
  WEFT_TRY(fault());
  args.ranks = ranks();
  args.experts_per_rank = experts_per_rank(args.experts);
  const GridPlan grid = plan_layout(args.tokens, args.ranks, args.experts, limits_);
  if (grid.blocks > grid.blocks_per_cluster)
    WEFT_TRY(zero_words(args.counts, args.ranks + args.experts, stream));
  return launch(key_of_layout, grid, &args, sizeof(args), {}, stream);
}

Result<Received> MoeBuffer::run_dispatch(const DispatchCall& call) {
  WEFT_TRY(fault());
  if (levels_) WEFT_TRY(levels_->fits(call.format.row_bytes, call.format.scale_words, call.format.top_k));
  return in_order(call.order, [&](const Place& place) { return send_rows(call, place); });
}

Result<Received> MoeBuffer::send_rows(const DispatchCall& call, const Place& place) {
  const RowFormat& format = call.format;
  const DispatchRoutes& routes = call.routes;
  Received received{};
  received.is_captured = place.is_captured;
  received.layout =
      receive_layout(routes.rows, format.row_bytes, format.scale_words, format.top_k, format.id_bytes);
  WEFT_TRY(ensure_staging(staging_bytes_of(routes.staging_rows, format.combine_row_bytes, format.top_k),
                          "dispatch"));
  WEFT_TRY(take_pieces(call, received));
  const Status started = start_rows(call, received, place);
  if (started.ok()) return received;
  heap_.give(received.rows_at);
  if (!received.is_one_piece) heap_.give(received.meta_at);
  return started;
}

// Peers that have room would wait for this rank's record until their deadline.
Status MoeBuffer::refuse(const DispatchCall& call) {
  return in_order(call.order, [&](const Place& place) {
    return place.is_captured ? Status() : start_rows(call, Received{}, place);
  });
}

Status MoeBuffer::refuse(const CombineCall& call) {
  return in_order(call.order, [&](const Place& place) {
    return place.is_captured ? Status() : start_sums(call, place.stream);
  });
}

Status MoeBuffer::start_rows(const DispatchCall& call, const Received& received, const Place& place) {
  const RowFormat& format = call.format;
  const DispatchRoutes& routes = call.routes;
  DispatchArgs args{control(control_.dispatch_state), routes.memory, call};
  args.tokens = routes.tokens;
  // The report of another dispatch, or none yet, says nothing about this handle, which may be of another buffer.
  const bool is_reported = routes.counts_unknown && routes.id == unawaited_handle_;
  args.report = is_reported ? unawaited_report() : nullptr;
  args.mine = {
      received.rows_at, received.meta_at,
      routes.rows,      routes.id,
      format.row_bytes, row_extras(format.scale_words, format.top_k, format.top_k ? format.id_bytes : 0),
      lacking_.bytes,   lacking_.free_bytes};
  args.experts = routes.experts;
  args.experts_per_rank = experts_per_rank(routes.experts);
  args.id_bytes = format.id_bytes;
  args.fill_tail = routes.counts_unknown ? 1 : 0;
  args.keep_weights = call.keep_weights ? 1 : 0;
  const HighThroughputShape shape = dispatch_shape(format);
  const GridPlan grid = plan_dispatch(ranks(), piece_bytes_of(shape), call.num_sms, limits_);
  args = in_roles(args, grid);
  if (levels_) return dispatch_on_levels(args, call, place.stream);
  return launch(&dispatch_key, grid, &args, sizeof(args), shape, place.stream);
}

Status MoeBuffer::run_combine(const CombineCall& call) {
  WEFT_TRY(fault());
  if (levels_) WEFT_TRY(levels_->fits(call.row_bytes, 0, call.top_k));
  return in_order(call.order, [&](const Place& place) { return send_sums(call, place.stream); });
}

Status MoeBuffer::send_sums(const CombineCall& call, void* stream) {
  WEFT_TRY(ensure_staging(staging_bytes_of(call.routes.staging_rows, call.row_bytes, call.top_k), "combine"));
  return start_sums(call, stream);
}

Status MoeBuffer::start_sums(const CombineCall& call, void* stream) {
  const DispatchRoutes& routes = call.routes;
  CombineArgs args{control(control_.combine_state), routes.memory, call};
  args.tokens = routes.tokens;
  args.mine = {staging_at_,         staging_at_ + round_up(routes.staging_rows * call.row_bytes, 16),
               routes.staging_rows, routes.id,
               call.row_bytes,      row_extras(0, call.top_k, 0),
               lacking_.bytes,      lacking_.free_bytes};
  if (comm_->device().is_host()) prefer_huge_pages(call.combined, routes.tokens * call.row_bytes);
  const HighThroughputShape shape = combine_shape(call.row_bytes, call.top_k, call.element);
  const GridPlan grid = plan_combine(ranks(), piece_bytes_of(shape), call.num_sms, limits_);
  args = in_roles(args, grid);
  if (levels_) return combine_on_levels(args, call, stream);
  return launch(&combine_key, grid, &args, sizeof(args), shape, stream);
}

}  // namespace weft
