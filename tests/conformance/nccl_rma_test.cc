// SPDX-License-Identifier: Apache-2.0
//
// libnccl-rma-weft.so as NCCL uses it, through its exported tables: both versions, ranks as threads over the loopback
// with faults and as processes over tcp and shm.
#ifdef WEFT_HAS_NCCL_RMA
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <numeric>

#include "base/config.h"
#include "providers/provider.h"
#include "tests/conformance/nccl_rma_harness.h"

namespace weft::nccl_rma::testing {
namespace {

using ::testing::HasSubstr;
using weft::testing::RanksAre;

#ifdef __SANITIZE_THREAD__
constexpr bool kSeesOneProcess = true;
#else
constexpr bool kSeesOneProcess = false;
#endif

struct Place {
  std::string label, provider;
  RanksAre ranks;
  bool is_wild = false;
};

const std::vector<Place>& places() {
  static const std::vector<Place> all = {
      {"loopback", "loopback", RanksAre::kThreads},
      {"loopback_wild", "loopback:seed=7,reorder=0.3,delay=0.1,delay_polls=40,duplicate=0.02",
       RanksAre::kThreads, true},
      {"fabric_tcp", "fabric:tcp", RanksAre::kProcesses},
      {"fabric_shm", "fabric:shm", RanksAre::kProcesses},
  };
  return all;
}

using Body = std::function<void(std::shared_ptr<Bootstrap>)>;

// Each run is in processes of its own: the library chooses its network once.
void run(const Place& place, int ranks, const Body& body) {
  const auto prepare = [&] {
    setenv("WEFT_PROXY_PROVIDER", place.provider.c_str(), 1);
    setenv("WEFT_TIMEOUT_S", "60", 1);
    setenv("WEFT_INTERFACE", "lo", 1);
    config_reload();
  };
  if (place.ranks == RanksAre::kProcesses)
    return weft::testing::run_process_ranks(ranks, [&](std::shared_ptr<Bootstrap> bootstrap) {
      prepare();
      body(std::move(bootstrap));
    });
  weft::testing::run_process_ranks(1, [&](std::shared_ptr<Bootstrap>) {
    prepare();
    weft::testing::run_thread_ranks(ranks, body);
  });
}

class NcclRma : public ::testing::TestWithParam<std::tuple<Place, const char*>> {
 protected:
  void SetUp() override {
    if (place().provider.starts_with("loopback")) return;
    if (kSeesOneProcess) GTEST_SKIP() << "ThreadSanitizer does not see the order that other processes make";
    auto provider = provider::find_provider(place().provider);
    ASSERT_TRUE(provider.ok());
    for (const provider::Nic& nic : (*provider)->probe()) {
      if (nic.usable()) return;
      why_ = nic.unusable_because;
    }
    GTEST_SKIP() << why_;
  }
  const Place& place() const { return std::get<0>(GetParam()); }
  const char* symbol() const { return std::get<1>(GetParam()); }
  std::string why_ = "no NIC";
};

INSTANTIATE_TEST_SUITE_P(All, NcclRma,
                         ::testing::Combine(::testing::ValuesIn(places()),
                                            ::testing::Values("ncclRmaPlugin_v13", "ncclRmaPlugin_v14")),
                         [](const auto& info) {
                           return std::get<0>(info.param).label +
                                  std::string(std::get<1>(info.param)).substr(13);
                         });

bool wait_for(const uint64_t& word, uint64_t value, double seconds = 60) {
  return wait_until(Deadline::after_s(seconds), [&] {
    return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(word)).load(std::memory_order_acquire) >= value;
  });
}

TEST_P(NcclRma, SizesOfEveryKindArriveBeforeTheirSignal) {
  run(place(), 2, [&](std::shared_ptr<Bootstrap> bootstrap) {
    constexpr uint64_t kBytes = (16 << 20) + 5, kGuard = 64;
    const Library library(symbol());
    ASSERT_TRUE(library.is_loaded());
    Communicator comm(library, bootstrap);
    ASSERT_TRUE(comm.is_connected());
    std::vector<char> src(kBytes), dst(kBytes + kGuard, char(0xEE));
    std::vector<uint64_t> signals(4);
    for (uint64_t i = 0; i < kBytes; ++i)
      src[i] = static_cast<char>(i * 31 + i / 253 + uint64_t(comm.rank()));
    void* src_memory = comm.enroll(src.data(), kBytes);
    void* dst_memory = comm.enroll(dst.data(), kBytes);
    void* signal_memory = comm.enroll(signals.data(), 32, kForceStrictOrder);
    comm.open(2);
    const uint32_t peer = 1 - static_cast<uint32_t>(comm.rank());
    uint64_t expected = 0;
    for (uint64_t bytes : std::vector<uint64_t>{0, 1, 7, 8, 1023, 1024, 1025, 4095, 65537, 1 << 20, kBytes}) {
      comm.barrier();
      std::fill(dst.begin(), dst.end(), char(0xEE));
      comm.barrier();
      const uint64_t at = kBytes - bytes;  // the window's last bytes
      Operation put{peer, 1, src_memory, at, bytes, dst_memory, at, signal_memory, 8, bytes + 3};
      put.op = bytes % 2 ? kSignalInc : kSignalAdd;
      expected += bytes % 2 ? 1 : bytes + 3;
      if (bytes == 0) put.src = put.dst = nullptr;  // a signal alone
      comm.push(put);
      ASSERT_TRUE(wait_for(signals[1], expected)) << bytes;
      for (uint64_t i = at; i < kBytes; ++i)
        ASSERT_EQ(dst[i], static_cast<char>(i * 31 + i / 253 + peer)) << i << " of " << bytes;
      ASSERT_TRUE(at == 0 || dst[at - 1] == char(0xEE));
      ASSERT_EQ(dst[kBytes], char(0xEE));
    }
    ASSERT_TRUE(comm.quiet());
    EXPECT_EQ(signals[1], expected);
    EXPECT_EQ(signals[0] + signals[2] + signals[3], 0u);
    comm.barrier();
    comm.close();
  });
}

// What a rank sends to another on one channel: number, size and value of each operation follow from its place alone.
struct Script {
  uint64_t seed;
  uint64_t hash(uint64_t i) const {
    uint64_t x = seed * 0x9E3779B97F4A7C15 + i * 0xBF58476D1CE4E5B9;
    x ^= x >> 31;
    x *= 0x94D049BB133111EB;
    return x ^ x >> 29;
  }
  static constexpr uint64_t kSlotBytes = 3000;
  uint64_t bytes(uint64_t i) const {
    const uint64_t h = hash(i) % 16;
    return h == 0 ? 0 : h < 12 ? hash(i + 1) % 97 : h < 15 ? hash(i + 1) % 1100 : hash(i + 1) % kSlotBytes;
  }
  bool has_signal(uint64_t i) const { return hash(i) % 3 != 0; }
  uint64_t value(uint64_t i) const { return 1 + hash(i + 2) % 5; }
  char byte(uint64_t i, uint64_t at) const { return static_cast<char>(hash(i) + at * 7); }
};

// Every rank to every rank (or every stride-th) on every channel: puts of random sizes with and without signals into a ring
// of slots, checked by the receiver as soon as a signal says so, and given back by a signal the other way.
void random_traffic(Communicator& comm, int channels, int stride, uint64_t operations, uint64_t seed) {
  constexpr uint64_t kSlots = 64;
  const auto ranks = static_cast<uint64_t>(comm.ranks()), self = static_cast<uint64_t>(comm.rank());
  const uint64_t pairs = ranks * static_cast<uint64_t>(channels);  // pair: peer and channel
  const uint64_t half = pairs * kSlots * Script::kSlotBytes;
  std::vector<char> src(half), dst(half, char(0xEE));
  std::vector<uint64_t> words(pairs * 2);  // arrived, given back
  void* src_memory = comm.enroll(src.data(), half);
  void* dst_memory = comm.enroll(dst.data(), half);
  void* word_memory = comm.enroll(words.data(), words.size() * 8, kForceStrictOrder | kSignalNeverReset);
  comm.open(channels, stride);
  comm.barrier();
  const auto pair_of = [&](uint64_t rank, uint64_t channel) { return channel * ranks + rank; };
  const auto script = [&](uint64_t from, uint64_t to, uint64_t channel) {
    return Script{seed + (from * ranks + to) * 64 + channel};
  };
  std::atomic<bool> is_fine{true};
  const auto drive = [&](uint64_t channel) {
    struct Way {
      uint64_t sent = 0, taken = 0, arrived = 0, given = 0;
    };
    std::vector<Way> ways(ranks);
    const auto is_used = [&](uint64_t rank) {
      return (rank + ranks - self) % static_cast<uint64_t>(stride) == 0;
    };
    const auto send = [&](uint64_t to) {
      Way& way = ways[to];
      const uint64_t pair = pair_of(to, channel), there = pair_of(self, channel);
      const Script say = script(self, to, channel);
      const uint64_t back = std::atomic_ref<uint64_t>(words[pair * 2 + 1]).load(std::memory_order_acquire);
      for (; way.sent < operations && way.sent - back < kSlots; ++way.sent) {
        const uint64_t slot = way.sent % kSlots * Script::kSlotBytes, i = way.sent;
        char* from = src.data() + pair * kSlots * Script::kSlotBytes + slot;
        for (uint64_t at = 0; at < say.bytes(i); ++at) from[at] = say.byte(i, at);
        Operation put{static_cast<uint32_t>(to),
                      static_cast<uint32_t>(channel),
                      src_memory,
                      static_cast<uint64_t>(from - src.data()),
                      say.bytes(i),
                      dst_memory,
                      there * kSlots * Script::kSlotBytes + slot};
        if (say.has_signal(i) || i + 1 == operations || (i + 1) % (kSlots / 4) == 0) {
          put.signal = word_memory;
          put.signal_offset = there * 16;
          put.value = say.value(i);
        }
        comm.push(put);
      }
    };
    // Everything up to the last operation that the signal's value covers must be there.
    const auto take = [&](uint64_t from) {
      Way& way = ways[from];
      const uint64_t pair = pair_of(from, channel);
      const Script said = script(from, self, channel);
      const uint64_t value = std::atomic_ref<uint64_t>(words[pair * 2]).load(std::memory_order_acquire);
      uint64_t i = way.taken, arrived = way.arrived, last = way.taken;
      for (; arrived < value && i < operations; ++i) {
        if (!said.has_signal(i) && i + 1 != operations && (i + 1) % (kSlots / 4) != 0) continue;
        arrived += said.value(i);
        last = i + 1;
      }
      if (arrived != value) return is_fine = false, void();
      for (i = way.taken; i < last; ++i) {
        const char* bytes = dst.data() + (pair * kSlots + i % kSlots) * Script::kSlotBytes;
        for (uint64_t at = 0; at < said.bytes(i); ++at)
          if (bytes[at] != said.byte(i, at)) return is_fine = false, void();
      }
      way.taken = last;
      way.arrived = arrived;
      if (way.taken - way.given < kSlots / 2 && way.taken != operations) return;
      if (way.taken == way.given) return;
      comm.push({static_cast<uint32_t>(from), static_cast<uint32_t>(channel), nullptr, 0, 0, nullptr, 0,
                 word_memory, pair_of(self, channel) * 16 + 8, way.taken - way.given, kSignalAdd, false,
                 false});
      way.given = way.taken;
    };
    const auto is_done = [&] {
      for (uint64_t rank = 0; rank < ranks; ++rank)
        if (is_used(rank) && (ways[rank].sent < operations || ways[rank].given < operations)) return false;
      return true;
    };
    uint64_t before = 0;
    Deadline until = Deadline::after_s(120);
    while (!is_done() && is_fine && comm.failure() == kNcclSuccess && !until.passed()) {
      uint64_t now = 0;
      for (uint64_t rank = 0; rank < ranks; ++rank) {
        if (!is_used(rank)) continue;
        send(rank);
        take(rank);
        now += ways[rank].sent + ways[rank].taken;
      }
      if (now != before) until = Deadline::after_s(120);
      before = now;
      std::this_thread::yield();
    }
    EXPECT_TRUE(is_done()) << "rank " << self << " channel " << channel << ": " << ways[0].sent << " sent, "
                           << ways[0].taken << " taken of rank 0";
  };
  std::vector<std::thread> kernels;
  for (int channel = 0; channel < channels; ++channel) kernels.emplace_back(drive, channel);
  for (std::thread& kernel : kernels) kernel.join();
  EXPECT_TRUE(is_fine) << "rank " << self << ": bytes or signals that were not sent";
  EXPECT_TRUE(comm.quiet());
  EXPECT_EQ(comm.failure(), kNcclSuccess);
  comm.barrier();
  for (uint64_t pair = 0; pair < pairs; ++pair) {
    const uint64_t from = pair % ranks;
    if ((from + ranks - self) % static_cast<uint64_t>(stride)) continue;
    const Script said = script(from, self, pair / ranks);
    uint64_t sum = 0;
    for (uint64_t i = 0; i < operations; ++i)
      if (said.has_signal(i) || i + 1 == operations || (i + 1) % (kSlots / 4) == 0) sum += said.value(i);
    EXPECT_EQ(words[pair * 2], sum) << "rank " << self << " pair " << pair;
    EXPECT_EQ(words[pair * 2 + 1], operations);
  }
  comm.barrier();
  comm.close();
}

// RMA_OPERATIONS: how many in all, of all ranks; tests/system/test_nccl_rma.py asks for a million.
uint64_t operations_in_all(uint64_t otherwise) {
  const char* wanted = std::getenv("RMA_OPERATIONS");
  return wanted ? std::strtoull(wanted, nullptr, 10) : otherwise;
}

TEST_P(NcclRma, TrafficOfTwoTimesTwoRanksIsExact) {
  const uint64_t all = operations_in_all(12000);
  run(place(), 4, [&](std::shared_ptr<Bootstrap> bootstrap) {
    const Library library(symbol());
    Communicator comm(library, bootstrap);
    ASSERT_TRUE(comm.is_connected());
    random_traffic(comm, 2, 1, (all + 31) / 32, 1);
    if (comm.rank() == 0)
      std::printf("%lu operations of rank 0\n", static_cast<unsigned long>(comm.pushed()));
  });
}

TEST_P(NcclRma, RailsOfTwoTimesTwoRanks) {
  if (std::string(symbol()).ends_with("13")) GTEST_SKIP() << "version 13 has no stride";
  run(place(), 4, [&](std::shared_ptr<Bootstrap> bootstrap) {
    const Library library(symbol());
    Communicator comm(library, bootstrap);
    ASSERT_TRUE(comm.is_connected());
    random_traffic(comm, 3, 2, 100, 2);
  });
}

TEST_P(NcclRma, GetsAndContextsThatComeAndGo) {
  run(place(), 2, [&](std::shared_ptr<Bootstrap> bootstrap) {
    const Library library(symbol());
    Communicator comm(library, bootstrap);
    ASSERT_TRUE(comm.is_connected());
    const auto peer = 1 - static_cast<uint32_t>(comm.rank());
    std::vector<uint32_t> here(30000), there(30000, 0xEEEEEEEE);
    std::iota(here.begin(), here.end(), static_cast<uint32_t>(comm.rank()) << 20);
    uint64_t signals[2] = {};
    void* here_memory = comm.enroll(here.data(), here.size() * 4);
    void* there_memory = comm.enroll(there.data(), there.size() * 4);
    void* signal_memory = comm.enroll(signals, sizeof signals, kForceStrictOrder);
    for (int life = 0; life < 5; ++life) {
      comm.open(3);
      std::fill(there.begin(), there.end(), 0xEEEEEEEE);
      for (uint32_t i = 0; i < 30; ++i) {
        Operation get{peer, i % 3, here_memory, i * 4000, i == 7 ? 0u : 4000u, there_memory, i * 4000};
        get.is_get = true;
        comm.push(get);
      }
      ASSERT_TRUE(comm.quiet());
      for (uint32_t i = 0; i < 30000; ++i)
        ASSERT_EQ(there[i], i / 1000 == 7 ? 0xEEEEEEEE : (peer << 20) + i) << i;
      // A put to oneself goes the same way for NCCL.
      const auto self = static_cast<uint32_t>(comm.rank());
      comm.push({self, 1, here_memory, 4, 4001, there_memory, 28000, signal_memory, 8, 1, kSignalInc});
      comm.push({peer, 2, nullptr, 0, 0, nullptr, 0, signal_memory, 0, 5});
      ASSERT_TRUE(wait_for(signals[0], 5 * static_cast<uint64_t>(life + 1)));
      ASSERT_TRUE(wait_for(signals[1], static_cast<uint64_t>(life + 1)));
      ASSERT_EQ(there[7000], here[1]);
      void* request = nullptr;
      EXPECT_EQ(library.table().flush(comm.context(), 0, signal_memory, peer, &request), kNcclSuccess);
      int done = 0;
      EXPECT_EQ(library.table().test(comm.team(), request, &done), kNcclSuccess);
      EXPECT_EQ(done, 1);
      ASSERT_TRUE(comm.quiet());
      comm.barrier();
      comm.shut();
    }
    comm.close();
  });
}

TEST_P(NcclRma, MistakesAreRefusedAndNothingIsWritten) {
  run(place(), 2, [&](std::shared_ptr<Bootstrap> bootstrap) {
    const Library library(symbol());
    const RmaV14& rma = library.table();
    Communicator comm(library, bootstrap);
    ASSERT_TRUE(comm.is_connected());
    std::vector<char> data(100, char(comm.rank()));
    uint64_t word = 0;
    void* memory = comm.enroll(data.data(), 100);
    void* words = comm.enroll(&word, 8);
    comm.open(2);
    void* const context = comm.context();
    const auto peer = 1 - static_cast<uint32_t>(comm.rank());
    void *request = nullptr, *bad = &data, *out = nullptr;
    int done = 0;
    bool has_error = true;
    EXPECT_EQ(rma.put(context, 0, 1, memory, 100, 0, memory, peer, &request), kNcclInvalidArgument);
    EXPECT_EQ(rma.put(context, 0, 0, memory, 100, UINT64_MAX, memory, peer, &request), kNcclInvalidArgument);
    EXPECT_EQ(rma.put(context, 0, 0, bad, 10, 0, memory, peer, &request), kNcclInvalidArgument);
    EXPECT_EQ(rma.put(context, 0, 0, memory, 10, 0, nullptr, peer, &request), kNcclInvalidArgument);
    EXPECT_EQ(rma.put(context, 2, 0, memory, 10, 0, memory, peer, &request), kNcclInvalidArgument);
    EXPECT_EQ(rma.put(context, -1, 0, memory, 10, 0, memory, peer, &request), kNcclInvalidArgument);
    EXPECT_EQ(rma.put(context, 0, 0, memory, 10, 0, memory, 2, &request), kNcclInvalidArgument);
    EXPECT_EQ(rma.put(bad, 0, 0, memory, 10, 0, memory, peer, &request), kNcclInvalidArgument);
    EXPECT_EQ(rma.put(comm.team(), 0, 0, memory, 10, 0, memory, peer, &request), kNcclInvalidArgument);
    const auto signal = [&](uint64_t at, void* handle, uint32_t op) {
      return library.put_signal(context, 0, 0, nullptr, 0, 0, nullptr, peer, at, handle, 1, op, true,
                                &request);
    };
    EXPECT_EQ(signal(4, words, kSignalInc), kNcclInvalidArgument);
    EXPECT_EQ(signal(8, words, kSignalInc), kNcclInvalidArgument);
    EXPECT_EQ(signal(0, words, 3), kNcclInvalidArgument);
    EXPECT_EQ(signal(0, nullptr, kSignalAdd), kNcclInvalidArgument);
    EXPECT_EQ(rma.test(comm.team(), bad, &done), kNcclInvalidArgument);
    EXPECT_EQ(rma.test(comm.team(), nullptr, &done), kNcclInvalidArgument);
    EXPECT_EQ(rma.deregister(comm.team(), bad), kNcclInvalidArgument);
    EXPECT_EQ(rma.close_team(bad), kNcclInvalidArgument);
    EXPECT_EQ(rma.listen(nullptr, 99, data.data(), &out), kNcclInvalidArgument);
    EXPECT_EQ(library.create_context(comm.team(), {0, -1, 1}, &out), kNcclInvalidArgument);
    if (std::string(symbol()).ends_with("14")) {
      EXPECT_EQ(library.create_context(comm.team(), {1, -1, 3}, &out), kNcclInvalidArgument);
    }
    EXPECT_EQ(rma.query_last_error(context, &has_error), kNcclSuccess);
    EXPECT_FALSE(has_error);  // mistakes are the caller's, the communicator goes on
    EXPECT_THAT(Library::lines(),
                ::testing::Contains(HasSubstr("iput: srcOff: got 100 bytes at 1, allowed: within the "
                                              "100 bytes of rank")));
    comm.barrier();
    EXPECT_EQ(word, 0u);
    EXPECT_EQ(data, std::vector<char>(100, char(comm.rank())));
    comm.barrier();
    comm.push({peer, 0, nullptr, 0, 0, nullptr, 0, words, 0, 1});
    EXPECT_TRUE(wait_for(word, 1));
    // Registration fails everywhere when it fails on one rank.
    void* none = nullptr;
    const bool is_wrong = comm.rank() == 1;
    const NcclResult result =
        library.enroll(comm.team(), data.data(), is_wrong ? 0 : 100, kPointerHost, 0, &none);
    EXPECT_EQ(result, is_wrong ? kNcclInvalidArgument : kNcclSystemError);
    EXPECT_EQ(none, nullptr);
    EXPECT_TRUE(comm.quiet());
    comm.barrier();
    comm.close();
  });
}

TEST(NcclRmaLibrary, OffersItsVersionsAndRefusesHandlesOfOthers) {
  run(places()[0], 1, [&](std::shared_ptr<Bootstrap> bootstrap) {
    for (const char* symbol :
         {"ncclRmaPlugin_v12", "ncclRmaPlugin_v15", "ncclRmaPlugin_v16", "ncclGinPlugin_v14"})
      EXPECT_FALSE(Library(symbol).is_loaded()) << symbol;
    EXPECT_TRUE(Library("ncclGinPlugin_v13").is_loaded());
    const Library library("ncclRmaPlugin_v14");
    const RmaV14& rma = library.table();
    EXPECT_STREQ(rma.name, "Weft");
    Communicator comm(library, bootstrap);
    void *listener = nullptr, *team = nullptr;
    char handle[kHandleBytes];
    ASSERT_EQ(rma.listen(nullptr, 0, handle, &listener), kNcclSuccess);
    void* handles[] = {handle};
    handle[8] ^= 7;  // another protocol
    EXPECT_EQ(rma.connect(nullptr, handles, 1, 0, listener, &team), kNcclInvalidArgument);
    handle[0] = 'x';  // another plug-in
    EXPECT_EQ(rma.connect(nullptr, handles, 1, 0, listener, &team), kNcclInvalidArgument);
    EXPECT_EQ(team, nullptr);
    EXPECT_THAT(Library::lines(), ::testing::Contains(HasSubstr("rank 0 speaks version 6, allowed: 1")));
    EXPECT_EQ(rma.close_listener(listener), kNcclSuccess);
    EXPECT_EQ(rma.close_listener(listener), kNcclInvalidArgument);
  });
}

TEST(NcclRmaLibrary, InitFailsWithoutANetwork) {
  Place nowhere = places()[0];
  nowhere.provider = "fabric:efa";
  run(nowhere, 1, [&](std::shared_ptr<Bootstrap>) {
    const Library library("ncclRmaPlugin_v14");
    void* context = nullptr;
    EXPECT_NE(library.table().init(&context, 1, nullptr), kNcclSuccess);
    EXPECT_EQ(context, nullptr);
  });
}

TEST(NcclRmaLibrary, ClosedCommunicatorsRefuseAndExitNeedsNoClose) {
  run(places()[0], 1, [&](std::shared_ptr<Bootstrap> bootstrap) {
    const Library library("ncclRmaPlugin_v14");
    const RmaV14& rma = library.table();
    Communicator closed(library, bootstrap), left_open(library, bootstrap);
    void *context = nullptr, *request = nullptr;
    bool has_error = false;
    ASSERT_EQ(library.create_context(closed.team(), {1, -1, 1}, &context), kNcclSuccess);
    closed.close();
    EXPECT_EQ(rma.put(context, 0, 0, nullptr, 0, 0, nullptr, 0, &request), kNcclInvalidUsage);
    EXPECT_EQ(rma.progress(context), kNcclInvalidUsage);
    EXPECT_EQ(rma.query_last_error(context, &has_error), kNcclSuccess);
    EXPECT_EQ(rma.destroy_context(context), kNcclSuccess);
    left_open.open(1);
    std::fflush(nullptr);
    std::exit(::testing::Test::HasFailure() ? 1 : 0);  // with everything of the second one alive
  });
}

TEST(NcclRmaLibrary, AForkedChildIsRefusedAndEndsByItself) {
  run(places()[0], 1, [&](std::shared_ptr<Bootstrap> bootstrap) {
    const Library library("ncclRmaPlugin_v14");
    const RmaV14& rma = library.table();
    Communicator comm(library, bootstrap);
    void *context = nullptr, *request = nullptr;
    ASSERT_EQ(library.create_context(comm.team(), {1, -1, 1}, &context), kNcclSuccess);
    std::fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      const bool is_refused =
          rma.put(context, 0, 0, nullptr, 0, 0, nullptr, 0, &request) == kNcclInvalidArgument &&
          rma.progress(context) == kNcclInvalidArgument &&
          rma.destroy_context(context) == kNcclInvalidArgument &&
          rma.close_team(comm.team()) == kNcclInvalidArgument;
      std::exit(is_refused ? 0 : 1);
    }
    int status = 0;
    EXPECT_TRUE(wait_until(Deadline::after_s(60), [&] { return waitpid(child, &status, WNOHANG) == child; }));
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    EXPECT_EQ(rma.put(context, 0, 0, nullptr, 0, 0, nullptr, 0, &request), kNcclSuccess);
    EXPECT_EQ(rma.destroy_context(context), kNcclSuccess);
    comm.close();
  });
}

