// SPDX-License-Identifier: Apache-2.0
//
// Collectives by exchange on the weak machine: all kinds, by lines, in place and by stages, several calls in a row.
#include "kernels/collective/exchange.cuh"
#include "kernels/core/carver.h"
#include "transports/mapped/channel.cuh"
#include "weak/buffers.h"
#include "weak/scenarios.h"

namespace weft::weak {
namespace {

constexpr uint32_t kMostRanks = 3, kCalls = 3, kMostBlocks = 2, kRegionUnits = 2, kStageUnits = 4,
                   kPieceBytes = 32;

// Constants, as on a GPU: what they do not choose is not compiled.
template <Exchange kKind>
struct KindShape {
  static constexpr auto exchange = static_cast<int64_t>(kKind);
  static constexpr auto element = static_cast<int64_t>(Element::kInt32);
  static constexpr auto reduction = static_cast<int64_t>(Reduction::kSum);
  static constexpr int64_t ranks = kKind == Exchange::kBroadcast || kKind == Exchange::kReduce ? 3 : 2;
};

int32_t value_of(uint32_t rank, uint32_t call, uint64_t i) {
  return static_cast<int32_t>(rank * 1000 + call * 100 + i * 7 + 1);
}

template <Exchange kKind>
class ExchangeRun {
 public:
  static constexpr KindShape<kKind> kShape{};
  static constexpr auto kRanks = static_cast<uint32_t>(kShape.ranks);

  explicit ExchangeRun(Machine& machine) : machine_(machine) {
    blocks_ = static_cast<uint32_t>(1 + draw(kMostBlocks));
    warps_ = static_cast<uint32_t>(1 + draw(2));
    const uint64_t before = draw(2) == 0 ? 0 : 0xfffffffd;  // rounds and slices before this run
    Carver carver;
    layout_.inbox_at = carver.take(uint64_t{2} * kRanks * kMostBlocks * kRegionUnits * 32);
    layout_.descriptors_at = carver.take(uint64_t{2} * kMostBlocks * kRanks * 16);
    layout_.done_at = carver.take(uint64_t{kMostBlocks} * kRanks * 8);
    layout_.stages_at = carver.take(uint64_t{kStageAreas} * kRanks * kMostBlocks * kStageUnits * 16);
    layout_.staged_at = carver.take(uint64_t{kMostBlocks} * kRanks * 8);
    layout_.blocks = kMostBlocks;
    layout_.region_units = kRegionUnits;
    layout_.stage_units = kStageUnits;
    const uint64_t control_end = carver.end();
    for (uint32_t call = 0; call < kCalls; ++call) {
      bytes_[call] = uint64_t{4} * (1 + draw(24));
      if (draw(2) == 0) bytes_[call] = (bytes_[call] + 15) / 16 * 16;
    }
    // A call's output stands where the input of the one before was.
    outputs_at_[0] = carver.take(bytes_[0] * parts_out());
    for (uint32_t call = 0; call < kCalls; ++call) {
      const uint64_t next = call + 1 < kCalls ? bytes_[call + 1] * parts_out() : 0;
      inputs_at_[call] = carver.take(std::max(bytes_[call] * parts_in(), next));
      if (call + 1 < kCalls) outputs_at_[call + 1] = inputs_at_[call];
    }
    tables_ = shared_array<std::byte* const*>(buffers_, machine, "tables of windows", 1);
    bases_ = shared_array<std::byte*>(buffers_, machine, "windows", kMostRanks);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      const std::string of = " of rank " + std::to_string(rank);
      std::byte* base = shared_array<std::byte>(buffers_, machine, "window" + of, carver.end(), kPoison);
      bases_[rank] = base;
      std::memset(base, before == 0 ? 0 : 0xa5, control_end);
      auto* done = reinterpret_cast<uint64_t*>(base + layout_.done_at);
      auto* staged = reinterpret_cast<uint64_t*>(base + layout_.staged_at);
      for (uint32_t i = 0; i < kMostBlocks * kRanks; ++i) {
        done[i] = before;
        staged[i] = before << 32;
      }
      std::memset(base + layout_.descriptors_at, 0, uint64_t{2} * kMostBlocks * kRanks * 16);
      faults_[rank] = shared_array<FaultBox>(buffers_, machine, "fault box" + of, 1);
      states_[rank] = shared_array<ExchangeState>(buffers_, machine, "states" + of, kMostBlocks);
      for (uint32_t block = 0; block < kMostBlocks; ++block) states_[rank][block] = {before, before, before};
    }
    tables_[0] = bases_;
  }

