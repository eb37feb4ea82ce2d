// SPDX-License-Identifier: Apache-2.0
//
// Low-latency round trips for tests: what every rank puts in, one dispatch and combine on one rank, and what plain
// indexing says of both.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "kernels/core/logfmt.cuh"
#include "memory/device_memory.h"
#include "memory/host_visible.h"
#include "moe/low_latency.h"
#include "moe/two_level.h"
#include "support/ranks.h"
#include "support/shared_vector.h"

namespace weft::testing {

inline constexpr uint8_t kPoison = 0xa5;
inline constexpr double kTimeoutS = 20.0;

struct Case {
  uint32_t ranks;
  uint32_t hidden;
  uint32_t top_k;
  uint32_t experts;
  uint32_t max_tokens;
  int64_t payload = kPayloadCopy;
  int64_t reply = kReplyReduced;
  uint32_t host_threads = 1;
  bool weights_travel = false;
  int64_t only_expert = -1;  // every choice is this one
  bool no_tokens = false;
  uint32_t padding = 0;  // not 0: received rows are packed, those of each expert at a multiple of it

  uint32_t experts_per_rank() const { return (experts + ranks - 1) / ranks; }
  bool is_fp8() const { return payload != kPayloadCopy; }
  uint32_t row_bytes() const { return is_fp8() ? hidden : hidden * 2; }
  uint32_t scale_bytes() const {
    if (!is_fp8()) return 0;
    return hidden / kGroupElems * (payload == kPayloadFp8Exponent ? 1 : 4);
  }
  uint64_t rows() const { return uint64_t{ranks} * max_tokens; }  // per expert
};

// What one rank puts in. Every rank can make every other's.
struct Input {
  uint32_t tokens = 0;
  Shared<uint16_t> x;
  Shared<int64_t> ids;
  Shared<float> weights;
};

inline Input make_input(const Case& c, uint32_t rank, uint32_t seed) {
  std::mt19937 random(seed * 7919 + rank);
  Input in;
  in.tokens = c.no_tokens || (rank == 1 && c.ranks > 2) ? 0
              : rank == 0                               ? c.max_tokens
                                                        : random() % (c.max_tokens + 1);
  for (uint64_t i = 0; i < uint64_t{in.tokens} * c.hidden; ++i) {
    const float value = (static_cast<float>(random() % 20000) - 10000.0f) / 11000.0f;
    in.x.push_back(static_cast<uint16_t>(bf16_bits(value)));
  }
  std::vector<int64_t> experts(std::max(c.experts, c.top_k), -1);
  std::iota(experts.begin(), experts.begin() + c.experts, 0);
  for (uint32_t t = 0; t < in.tokens; ++t) {
    std::shuffle(experts.begin(), experts.end(), random);
    for (uint32_t k = 0; k < c.top_k; ++k) {
      in.ids.push_back(c.only_expert >= 0 ? c.only_expert : random() % 8 == 0 ? -1 : experts[k]);
      in.weights.push_back(static_cast<float>(random() % 1000) / 1000.0f);
    }
    // A rank with few tokens names some experts twice: there is room for those rows.
    const bool twice = in.tokens <= c.max_tokens / 2 && c.top_k > 1 && t % 3 == 0;
    if (twice) in.ids[in.ids.size() - 1] = in.ids[in.ids.size() - 2];
  }
  return in;
}

template <class T>
Shared<T> poisoned(uint64_t elements) {
  Shared<T> memory(elements);
  if (elements) std::memset(memory.data(), kPoison, elements * sizeof(T));
  return memory;
}

template <class Vector>
auto bytes_of(Vector& of) {
  using Byte = std::conditional_t<std::is_const_v<Vector>, const std::byte, std::byte>;
  return reinterpret_cast<Byte*>(of.data());
}

struct Output {
  Shared<uint8_t> rows;
  Shared<uint32_t> scales;
  Shared<int32_t> src_info, counts, out_source, stats, routes;
  Shared<int64_t> layout_range;
  Shared<float> weights;
  Shared<uint64_t> waits;
  Shared<uint16_t> y;
  Shared<uint16_t> combined;
};

// One rank of one test.
class Rank {
 public:
  Rank(std::shared_ptr<Bootstrap> boot, uint64_t region_bytes, uint32_t host_threads, uint32_t line_tokens,
       bool may_mask = false, double timeout_s = kTimeoutS, bool has_page = false) {
    auto comm = Communicator::create(boot, Device{Device::Kind::kHost, 0}, kTimeoutS);
    EXPECT_EQ(comm.status().message(), "");
    comm_ = *comm;
    make_mode(region_bytes, ComputeLimits{false, 1, host_threads, 0}, line_tokens, may_mask, timeout_s,
              has_page);
  }
  // On any device; the vectors of its round trips must be Shared there.
  Rank(std::shared_ptr<Communicator> comm, uint64_t region_bytes, const ComputeLimits& limits)
      : comm_(std::move(comm)) {
    if (limits.is_cuda) {
      auto stream = OwnStream::create(comm_->device().ordinal);
      EXPECT_EQ(stream.status().message(), "");
      stream_ = std::move(*stream);
    }
    make_mode(region_bytes, limits, 0, false, kTimeoutS, comm_->sharing() == Sharing::kCudaPinned);
  }

