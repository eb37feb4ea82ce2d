// SPDX-License-Identifier: Apache-2.0
//
// High-throughput dispatch and combine on the host target, ranks as threads of one process, against plain
// indexing.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>

#include "conformance/fixtures.h"
#include "kernels/core/numbers.cuh"
#include "moe/buffer.h"

namespace weft {
namespace {

using namespace weft::testing;  // NOLINT(google-build-using-namespace)

struct Case {
  uint32_t ranks;
  uint32_t row_bytes;
  uint32_t top_k;
  uint32_t experts;
  uint32_t most_tokens;
  uint32_t scale_words;
};

// What one rank puts in and gets out.
struct RankData {
  uint32_t tokens = 0;
  std::vector<uint16_t> x;
  std::vector<uint32_t> scales;
  std::vector<int64_t> ids;
  std::vector<float> weights;
  std::vector<int32_t> counts;  // per rank, then per expert
  std::vector<uint8_t> in_rank;
  std::vector<int32_t> send_row, slot_base, prefix;
  std::vector<uint16_t> combined;
  std::vector<float> combined_weights;

  std::vector<int32_t> routes, records;  // of ranks that do not all map each other

  HandleMemory memory() {
    return {{send_row.data(), slot_base.data(), prefix.data(), nullptr}, routes.data(), records.data()};
  }
};

RankData make_rank(const Case& c, uint32_t rank, uint32_t seed) {
  std::mt19937 random(seed * 131 + rank);
  RankData data;
  data.tokens = rank == 1 ? 0 : random() % (c.most_tokens + 1);
  const uint32_t elements = c.row_bytes / 2;
  for (uint64_t i = 0; i < uint64_t{data.tokens} * elements; ++i)
    data.x.push_back(static_cast<uint16_t>(bf16_bits(static_cast<float>(random() % 64) - 32.0f)));
  for (uint64_t i = 0; i < uint64_t{data.tokens} * c.scale_words; ++i) data.scales.push_back(random());
  for (uint64_t i = 0; i < uint64_t{data.tokens} * c.top_k; ++i) {
    data.ids.push_back(random() % 8 == 0 ? -1 : static_cast<int64_t>(random() % c.experts));
    data.weights.push_back(static_cast<float>(random() % 1000) / 1000.0f);
  }
  data.counts.resize(c.ranks + c.experts, -7);
  data.in_rank.resize(uint64_t{data.tokens} * c.ranks, 9);
  data.send_row.resize(uint64_t{data.tokens} * c.ranks);
  data.slot_base.resize(data.tokens);
  data.prefix.resize(uint64_t{c.ranks} * c.ranks);
  data.combined.resize(uint64_t{data.tokens} * elements, 0xdead);
  data.combined_weights.resize(uint64_t{data.tokens} * c.top_k, -1.0f);
  return data;
}

class HighThroughput : public ::testing::TestWithParam<Case> {
 protected:
  // One dispatch and combine of every rank, checked by that rank's thread.
  void run_rank(MoeBuffer& buffer, uint32_t rank, std::vector<RankData>& all) {
    const Case& c = GetParam();
    RankData& mine = all[rank];
    ASSERT_EQ(buffer
                  .layout({mine.ids.data(), mine.tokens, c.top_k, 8, 0, c.experts, 0, 0, mine.counts.data(),
                           mine.in_rank.data(), nullptr},
                          nullptr)
                  .message(),
              "");
    mine.routes.resize(buffer.route_words(mine.tokens, false));
    const RowFormat format{c.row_bytes, c.scale_words, c.top_k, 8, 2, c.row_bytes};
    const DispatchTensors rows{reinterpret_cast<std::byte*>(mine.x.data()),
                               mine.scales.data(),
                               c.scale_words,
                               1,
                               mine.ids.data(),
                               mine.weights.data()};
    const auto new_records = [&](uint64_t words) {
      mine.records.resize(words);
      return mine.records.data();
    };
    const NotifyCall counts{{mine.in_rank.data(), mine.counts.data() + c.ranks},
                            format,
                            mine.memory(),
                            mine.tokens,
                            c.experts,
                            0,
                            {}};
    Result<Dispatched> came = buffer.dispatch_new({counts, rows, false, 0, {}, new_records});
    ASSERT_EQ(came.status().message(), "");
    const Received* received = &came->received;
    check_received(buffer, rank, all, came->routes, *received);

    const std::byte* meta = buffer.window().local() + received->meta_at;
    ASSERT_EQ(buffer
                  .combine({{buffer.window().local() + received->rows_at,
                             reinterpret_cast<const float*>(meta + received->layout.weights),
                             reinterpret_cast<const int32_t*>(meta + received->layout.slot),
                             {nullptr, nullptr},
                             reinterpret_cast<std::byte*>(mine.combined.data()),
                             mine.combined_weights.data()},
                            c.row_bytes,
                            c.top_k,
                            kElementBf16,
                            came->routes,
                            0,
                            {}})
                  .message(),
              "");
    check_combined(mine);
    buffer.give_back(received->rows_at);
    buffer.give_back(received->meta_at);
    ASSERT_EQ(buffer.barrier({}).message(), "");
  }

