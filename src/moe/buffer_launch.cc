// SPDX-License-Identifier: Apache-2.0
//
// The launches of MoeBuffer's calls: which kernel, with what grid. Ranks that all map each other run other kernels than
// ranks that do not.
#include "moe/buffer.h"

namespace weft {
namespace {

KernelKey key_of_notify(const HighThroughputShape&) {
  return notify_key();
}
KernelKey key_of_two_level_notify(const HighThroughputShape&) {
  return two_level_notify_key();
}

uint32_t piece_bytes_of(const HighThroughputShape& shape) {
  return static_cast<uint32_t>(shape.piece_bytes);
}

// The arguments with the roles that a plan gives to warps.
DispatchArgs in_roles(DispatchArgs args, const GridPlan& grid) {
  args.row_warps = grid.first_role;
  args.meta_warps = grid.second_role;
  return args;
}
CombineArgs in_roles(CombineArgs args, const GridPlan& grid) {
  args.push_warps = grid.first_role;
  args.sum_warps = grid.second_role;
  args.watch_warps = grid.watch_role;
  return args;
}

template <class TwoLevelArgs, class Args>
TwoLevelArgs in_batches(const Args& args, const TwoLevelGrid& plan) {
  TwoLevelArgs both{};
  both.base = in_roles(args, plan.grid);
  both.batch_warps = plan.batch_warps;
  both.states_at = plan.states_at;
  return both;
}

}  // namespace

// A barrier has no tokens, and one block.
Status MoeBuffer::launch_notify(const NotifyArgs& args, const HandleMemory& memory, bool is_barrier,
                                void* stream) {
  const auto ranks = static_cast<uint32_t>(comm_->size());
  GridPlan grid =
      levels_ ? plan_two_level_notify(ranks, levels_->islands().count, limits_) : plan_notify(ranks, limits_);
  if (is_barrier) grid.blocks = 1;
  if (!levels_) return launch(key_of_notify, grid, &args, sizeof(args), {}, stream);
  TwoLevelNotifyArgs both{};
  both.base = args;
  both.sum_place = memory.sum_place;
  levels_->complete(both, *window_, memory, args.mine.tokens);
  return launch(key_of_two_level_notify, grid, &both, sizeof(both), {}, stream);
}

Status MoeBuffer::launch_dispatch(const DispatchArgs& args, const DispatchCall& call) {
  const auto ranks = static_cast<uint32_t>(comm_->size());
  const HighThroughputShape shape = dispatch_shape(call.format);
  if (!levels_) {
    const GridPlan grid = plan_dispatch(ranks, piece_bytes_of(shape), call.num_sms, limits_);
    const DispatchArgs filled = in_roles(args, grid);
    return launch(&dispatch_key, grid, &filled, sizeof(filled), shape, call.order.stream);
  }
  const TwoLevelGrid plan = plan_two_level_dispatch(ranks, levels_->islands(), levels_->batches(),
                                                    piece_bytes_of(shape), call.num_sms, limits_);
  auto both = in_batches<TwoLevelDispatchArgs>(args, plan);
  levels_->complete(both, *window_, call.handle, call.tokens);
  both.routes.most_messages = levels_->most_messages(call.staging_rows, call.rows);
  return launch(&two_level_dispatch_key, plan.grid, &both, sizeof(both), shape, call.order.stream);
}

Status MoeBuffer::launch_combine(const CombineArgs& args, const CombineCall& call) {
  const auto ranks = static_cast<uint32_t>(comm_->size());
  const HighThroughputShape shape = combine_shape(call.row_bytes, call.top_k, call.element);
  if (!levels_) {
    const GridPlan grid = plan_combine(ranks, piece_bytes_of(shape), call.num_sms, limits_);
    const CombineArgs filled = in_roles(args, grid);
    return launch(&combine_key, grid, &filled, sizeof(filled), shape, call.order.stream);
  }
  const TwoLevelGrid plan =
      plan_two_level_combine(levels_->islands(), levels_->batches(), call.num_sms, limits_);
  auto both = in_batches<TwoLevelCombineArgs>(args, plan);
  levels_->complete(both, *window_, call.handle, call.tokens);
  return launch(&two_level_combine_key, plan.grid, &both, sizeof(both), shape, call.order.stream);
}

}  // namespace weft
