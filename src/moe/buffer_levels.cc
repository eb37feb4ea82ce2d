// SPDX-License-Identifier: Apache-2.0
//
// The launches of MoeBuffer's calls among ranks that do not all map each other: other kernels, whose arguments are those
// of the others and more.
#include "moe/buffer.h"

namespace weft {
namespace {

KernelKey key_of_notify(const HighThroughputShape&) {
  return two_level_notify_key();
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

Status MoeBuffer::notify_on_levels(const NotifyArgs& args, const HandleMemory& memory, bool is_barrier,
                                   void* stream) {
  GridPlan grid = plan_two_level_notify(ranks(), levels_->domains().count, limits_);
  if (is_barrier) grid.blocks = 1;  // it has no tokens
  TwoLevelNotifyArgs both{};
  both.base = args;
  levels_->complete(both, *window_, memory, args.mine.tokens);
  return launch(key_of_notify, grid, &both, sizeof(both), {}, stream);
}

Status MoeBuffer::dispatch_on_levels(const DispatchArgs& args, const DispatchCall& call, void* stream) {
  const HighThroughputShape shape = dispatch_shape(call.format);
  const TwoLevelGrid plan = plan_two_level_dispatch(ranks(), levels_->domains(), levels_->batches(),
                                                    piece_bytes_of(shape), call.num_sms, limits_);
  auto both = in_batches<TwoLevelDispatchArgs>(args, plan);
  levels_->complete(both, *window_, call.routes.memory, call.routes.tokens);
  both.routes.most_messages = levels_->most_messages(call.routes.staging_rows, call.routes.rows);
  return launch(&two_level_dispatch_key, plan.grid, &both, sizeof(both), shape, stream);
}

Status MoeBuffer::combine_on_levels(const CombineArgs& args, const CombineCall& call, void* stream) {
  const TwoLevelGrid plan =
      plan_two_level_combine(levels_->domains(), levels_->batches(), call.num_sms, limits_);
  auto both = in_batches<TwoLevelCombineArgs>(args, plan);
  levels_->complete(both, *window_, call.routes.memory, call.routes.tokens);
  const HighThroughputShape shape = combine_shape(call.row_bytes, call.top_k, call.element);
  return launch(&two_level_combine_key, plan.grid, &both, sizeof(both), shape, stream);
}

}  // namespace weft
