// SPDX-License-Identifier: Apache-2.0
//
// The part of a MoeBuffer for ranks that do not all map each other: its domains, and the places of its rings.
//   WEFT_TRY_ASSIGN(const DomainPlan domains, agree_on_domains(*comm, false)); // collective
//   TwoLevel levels(std::move(domains), plan_two_level(begin, ...), limits);
//   WEFT_TRY(levels.write_tables(*window));
//   TwoLevelDispatchArgs args = levels.dispatch_args(window, dispatch_args, memory, tokens, grid);
// Threads: const methods may run concurrently.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "comm/window.h"
#include "plan/two_level.h"

namespace weft {

struct HandleMemory;

// Of a dispatch, from prefix i32[R][R]: rows of ranks 0 to i for rank j.
inline uint64_t rows_between(const int32_t* prefix, int ranks, int from, int to) {
  const int32_t before = from > 0 ? prefix[(from - 1) * ranks + to] : 0;
  return static_cast<uint64_t>(prefix[from * ranks + to] - before);
}

// All ranks tell each other which ranks they map. single_rank_domains: this rank says that it maps nobody, so it is a
// domain of its own whatever the others say. Errors: those of Communicator::show().
Result<DomainPlan> agree_on_domains(Communicator& comm, bool single_rank_domains);

class TwoLevel {
 public:
  TwoLevel(DomainPlan domains, const TwoLevelControl& control, uint32_t rank)
      : domains_(std::move(domains)),
        control_(control),
        rank_(rank),
        sources_(domains_.sources_of(rank)),
        numbers_(domains_.numbers_of(rank)) {}

  Status write_tables(Window& window) const;
  const DomainPlan& domains() const { return domains_; }
  uint32_t batches() const { return control_.batches; }
  uint64_t end() const { return control_.end; }
  // i32 words of HandleMemory::routes, and of records for so many messages. is_ordered: with HandleMemory::sum_place.
  uint64_t route_words(uint64_t tokens, bool is_ordered) const;
  uint64_t record_words(uint64_t messages, bool is_ordered) const {
    return messages * weft::record_words(domains_.widest, is_ordered);
  }
  // Messages that this rank forwards at most, with so many rows in the staging of combine and received by itself.
  uint64_t most_messages(uint64_t staging_rows, uint64_t received_rows) const {
    return staging_rows + received_rows;
  }
  // Rows in the staging of combine at most, where no rank receives more than `rows`, nor, unless 0, has more tokens than
  // `tokens`: members return them for the sources of a rank, and for itself.
  uint64_t most_staging_rows(uint64_t rows, uint64_t tokens) const {
    const uint64_t of_member = tokens == 0 ? rows : std::min(rows, (domains_.most_sources + 1) * tokens);
    return (domains_.widest - 1) * of_member;
  }
  // Errors: kInvalid where one row with what goes beside it does not fit a slot.
  Status fits(uint64_t row_bytes, uint64_t scale_words, uint64_t top_k) const;

  // How many rows this rank sends to whom, on the host: in a dispatch, or back in its combine.
  std::vector<std::pair<uint32_t, uint64_t>> rows_sent(const HandleMemory& memory, uint32_t tokens,
                                                       bool comes_back) const;

  // Fills in what an argument struct has besides its base.
  template <class Args>
  void complete(Args& args, const Window& window, const HandleMemory& memory, uint32_t tokens) const {
    args.domains = tables(window);
    args.at = control_.offsets;
    args.routes = routes(memory, tokens);
  }

 private:
  Domains tables(const Window& window) const;
  TwoLevelRoutes routes(const HandleMemory& memory, uint32_t tokens) const;

  DomainPlan domains_;
  TwoLevelControl control_;
  uint32_t rank_;
  std::vector<uint32_t> sources_, numbers_;
};

}  // namespace weft
