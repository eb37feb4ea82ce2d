// SPDX-License-Identifier: Apache-2.0
//
// Low-latency dispatch and combine on the host target, ranks as threads and as processes, against plain
// indexing.
#include "moe/low_latency.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "base/text.h"
#include "kernels/low_latency_rounds.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using namespace weft::testing;  // NOLINT(google-build-using-namespace)

// Of waits that end in vain; a rank that waits for its turn on a busy machine is not silent.
constexpr double kSilentS = 1.5;

// No lines, lines for ranks with few tokens beside ranks with more, and the usual: most cases have no more.
constexpr uint32_t kUsual = 64;
constexpr uint32_t kLineTokens[] = {0, 5, kUsual};

class LowLatencyLines : public ::testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(LineTokens, LowLatencyLines, ::testing::ValuesIn(kLineTokens));

class LowLatencyCases : public ::testing::TestWithParam<Case> {};

TEST_P(LowLatencyCases, ThreadsRoundTrip) {
  run_ranks(RanksAre::kThreads, GetParam().ranks, [](std::shared_ptr<Bootstrap> boot) {
    for (uint32_t line_tokens : kLineTokens) {
      Rank rank(boot, region_for(GetParam()), GetParam().host_threads, line_tokens);
      for (uint32_t seed = 0; seed < 3; ++seed) run_round_trip(GetParam(), rank, seed);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, LowLatencyCases,
                         ::testing::Values(Case{1, 8, 1, 1, 1}, Case{1, 128, 2, 3, 5, kPayloadFp8},
                                           Case{2, 512, 3, 8, 9, kPayloadFp8Exponent},
                                           Case{2, 64, 8, 6, 130, kPayloadCopy, kReplyExact},
                                           Case{3, 40, 3, 7, 6},
                                           Case{3, 256, 4, 8, 17, kPayloadFp8Rounded, kReplyExact, 3},
                                           Case{4, 1024, 8, 32, 20, kPayloadFp8, kReplyReducedLog},
                                           Case{4, 1536, 8, 32, 20, kPayloadCopy, kReplyExactLog, 2},
                                           Case{5, 8, 32, 64, 11, kPayloadCopy, kReplyReduced, 2, true},
                                           Case{7, 16, 2, 5, 9, kPayloadCopy, kReplyReduced, 1, true},
                                           Case{17, 8, 4, 34, 6},
                                           Case{6, 128, 2, 3, 4, kPayloadFp8, kReplyExact, 1, true}));

INSTANTIATE_TEST_SUITE_P(
    Extremes, LowLatencyCases,
    ::testing::Values(Case{3, 8, 3, 6, 1500}, Case{3, 64, 1, 6, 40, kPayloadCopy, kReplyExact, 2, false, 4},
                      Case{4, 64, 3, 8, 16, kPayloadCopy, kReplyReduced, 1, false, -1, true}));

TEST(LowLatency, ProcessesRoundTrip) {
  const Case c{3, 256, 4, 8, 12, kPayloadFp8};
  run_ranks(RanksAre::kProcesses, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank(boot, region_for(c), 1, kUsual);
    for (uint32_t seed = 0; seed < 4; ++seed) run_round_trip(c, rank, seed);
  });
}

TEST_P(LowLatencyLines, TwoCallsMayBeOutstanding) {
  const Case c{3, 128, 3, 6, 10};
  run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank(boot, region_for(c), 2, GetParam());
    for (uint32_t turn = 0; turn < 5; ++turn) {
      RoundTrip a(c, rank, 2 * turn);
      RoundTrip b(c, rank, 2 * turn + 1);
      ASSERT_EQ(a.dispatch(kPhaseSend).message(), "");
      ASSERT_EQ(b.dispatch(kPhaseSend).message(), "");
      ASSERT_EQ(a.dispatch(kPhaseReceive).message(), "");
      a.check_dispatched();
      ASSERT_EQ(a.combine(kPhaseSend).message(), "");
      ASSERT_EQ(b.dispatch(kPhaseReceive).message(), "");
      b.check_dispatched();
      ASSERT_EQ(b.combine(kPhaseSend).message(), "");
      ASSERT_EQ(a.combine(kPhaseReceive).message(), "");
      ASSERT_EQ(b.combine(kPhaseReceive).message(), "");
      a.check_combined();
      b.check_combined();
    }
  });
}