  // As a GPU has one, or polls its window where that has a host part.
  LowLatencyTerms with_page(LowLatencyTerms terms, uint64_t region_bytes) {
    terms.is_watched = window_->has_host_part();
    if (terms.is_watched) return terms;
    auto page = make_low_latency_page(*comm_, region_bytes, terms.domains);
    EXPECT_EQ(page.status().message(), "");
    terms.page = std::move(*page);
    return terms;
  }

  // As a buffer agrees on them, but for lines.
  LowLatencyTerms terms(uint32_t line_tokens) {
    LowLatencyTerms made;
    if (!comm_->why_not_all_mapped().empty()) {
      auto domains = agree_on_domains(*comm_, false);
      EXPECT_EQ(domains.status().message(), "");
      auto agreed = agree_on_low_latency(*comm_, std::move(*domains));
      EXPECT_EQ(agreed.status().message(), "");
      made = std::move(*agreed);
      domains_ = made.domains;
    }
    made.line_tokens = line_tokens;
    return made;
  }

  uint32_t rank() const { return static_cast<uint32_t>(comm_->rank()); }
  LowLatency& mode() { return *mode_; }
  Communicator& comm() { return *comm_; }
  Window& window() { return *window_; }
  void* stream() const { return stream_ ? stream_->get() : nullptr; }
  // Until what was launched is done, and went well.
  Status wait() {
    if (!stream_) return {};
    WEFT_TRY(stream_->wait());
    return mode_->fault();
  }
  uint32_t node_of(uint32_t rank) const { return domains_.domain[rank]; }
  static constexpr uint64_t kBegin = 4096;

 private:
  void make_mode(uint64_t region_bytes, const ComputeLimits& limits, uint32_t line_tokens, bool may_mask,
                 double timeout_s, bool has_page) {
    constexpr uint64_t kRanksMax = 64;  // more ranks than any test has
    auto visible = HostVisible::create(comm_->device(), sizeof(FaultBox) + kRanksMax * sizeof(uint32_t));
    EXPECT_EQ(visible.status().message(), "");
    visible_ = std::move(*visible);
    auto window = Window::create(comm_, kBegin + region_bytes, kBegin + region_bytes);
    EXPECT_EQ(window.status().message(), "");
    window_ = std::move(*window);
    mode_ = std::make_unique<LowLatency>(
        *window_, kBegin, kBegin + region_bytes, limits,
        LowLatencyWaits{visible_->at<FaultBox>(0), timeout_s, may_mask,
                        visible_->at<uint32_t>(sizeof(FaultBox))},
        has_page ? with_page(terms(line_tokens), region_bytes) : terms(line_tokens));
  }

