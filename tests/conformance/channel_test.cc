// SPDX-License-Identifier: Apache-2.0
//
// One suite for every transport that is usable on this machine: what a channel promises to device code, on
// the host target, with ranks as threads and as processes. Sizes and rank counts are odd on purpose; windows
// are poisoned first, and what lies outside the target must stay poisoned.
#include <algorithm>
#include <cstring>
#include <thread>

#include "conformance/fixtures.h"
#include "kernels/core/wait.cuh"
#include "support/ranks.h"

namespace weft {
namespace {

using testing::RanksAre;
using testing::run_ranks;

constexpr double kTimeout_s = 30;
constexpr std::byte kPoison{0xA5};
constexpr uint64_t kSignals = 0;         // signals of this rank: 8 bytes per peer
constexpr uint64_t kData = 4096;         // where puts go
constexpr uint64_t kSource = 256 << 10;  // where puts come from
constexpr uint64_t kWindow = 512 << 10;  // bytes; a whole number of pages

// Bytes that depend on the writer and the place.
std::vector<std::byte> pattern(uint32_t writer, uint64_t offset, uint64_t bytes) {
  std::vector<std::byte> data(bytes);
  for (uint64_t i = 0; i < bytes; ++i)
    data[i] = static_cast<std::byte>(1 + (writer * 59 + (offset + i) * 7) % 160);
  return data;
}

// One rank of a test: a poisoned window, its mesh, and the waits. Bodies of tests are functions of it, as many fixtures
// have one mesh: a body is compiled for each mesh, which takes a third of the time that it takes for each fixture.
template <class MeshT>
class Rank {
 public:
  static std::unique_ptr<Rank> make(std::shared_ptr<Bootstrap> boot, const char* transport, bool adds) {
    auto comm = Communicator::create(std::move(boot), Device{}, kTimeout_s, transport);
    EXPECT_TRUE(comm.ok()) << comm.status().message();
    if (!comm.ok()) return nullptr;
    auto window = Window::create(*comm, kWindow);
    EXPECT_TRUE(window.ok()) << window.status().message();
    if (!window.ok()) return nullptr;
    std::memset((*window)->local() + kData, static_cast<int>(kPoison), (*window)->bytes() - kData);
    auto rank = std::unique_ptr<Rank>(new Rank(*comm, std::move(*window), adds));
    EXPECT_TRUE((*comm)->barrier().ok());
    return rank;
  }
  ~Rank() { EXPECT_TRUE(comm->barrier().ok()); }  // nobody leaves while others still write

  void take_mesh() { mesh = testing::mesh_of<MeshT>(*window); }
  uint32_t self() const { return mesh.rank(); }
  uint32_t size() const { return mesh.ranks(); }
  uint32_t right() const { return (self() + 1) % size(); }
  uint32_t left() const { return (self() + size() - 1) % size(); }
  auto to(uint32_t peer) { return mesh.to(peer); }
  static uint64_t signal_of(uint32_t peer) { return kSignals + 8 * peer; }

  // Writes what `writer` sends for the place `at` into the own window, where puts can take it.
  uint64_t stage(uint32_t writer, uint64_t at, uint64_t bytes, uint64_t where = kSource) {
    const auto data = pattern(writer, at, bytes);
    std::memcpy(mesh.local() + where, data.data(), bytes);
    return where;
  }
  // Whether `bytes` at `offset` of the own window are what `writer` sends for the place `at`.
  bool holds(uint64_t offset, uint32_t writer, uint64_t at, uint64_t bytes) const {
    return std::memcmp(mesh.local() + offset, pattern(writer, at, bytes).data(), bytes) == 0;
  }

  // Waits until the 8 bytes at `offset` of the own window reach `want`.
  bool wait(uint64_t offset, uint64_t want, double limit_s = kTimeout_s) {
    const WaitRule rule{static_cast<uint64_t>(limit_s * 1e9), &fault, self(), 0};
    uint64_t waited_ns = 0;
    return poll_signal(reinterpret_cast<uint64_t*>(mesh.local() + offset), want, rule, seen, waited_ns);
  }
  std::byte at(uint64_t offset) const { return mesh.local()[offset]; }