// One of several exchanges in flight, each in a region of its own, as the split all-to-all has them.
class MicroBatch {
 public:
  MicroBatch(std::shared_ptr<Bootstrap> boot, const Case& most, uint32_t line_tokens)
      : rank_(std::move(boot), region_for(most), 2, line_tokens) {}

  bool is_idle() const { return phase_ == 0; }
  void start(const Case& c, uint32_t seed) { round_trip_ = std::make_unique<RoundTrip>(c, rank_, seed); }
  // The next of its four phases, with what is to be checked behind it.
  void step() {
    const uint32_t phase = phase_++;
    const uint32_t half = phase % 2 == 0 ? kPhaseSend : kPhaseReceive;
    ASSERT_EQ((phase < 2 ? round_trip_->dispatch(half) : round_trip_->combine(half)).message(), "");
    if (phase == 1) round_trip_->check_dispatched();
    if (phase == 3) round_trip_->check_combined();
    phase_ %= 4;
  }

 private:
  Rank rank_;
  std::unique_ptr<RoundTrip> round_trip_;
  uint32_t phase_ = 0;
};

// Repeats (--gtest_repeat) draw other sizes.
TEST_P(LowLatencyLines, InterleavedMicroBatchesOfAnySizeStayApart) {
  constexpr uint32_t kRounds = 60;
  static uint32_t repeats = 0;
  const uint32_t repeat = repeats++;
  const Case most{3, 128, 4, 7, 12};
  run_ranks(RanksAre::kThreads, most.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    MicroBatch batches[2] = {{boot, most, GetParam()}, {boot, most, GetParam()}};
    std::mt19937 random(repeat);  // the same on all ranks
    for (uint32_t started = 0; started < kRounds || !batches[0].is_idle() || !batches[1].is_idle();) {
      MicroBatch& batch = batches[random() % 2];
      if (batch.is_idle()) {
        if (started == kRounds) continue;
        Case c = most;
        c.hidden = 64 * (1 + random() % 2);
        c.top_k = 1 + random() % 4;
        c.max_tokens = 1 + random() % 12;
        c.padding = random() % 3 == 0 ? 0 : 1 + random() % 5;
        c.weights_travel = random() % 2 == 0;
        c.no_tokens = random() % 8 == 0;
        batch.start(c, repeat * kRounds + started++);
      }
      batch.step();
      if (::testing::Test::HasFatalFailure()) return;
    }
  });
}

TEST_P(LowLatencyLines, SizesMayChangeFromCallToCall) {
  const Case big{3, 512, 8, 12, 40};
  const std::vector<Case> cases = {
      big, {3, 128, 3, 6, 10, kPayloadFp8}, {3, 8, 1, 3, 2, kPayloadCopy, kReplyExact}};
  run_ranks(RanksAre::kThreads, 3, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank(boot, region_for(big), 1, GetParam());
    for (uint32_t turn = 0; turn < 12; ++turn) run_round_trip(cases[turn % 3], rank, turn);
  });
}

TEST_P(LowLatencyLines, SlowRanksAreWaitedFor) {
  const Case c{4, 64, 3, 8, 6};
  run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank(boot, region_for(c), 1, GetParam());
    std::mt19937 random(rank.rank());
    for (uint32_t turn = 0; turn < 30; ++turn) {
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 4));
      run_round_trip(c, rank, turn);
    }
  });
}

