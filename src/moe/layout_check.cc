// SPDX-License-Identifier: Apache-2.0
#include "moe/layout_check.h"

#include <algorithm>
#include <vector>

#include "base/log.h"
#include "kernels/moe/routes.cuh"

namespace weft {
namespace {

Status refused(uint64_t token, uint32_t rank, bool has_expert) {
  return logged(Status::invalid(
      "is_token_in_rank: got {} for token {} and rank {}, where topk_idx has {} expert; allowed: what "
      "get_dispatch_layout() returned for this topk_idx",
      has_expert ? "False" : "True", token, rank, has_expert ? "an" : "no"));
}

}  // namespace

Status check_layout(const LayoutArgs& routes) {
  std::vector<uint8_t> has_expert(routes.ranks);
  for (uint64_t token = 0; token < routes.tokens; ++token) {
    std::fill(has_expert.begin(), has_expert.end(), uint8_t{0});
    for (uint32_t k = 0; k < routes.top_k; ++k) {
      const int64_t expert = expert_at(routes.topk_idx, routes.id_bytes, token * routes.top_k + k);
      if (expert >= 0 && expert < routes.experts)
        has_expert[static_cast<uint32_t>(expert) / routes.experts_per_rank] = 1;
    }
    const uint8_t* is_in_rank = routes.token_in_rank + token * routes.ranks;
    for (uint32_t rank = 0; rank < routes.ranks; ++rank)
      if ((is_in_rank[rank] != 0) != (has_expert[rank] != 0))
        return refused(token, rank, has_expert[rank] != 0);
  }
  return {};
}

Status check_slot_counts(const int32_t* counts, uint32_t experts, uint64_t most) {
  for (uint32_t i = 0; i < experts; ++i)
    if (counts[i] < 0 || static_cast<uint64_t>(counts[i]) > most)
      return Status::invalid("num_tokens_per_expert: got {} slots of expert {}, allowed: 0 to {}", counts[i],
                             i, most);
  return {};
}

}  // namespace weft