  uint32_t per_rank() const { return (GetParam().experts + GetParam().ranks - 1) / GetParam().ranks; }

  bool goes(const RankData& data, uint32_t token, uint32_t rank) const {
    const Case& c = GetParam();
    for (uint32_t k = 0; k < c.top_k; ++k) {
      const int64_t expert = data.ids[uint64_t{token} * c.top_k + k];
      if (expert >= 0 && expert / per_rank() == rank) return true;
    }
    return false;
  }

  void check_received(MoeBuffer& buffer, uint32_t rank, const std::vector<RankData>& all,
                      const DispatchRoutes& routes, const Received& received) {
    const Case& c = GetParam();
    const std::byte* rows = buffer.window().local() + received.rows_at;
    const std::byte* meta = buffer.window().local() + received.meta_at;
    const auto* ids = reinterpret_cast<const int64_t*>(meta);
    const auto* weights = reinterpret_cast<const float*>(meta + received.layout.weights);
    const auto* token_of = reinterpret_cast<const int32_t*>(meta + received.layout.token);
    const auto* scales = reinterpret_cast<const uint32_t*>(rows + received.layout.scales);
    uint64_t row = 0;
    for (const RankData& source : all) {
      for (uint32_t token = 0; token < source.tokens; ++token) {
        if (!goes(source, token, rank)) continue;
        ASSERT_LT(row, routes.rows);
        ASSERT_EQ(std::memcmp(rows + row * c.row_bytes, source.x.data() + uint64_t{token} * c.row_bytes / 2,
                              c.row_bytes),
                  0);
        ASSERT_EQ(token_of[row], static_cast<int32_t>(token));
        if (c.scale_words) {
          ASSERT_EQ(std::memcmp(scales + row * c.scale_words,
                                source.scales.data() + uint64_t{token} * c.scale_words, c.scale_words * 4),
                    0);
        }
        for (uint32_t k = 0; k < c.top_k; ++k) {
          const int64_t expert = source.ids[uint64_t{token} * c.top_k + k];
          const bool local = expert >= 0 && expert / per_rank() == rank;
          ASSERT_EQ(ids[row * c.top_k + k], local ? expert % per_rank() : -1);
          ASSERT_EQ(weights[row * c.top_k + k], local ? source.weights[uint64_t{token} * c.top_k + k] : 0.0f);
        }
        ++row;
      }
    }
    ASSERT_EQ(row, routes.rows);
  }