// Words and acknowledgements hold epochs far beyond 32 bits.
TEST_P(LowLatencyLines, EpochsGoOnForYears) {
  const Case c{2, 64, 2, 4, 6};
  run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank(boot, region_for(c), 2, GetParam());
    const uint64_t calls = uint64_t{1} << 44;
    const LowLatencyControl at = low_latency_control(c.ranks);
    std::byte* region = rank.window().local() + Rank::kBegin;
    auto* state = reinterpret_cast<LowLatencyState*>(region + at.state);
    state->started = calls << 16;
    state->received[0] = state->received[1] = calls;
    auto* consumed = reinterpret_cast<uint64_t*>(region + at.consumed);
    for (uint32_t i = 0; i < 2 * c.ranks; ++i) consumed[i] = calls;
    ASSERT_EQ(rank.comm().barrier().message(), "");
    for (uint32_t turn = 0; turn < 6; ++turn) run_round_trip(c, rank, turn);
  });
}

TEST_P(LowLatencyLines, SilentRankIsNamed) {
  const Case c{3, 64, 3, 6, 6};
  run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank(boot, region_for(c), 1, GetParam(), false, kSilentS);
    run_round_trip(c, rank, 0);
    if (rank.rank() == 2) return;
    RoundTrip trip(c, rank, 1);
    const Status status = trip.dispatch(kBoth);
    EXPECT_EQ(status.code(), Code::kPeerLost);
    EXPECT_THAT(status.message(), HasSubstr("low_latency_dispatch.recv"));
    EXPECT_THAT(status.message(), HasSubstr("for rank 2"));
    EXPECT_THAT(status.message(), HasSubstr("expected epoch 3, saw 1"));
    EXPECT_EQ(trip.combine(kBoth).code(), Code::kPeerLost);
  });
}

TEST_P(LowLatencyLines, SilentRankIsMaskedWhereAllowed) {
  const Case c{3, 64, 3, 6, 6};
  run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank(boot, region_for(c), 1, GetParam(), true, kSilentS);
    run_round_trip(c, rank, 0);
    if (rank.rank() == 1) return;
    for (uint32_t turn = 1; turn < 6; ++turn) {
      RoundTrip trip(c, rank, turn);
      EXPECT_EQ(trip.dispatch(kBoth).message(), "");
      EXPECT_EQ(trip.combine(kBoth).message(), "");
      std::vector<int32_t> masks(c.ranks, 9);
      ASSERT_EQ(rank.mode().query_masks(masks.data(), nullptr).message(), "");
      EXPECT_EQ(masks, (std::vector<int32_t>{0, 1, 0}));
    }
  });
}

void disagree(uint32_t line_tokens, bool may_mask) {
  const Case c{3, 64, 3, 6, 6};
  run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank(boot, region_for(Case{3, 64, 3, 6, 9}), 1, line_tokens, may_mask);
    run_round_trip(c, rank, 0);
    Case other = c;
    if (rank.rank() == 1) other.max_tokens = 9;
    if (rank.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(100));  // 0 waits for it, too
    RoundTrip trip(other, rank, 1);
    const Status status = trip.dispatch(kBoth);
    EXPECT_EQ(status.code(), Code::kInvalid);
    EXPECT_THAT(status.message(), HasSubstr("num_max_dispatch_tokens_per_rank"));
    EXPECT_THAT(status.message(), HasSubstr(rank.rank() == 1 ? "was given 9" : "rank 1 9"));
    std::vector<int32_t> masks(c.ranks, 9);
    ASSERT_EQ(rank.mode().query_masks(masks.data(), nullptr).message(), "");
    EXPECT_EQ(masks, (std::vector<int32_t>{0, 0, 0}));
    for (uint32_t turn = 2; turn < 6; ++turn) run_round_trip(c, rank, turn);
  });
}
TEST_P(LowLatencyLines, RanksThatDisagreeAreToldAndMayGoOn) {
  disagree(GetParam(), false);
}
TEST_P(LowLatencyLines, RanksThatDisagreeAreNotMasked) {
  disagree(GetParam(), true);
}