  DomainPlan domains_;
  std::unique_ptr<HostVisible> visible_;
  std::unique_ptr<OwnStream> stream_;
  std::shared_ptr<Communicator> comm_;
  std::unique_ptr<Window> window_;
  std::unique_ptr<LowLatency> mode_;
};

inline uint64_t region_for(const Case& c) {
  return low_latency_hint_bytes({c.ranks, c.max_tokens, c.top_k, c.experts}, c.hidden);
}

// One dispatch and its combine on one rank, in phases.
class RoundTrip {
 public:
  RoundTrip(const Case& c, Rank& rank, uint32_t seed) : c_(c), rank_(rank) {
    for (uint32_t r = 0; r < c.ranks; ++r) all_.push_back(make_input(c, r, seed));
    const uint64_t rows = owned() * c.rows() + owned() * c.padding;
    out_.rows = poisoned<uint8_t>(rows * c.row_bytes());
    out_.scales = poisoned<uint32_t>(rows * ((c.scale_bytes() + 3) / 4));
    out_.src_info = poisoned<int32_t>(rows);
    out_.out_source = poisoned<int32_t>(rows);
    out_.weights = poisoned<float>(rows);
    out_.counts = poisoned<int32_t>(owned());
    out_.stats.assign(owned(), 1000);
    out_.layout_range = poisoned<int64_t>(uint64_t{owned()} * c.ranks);
    out_.routes =
        poisoned<int32_t>(rank.mode().routes_words(c.max_tokens, c.top_k, c.experts, c.weights_travel));
    out_.waits.assign(c.ranks, 0);
    out_.y.assign(rows * c.hidden, 0x7fc0);  // NaN where no row is
    out_.combined = poisoned<uint16_t>(uint64_t{mine().tokens} * c.hidden);
    fill_calls();
  }

  Status dispatch(uint32_t phases) { return run(dispatch_, phases); }
  Status combine(uint32_t phases) {
    if (phases & kPhaseSend) make_results();
    return run(combine_, phases);
  }

  bool replies_once_per_domain() const { return rank_.mode().replies_once_per_domain(combine_); }

  // Counts, ranges, sources and rows are those of plain indexing; nothing else was written.
  void check_dispatched() {
    for (uint32_t e = 0; e < owned(); ++e) {
      uint64_t row = 0;
      const uint64_t first = c_.padding == 0 ? 0 : first_row(e);
      const int64_t expert = int64_t(rank_.rank()) * c_.experts_per_rank() + e;
      for (uint32_t s = 0; s < c_.ranks; ++s) {
        const uint64_t begin = row;
        for (uint32_t t = 0; t < all_[s].tokens; ++t)
          for (uint32_t k = 0; k < c_.top_k; ++k)
            if (all_[s].ids[uint64_t{t} * c_.top_k + k] == expert) check_row(e, row++, s, t, k);
        EXPECT_EQ(out_.layout_range[uint64_t{e} * c_.ranks + s],
                  static_cast<int64_t>((first + begin) << 32 | (row - begin)));
      }
      EXPECT_EQ(out_.counts[e], static_cast<int32_t>(row));
      EXPECT_EQ(out_.stats[e], 1000 + static_cast<int32_t>(row));
      if (c_.padding == 0 ? row < c_.rows() : row % c_.padding != 0) {
        const uint8_t* after = out_.rows.data() + (first_row(e) + row) * c_.row_bytes();
        EXPECT_EQ(after[0], kPoison);
        EXPECT_EQ(after[c_.row_bytes() - 1], kPoison);
      }
    }
  }

  void check_combined() {
    double difference = 0, scale = 0;
    for (uint64_t i = 0; i < out_.combined.size(); ++i) {
      const double want = expected(i / c_.hidden, i % c_.hidden);
      const double got = float_of_bf16(out_.combined[i]);
      if (c_.reply == kReplyExact) ASSERT_EQ(got, float_of_bf16(bf16_bits(static_cast<float>(want)))) << i;
      if (c_.reply == kReplyReduced) ASSERT_EQ(got, expected_reduced(i / c_.hidden, i % c_.hidden)) << i;
      difference += (want + 1) * (got + 1);
      scale += (want + 1) * (want + 1) + (got + 1) * (got + 1);
    }
    if (scale > 0) EXPECT_LT(1 - 2 * difference / scale, is_log(c_.reply) ? 9e-4 : 1e-5);
  }

 private:
  template <class Form, class Memory>
  struct Call : Form, Memory {
    uint32_t call_slot = 0;
  };
  template <class Form, class Memory>
  Status run(Call<Form, Memory>& call, uint32_t phases) {
    call.has_weights = call.topk_weights != nullptr;
    WEFT_TRY_ASSIGN(const auto planned, rank_.mode().plan(static_cast<const Form&>(call)));
    WEFT_TRY(rank_.mode().launch(planned, call, call.call_slot, phases, rank_.stream()));
    return rank_.wait();
  }

  const Input& mine() const { return all_[rank_.rank()]; }
  // The last ranks own fewer experts, or none, where these do not divide evenly.
  uint32_t owned() const {
    const uint32_t before = std::min(c_.experts, rank_.rank() * c_.experts_per_rank());
    return std::min(c_.experts - before, c_.experts_per_rank());
  }