  bool play() {
    for (uint32_t call = 0; call < kCalls; ++call) {
      way_[call] = static_cast<ExchangeWay>(draw(3));
      if (way_[call] == ExchangeWay::kPlaces && bytes_[call] % 16 != 0) way_[call] = ExchangeWay::kStages;
      root_[call] = has_root(kKind) ? static_cast<uint32_t>(draw(kRanks)) : 0;
      const bool is_one_shot = draw(2) == 0, has_places = draw(4) != 0;
      for (uint32_t rank = 0; rank < kRanks; ++rank) launch(rank, call, is_one_shot, has_places);
    }
    if (!machine_.run()) return false;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      for (uint32_t call = 0; call < kCalls; ++call)
        if (!is_right(rank, call)) return false;
      if (!is_value(machine_, &faults_[rank]->raised, uint32_t{0}, "the fault box")) return false;
    }
    return true;
  }

 private:
  uint64_t draw(uint64_t below) { return machine_.memory().draw(below); }
  static uint32_t parts_in() {
    return kKind == Exchange::kReduceScatter || kKind == Exchange::kAllToAll || kKind == Exchange::kScatter
               ? kRanks
               : 1;
  }
  static uint32_t parts_out() {
    return kKind == Exchange::kAllGather || kKind == Exchange::kAllToAll || kKind == Exchange::kGather
               ? kRanks
               : 1;
  }
  int32_t* input(uint32_t rank, uint32_t call) const {
    return reinterpret_cast<int32_t*>(bases_[rank] + inputs_at_[call]);
  }
  int32_t* output(uint32_t rank, uint32_t call) const {
    return reinterpret_cast<int32_t*>(bases_[rank] + outputs_at_[call]);
  }

  void launch(uint32_t rank, uint32_t call, bool is_one_shot, bool has_places) {
    // The input is written by a kernel before: peers see it by the call's own order.
    int32_t* const in = input(rank, call);
    const uint64_t elements = bytes_[call] / 4 * parts_in();
    machine_.launch(rank, {.name = "fill", .rank = rank, .lanes = Warp::kMaxSize, .body = [=] {
                             for (uint64_t i = Warp{}.rank(); i < elements; i += Warp::kMaxSize)
                               in[i] = value_of(rank, call, i);
                           }});
    ExchangeArgs args{};
    args.input = bases_[rank] + inputs_at_[call];
    args.output = bases_[rank] + outputs_at_[call];
    args.bytes = bytes_[call];
    args.slice_units = kRegionUnits;
    args.stage_slice_units = has_shares(kKind) ? kStageUnits / 2 : kStageUnits;
    args.piece_bytes = kPieceBytes;
    args.pipe_warps = warps_;
    args.is_one_shot = is_one_shot ? 1 : 0;
    args.way = way_[call];
    args.digest = 0x5eed0000 + call * 64;
    args.root = root_[call];
    for (uint32_t which = 0; which < 2; ++which) {
      if (!has_places) continue;
      args.places[which] =
          uint64_t{1} << kDescriptorOffsetBits | (which ? outputs_at_ : inputs_at_)[call] / 16;
      args.own_windows[which] = bases_;
    }
    args.windows = tables_;
    args.states = states_[rank];
    args.layout = layout_;
    args.wait = {.timeout_ns = ~uint64_t{0}, .fault = faults_[rank], .self = rank, .reserved = 0};
    const MappedMesh mesh = MappedMesh::of(bases_, bases_, rank, kRanks);
    machine_.launch(rank, {.name = "run_exchange",
                           .rank = rank,
                           .blocks = blocks_of(call, is_one_shot),
                           .warps = warps_,
                           .lanes = Warp::kMaxSize,
                           .shared_bytes = exchange::places_bytes(kRanks) + warps_ * pipe_bytes(kPieceBytes),
                           .body = [=] { run_exchange(args, mesh, kShape); }});
  }