// Every token names one expert three times: more rows than its output has.
TEST(LowLatency, TooManyRowsForAnExpertAreReported) {
  const Case c{2, 64, 3, 6, 6, kPayloadCopy, kReplyReduced, 1, false, 4};
  run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank(boot, region_for(c), 1, kUsual);
    RoundTrip trip(c, rank, 0);
    const Status status = trip.dispatch(kBoth);
    if (rank.rank() == 0) EXPECT_EQ(status.message(), "");
    if (rank.rank() == 1) EXPECT_THAT(status.message(), HasSubstr("rows for its expert 1, allowed: 12"));
    run_round_trip({2, 64, 3, 6, 6}, rank, 1);
  });
}

TEST(LowLatency, CombineOfAnotherDispatchIsRefused) {
  const Case c{2, 64, 3, 6, 6};
  run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank(boot, region_for(c), 1, kUsual);
    RoundTrip first(c, rank, 0);
    ASSERT_EQ(first.dispatch(kBoth).message(), "");
    RoundTrip second(c, rank, 1);
    ASSERT_EQ(second.dispatch(kBoth).message(), "");
    const Status status = (rank.rank() == 0 ? first : second).combine(kBoth);
    EXPECT_EQ(status.code(), Code::kInvalid);
    EXPECT_THAT(status.message(), HasSubstr("handle"));
    run_round_trip(c, rank, 3);
  });
}

TEST(LowLatency, TooSmallARegionIsRefusedBeforeAnythingIsSent) {
  const Case c{2, 64, 3, 6, 6};
  run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank(boot, region_for(c), 1, kUsual);
    const Case big{2, 4096, 3, 6, 600};
    RoundTrip trip(big, rank, 0);
    const Status status = trip.dispatch(kBoth);
    EXPECT_EQ(status.code(), Code::kCapacity);
    EXPECT_THAT(status.message(), HasSubstr("num_rdma_bytes"));
    run_round_trip(c, rank, 1);
  });
}

// What the refusal above asks for: it has room for words, and for lines as far as they take no more.
TEST(LowLatency, TheLeastRegionServesEvenWhereOnlySomeLinesFit) {
  const Case c{3, 64, 1, 3, 9};
  const Batches batches = batches_of(c.max_tokens);
  const MessageLayout message = message_layout(c.top_k, false, c.row_bytes(), c.scale_bytes());
  const CombineLayout combine =
      combine_layout(c.ranks, c.max_tokens, c.top_k, reply_stride(c.hidden * 2, c.reply));
  const uint64_t region = low_latency_region_bytes(
      c.ranks, std::max(message_bytes(c.ranks, batches, message), combine.word_bytes));
  const uint64_t half = low_latency_half_bytes(c.ranks, region);
  const uint64_t line_room = half - lines_begin(c.ranks, half);
  ASSERT_GT(line_message_bytes(c.ranks, batches, message), line_room);
  ASSERT_LE(combine.line_bytes, line_room);
  run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
    Rank rank(boot, region, 1, kUsual);
    for (uint32_t seed = 0; seed < 3; ++seed) run_round_trip(c, rank, seed);
  });
}

// ---- faults

TEST(LowLatencyFaults, SayHowMuchCameAndWhatIsRefusedForIt) {
  run_ranks(RanksAre::kThreads, 1, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = Communicator::create(boot, Device{Device::Kind::kHost, 0}, kTimeoutS);
    ASSERT_EQ(comm.status().message(), "");
    PeerWatch& peers = (*comm)->peers();
    FaultBox box{};
    raise(&box, Site::kLowLatencyCombineRecv, 0, 0, 2, 2, 1'000'000'000);
    raise(&box.mistake, Site::kCombineExpert, 0, 1, 3, 5, 0);
    const std::string first = take_fault(box, peers).message();
    EXPECT_THAT(first, HasSubstr("epoch 2 has begun there, and not all of it came"));
    EXPECT_THAT(first, ::testing::Not(HasSubstr("saw 2")));
    EXPECT_EQ(take_fault(box, peers).message(), "not made, as an earlier call failed: " + first);
  });
}