  void fill_calls() {
    auto& d = dispatch_;
    d.max_tokens = c_.max_tokens;
    d.tokens = mine().tokens;
    d.top_k = c_.top_k;
    d.experts = c_.experts;
    d.payload = c_.payload;
    d.row_bytes = c_.row_bytes();
    d.scale_bytes = c_.scale_bytes();
    d.topk_idx = mine().ids.data();
    static const float kNone = 0;  // a null pointer would say that no weights travel, on this rank only
    d.topk_weights = !c_.weights_travel ? nullptr : mine().weights.empty() ? &kNone : mine().weights.data();
    d.x = bytes_of(mine().x);
    d.out = bytes_of(out_.rows);
    d.out_scales = out_.scales.data();
    d.padding = c_.padding;
    d.max_rows = static_cast<uint32_t>(out_.src_info.size());
    d.scale_word_stride = c_.rows();
    d.scale_row_stride = 1;
    d.scale_expert_stride = c_.rows() * ((c_.scale_bytes() + 3) / 4);
    d.src_info = out_.src_info.data();
    d.layout_range = out_.layout_range.data();
    d.counts = out_.counts.data();
    d.out_weights = out_.weights.data();
    d.out_source = out_.out_source.data();
    d.expert_stats = out_.stats.data();
    d.wait_cycles = out_.waits.data();
    d.routes = out_.routes.data();
    d.call_slot = rank_.mode().next_call_slot();
    auto& b = combine_;
    b.max_tokens = c_.max_tokens;
    b.tokens = mine().tokens;
    b.top_k = c_.top_k;
    b.experts = c_.experts;
    b.reply = c_.reply;
    b.row_bytes = c_.hidden * 2;
    b.topk_idx = mine().ids.data();
    b.topk_weights = c_.weights_travel && is_reduced(c_.reply) ? nullptr
                     : mine().weights.empty()                  ? &kNone
                                                               : mine().weights.data();
    b.dispatch_had_weights = c_.weights_travel;
    b.x = bytes_of(out_.y);
    b.routes = out_.routes.data();
    b.combined = bytes_of(out_.combined);
    b.wait_cycles = out_.waits.data();
    b.call_slot = rank_.mode().next_call_slot();
  }

  // Where the rows of an expert begin.
  uint64_t first_row(uint32_t e) const {
    if (c_.padding == 0) return e * c_.rows();
    uint64_t at = 0;
    for (uint32_t before = 0; before < e; ++before)
      at += (chosen(before) + c_.padding - 1) / c_.padding * c_.padding;
    return at;
  }
  uint64_t chosen(uint32_t e) const {
    const int64_t expert = int64_t(rank_.rank()) * c_.experts_per_rank() + e;
    uint64_t count = 0;
    for (const Input& in : all_) count += std::count(in.ids.begin(), in.ids.end(), expert);
    return count;
  }

  float x_of(uint32_t source, uint64_t token, uint64_t channel) const {
    return float_of_bf16(all_[source].x[token * c_.hidden + channel]);
  }

  void check_row(uint32_t e, uint64_t in_expert, uint32_t source, uint32_t token, uint32_t k) {
    const uint64_t row = first_row(e) + in_expert;
    ASSERT_EQ(out_.src_info[row], static_cast<int32_t>(token));
    ASSERT_EQ(out_.out_source[row], static_cast<int32_t>(source));
    if (c_.weights_travel) ASSERT_EQ(out_.weights[row], all_[source].weights[uint64_t{token} * c_.top_k + k]);
    const uint8_t* bytes = out_.rows.data() + row * c_.row_bytes();
    if (!c_.is_fp8()) {
      ASSERT_EQ(std::memcmp(bytes, &all_[source].x[uint64_t{token} * c_.hidden], c_.row_bytes()), 0)
          << "expert " << e << " row " << in_expert;
      return;
    }
    for (uint32_t group = 0; group < c_.hidden / kGroupElems; ++group) {
      float amax = 0;
      for (uint32_t i = 0; i < kGroupElems; ++i)
        amax = std::max(amax, std::abs(x_of(source, token, group * kGroupElems + i)));
      const Fp8Scale scale = fp8_scale(amax, c_.payload != kPayloadFp8);
      ASSERT_EQ(scale_of(e, in_expert, group), scale.scale);
      for (uint32_t i = 0; i < kGroupElems; ++i) {
        const float value = x_of(source, token, group * kGroupElems + i) * scale.multiply;
        ASSERT_EQ(bytes[group * kGroupElems + i], e4m3_portable(value));
      }
    }
  }