  // By lines each block of a launch has a slice.
  uint32_t blocks_of(uint32_t call, bool is_one_shot) const {
    if (way_[call] != ExchangeWay::kLines) return blocks_;
    const bool is_two_shot = kKind == Exchange::kAllReduce && !is_one_shot;
    const uint64_t units =
        is_two_shot ? exchange::share_units_of(bytes_[call], kRanks) : (bytes_[call] + 15) / 16;
    return std::min(blocks_, static_cast<uint32_t>((units + kRegionUnits - 1) / kRegionUnits));
  }

  // Element i of a rank's output, and whether the rank has one.
  bool expected(uint32_t rank, uint32_t call, uint64_t i, int32_t& value) const {
    const uint64_t each = bytes_[call] / 4;
    const auto from = static_cast<uint32_t>(i / each);
    auto sum_at = [&](uint64_t at) {
      value = 0;
      for (uint32_t peer = 0; peer < kRanks; ++peer) value += value_of(peer, call, at);
    };
    switch (kKind) {
      case Exchange::kAllReduce:
        return sum_at(i), true;
      case Exchange::kReduce:
        return sum_at(i), rank == root_[call];
      case Exchange::kReduceScatter:
        return sum_at(rank * each + i), true;
      case Exchange::kAllGather:
        return value = value_of(from, call, i % each), true;
      case Exchange::kGather:
        return value = value_of(from, call, i % each), rank == root_[call];
      case Exchange::kAllToAll:
        return value = value_of(from, call, rank * each + i % each), true;
      case Exchange::kBroadcast:
        return value = value_of(root_[call], call, i), true;
      case Exchange::kScatter:
        return value = value_of(root_[call], call, rank * each + i), true;
    }
    return false;
  }
  bool is_right(uint32_t rank, uint32_t call) {
    for (uint64_t i = 0; i < bytes_[call] / 4 * parts_out(); ++i) {
      int32_t want = 0;
      if (expected(rank, call, i, want) &&
          !is_value(machine_, &output(rank, call)[i], want,
                    "element " + std::to_string(i) + " of call " + std::to_string(call) + " of rank " +
                        std::to_string(rank)))
        return false;
    }
    return true;
  }

  Machine& machine_;
  std::deque<Buffer> buffers_;
  ExchangeLayout layout_{};
  std::byte** bases_;
  std::byte* const** tables_;
  FaultBox* faults_[kMostRanks];
  ExchangeState* states_[kMostRanks];
  uint32_t blocks_, warps_;
  uint64_t bytes_[kCalls], inputs_at_[kCalls], outputs_at_[kCalls];
  ExchangeWay way_[kCalls];
  uint32_t root_[kCalls];
};

template <Exchange kKind>
bool play(Machine& machine) {
  return ExchangeRun<kKind>(machine).play();
}

}  // namespace

bool play_exchange(Machine& machine, uint64_t /*seed*/) {
  constexpr bool (*kPlays[])(Machine&) = {play<Exchange::kAllReduce>,     play<Exchange::kAllGather>,
                                          play<Exchange::kReduceScatter>, play<Exchange::kAllToAll>,
                                          play<Exchange::kBroadcast>,     play<Exchange::kReduce>,
                                          play<Exchange::kGather>,        play<Exchange::kScatter>};
  static_assert(sizeof(kPlays) / sizeof(kPlays[0]) == kExchanges);
  return kPlays[machine.memory().draw(kExchanges)](machine);
}

}  // namespace weft::weak