  std::shared_ptr<Communicator> comm;
  std::unique_ptr<Window> window;
  MeshT mesh;
  FaultBox fault{};
  uint64_t seen = 0;
  const bool adds;  // whether the transport has atomics

 private:
  Rank(std::shared_ptr<Communicator> c, std::unique_ptr<Window> w, bool has_atomics)
      : comm(std::move(c)), window(std::move(w)), mesh(testing::mesh_of<MeshT>(*window)), adds(has_atomics) {}
};

template <class Fixture>
class ChannelTest : public ::testing::Test {
 protected:
  using OneRank = Rank<typename Fixture::Mesh>;

  void SetUp() override {
    Fixture::set_up();
    for (const Candidate& candidate : candidates(Device{}))
      if (std::string_view(candidate.transport->name()) == Fixture::kName) caps = candidate.caps;
    if (!caps.is_usable()) GTEST_SKIP() << Fixture::kName << " is unusable here: " << caps.unusable_because;
  }

  void TearDown() override { Fixture::tear_down(); }

  // Runs body(rank) for the fixture's numbers of ranks up to `most`, as threads and as processes. Where the
  // fixture has no such number the test is skipped, and says so.
  void on_ranks(void (*body)(OneRank&), int most = 17) {
    const std::vector<int> sizes = Fixture::ranks();
    if (std::none_of(sizes.begin(), sizes.end(), [&](int ranks) { return ranks <= most; }))
      GTEST_SKIP() << "needs " << most << " ranks or fewer";
    for (RanksAre kind : Fixture::kinds())
      for (int ranks : sizes) {
        if (ranks > most) continue;
        SCOPED_TRACE(::testing::Message() << ranks << " ranks, " << testing::to_string(kind));
        run_ranks(kind, ranks, [&](std::shared_ptr<Bootstrap> boot) {
          if (auto rank = OneRank::make(std::move(boot), Fixture::kTransport, caps.has_atomics)) body(*rank);
        });
      }
  }

