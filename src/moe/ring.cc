// SPDX-License-Identifier: Apache-2.0
#include "moe/ring.h"

#include "jit/mesh_launch.h"

namespace weft {

Result<std::unique_ptr<Ring>> Ring::create(MoeBuffer& buffer, uint64_t max_bytes, uint32_t in_flight) {
  WEFT_TRY(buffer.communicator()->agree(
      "pp_set_config", {{"num_max_tensor_bytes", max_bytes}, {"num_max_inflight_tensors", in_flight}}));
  const bool has_ports = !buffer.communicator()->why_not_all_mapped().empty();
  const NeighbourPlan plan = plan_neighbours(max_bytes, in_flight, has_ports);
  WEFT_TRY_ASSIGN(auto window, Window::create(buffer.communicator(), plan.at.end, plan.at.end));
  return std::unique_ptr<Ring>(new Ring(buffer, std::move(window), plan, max_bytes, in_flight));
}

Status Ring::run(const RingCall& call, bool sends) {
  WEFT_TRY(buffer_.fault());
  const Communicator& comm = *window_->communicator();
  const auto ranks = static_cast<uint32_t>(comm.size());
  const auto self = static_cast<uint32_t>(comm.rank());
  const int side = call.peer >= ranks ? -1
                   : sends            ? ring_side(self, call.peer, ranks)
                                      : ring_side(call.peer, self, ranks);
  if (side < 0)
    return Status::invalid("{}: got {}, allowed: the neighbours of rank {} among {} ranks, {} and {}",
                           sends ? "dst_rank_idx" : "src_rank_idx", call.peer, self, ranks,
                           (self + ranks - 1) % ranks, (self + 1) % ranks);
  if (call.bytes > max_bytes_)
    return Status::invalid("t: got {} bytes, allowed: at most the {} of pp_set_config()", call.bytes,
                           max_bytes_);
  RingArgs args{};
  args.wait = buffer_.wait_rule();
  args.at = plan_.at;
  args.state =
      reinterpret_cast<GridState*>(window_->local() + plan_.at.states) + (sends ? 0 : kRingSides) + side;
  args.data = call.data;
  args.bytes = call.bytes;
  args.slot_bytes = plan_.slot_bytes;
  args.in_flight = in_flight_;
  args.peer = call.peer;
  args.side = static_cast<uint32_t>(side);
  const RingShape shape{reinterpret_cast<uint64_t>(call.data) % 16 == 0 && call.bytes % 16 == 0};
  const GridPlan grid = plan_ring_message(call.bytes, call.num_sms, buffer_.limits());
  KernelKey key{"kernels/moe/ring.cuh", sends ? "ring_send" : "ring_receive", "RingArgs"};
  key.shape = {{"vec_aligned", shape.vec_aligned}};
  const Launch how{grid.blocks, grid.threads_per_block, grid.shared_bytes, call.stream, false};
  WEFT_TRY(launch_on_mesh(*window_, std::move(key), how, &args, sizeof(args), &shape));
  return comm.device().is_host() ? buffer_.fault() : Status();
}

}  // namespace weft