// Rank 2 is killed in the middle: what goes to it fails with its name, the rest goes on, and NCCL hears of it.
TEST(NcclRmaDeath, ADeadPeerFailsWhatGoesToItAlone) {
  if (kSeesOneProcess) GTEST_SKIP() << "ThreadSanitizer does not see the order that other processes make";
  const Place& tcp = places()[2];
  auto provider = provider::find_provider(tcp.provider);
  if (!provider.ok() || !(*provider)->probe()[0].usable()) GTEST_SKIP() << "no tcp";
  weft::testing::ForkRendezvous rendezvous(3);
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (int rank = 0; rank < 3; ++rank) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child > 0) {
      children.push_back(child);
      continue;
    }
    setenv("WEFT_PROXY_PROVIDER", tcp.provider.c_str(), 1);
    setenv("WEFT_INTERFACE", "lo", 1);
    setenv("WEFT_HEARTBEAT_S", "0.2", 1);
    setenv("WEFT_PEER_DEAD_S", "2", 1);
    config_reload();
    const Library library("ncclRmaPlugin_v14");
    const RmaV14& rma = library.table();
    Communicator comm(library, rendezvous.bootstrap(rank));
    std::vector<char> data(1 << 20);
    uint64_t words[3] = {};
    void* memory = comm.enroll(data.data(), data.size());
    void* signals = comm.enroll(words, sizeof words);
    void* context = nullptr;
    EXPECT_EQ(library.create_context(comm.team(), {1, -1, 1}, &context), kNcclSuccess);
    comm.barrier();
    if (rank == 2) {
      usleep(100000);
      kill(getpid(), SIGKILL);
    }
    const auto end = [&](void* request) {
      int done = 0;
      NcclResult result = kNcclSuccess;
      wait_until(Deadline::after_s(30), [&] {
        result = rma.test(comm.team(), request, &done);
        return result != kNcclSuccess || done;
      });
      return result;
    };
    NcclResult result = kNcclSuccess;
    for (int i = 0; i < 100000 && result == kNcclSuccess; ++i) {
      void* request = nullptr;
      result = library.put_signal(context, 0, 0, memory, 5000, 5000, memory, 2, 0, signals, 1, kSignalInc,
                                  false, &request);
      if (result == kNcclSuccess) result = end(request);
    }
    EXPECT_EQ(result, kNcclRemoteError);
    void* request = nullptr;
    EXPECT_EQ(library.put_signal(context, 0, 0, memory, 5000, 5000, memory, static_cast<uint32_t>(1 - rank),
                                 8, signals, 1, kSignalInc, true, &request),
              kNcclSuccess);
    EXPECT_EQ(end(request), kNcclSuccess);
    EXPECT_TRUE(wait_for(words[1], 1, 10));
    bool has_error = false;
    EXPECT_EQ(rma.query_last_error(context, &has_error), kNcclSuccess);
    EXPECT_TRUE(has_error);
    EXPECT_EQ(rma.progress(context), kNcclRemoteError);
    size_t found = 0;
    for (const std::string& line : Library::lines())
      found += line.find(text("nccl_rma: rank {} of 3: ", rank)) != std::string::npos &&
               line.find("rank 2") != std::string::npos;
    EXPECT_EQ(found, 1u) << ::testing::PrintToString(Library::lines());
    EXPECT_EQ(rma.destroy_context(context), kNcclSuccess);
    comm.close();
    std::fflush(nullptr);
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  for (int rank = 0; rank < 3; ++rank) {
    int state = 0;
    waitpid(children[static_cast<size_t>(rank)], &state, 0);
    if (rank == 2) {
      EXPECT_TRUE(WIFSIGNALED(state));
    } else {
      EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0) << "rank " << rank << " wait status " << state;
    }
  }
}

}  // namespace
}  // namespace weft::nccl_rma::testing
#endif