  Caps caps;
};

TYPED_TEST_SUITE(ChannelTest, testing::Fixtures);

template <class R>
void put_with_signal_around_the_ring(R& rank) {
  uint64_t epoch = 0;
  uint64_t end = kData;  // of what has been written so far
  for (uint64_t bytes : {16u, 48u, 1008u, 4096u, 65552u}) {
    const uint64_t at = end + 16;  // 16 bytes between targets stay poisoned
    auto right = rank.to(rank.right());
    right.flush();  // the source of the last put is written again
    const uint64_t src = rank.stage(rank.self(), at, bytes);
    right.put_with_signal(Warp{}, at, src, bytes, rank.signal_of(rank.self()), ++epoch);
    ASSERT_TRUE(rank.wait(rank.signal_of(rank.left()), epoch)) << "saw " << rank.seen;
    EXPECT_TRUE(rank.holds(at, rank.left(), at, bytes)) << bytes << " bytes";
    for (uint64_t i = 1; i <= 16; ++i) {
      EXPECT_EQ(rank.at(at - i), kPoison);
      EXPECT_EQ(rank.at(at + bytes + i - 1), kPoison);
    }
    end = at + bytes;
  }
}
TYPED_TEST(ChannelTest, PutWithSignalAroundTheRing) {
  this->on_ranks(put_with_signal_around_the_ring);
}

// Rows take another way to memory than signals do, so the last bytes of each are looked at as soon as it
// shows.
template <class R>
void drained_rows_are_there_when_their_signal_is(R& rank) {
  constexpr uint32_t kRowBytes = 272, kRounds = 1000;
  constexpr uint64_t kReadSignals = 2048;
  std::vector<Vec16> row(kRowBytes / sizeof(Vec16));
  RowPipe<4> pipe(Warp{}, nullptr, kRowBytes);
  for (uint64_t round = 1; round <= kRounds; ++round) {
    std::memset(row.data(), static_cast<int>(round), kRowBytes);
    auto right = rank.to(rank.right());
    bool is_sent = false;
    pipe.run(
        [&] {
          const auto* src = is_sent ? nullptr : reinterpret_cast<std::byte*>(row.data());
          is_sent = true;
          return RowItem<int>{{src, kRowBytes}, 0};
        },
        [&](int, RowPiece stage) { pipe.store(right.mapped() + kData, stage); });
    pipe.drain();
    right.put_value(rank.signal_of(rank.self()), round);
    ASSERT_TRUE(rank.wait(rank.signal_of(rank.left()), round)) << "saw " << rank.seen;
    for (uint64_t at = kRowBytes; at > 0; at -= 16)
      ASSERT_EQ(rank.at(kData + at - 1), static_cast<std::byte>(round)) << "byte " << at - 1;
    rank.to(rank.left()).put_value(kReadSignals + 8 * rank.self(), round);
    ASSERT_TRUE(rank.wait(kReadSignals + 8 * rank.right(), round)) << "saw " << rank.seen;
  }
}
TYPED_TEST(ChannelTest, DrainedRowsAreThereWhenTheirSignalIs) {
  if constexpr (!MappedMeshOnly<typename TypeParam::Mesh>)
    GTEST_SKIP() << "rows are stored by loads and stores";
  // No more than 2 ranks: beyond the cores they take turns, and then nothing is seen early.
  if constexpr (MappedMeshOnly<typename TypeParam::Mesh>)
    this->on_ranks(drained_rows_are_there_when_their_signal_is, 2);
}

template <class R>
void a_signal_publishes_everything_put_before(R& rank) {
  constexpr uint64_t kPiece = 208, kPieces = 12;
  const auto place = [&](uint32_t writer, uint64_t piece) {
    return kData + (writer * kPieces + piece) * kPiece;
  };
  for (uint32_t peer = 0; peer < rank.size(); ++peer) {
    auto channel = rank.to(peer);
    for (uint64_t piece = kPieces; piece-- > 0;) {
      const uint64_t src = rank.stage(rank.self(), piece, kPiece);
      channel.put(Warp{}, place(rank.self(), piece), src, kPiece);
      channel.flush();  // the next piece takes the place of this one
    }
    channel.put_value(rank.signal_of(rank.self()), 1);
  }
  for (uint32_t peer = 0; peer < rank.size(); ++peer) {
    ASSERT_TRUE(rank.wait(rank.signal_of(peer), 1));
    for (uint64_t piece = 0; piece < kPieces; ++piece) {
      EXPECT_TRUE(rank.holds(place(peer, piece), peer, piece, kPiece)) << "from " << peer;
    }
  }
}
TYPED_TEST(ChannelTest, ASignalPublishesEverythingPutBefore) {
  this->on_ranks(a_signal_publishes_everything_put_before);
}

template <class R>
void the_last_bytes_of_the_window_are_reachable(R& rank) {
  const uint64_t end = rank.window->bytes();
  // The signal's place is poisoned, which a wait would take for reached.
  std::memset(rank.mesh.local() + end - 8, 0, 8);
  ASSERT_TRUE(rank.comm->barrier().ok());
  const uint64_t src = rank.stage(rank.self(), end, 16);
  rank.to(rank.right()).put_with_signal(Warp{}, end - 32, src, 16, end - 8, 5);
  ASSERT_TRUE(rank.wait(end - 8, 5));
  EXPECT_EQ(rank.seen, 5u);
  EXPECT_TRUE(rank.holds(end - 32, rank.left(), end, 16));
  EXPECT_EQ(rank.at(end - 33), kPoison);
  EXPECT_EQ(rank.at(end - 9), kPoison);
}
TYPED_TEST(ChannelTest, TheLastBytesOfTheWindowAreReachable) {
  this->on_ranks(the_last_bytes_of_the_window_are_reachable);
}

template <class R>
void adds_of_all_ranks_sum(R& rank) {
  constexpr uint64_t kTimes = 50;
  for (uint64_t i = 0; i < kTimes; ++i)
    for (uint32_t peer = 0; peer < rank.size(); ++peer) rank.to(peer).signal_add(kSignals, rank.self() + 1);
  const uint64_t total = kTimes * rank.size() * (rank.size() + 1) / 2;
  ASSERT_TRUE(rank.wait(kSignals, total)) << "saw " << rank.seen << " of " << total;
  ASSERT_TRUE(rank.comm->barrier().ok());
  EXPECT_EQ(load_acquire(reinterpret_cast<uint64_t*>(rank.mesh.local())), total);
}
TYPED_TEST(ChannelTest, AddsOfAllRanksSum) {
  if (!this->caps.has_atomics) GTEST_SKIP() << "no atomics";
  this->on_ranks(adds_of_all_ranks_sum);
}

// More than 16 bits count, of signals on one word, and of values that a word has had. In parts, each with a deadline of
// its own: under a sanitizer, a model of a NIC takes 100 us and more for a signal.
template <class R>
void signals_go_past_sixteen_bits(R& rank) {
  constexpr uint64_t kTimes = (1 << 16) + 3, kPart = 1 << 12;
  auto right = rank.to(rank.right());
  for (uint64_t sent = 0; sent < kTimes;) {
    const uint64_t part_ends = std::min(sent + kPart, kTimes);
    while (sent < part_ends) {
      ++sent;
      if (rank.self() != 0) continue;
      right.put_value(kSignals, sent);
      if (rank.adds) right.signal_add(kSignals + 8, 1);
    }
    if (rank.left() == 0) {
      ASSERT_TRUE(rank.wait(kSignals, sent)) << "saw " << rank.seen << " of " << sent;
      if (rank.adds) ASSERT_TRUE(rank.wait(kSignals + 8, sent)) << "saw " << rank.seen << " of " << sent;
    }
    ASSERT_TRUE(rank.comm->barrier().ok());
  }
  const uint64_t added = load_acquire(reinterpret_cast<uint64_t*>(rank.mesh.local() + kSignals + 8));
  EXPECT_EQ(added, rank.adds && rank.left() == 0 ? kTimes : 0);
}
TYPED_TEST(ChannelTest, SignalsGoPastSixteenBits) {
  this->on_ranks(signals_go_past_sixteen_bits, 4);
}

template <class R>
void an_add_publishes_earlier_puts(R& rank) {
  const uint64_t slot = kData + 64 * rank.self();
  const uint64_t src = rank.stage(rank.self(), slot, 64);
  for (uint32_t peer = 0; peer < rank.size(); ++peer) {
    auto channel = rank.to(peer);
    channel.put(Warp{}, slot, src, 64);
    channel.signal_add(kSignals, 1);
  }
  ASSERT_TRUE(rank.wait(kSignals, rank.size()));
  for (uint32_t peer = 0; peer < rank.size(); ++peer)
    EXPECT_TRUE(rank.holds(kData + 64 * peer, peer, kData + 64 * peer, 64)) << "from " << peer;
}
TYPED_TEST(ChannelTest, AnAddPublishesEarlierPuts) {
  if (!this->caps.has_atomics) GTEST_SKIP() << "no atomics";
  this->on_ranks(an_add_publishes_earlier_puts);
}

template <class R>
void epochs_grow_past_the_old_word_sizes(R& rank) {
  // Where 31, 32 and 63-bit counters would wrap or turn negative.
  for (uint64_t around : {uint64_t{1} << 31, uint64_t{1} << 32, uint64_t{1} << 63})
    for (uint64_t epoch = around - 3; epoch <= around + 3; ++epoch) {
      const uint64_t slot = kData + 32 * (epoch % 2);  // double-buffered, as protocols do
      auto right = rank.to(rank.right());
      right.flush();
      const uint64_t src = rank.stage(rank.self(), epoch, 32);
      right.put_with_signal(Warp{}, slot, src, 32, rank.signal_of(rank.self()), epoch);
      ASSERT_TRUE(rank.wait(rank.signal_of(rank.left()), epoch)) << "saw " << rank.seen;
      ASSERT_TRUE(rank.holds(slot, rank.left(), epoch, 32));
      // The left neighbour may go on: its next put but one would land here.
      rank.to(rank.left()).put_value(2048 + rank.signal_of(rank.self()), epoch);
      ASSERT_TRUE(rank.wait(2048 + rank.signal_of(rank.right()), epoch));
    }
}
TYPED_TEST(ChannelTest, EpochsGrowPastTheOldWordSizes) {
  this->on_ranks(epochs_grow_past_the_old_word_sizes);
}

template <class R>
void a_wait_for_nothing_ends_and_tells_what_it_saw(R& rank) {
  rank.to(rank.self()).put_value(kSignals, 41);
  ASSERT_TRUE(rank.wait(kSignals, 41));
  EXPECT_FALSE(rank.wait(kSignals, 42, 0.02));
  EXPECT_EQ(rank.seen, 41u);
}
TYPED_TEST(ChannelTest, AWaitForNothingEndsAndTellsWhatItSaw) {
  this->on_ranks(a_wait_for_nothing_ends_and_tells_what_it_saw);
}

template <class R>
void a_fault_elsewhere_ends_a_wait(R& rank) {
  raise(&rank.fault, Site::kBarrier, rank.self(), rank.right(), 2, 1, 3);
  raise(&rank.fault, Site::kCounts, 9, 9, 9, 9, 9);  // the first one stays
  EXPECT_FALSE(rank.wait(kSignals, 1));
  EXPECT_EQ(rank.fault.site, Site::kBarrier);
  EXPECT_EQ(rank.fault.peer, rank.right());
}
TYPED_TEST(ChannelTest, AFaultElsewhereEndsAWait) {
  this->on_ranks(a_fault_elsewhere_ends_a_wait);
}

template <class R>
void a_channel_to_oneself_works(R& rank) {
  const uint64_t src = rank.stage(rank.self(), 0, 160);
  rank.to(rank.self()).put_with_signal(Warp{}, kData, src, 160, rank.signal_of(rank.self()), 1);
  ASSERT_TRUE(rank.wait(rank.signal_of(rank.self()), 1));
  EXPECT_TRUE(rank.holds(kData, rank.self(), 0, 160));
}
TYPED_TEST(ChannelTest, AChannelToOneselfWorks) {
  this->on_ranks(a_channel_to_oneself_works);
}

template <class R>
void flush_makes_the_source_reusable(R& rank) {
  const uint64_t src = rank.stage(rank.self(), 0, 8000);
  auto channel = rank.to(rank.right());
  channel.put(Warp{}, kData, src, 8000);
  channel.flush();
  std::memset(rank.mesh.local() + src, 0, 8000);
  channel.put_value(rank.signal_of(rank.self()), 1);
  ASSERT_TRUE(rank.wait(rank.signal_of(rank.left()), 1));
  EXPECT_TRUE(rank.holds(kData, rank.left(), 0, 8000));
}
TYPED_TEST(ChannelTest, FlushMakesTheSourceReusable) {
  this->on_ranks(flush_makes_the_source_reusable);
}

template <class R>
void gets_bring_what_a_peer_holds_before_their_word(R& rank) {
  constexpr uint64_t kPiece = 4112, kPieces = 9;
  rank.stage(rank.self(), 0, kPiece * kPieces);
  ASSERT_TRUE(rank.comm->barrier().ok());
  uint64_t got = 0;
  for (uint32_t peer = 0; peer < rank.size(); ++peer) {
    auto channel = rank.to(peer);
    for (uint64_t piece = 0; piece < kPieces; ++piece) {
      const uint64_t at = kData + got % 3 * kPiece;
      channel.get(Warp{}, at, kSource + piece * kPiece, kPiece, rank.signal_of(rank.self()), ++got);
      if (got % 3 != 0) continue;  // up to three are under way
      ASSERT_TRUE(rank.wait(rank.signal_of(rank.self()), got)) << "saw " << rank.seen;
      for (uint64_t back = 0; back < 3; ++back)
        EXPECT_TRUE(rank.holds(kData + (2 - back) * kPiece, peer, (piece - back) * kPiece, kPiece))
            << "piece " << piece - back << " of rank " << peer;
    }
  }
  EXPECT_EQ(rank.at(kData + 3 * kPiece), kPoison);
  rank.to(rank.right()).get(Warp{}, kData, kSource, 0, rank.signal_of(rank.self()), ++got);
  EXPECT_TRUE(rank.wait(rank.signal_of(rank.self()), got));
}
TYPED_TEST(ChannelTest, GetsBringWhatAPeerHoldsBeforeTheirWord) {
  this->on_ranks(gets_bring_what_a_peer_holds_before_their_word);
}

template <class R>
void several_warps_put_at_once(R& rank) {
  constexpr uint32_t kWarps = 3;
  constexpr uint64_t kShare = 2064;
  const uint64_t src = rank.stage(rank.self(), 0, kWarps * kShare);
  std::vector<std::thread> warps;
  for (uint32_t warp = 0; warp < kWarps; ++warp)
    warps.emplace_back([&, warp] {
      rank.to(rank.right()).put(Warp{}, kData + warp * kShare, src + warp * kShare, kShare);
      rank.to(rank.right()).signal_add(kSignals, 1);
    });
  for (std::thread& warp : warps) warp.join();
  ASSERT_TRUE(rank.wait(kSignals, kWarps));
  EXPECT_TRUE(rank.holds(kData, rank.left(), 0, kWarps * kShare));
}
TYPED_TEST(ChannelTest, SeveralWarpsPutAtOnce) {
  this->on_ranks(several_warps_put_at_once);
}

template <class R>
void mapped_peers_give_their_address(R& rank) {
  for (uint32_t peer = 0; peer < rank.size(); ++peer)
    EXPECT_EQ(rank.to(peer).mapped(), rank.window->base(static_cast<int>(peer)));
}
TYPED_TEST(ChannelTest, MappedPeersGiveTheirAddress) {
  if constexpr (!MappedMeshOnly<typename TypeParam::Mesh>) GTEST_SKIP() << "ports have no addresses";
  if constexpr (MappedMeshOnly<typename TypeParam::Mesh>) this->on_ranks(mapped_peers_give_their_address);
}

template <class R>
void it_still_works_after_the_window_has_grown(R& rank) {
  ASSERT_TRUE(rank.window->grow(kWindow + 100000).ok());
  rank.take_mesh();
  const uint64_t at = kWindow - 64;  // across the seam of the two segments
  const uint64_t src = rank.stage(rank.self(), at, 128);
  rank.to(rank.right()).put_with_signal(Warp{}, at, src, 128, rank.signal_of(rank.self()), 1);
  ASSERT_TRUE(rank.wait(rank.signal_of(rank.left()), 1));
  EXPECT_TRUE(rank.holds(at, rank.left(), at, 128));
}
TYPED_TEST(ChannelTest, ItStillWorksAfterTheWindowHasGrown) {
  if (this->caps.brings_memory) GTEST_SKIP() << "windows in memory of a library do not grow";
  this->on_ranks(it_still_works_after_the_window_has_grown);
}

// Nothing that was asked for before is waited for until the window has grown.
template <class R>
void what_is_under_way_survives_the_growth_of_its_window(R& rank) {
  constexpr uint64_t kRow = 2064, kRows = 20, kTurns = 4, kReadSignals = 2048;
  for (uint64_t turn = 0; turn < kTurns; ++turn) {
    auto right = rank.to(rank.right());
    for (uint64_t row = 0; row < kRows; ++row) {
      const uint64_t number = turn * kRows + row;
      const uint64_t src = rank.stage(rank.self(), number, kRow, kSource + row * kRow);
      right.put_with_signal(Warp{}, kData + row * kRow, src, kRow, rank.signal_of(rank.self()), number + 1);
    }
    ASSERT_TRUE(rank.window->grow(rank.window->bytes() + 70'000).ok());
    rank.take_mesh();
    const uint64_t last = rank.window->bytes() - 16;  // where there was no window when the rows were sent
    auto now = rank.to(rank.right());
    now.put(Warp{}, last, kSource, 16);
    now.put_value(rank.signal_of(rank.self()), (turn + 1) * kRows + 1);
    ASSERT_TRUE(rank.wait(rank.signal_of(rank.left()), (turn + 1) * kRows + 1)) << "saw " << rank.seen;
    for (uint64_t row = 0; row < kRows; ++row)
      EXPECT_TRUE(rank.holds(kData + row * kRow, rank.left(), turn * kRows + row, kRow)) << "row " << row;
    EXPECT_TRUE(rank.holds(last, rank.left(), turn * kRows, 16));
    rank.to(rank.left()).put_value(kReadSignals + rank.signal_of(rank.self()), turn + 1);
    ASSERT_TRUE(rank.wait(kReadSignals + rank.signal_of(rank.right()), turn + 1)) << "saw " << rank.seen;
    now.flush();
  }
}
TYPED_TEST(ChannelTest, WhatIsUnderWaySurvivesTheGrowthOfItsWindow) {
  if (this->caps.brings_memory) GTEST_SKIP() << "windows in memory of a library do not grow";
  this->on_ranks(what_is_under_way_survives_the_growth_of_its_window);
}

// Kernels may be handed wrong offsets: a port refuses them before anything leaves.
template <class R>
void what_lies_outside_the_window_is_an_error_and_not_sent(R& rank) {
  uint32_t peer = rank.right();
  while (rank.window->base(static_cast<int>(peer))) peer = (peer + 1) % rank.size();
  const uint64_t end = rank.window->bytes();
  rank.to(peer).put(Warp{}, end - 16, kSignals, 32);
  const auto fault = [&] { return rank.comm->port_link()->fault(); };
  ASSERT_TRUE(wait_until(Deadline::after_s(10), [&] { return !fault().ok(); }));
  EXPECT_EQ(fault().code(), Code::kInvalid);
  const std::string sentence = text("a put or signal to rank {} lies outside the window", peer);
  EXPECT_NE(fault().message().find(sentence), std::string::npos) << fault().message();
  EXPECT_NE(fault().message().find(text("rank {}, ", rank.self())), std::string::npos) << fault().message();
  ASSERT_TRUE(rank.comm->barrier().ok());
  EXPECT_EQ(rank.at(end - 1), kPoison);
}
TYPED_TEST(ChannelTest, WhatLiesOutsideTheWindowIsAnErrorAndNotSent) {
  if constexpr (MappedMeshOnly<typename TypeParam::Mesh>)
    GTEST_SKIP() << "loads and stores go where they are told";
  if constexpr (!MappedMeshOnly<typename TypeParam::Mesh>)
    this->on_ranks(what_lies_outside_the_window_is_an_error_and_not_sent);
}

TEST(Conformance, EveryTransportIsTested) {
  for (const Transport* transport : transports()) {
    const auto is_it = [&](std::string_view tested) { return tested == transport->name(); };
    EXPECT_TRUE(
        std::any_of(std::begin(testing::kTestedTransports), std::end(testing::kTestedTransports), is_it))
        << transport->name() << " has no fixture in tests/conformance/fixtures.h";
  }
}

}  // namespace
}  // namespace weft