  // Every rank sends its row back as it came: the sum is a multiple of the row.
  void check_combined(const RankData& mine) {
    const Case& c = GetParam();
    const uint32_t elements = c.row_bytes / 2;
    for (uint32_t token = 0; token < mine.tokens; ++token) {
      uint32_t copies = 0;
      for (uint32_t rank = 0; rank < c.ranks; ++rank) copies += goes(mine, token, rank);
      for (uint32_t i = 0; i < elements; ++i) {
        const uint64_t at = uint64_t{token} * elements + i;
        const float sum = copies ? static_cast<float>(copies) * float_of_bf16(mine.x[at]) : 0.0f;
        ASSERT_EQ(mine.combined[at], bf16_bits(sum)) << "token " << token << ", element " << i;
      }
      for (uint32_t k = 0; k < c.top_k; ++k) {
        const uint64_t at = uint64_t{token} * c.top_k + k;
        ASSERT_EQ(mine.combined_weights[at], mine.ids[at] >= 0 ? mine.weights[at] : 0.0f);
      }
    }
  }
};

TEST_P(HighThroughput, RowsGoOutAndComeBack) {
  const Case& c = GetParam();
  auto bootstraps = thread_bootstraps(static_cast<int>(c.ranks));
  std::vector<std::vector<RankData>> rounds;
  for (uint32_t round = 0; round < 3; ++round) {
    rounds.emplace_back();
    for (uint32_t rank = 0; rank < c.ranks; ++rank) rounds.back().push_back(make_rank(c, rank, round));
  }
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < c.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      auto comm = Communicator::create(bootstraps[rank], Device{}, 60.0);
      ASSERT_EQ(comm.status().message(), "");
      auto buffer = MoeBuffer::create(*comm, {4096, 0, 60.0});  // too small: dispatch must grow it
      ASSERT_EQ(buffer.status().message(), "");
      for (auto& round : rounds) run_rank(**buffer, rank, round);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

const auto kShapes = ::testing::Values(
    Case{1, 16, 1, 1, 5, 0}, Case{2, 256, 2, 8, 33, 0}, Case{3, 48, 4, 7, 20, 3}, Case{5, 16, 32, 64, 17, 0},
    Case{7, 34 * 1024 + 16, 3, 14, 9, 1}, Case{17, 112, 8, 40, 12, 0}, Case{4, 1024, 8, 32, 700, 2});

INSTANTIATE_TEST_SUITE_P(Shapes, HighThroughput, kShapes);

// The same in nodes of so many ranks, over a network that reorders and delays. FIFOs are small, so that laps wrap.
class TwoLevels : public HighThroughput {
 protected:
  void run_in_nodes(PortsCase ports, const char* host_threads) {
    ports_ = ports;
    ports_.set_up();
    Settings::set({{"WEFT_HOST_THREADS", host_threads}});
    const Case& c = GetParam();
    std::vector<std::vector<RankData>> rounds(3);
    for (uint32_t round = 0; round < rounds.size(); ++round)
      for (uint32_t rank = 0; rank < c.ranks; ++rank) rounds[round].push_back(make_rank(c, rank, round));
    run_ranks(RanksAre::kThreads, c.ranks, [&](std::shared_ptr<Bootstrap> boot) {
      const auto rank = static_cast<uint32_t>(boot->rank());
      auto comm = Communicator::create(boot, Device{}, 60.0);
      ASSERT_EQ(comm.status().message(), "");
      auto buffer = MoeBuffer::create(*comm, {4096, 0, 60.0});
      ASSERT_EQ(buffer.status().message(), "");
      for (auto& round : rounds) run_rank(**buffer, rank, round);
    });
  }
  void TearDown() override {
    ports_.tear_down();
    Settings::clear({"WEFT_HOST_THREADS"});
  }

 private:
  PortsCase ports_{"1"};
};

TEST_P(TwoLevels, RowsGoOutAndComeBackAmongLoners) {
  run_in_nodes({"1"}, "1");
}

TEST_P(TwoLevels, RowsGoOutAndComeBackAmongPairs) {
  run_in_nodes({"2"}, "3");
}

TEST_P(TwoLevels, RowsGoOutAndComeBackOverQueues) {
  run_in_nodes({"1", true}, "1");
}

TEST_P(TwoLevels, RowsGoOutAndComeBackOverQueuesAmongPairs) {
  run_in_nodes({"2", true}, "3");
}

INSTANTIATE_TEST_SUITE_P(Shapes, TwoLevels,
                         ::testing::Values(Case{2, 256, 2, 8, 33, 0}, Case{3, 48, 4, 7, 20, 3},
                                           Case{7, 34 * 1024 + 16, 3, 14, 9, 1},
                                           Case{4, 1024, 8, 32, 700, 2}));

}  // namespace
}  // namespace weft
