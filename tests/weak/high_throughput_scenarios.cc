// SPDX-License-Identifier: Apache-2.0
//
// High-throughput layout, notify, dispatch and combine on the weak machine: every rank sends its rows back as they came, so a
// token's sum is a multiple of its row.
#include "kernels/core/carver.h"
#include "kernels/core/numbers.cuh"
#include "kernels/moe/high_throughput_combine.cuh"
#include "kernels/moe/high_throughput_dispatch.cuh"
#include "transports/mapped/channel.cuh"
#include "weak/buffers.h"
#include "weak/scenarios.h"

namespace weft::weak {
namespace {

constexpr uint32_t kRanks = 2, kTopK = 2, kLocalExperts = 2, kExperts = kRanks * kLocalExperts, kCalls = 2;
constexpr uint32_t kRowBytes = 64, kChannels = kRowBytes / 2, kPieceBytes = 48, kScaleWords = 1;
constexpr uint32_t kMostTokens = 10, kCapacity = kRanks * kMostTokens;  // rows of a burst, and some more

struct WindowLayout {
  HighThroughputOffsets at;
  uint64_t states;  // GridState[3]: of notify, dispatch and combine
  uint64_t control_end;
  uint64_t rows, meta, staging, staging_weights;
  uint64_t end;
};
ReceiveLayout received() {
  return receive_layout(kCapacity, kRowBytes, kScaleWords, kTopK, sizeof(int64_t));
}
WindowLayout window_layout() {
  WindowLayout made{};
  HighThroughputOffsets& at = made.at;
  Carver carver;
  at.record_words = round_up(sizeof(CountHeader) / 4 + kRanks + kLocalExperts, 32);
  at.count_signal = carver.take(kRanks * 8);
  at.count_record = carver.take(2 * kRanks * at.record_words * 4);
  at.rendezvous_signal = carver.take(kRanks * 8);
  at.rendezvous_record = carver.take(2 * kRanks * sizeof(RendezvousRecord));
  at.arrived_signal = carver.take(kRanks * 8);
  at.combine_signal = carver.take(kRanks * 8);
  at.combine_record = carver.take(2 * kRanks * sizeof(RendezvousRecord));
  at.burst_signal = carver.take(uint64_t{kRanks} * kMaxBursts * 8);
  made.states = carver.take(3 * sizeof(GridState));
  made.control_end = carver.end();
  made.rows = carver.take(received().rows_bytes);
  made.meta = carver.take(received().meta_bytes);
  made.staging = carver.take(uint64_t{kCapacity} * kRowBytes);
  made.staging_weights = carver.take(uint64_t{kCapacity} * kTopK * 4);
  made.end = carver.end();
  return made;
}

struct Setting {
  uint32_t blocks;
  uint64_t epoch;  // of every exchange, before the run
  bool watches, queues, is_unawaited;
};

struct Call {
  uint32_t tokens;
  int64_t* ids;
  float* weights;
  uint16_t* x;
  uint32_t* scales;
  int32_t* counts;
  uint8_t* in_rank;
  RoutePlaces places;
  CountReport* report;
  uint16_t* combined;
  float* combined_weights;
};

uint32_t value_of(uint32_t rank, uint32_t call, uint32_t token, uint32_t channel) {
  return 1 + (rank * 5 + call * 3 + token * 7 + channel) % 13;
}
uint16_t bf16_of(uint32_t value) {
  return static_cast<uint16_t>(bf16_bits(static_cast<float>(value)));
}

class HighThroughputRun {
 public:
  HighThroughputRun(Machine& machine, const Setting& setting)
      : machine_(machine), setting_(setting), window_(window_layout()) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      const std::string of = " of rank " + std::to_string(rank);
      bases_[rank] = shared_array<std::byte>(buffers_, machine, "window" + of, window_.end, kPoison);
      faults_[rank] = shared_array<FaultBox>(buffers_, machine, "fault box" + of, 1);
      std::memset(bases_[rank], 0, window_.control_end);
      for (uint32_t i = 0; i < 3; ++i) state(rank, i)->epoch = setting.epoch;
      for (uint32_t call = 0; call < kCalls; ++call) calls_[rank][call] = make_call(rank, call);
    }
  }

  bool play() {
    for (uint32_t rank = 0; rank < kRanks; ++rank)
      for (uint32_t call = 0; call < kCalls; ++call) {
        launch_layout(rank, calls_[rank][call]);
        launch_notify(rank, calls_[rank][call]);
        launch_dispatch(rank, call);
        launch_combine(rank, call);
      }
    if (!machine_.run()) return false;
    for (uint32_t rank = 0; rank < kRanks; ++rank)
      for (uint32_t call = 0; call < kCalls; ++call)
        if (!is_right(rank, call)) return false;
    return true;
  }