  float scale_of(uint32_t e, uint64_t row, uint32_t group) const {
    const uint64_t words = c_.scale_bytes() / 4;
    const uint64_t word = c_.payload == kPayloadFp8Exponent ? group / 4 : group;
    const uint32_t bits = out_.scales[e * c_.rows() * words + word * c_.rows() + row];
    return c_.payload == kPayloadFp8Exponent ? float_of_bits((bits >> (group % 4 * 8) & 0xffu) << 23)
                                             : float_of_bits(bits);
  }

  // An expert's result is a bf16 multiple of what the token was.
  static uint16_t result(float value, int64_t expert) {
    return static_cast<uint16_t>(bf16_bits(value * (0.25f + 0.01f * static_cast<float>(expert % 7))));
  }
  void make_results() {
    for (uint32_t e = 0; e < owned(); ++e) {
      for (int64_t row = 0; row < out_.counts[e]; ++row) {
        const uint64_t at = first_row(e) + row;
        const int64_t expert = int64_t(rank_.rank()) * c_.experts_per_rank() + e;
        for (uint32_t h = 0; h < c_.hidden; ++h)
          out_.y[at * c_.hidden + h] = result(x_of(out_.out_source[at], out_.src_info[at], h), expert);
      }
    }
  }
  // Ranks round their sums, and so do nodes where their sums cross once: both in the order of first slots.
  float expected_reduced(uint64_t token, uint64_t channel) const {
    std::vector<std::pair<uint32_t, float>> of_ranks, of_repliers;
    const auto add_to = [](auto& sums, uint32_t whose, float value) {
      const auto found =
          std::find_if(sums.begin(), sums.end(), [&](auto& sum) { return sum.first == whose; });
      if (found == sums.end())
        sums.emplace_back(whose, 0.0f + value);
      else
        found->second += value;
    };
    for (uint32_t k = 0; k < c_.top_k; ++k) {
      const int64_t expert = mine().ids[token * c_.top_k + k];
      if (expert < 0) continue;
      const float product = mine().weights[token * c_.top_k + k] *
                            float_of_bf16(result(x_of(rank_.rank(), token, channel), expert));
      add_to(of_ranks, static_cast<uint32_t>(expert / c_.experts_per_rank()), product);
    }
    const bool shares = rank_.mode().replies_once_per_domain(combine_);
    for (const auto& [rank, sum] : of_ranks) {
      const bool is_far = shares && rank_.node_of(rank) != rank_.node_of(rank_.rank());
      add_to(of_repliers, is_far ? c_.ranks + rank_.node_of(rank) : rank, float_of_bf16(bf16_bits(sum)));
    }
    float all = 0;
    for (const auto& [replier, sum] : of_repliers) all += float_of_bf16(bf16_bits(sum));
    return float_of_bf16(bf16_bits(all));
  }
  double expected(uint64_t token, uint64_t channel) const {
    float sum = 0;
    for (uint32_t k = 0; k < c_.top_k; ++k) {
      const int64_t expert = mine().ids[token * c_.top_k + k];
      if (expert < 0) continue;
      sum += mine().weights[token * c_.top_k + k] *
             float_of_bf16(result(x_of(rank_.rank(), token, channel), expert));
    }
    return sum;
  }

  Case c_;
  Rank& rank_;
  std::vector<Input> all_;
  Output out_;
  Call<LowLatencyDispatchFacts, LowLatencyDispatchMemory> dispatch_{};
  Call<LowLatencyCombineFacts, LowLatencyCombineMemory> combine_{};
};

inline constexpr uint32_t kBoth = kPhaseSend | kPhaseReceive;

inline void run_round_trip(const Case& c, Rank& rank, uint32_t seed) {
  RoundTrip trip(c, rank, seed);
  ASSERT_EQ(trip.dispatch(kBoth).message(), "");
  trip.check_dispatched();
  ASSERT_EQ(trip.combine(kBoth).message(), "");
  trip.check_combined();
}

}  // namespace weft::testing