TEST(LowLatencyFaults, AMistakeIsToldOnce) {
  run_ranks(RanksAre::kThreads, 1, [](std::shared_ptr<Bootstrap> boot) {
    auto comm = Communicator::create(boot, Device{Device::Kind::kHost, 0}, kTimeoutS);
    ASSERT_EQ(comm.status().message(), "");
    FaultBox box{};
    for (uint32_t slot : {1u, 4u}) {
      raise(&box.mistake, Site::kCombineExpert, 0, slot, 3, 5, 0);
      EXPECT_EQ(box.raised, 0u);  // no wait ends for it
      const Status told = take_fault(box, (*comm)->peers());
      EXPECT_EQ(told.code(), Code::kInvalid);
      EXPECT_THAT(told.message(), HasSubstr(text("slot {} of token 3 names expert 5", slot)));
      EXPECT_TRUE(take_fault(box, (*comm)->peers()).ok());
    }
  });
}

// ---- numbers

float e4m3_value(uint32_t code) {
  const uint32_t exponent = code >> 3 & 0xf;
  const float mantissa = static_cast<float>(code & 7) / 8.0f;
  const float size =
      exponent == 0 ? std::ldexp(mantissa, -6) : std::ldexp(1.0f + mantissa, static_cast<int>(exponent) - 7);
  return code & 0x80 ? -size : size;
}

TEST(Quantise, E4m3IsTheNearestEvenAndSaturates) {
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    const float value =
        std::ldexp(static_cast<float>(random() % 65536) / 32768.0f, static_cast<int>(random() % 24) - 14);
    const uint32_t code = e4m3_portable(value);
    uint32_t best = 0;
    for (uint32_t other = 0; other <= 0x7e; ++other) {
      const float closer = std::abs(e4m3_value(best) - value) - std::abs(e4m3_value(other) - value);
      if (closer > 0 || (closer == 0 && other % 2 == 0)) best = other;
    }
    ASSERT_EQ(code, best) << value;
    ASSERT_EQ(e4m3_portable(-value), value == 0 ? 0x80 : code | 0x80);
  }
  EXPECT_EQ(e4m3_portable(std::numeric_limits<float>::infinity()), 0x7eu);
  EXPECT_EQ(e4m3_portable(std::numeric_limits<float>::quiet_NaN()) & 0x7fu, 0x7fu);
}

TEST(Quantise, RoundedScalesArePowersOfTwoFromAbove) {
  for (float amax : {0.0f, 1e-5f, 1e-4f, 0.3f, 1.0f, 447.0f, 448.0f, 448.1f, 896.0f, 3e38f}) {
    const Fp8Scale scale = fp8_scale(amax, true);
    int exponent = 0;
    EXPECT_EQ(std::frexp(scale.scale, &exponent), 0.5f) << amax;
    EXPECT_GE(scale.scale, std::max(amax, 1e-4f) / 448.0f);
    EXPECT_LT(scale.scale / 2, std::max(amax, 1e-4f) / 448.0f);
    EXPECT_EQ(scale.scale * scale.multiply, 1.0f);
    EXPECT_EQ(ue8m0(scale.scale), exponent - 1 + 127);
  }
  EXPECT_EQ(fp8_scale(448.0f, false).scale, 1.0f);
  EXPECT_EQ(fp8_scale(0.0f, false).scale, 1e-4f / 448.0f);
}

