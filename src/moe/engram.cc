// SPDX-License-Identifier: Apache-2.0
#include "moe/engram.h"

#include "jit/mesh_launch.h"
#include "plan/elastic.h"

namespace weft {

Status Engram::resize(uint64_t entries_per_rank, uint64_t row_bytes, const std::string& type) {
  WEFT_TRY(buffer_.communicator()->agree("engram_write", {{"storage (entries)", entries_per_rank},
                                                          {"storage (bytes per entry)", row_bytes},
                                                          {"storage (type)", 0, type}}));
  if (window_ && entries_per_rank == entries_per_rank_ && row_bytes == row_bytes_) return {};
  entries_per_rank_ = row_bytes_ = 0;
  window_.reset();  // the new one may need its memory
  at_ = plan_engram(entries_per_rank, row_bytes, has_ports(), buffer_.limits());
  // Where no network reaches the device, all lies where ports can read it: the owner stores entries once.
  const bool is_reached = buffer_.communicator()->port_windows().are_in_device;
  WEFT_TRY_ASSIGN(window_,
                  Window::create(buffer_.communicator(), at_.end, is_reached ? at_.end : 0, at_.landings));
  entries_per_rank_ = entries_per_rank;
  row_bytes_ = row_bytes;
  return {};
}

bool Engram::has_ports() const {
  return !buffer_.communicator()->why_not_all_mapped().empty();
}

Status Engram::run_fetch(const EngramFetch& call) {
  WEFT_TRY(buffer_.fault());
  EngramArgs args{};
  args.wait = buffer_.wait_rule();
  args.at = at_;
  args.indices = call.indices;
  args.count = call.count;
  args.entries_per_rank = entries_per_rank_;
  args.row_bytes = row_bytes_;
  args.out = call.out;
  args.id_bytes = call.id_bytes;
  const EngramShape shape;
  const GridPlan grid = plan_engram_fetch(call.count, has_ports(), buffer_.limits());
  const Launch how{grid.blocks, grid.threads_per_block, grid.shared_bytes, call.stream, false};
  WEFT_TRY(launch_on_mesh(*window_, {"kernels/moe/engram.cuh", "engram_fetch", "EngramArgs"}, how, &args,
                          sizeof(args), &shape));
  return window_->communicator()->device().is_host() ? buffer_.fault() : Status();
}

}  // namespace weft
