// SPDX-License-Identifier: Apache-2.0
#include "plan/low_latency.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace weft {
namespace {

constexpr ComputeLimits kH200{true, 132, 1, 227 * 1024};
constexpr ComputeLimits kHost{false, 1, 2, 0};

LowLatencyDispatchShape fp8(const LowLatencySizes& sizes, int64_t hidden) {
  return {sizes.ranks, sizes.experts_per_rank(), sizes.top_k, hidden, hidden / 32, kPayloadFp8, 0};
}
LowLatencyCombineShape bf16(const LowLatencySizes& sizes, int64_t hidden, int64_t reply = kReplyReduced) {
  return {sizes.ranks, sizes.experts_per_rank(), sizes.top_k, hidden * 2, reply, 0};
}

std::string dispatch_text(const LowLatencySizes& sizes, int64_t hidden, const ComputeLimits& limits) {
  return to_text(plan_low_latency_dispatch(sizes, fp8(sizes, hidden), limits));
}
std::string combine_text(const LowLatencySizes& sizes, int64_t hidden, uint32_t tokens,
                         const ComputeLimits& limits) {
  return to_text(plan_low_latency_combine(sizes, bf16(sizes, hidden), tokens, limits));
}

TEST(LowLatencyPlan, GoldenPlansOfTypicalCalls) {
  const LowLatencySizes deepseek{8, 128, 8, 256};
  EXPECT_EQ(dispatch_text(deepseek, 7168, kH200),
            "words 7733248 bytes, 132 blocks of 512 threads, 5232 bytes shared, 1 pieces, 2 receive splits");
  EXPECT_EQ(
      combine_text(deepseek, 7168, 128, kH200),
      "words 16908288 bytes, 132 blocks of 512 threads, 2608 bytes shared, 3 pieces, 15 receive splits");
  EXPECT_EQ(
      combine_text(deepseek, 7168, 1, kH200),
      "words 16908288 bytes, 132 blocks of 512 threads, 2608 bytes shared, 3 pieces, 48 receive splits");
  const LowLatencySizes few{8, 8, 8, 256};
  EXPECT_EQ(
      combine_text(few, 7168, 8, kH200),
      "words 1056768 bytes, 132 blocks of 512 threads, 2608 bytes shared, 8 pieces, 128 receive splits");
  EXPECT_EQ(dispatch_text(few, 7168, kHost),
            "words 483328 bytes, 2 blocks of 1 threads, 2592 bytes shared, 1 pieces, 1 receive splits");
}

// Few SMs have few warps, which then take larger parts; those of a launch that may take all are as before.
TEST(LowLatencyPlan, CallsOnFewSmsHaveFewBlocksAndLargerPieces) {
  LowLatencySizes sizes{2, 128, 8, 256};
  EXPECT_EQ(
      combine_text(sizes, 7168, 128, kH200),
      "words 16809984 bytes, 132 blocks of 512 threads, 2592 bytes shared, 8 pieces, 16 receive splits");
  sizes.grid_sms = 500;
  EXPECT_EQ(plan_low_latency_dispatch(sizes, fp8(sizes, 7168), kH200).blocks, 132u);
  EXPECT_EQ(plan_low_latency_combine(sizes, bf16(sizes, 7168), 128, kH200).pieces, 8u);
  sizes.grid_sms = 8;
  EXPECT_EQ(plan_low_latency_dispatch(sizes, fp8(sizes, 7168), kH200).blocks, 8u);
  EXPECT_EQ(plan_low_latency_dispatch(sizes, fp8(sizes, 7168), kHost).blocks, 2u);
  const LowLatencyPlan plan = plan_low_latency_combine(sizes, bf16(sizes, 7168), 128, kH200);
  EXPECT_EQ(plan.blocks, 8u);
  EXPECT_EQ(plan.pieces, 1u);
  EXPECT_EQ(plan.receive_splits, 1u);
}

// Where each warp has several messages, rows go in bulk, without lines and in one piece; not where there are more warps, nor
// over ports, nor where shared memory is small, whose ranks still send what the others take.
TEST(LowLatencyPlan, FewSmsOfManyTokensMoveRowsInBulk) {
  LowLatencySizes sizes{4, 128, 8, 256, kPlannedLineTokens, 1 << 30};
  sizes.grid_sms = 4;
  const LowLatencyDispatchShape there{4, 64, 8, 7168, 224, kPayloadCopy, 1, 1};
  const LowLatencyCombineShape back{4, 64, 8, 14336, kReplyReduced, 1, kElementBf16, kElementBf16, 0};
  const auto dispatch = [&](const ComputeLimits& limits) {
    return plan_low_latency_dispatch(sizes, there, limits);
  };
  const auto combine = [&](const ComputeLimits& limits) {
    return plan_low_latency_combine(sizes, back, 128, limits);
  };
  EXPECT_TRUE(dispatch(kH200).in_bulk);
  EXPECT_TRUE(combine(kH200).in_bulk);
  EXPECT_FALSE(dispatch(kH200).lines);
  EXPECT_FALSE(combine(kH200).lines);
  EXPECT_EQ(combine(kH200).pieces, 1u);
  EXPECT_LE(dispatch(kH200).shared_bytes, kH200.shared_bytes);
  EXPECT_LE(combine(kH200).shared_bytes, kH200.shared_bytes);
  const ComputeLimits small{true, 82, 1, 99 * 1024};
  EXPECT_FALSE(dispatch(small).in_bulk);
  EXPECT_FALSE(dispatch(small).lines);
  EXPECT_FALSE(combine(small).in_bulk);
  EXPECT_EQ(combine(small).pieces, 1u);
  EXPECT_FALSE(dispatch(kHost).in_bulk);
  sizes.grid_sms = 32;
  EXPECT_FALSE(dispatch(kH200).in_bulk);
  EXPECT_FALSE(combine(kH200).in_bulk);
  sizes.grid_sms = 0;
  EXPECT_FALSE(dispatch(kH200).in_bulk);
  sizes.grid_sms = 4;
  sizes.has_ports = true;
  EXPECT_FALSE(dispatch(kH200).in_bulk);
  sizes.has_ports = false;
  sizes.bulk_rows = BulkRows::kNever;
  EXPECT_FALSE(dispatch(kH200).in_bulk);
  sizes.bulk_rows = BulkRows::kAlways;
  EXPECT_TRUE(dispatch(kHost).in_bulk);
  EXPECT_TRUE(combine(kHost).in_bulk);
}

// So that a product whose blocks go in clusters finds the other SMs side by side, too.
TEST(LowLatencyPlan, SmsOfACallLieSideBySide) {
  LowLatencySizes sizes{4, 128, 8, 256};
  ComputeLimits limits = kH200;
  limits.has_clusters = true;
  auto cluster = [&] {
    const uint32_t dispatch = plan_low_latency_dispatch(sizes, fp8(sizes, 7168), limits).blocks_per_cluster;
    EXPECT_EQ(dispatch, plan_low_latency_combine(sizes, bf16(sizes, 7168), 128, limits).blocks_per_cluster);
    return dispatch;
  };
  EXPECT_EQ(cluster(), 1u);
  for (const auto& [sms, expected] : {std::pair{12u, 2u}, {14u, 2u}, {7u, 1u}}) {
    sizes.grid_sms = sms;
    EXPECT_EQ(cluster(), expected) << sms;
  }
  sizes.grid_sms = 12;
  limits.has_clusters = false;
  EXPECT_EQ(cluster(), 1u);
}

// A block watches, and what is shared out over warps is shared out over those of the others.
TEST(LowLatencyPlan, WhereABlockWatchesTheOthersShareTheWork) {
  LowLatencySizes sizes{2, 128, 8, 256, 0, 0, true, true};
  for (const uint32_t max_blocks : {1u, 2u, 17u, 132u}) {
    const ComputeLimits limits{true, max_blocks, 1, 227 * 1024};
    const LowLatencyPlan combine = plan_low_latency_combine(sizes, bf16(sizes, 7168), 128, limits);
    EXPECT_EQ(combine.blocks, std::max(max_blocks, 2u));
    EXPECT_LE(combine.receive_splits * 128, std::max((combine.blocks - 1) * 16, 128u));
    EXPECT_EQ(combine.answer_parts, 2u);  // 16 warps, batches of 8 tokens
    const LowLatencyPlan dispatch = plan_low_latency_dispatch(sizes, fp8(sizes, 7168), limits);
    EXPECT_EQ(dispatch.blocks, combine.blocks);
    EXPECT_LE(dispatch.receive_splits * 2 * 16, std::max((combine.blocks - 1) * 16, 32u));
  }
  EXPECT_EQ(plan_low_latency_combine(sizes, bf16(sizes, 7168), 128, kHost).blocks, kHost.host_threads + 1);
  sizes.is_watched = false;
  EXPECT_EQ(plan_low_latency_combine(sizes, bf16(sizes, 7168), 128, kHost).blocks, kHost.host_threads);
}

// What a rank sends to itself has room beside the control area: all messages of a dispatch, all reduced replies.
TEST(LowLatencyPlan, APageHoldsWhatARankSendsToItself) {
  for (const uint32_t ranks : {2u, 3u, 8u, 64u}) {
    const LowLatencySizes sizes{ranks, 128, 8, 256, 0, 0, true, true};
    const uint64_t region =
        low_latency_bytes_with_ports(ranks, low_latency_hint_bytes({ranks, 128, 8, 256}, 7168));
    const uint64_t half = (low_latency_page_bytes(ranks, region) - low_latency_control(ranks).end) / 2;
    const LowLatencyDispatchShape shape = fp8(sizes, 7168);
    EXPECT_GE(half, own_dispatch_bytes(sizes.batches(),
                                       message_layout(8, true, shape.row_bytes, shape.scale_bytes)));
    const PortCombineLayout at = port_combine_layout(ranks, 128, 8, sizes.batches(), 14336, kReplyReduced);
    if (ranks <= 8) {
      EXPECT_GE(half, own_combine(at, 128, 8, sizes.batches()).bytes);
    }
  }
}

// Ranks must agree on everything about a reply, and not all have the same number of tokens.
TEST(LowLatencyPlan, PiecesDoNotDependOnTheTokensOfARank) {
  for (uint32_t max_tokens : {1u, 7u, 64u, 128u, 300u, 5000u}) {
    const LowLatencySizes sizes{8, max_tokens, 8, 256};
    const uint32_t pieces = plan_low_latency_combine(sizes, bf16(sizes, 7168), 0, kH200).pieces;
    for (uint32_t tokens : {1u, max_tokens / 2, max_tokens}) {
      const LowLatencyPlan plan = plan_low_latency_combine(sizes, bf16(sizes, 7168), tokens, kH200);
      EXPECT_EQ(plan.pieces, pieces);
      EXPECT_EQ(plan.receive_splits % pieces, 0u);
    }
    EXPECT_LE(batches_of(max_tokens).count * pieces, kWordsPerSource);
  }
}

// Few tokens travel as lines: one to a batch, and only while the bytes that lines add cost less than they
// save.
TEST(LowLatencyPlan, LinesAreForFewTokens) {
  auto line_tokens = [](LowLatencySizes sizes, uint32_t wanted, const ComputeLimits& limits) {
    sizes.line_tokens = wanted;
    sizes.line_room = uint64_t{1} << 30;
    return plan_low_latency_dispatch(sizes, fp8(sizes, 7168), limits).line_tokens;
  };
  EXPECT_EQ(line_tokens({8, 128, 8, 256}, kPlannedLineTokens, kH200), 110u);
  EXPECT_EQ(line_tokens({2, 128, 8, 256}, kPlannedLineTokens, kH200), 128u);
  EXPECT_EQ(line_tokens({8, 16, 8, 256}, kPlannedLineTokens, kH200), 16u);
  EXPECT_EQ(line_tokens({8, 4096, 8, 256}, 64, kH200), 64u);
  EXPECT_EQ(line_tokens({8, 300, 8, 256}, kMaxBatches, kH200), 100u);  // batches of three tokens
  EXPECT_EQ(line_tokens({8, 128, 8, 256}, 0, kH200), 0u);
  ComputeLimits small = kH200;
  small.shared_bytes = 8 * 1024;  // no room for the image of a message
  EXPECT_EQ(line_tokens({8, 128, 8, 256}, 64, small), 0u);
}

// Lines have memory of their own, at the end of a half. A call whose lines do not fit there has none.
TEST(LowLatencyPlan, LinesNeedRoomOfTheirOwn) {
  LowLatencySizes sizes{8, 128, 8, 256, 128};
  const LowLatencyDispatchShape shape = fp8(sizes, 7168);
  const MessageLayout message = message_layout(8, false, 7168, 7168 / 32);
  sizes.line_room = line_message_bytes(8, batches_of(128), message);
  EXPECT_TRUE(plan_low_latency_dispatch(sizes, shape, kH200).lines);
  EXPECT_EQ(plan_low_latency_dispatch(sizes, shape, kH200).line_tokens, 128u);
  sizes.line_room -= 1;
  EXPECT_FALSE(plan_low_latency_dispatch(sizes, shape, kH200).lines);
  EXPECT_EQ(plan_low_latency_dispatch(sizes, shape, kH200).line_tokens, 0u);
  sizes.line_room = combine_layout(8, 128, 8, line_bytes_of(14336)).line_bytes;
  EXPECT_TRUE(plan_low_latency_combine(sizes, bf16(sizes, 7168), 128, kH200).lines);
  sizes.line_room -= 1;
  EXPECT_FALSE(plan_low_latency_combine(sizes, bf16(sizes, 7168), 128, kH200).lines);
  for (uint64_t half_bytes : {uint64_t{0}, uint64_t{128}, uint64_t{100'096}, uint64_t{1} << 33}) {
    const uint64_t begin = lines_begin(8, half_bytes);
    EXPECT_EQ(begin % kLineBytes, 0u);
    EXPECT_LE(half_bytes - begin, std::min(half_bytes / 2, most_line_bytes(8)));
  }
}

TEST(LowLatencyPlan, BatchesHoldEveryToken) {
  for (uint32_t max_tokens = 1; max_tokens < 1000; ++max_tokens) {
    const Batches batches = batches_of(max_tokens);
    EXPECT_LE(batches.count, kMaxBatches);
    EXPECT_GE(batches.count * batches.capacity, max_tokens);
    for (uint32_t tokens : {1u, max_tokens / 2, max_tokens})
      EXPECT_LE(batches.share(tokens), batches.capacity);
  }
}

TEST(LowLatencyPlan, TheHintHoldsEveryFormat) {
  for (uint32_t ranks : {1u, 3u, 8u, 17u, 64u}) {
    for (uint32_t max_tokens : {1u, 100u, 129u, 4096u}) {
      LowLatencySizes sizes{ranks, max_tokens, 32, 100, kPlannedLineTokens};
      const uint64_t full_half = low_latency_half_bytes(ranks, low_latency_hint_bytes(sizes, 2048));
      const uint64_t half = lines_begin(ranks, full_half);
      sizes.line_room = full_half - half;
      EXPECT_LE(low_latency_region_bytes(ranks, half), low_latency_hint_bytes(sizes, 2048));
      LowLatencyDispatchShape copy = fp8(sizes, 4096);
      copy.scale_bytes = 2048 / 16 * 4;
      copy.payload = kPayloadCopy;
      copy.weights = 1;
      EXPECT_LE(plan_low_latency_dispatch(sizes, copy, kH200).word_bytes, half);
      EXPECT_TRUE(plan_low_latency_dispatch(sizes, copy, kH200).lines);
      EXPECT_LE(plan_low_latency_dispatch(sizes, fp8(sizes, 2048), kH200).word_bytes, half);
      for (int64_t reply = kReplyReduced; reply <= kReplyExactLog; ++reply) {
        const LowLatencyPlan plan =
            plan_low_latency_combine(sizes, bf16(sizes, 2048, reply), max_tokens, kH200);
        EXPECT_LE(plan.word_bytes, half);
        EXPECT_TRUE(plan.lines);
      }
    }
  }
}

TEST(LowLatencyPlan, ARegionTooSmallForItsControlAreaHasNoHalves) {
  EXPECT_EQ(low_latency_half_bytes(8, 0), 0u);
  EXPECT_EQ(low_latency_half_bytes(8, low_latency_control(8).end), 0u);
  EXPECT_EQ(low_latency_half_bytes(8, low_latency_control(8).end + 511), 128u);
}

}  // namespace
}  // namespace weft