// What an infinity is scaled by is finite, and 448 of it are infinite again; finite neighbours are.
TEST(Quantise, InfinitiesKeepTheirSignAndNanStaysNan) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto read = [](uint32_t code) { return float_of_e4m3(code); };
  for (bool rounded : {false, true}) {
    const Fp8Scale scale = fp8_scale(infinity, rounded);
    EXPECT_EQ(ue8m0(scale.scale), 254);
    for (float value : {infinity, -infinity})
      EXPECT_EQ(read(e4m3_portable(value * scale.multiply)) * scale.scale, value) << rounded;
    EXPECT_EQ(read(e4m3_portable(1.0f * scale.multiply)) * scale.scale, 0.0f);
    EXPECT_TRUE(std::isnan(read(e4m3_portable(nan * scale.multiply)) * scale.scale));
  }
  float values[kUnitElems] = {};
  uint32_t words[kUnitElems / 4];
  values[1] = infinity;
  values[2] = -infinity;
  values[3] = nan;
  const float mxfp8 = float_of_bits(Mxfp8{}.encode(values, words) << 23);
  EXPECT_EQ(read(words[0] >> 8 & 0xff) * mxfp8, infinity);
  EXPECT_EQ(read(words[0] >> 16 & 0xff) * mxfp8, -infinity);
  EXPECT_TRUE(std::isnan(read(words[0] >> 24) * mxfp8));
  EXPECT_TRUE(std::isnan(read(Nvfp4{1.0f, false}.encode(values, words))));
  EXPECT_EQ((Nvfp4{1.0f, true}.encode(values, words)), 0xffu);  // NaN as an exponent
  values[3] = 0;
  for (bool power_of_two : {false, true}) {
    const Nvfp4 nvfp4{1.0f, power_of_two};
    const uint32_t scale = nvfp4.encode(values, words);
    EXPECT_EQ(scale, power_of_two ? 254u : 0x7eu);
    EXPECT_EQ(words[0] >> 4 & 0xf, 7u);  // 6, the largest
    EXPECT_EQ(words[0] >> 8 & 0xf, 15u);
  }
}

TEST(Quantise, LogarithmAndPowerAreCloseToTheLibrarys) {
  std::mt19937 random(2);
  for (int i = 0; i < 100000; ++i) {
    const float value = std::ldexp(1.0f + static_cast<float>(random() % 8388608) / 8388608.0f,
                                   static_cast<int>(random() % 250) - 135);
    ASSERT_NEAR(log2_positive(value), std::log2(static_cast<double>(value)),
                1.5e-7 * std::max(1.0f, std::abs(std::log2(value))));
    const float power = (static_cast<float>(random() % 2000000) - 1000000.0f) / 8000.0f;
    ASSERT_NEAR(exp2_bounded(power) / std::exp2(static_cast<double>(power)), 1.0, 2e-6) << power;
  }
  EXPECT_EQ(exp2_bounded(-127.0f), 0.0f);
}

TEST(Quantise, LogCodesRoundToTheNearestOfTheirGrid) {
  const LogGrid grid = log_grid(0.9f, 0.001f);
  ASSERT_TRUE(grid.fits());
  EXPECT_EQ(log_encode(grid, 0.0f), 0u);
  EXPECT_EQ(log_encode(grid, -0.9f), 511u | 512u);
  EXPECT_EQ(log_encode(grid, 0.001f), 1u);
  for (uint32_t code = 1; code < kLogCodes; ++code) ASSERT_EQ(log_encode(grid, log_decode(grid, code)), code);
  for (float value = 0.0011f; value < 0.9f; value *= 1.003f) {
    const uint32_t code = log_encode(grid, value);
    const float off = std::abs(log_decode(grid, code) - value);
    ASSERT_LE(off, std::abs(log_decode(grid, code + 1) - value) * 1.001f);
    ASSERT_LE(off, std::abs(log_decode(grid, code - 1) - value) * 1.001f);
  }
  EXPECT_FALSE(log_grid(1.0f, 0.1f).fits());
  EXPECT_FALSE(log_grid(0.5f, 0.5f).fits());
  EXPECT_FALSE(log_grid(0.0f, 0.0f).fits());
}

}  // namespace
}  // namespace weft