 private:
  uint64_t draw(uint64_t below) { return machine_.memory().draw(below); }
  GridState* state(uint32_t rank, uint32_t which) const {
    return reinterpret_cast<GridState*>(bases_[rank] + window_.states) + which;
  }
  template <class T>
  T* array(const std::string& name, uint64_t count, std::byte fill = kPoison) {
    return shared_array<T>(buffers_, machine_, name, count, fill);
  }

  Call make_call(uint32_t rank, uint32_t number) {
    const std::string of = " of call " + std::to_string(number) + " of rank " + std::to_string(rank);
    Call call{};
    call.tokens = static_cast<uint32_t>(draw(kMostTokens + 1));
    call.ids = array<int64_t>("ids" + of, kMostTokens * kTopK);
    call.weights = array<float>("weights" + of, kMostTokens * kTopK);
    call.x = array<uint16_t>("x" + of, kMostTokens * kChannels);
    call.scales = array<uint32_t>("scales" + of, kMostTokens * kScaleWords);
    call.counts = array<int32_t>("counts" + of, kRanks + kExperts, std::byte{0});
    call.in_rank = array<uint8_t>("tokens in ranks" + of, kMostTokens * kRanks);
    call.places = {array<int32_t>("rows sent" + of, kMostTokens * kRanks),
                   array<int32_t>("slots" + of, kMostTokens),
                   array<int32_t>("prefixes" + of, kRanks * kRanks), nullptr};
    call.report = reinterpret_cast<CountReport*>(array<std::byte>(
        "report" + of, sizeof(CountReport) + kRanks * sizeof(RankCounts) + kLocalExperts * sizeof(int32_t)));
    call.combined = array<uint16_t>("sums" + of, kMostTokens * kChannels);
    call.combined_weights = array<float>("summed weights" + of, kMostTokens * kTopK);
    for (uint32_t t = 0; t < call.tokens; ++t) {
      for (uint32_t k = 0; k < kTopK; ++k) {
        call.ids[t * kTopK + k] = draw(6) == 0 ? -1 : static_cast<int64_t>(draw(kExperts));
        call.weights[t * kTopK + k] = static_cast<float>(1 + draw(9));
      }
      call.scales[t] = 1000 * number + t;
      for (uint32_t c = 0; c < kChannels; ++c)
        call.x[t * kChannels + c] = bf16_of(value_of(rank, number, t, c));
    }
    return call;
  }

  WaitRule wait_of(uint32_t rank) const {
    return {.timeout_ns = ~uint64_t{0}, .fault = faults_[rank], .self = rank, .reserved = 0};
  }
  CallControl control(uint32_t rank, uint32_t which) const {
    return {window_.at, wait_of(rank), state(rank, which)};
  }
  template <class Kernel>
  void launch(const char* name, uint32_t rank, uint32_t blocks, uint32_t warps, uint64_t shared_bytes,
              Kernel kernel) {
    const MappedMesh mesh = MappedMesh::of(bases_, nullptr, rank, kRanks);
    machine_.launch(rank, {.name = name,
                           .rank = rank,
                           .blocks = blocks,
                           .warps = warps,
                           .lanes = Warp::kMaxSize,
                           .shared_bytes = shared_bytes,
                           .body = [=] { kernel(mesh); }});
  }
  void launch_layout(uint32_t rank, const Call& call) {
    const LayoutArgs args{.topk_idx = call.ids,
                          .tokens = call.tokens,
                          .top_k = kTopK,
                          .id_bytes = 8,
                          .ranks = kRanks,
                          .experts = kExperts,
                          .experts_per_rank = kLocalExperts,
                          .reserved = 0,
                          .counts = call.counts,
                          .token_in_rank = call.in_rank,
                          .sum_place = nullptr};
    launch("dispatch_layout", rank, setting_.blocks, 1, (kRanks + kExperts) * 4,
           [=](const MappedMesh& mesh) { dispatch_layout(args, mesh, HighThroughputShape{}); });
  }
  void launch_notify(uint32_t rank, const Call& call) {
    NotifyArgs args{control(rank, 0), call.places, {call.in_rank, call.counts + kRanks}};
    args.mine = {.row_bytes = kRowBytes,
                 .scale_words = kScaleWords,
                 .top_k = kTopK,
                 .experts = kExperts,
                 .element = 2,
                 .tokens = call.tokens,
                 .reserved = {},
                 .free_bytes = 1 << 20,
                 .staging_bytes = 1 << 20};
    args.experts_per_rank = kLocalExperts;
    args.host_waits = setting_.is_unawaited ? 0 : 1;
    args.report = call.report;
    launch("dispatch_notify", rank, setting_.blocks, 2, 128,
           [=](const MappedMesh& mesh) { dispatch_notify(args, mesh, HighThroughputShape{}); });
  }
  void launch_dispatch(uint32_t rank, uint32_t number) {
    const Call& call = calls_[rank][number];
    const HighThroughputShape shape{kRowBytes, kPieceBytes, kScaleWords, kTopK, kElementBf16};
    DispatchArgs args{control(rank, 1), call.places, {}};
    args.x = reinterpret_cast<std::byte*>(call.x);
    args.scales = call.scales;
    args.scale_token_stride = kScaleWords;
    args.scale_word_stride = 1;
    args.topk_idx = call.ids;
    args.topk_weights = call.weights;
    args.tokens = call.tokens;
    args.report = setting_.is_unawaited ? call.report : nullptr;
    args.mine = {window_.rows,
                 window_.meta,
                 kCapacity,
                 40 + number,
                 kRowBytes,
                 row_extras(kScaleWords, kTopK, 8),
                 0,
                 0};
    args.experts = kExperts;
    args.experts_per_rank = kLocalExperts;
    args.id_bytes = 8;
    args.fill_tail = setting_.is_unawaited ? 1 : 0;
    args.row_warps = {0, 1};
    args.meta_warps = {1, 1};
    launch("dispatch_rows", rank, setting_.blocks, 2, rows_shared_bytes(kRanks, 1, kPieceBytes),
           [=](const MappedMesh& mesh) { dispatch_rows(args, mesh, shape); });
  }
  void launch_combine(uint32_t rank, uint32_t number) {
    const Call& call = calls_[rank][number];
    const HighThroughputShape shape{kRowBytes, kPieceBytes, 0, kTopK, kElementBf16};
    const ReceiveLayout here = received();
    const std::byte* meta = bases_[rank] + window_.meta;
    CombineArgs args{control(rank, 2), call.places, {}};
    args.x = bases_[rank] + window_.rows;
    args.topk_weights = reinterpret_cast<const float*>(meta + here.weights);
    args.slot = reinterpret_cast<const int32_t*>(meta + here.slot);
    args.combined = reinterpret_cast<std::byte*>(call.combined);
    args.combined_weights = call.combined_weights;
    args.tokens = call.tokens;
    args.mine = {window_.staging, window_.staging_weights, kCapacity, 80 + number,
                 kRowBytes,       row_extras(0, kTopK, 0), 0,         0};
    args.push_warps = {0, 1};
    args.sum_warps = {1, 1};
    args.watch_warps = {2, setting_.watches ? 1u : 0u};
    args.sum_slots = setting_.queues ? 2 : 0;
    const uint64_t shared =
        rows_shared_bytes(kRanks, 1, kPieceBytes) + (setting_.queues ? queue_bytes(2) : 0);
    launch("combine_rows", rank, setting_.blocks, setting_.watches ? 3 : 2, shared,
           [=](const MappedMesh& mesh) { combine_rows(args, mesh, shape); });
  }

  bool goes(const Call& call, uint32_t token, uint32_t rank) const {
    for (uint32_t k = 0; k < kTopK; ++k) {
      const int64_t expert = call.ids[token * kTopK + k];
      if (expert >= 0 && expert / kLocalExperts == rank) return true;
    }
    return false;
  }
  bool is_right(uint32_t rank, uint32_t number) {
    const Call& call = calls_[rank][number];
    const std::string of = " of call " + std::to_string(number) + " of rank " + std::to_string(rank);
    for (uint32_t t = 0; t < call.tokens; ++t) {
      uint32_t copies = 0;
      for (uint32_t to = 0; to < kRanks; ++to) copies += goes(call, t, to) ? 1 : 0;
      for (uint32_t c = 0; c < kChannels; ++c)
        if (!is_value(machine_, &call.combined[t * kChannels + c],
                      bf16_of(copies * value_of(rank, number, t, c)),
                      "channel " + std::to_string(c) + " of token " + std::to_string(t) + of))
          return false;
      for (uint32_t k = 0; k < kTopK; ++k)
        if (!is_value(machine_, &call.combined_weights[t * kTopK + k],
                      call.ids[t * kTopK + k] >= 0 ? call.weights[t * kTopK + k] : 0.0f,
                      "weight " + std::to_string(k) + " of token " + std::to_string(t) + of))
          return false;
    }
    return is_value(machine_, &faults_[rank]->raised, uint32_t{0}, "the fault box");
  }

  Machine& machine_;
  const Setting setting_;
  const WindowLayout window_;
  std::deque<Buffer> buffers_;
  std::byte* bases_[kRanks];
  FaultBox* faults_[kRanks];
  Call calls_[kRanks][kCalls];
};

}  // namespace

bool play_high_throughput(Machine& machine, uint64_t /*seed*/) {
  Setting setting{};
  setting.blocks = static_cast<uint32_t>(1 + machine.memory().draw(2));
  setting.watches = machine.memory().draw(2) == 0;
  setting.queues = machine.memory().draw(2) == 0;
  setting.is_unawaited = machine.memory().draw(2) == 0;
  return HighThroughputRun(machine, setting).play();
}

}  // namespace weft::weak
