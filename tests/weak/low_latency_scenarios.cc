// SPDX-License-Identifier: Apache-2.0
//
// Low-latency dispatch and combine on the weak machine. An expert gives back what it gets, so that a token's sum is its row
// times its weights; all numbers are small and whole.
#include "kernels/core/numbers.cuh"
#include "kernels/moe/low_latency_combine_bulk.cuh"
#include "kernels/moe/low_latency_dispatch_bulk.cuh"
#include "transports/mapped/channel.cuh"
#include "weak/buffers.h"
#include "weak/scenarios.h"

namespace weft::weak {
namespace {

constexpr uint32_t kRanks = 2, kTopK = 2, kLocalExperts = 2, kExperts = kRanks * kLocalExperts, kCalls = 2;
constexpr uint32_t kRowBytes = 64, kChannels = kRowBytes / 2;

enum class Way { kWords, kLines, kBulk };

// What all calls of a run have alike.
struct Setting {
  Way way;
  uint32_t max_tokens, blocks, warps;
  bool weights_travel;
  uint32_t first_number;  // calls before the first of this run
  uint32_t line_tokens[kRanks];

  Batches batches() const { return batches_of(max_tokens); }
  MessageLayout message() const { return message_layout(kTopK, weights_travel, kRowBytes, 0); }
  CombineLayout combine() const {
    return combine_layout(kRanks, max_tokens, kTopK, reply_stride(kRowBytes, kReplyReduced));
  }
  RoutesLayout routes() const { return routes_layout(kRanks, batches(), kTopK, weights_travel); }
  uint64_t half_bytes() const {
    const uint64_t words = larger(message_bytes(kRanks, batches(), message()), combine().word_bytes);
    const uint64_t lines = larger(line_message_bytes(kRanks, batches(), message()), combine().line_bytes);
    return 2 * (larger(words, lines) + kLineBytes) / kLineBytes * kLineBytes;
  }
  LowLatencyDispatchShape dispatch_shape() const {
    return {kRanks, kLocalExperts, kTopK, kRowBytes, 0, kPayloadCopy, weights_travel ? 1 : 0, 0};
  }
  LowLatencyCombineShape combine_shape() const {
    return {.ranks = kRanks,
            .experts_per_rank = kLocalExperts,
            .top_k = kTopK,
            .row_bytes = kRowBytes,
            .reply = kReplyReduced,
            .weights = weights_travel ? 1 : 0,
            .element = kElementBf16,
            .out_element = kElementBf16,
            .accumulate = 0};
  }
  uint64_t dispatch_shared_bytes() const {
    const uint64_t base =
        dispatch_shared(kRanks, kLocalExperts, kTopK, warps, message(), way == Way::kLines, false).bytes;
    return way != Way::kBulk
               ? base
               : dispatch_bulk_shared(base, kRanks, kLocalExperts, kTopK, warps, kRowBytes).bytes;
  }
  uint64_t combine_shared_bytes() const {
    const uint64_t base = combine_shared(kRanks, kTopK, warps, 0).bytes;
    return way != Way::kBulk ? base : combine_bulk_shared(base, kTopK, warps).bytes;
  }
};

// One call of a rank: its tensors and arguments.
struct Call {
  uint32_t tokens;
  int64_t* ids;
  float* weights;
  uint16_t* x;
  uint16_t* combined;
  LowLatencyDispatchArgs dispatch;
  LowLatencyCombineArgs combine;
};

uint32_t value_of(uint32_t rank, uint32_t call, uint32_t token, uint32_t channel) {
  return 1 + (rank * 5 + call * 3 + token * 7 + channel) % 13;
}
uint16_t bf16_of(uint32_t value) {
  return static_cast<uint16_t>(bf16_bits(static_cast<float>(value)));
}

class LowLatencyRun {
 public:
  LowLatencyRun(Machine& machine, const Setting& setting) : machine_(machine), setting_(setting) {
    const uint64_t control = low_latency_control(kRanks).end;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      const std::string of = " of rank " + std::to_string(rank);
      bases_[rank] = shared_array<std::byte>(buffers_, machine, "window" + of,
                                             control + 2 * setting.half_bytes(), kPoison);
      faults_[rank] = shared_array<FaultBox>(buffers_, machine, "fault box" + of, 1);
      begin_window(bases_[rank]);
      for (uint32_t call = 0; call < kCalls; ++call) calls_[rank][call] = make_call(rank, call);
    }
  }

  bool play() {
    const bool apart = draw(2) == 0, in_flight = apart && draw(2) == 0;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      if (in_flight) {
        launch_all(rank, {0, 1}, true);
      } else {
        for (uint32_t call = 0; call < kCalls; ++call) launch_all(rank, {call}, apart);
      }
    }
    if (!machine_.run()) return false;
    for (uint32_t rank = 0; rank < kRanks; ++rank)
      for (uint32_t call = 0; call < kCalls; ++call)
        if (!is_right(rank, call)) return false;
    return true;
  }

 private:
  uint64_t draw(uint64_t below) { return machine_.memory().draw(below); }

  // As calls before this run have left it: all were read.
  void begin_window(std::byte* base) const {
    const LowLatencyControl at = low_latency_control(kRanks);
    std::memset(base, 0, at.end);
    auto* state = reinterpret_cast<LowLatencyState*>(base + at.state);
    state->started = setting_.first_number * low_latency::kLaunchShare;
    auto* consumed = reinterpret_cast<uint64_t*>(base + at.consumed);
    for (uint32_t half = 0; half < 2; ++half) {
      const uint64_t last =
          setting_.first_number < 2 ? 0 : setting_.first_number - (setting_.first_number + half) % 2;
      state->received[half] = last;
      for (uint32_t peer = 0; peer < kRanks; ++peer) consumed[half * kRanks + peer] = last;
      auto* counts = reinterpret_cast<uint64_t*>(base + at.counts) + half * kMaxExperts;
      for (uint32_t i = 0; i < kRanks * kLocalExperts && last != 0; ++i) counts[i] = count_word(last, 7);
    }
  }

  LowLatencyCall common(uint32_t rank, uint32_t tokens, uint32_t ticket, uint32_t kind) const {
    LowLatencyCall call{};
    call.wait = {.timeout_ns = ~uint64_t{0}, .fault = faults_[rank], .self = rank, .reserved = 0};
    call.half_bytes = setting_.half_bytes();
    call.lines_at = lines_begin(kRanks, call.half_bytes);
    call.call_slot = ticket;
    call.max_tokens = setting_.max_tokens;
    call.tokens = tokens;
    call.experts = kExperts;
    call.id_bytes = 8;
    call.lines = setting_.way == Way::kLines ? 1 : 0;
    call.batches = setting_.batches();
    call.batch_tokens = Divisor::of(std::max(call.batches.share(tokens), 1u));
    call.handshake = {{setting_.max_tokens, kRowBytes, kTopK, kExperts, 0, kind}, 0};
    return call;
  }

  template <class T>
  T* array(const std::string& name, uint64_t count) {
    return shared_array<T>(buffers_, machine_, name, count, kPoison);
  }
  Call make_call(uint32_t rank, uint32_t number) {
    const std::string of = " of call " + std::to_string(number) + " of rank " + std::to_string(rank);
    Call call{};
    call.tokens = static_cast<uint32_t>(draw(setting_.max_tokens + 1));
    const uint64_t most = setting_.max_tokens, rows = uint64_t{kLocalExperts} * kRanks * most;
    call.ids = array<int64_t>("ids" + of, most * kTopK);
    call.weights = array<float>("weights" + of, most * kTopK);
    call.x = array<uint16_t>("x" + of, most * kChannels);
    call.combined = array<uint16_t>("sums" + of, most * kChannels);
    for (uint32_t t = 0; t < call.tokens; ++t) {
      call.ids[t * kTopK] = static_cast<int64_t>(draw(kExperts));
      call.ids[t * kTopK + 1] =
          draw(4) == 0 ? -1 : (call.ids[t * kTopK] + 1 + static_cast<int64_t>(draw(kExperts - 1))) % kExperts;
      for (uint32_t k = 0; k < kTopK; ++k) call.weights[t * kTopK + k] = static_cast<float>(1 + draw(3));
      for (uint32_t c = 0; c < kChannels; ++c)
        call.x[t * kChannels + c] = bf16_of(value_of(rank, number, t, c));
    }
    LowLatencyDispatchArgs& d = call.dispatch;
    d.call = common(rank, call.tokens, 2 * number, 1);
    d.x = reinterpret_cast<std::byte*>(call.x);
    d.topk_idx = call.ids;
    d.topk_weights = setting_.weights_travel ? call.weights : nullptr;
    d.out = array<std::byte>("rows" + of, rows * kRowBytes);
    d.src_info = array<int32_t>("tokens of rows" + of, rows);
    d.layout_range = array<int64_t>("ranges" + of, kLocalExperts * kRanks);
    d.counts = array<int32_t>("counts" + of, kLocalExperts);
    d.routes = array<int32_t>("routes" + of, setting_.routes().words);
    d.out_weights = setting_.weights_travel ? array<float>("row weights" + of, rows) : nullptr;
    d.out_source = array<int32_t>("sources of rows" + of, rows);
    d.x_row_bytes = kRowBytes;
    d.receive_splits = Divisor::of(1);
    d.source_jobs = Divisor::of(d.call.batches.count);
    d.line_tokens = setting_.line_tokens[rank];
    d.expert_rows = kRanks * setting_.max_tokens;
    d.max_rows = static_cast<uint32_t>(rows);

    LowLatencyCombineArgs& b = call.combine;
    b.call = common(rank, call.tokens, 2 * number + 1, 2);
    b.x = d.out;
    b.routes = d.routes;
    b.combined = reinterpret_cast<std::byte*>(call.combined);
    b.sent_idx = d.routes + setting_.routes().chosen;
    b.sent_id_bytes = sizeof(int32_t);
    b.topk_idx = setting_.weights_travel ? b.sent_idx : call.ids;
    if (setting_.weights_travel) b.call.id_bytes = sizeof(int32_t);
    b.topk_weights = setting_.weights_travel ? nullptr : call.weights;
    b.x_row_bytes = kRowBytes;
    b.pieces = b.receive_splits = b.piece_splits = b.answer_parts = Divisor::of(1);
    b.owner_jobs = Divisor::of(b.call.batches.count);
    return call;
  }

  void launch_all(uint32_t rank, const std::vector<uint32_t>& calls, bool apart) {
    for (const bool is_combine : {false, true})
      for (const uint32_t phases : apart ? std::vector<uint32_t>{kPhaseSend, kPhaseReceive}
                                         : std::vector<uint32_t>{kPhaseSend | kPhaseReceive})
        for (const uint32_t call : calls) launch(rank, call, is_combine, phases);
  }
  void launch(uint32_t rank, uint32_t number, bool is_combine, uint32_t phases) {
    const Call& call = calls_[rank][number];
    const MappedMesh mesh = MappedMesh::of(bases_, nullptr, rank, kRanks);
    Launch made{
        .name = is_combine ? "low_latency_combine" : "low_latency_dispatch",
        .rank = rank,
        .blocks = setting_.blocks,
        .warps = setting_.warps,
        .lanes = Warp::kMaxSize,
        .shared_bytes = is_combine ? setting_.combine_shared_bytes() : setting_.dispatch_shared_bytes(),
        .body = {}};
    const bool in_bulk = setting_.way == Way::kBulk;
    if (is_combine) {
      LowLatencyCombineArgs args = call.combine;
      args.call.phases = phases;
      const LowLatencyCombineShape shape = setting_.combine_shape();
      made.body = [=] {
        in_bulk ? low_latency_combine_bulk(args, mesh, shape) : low_latency_combine(args, mesh, shape);
      };
    } else {
      LowLatencyDispatchArgs args = call.dispatch;
      args.call.phases = phases;
      const LowLatencyDispatchShape shape = setting_.dispatch_shape();
      made.body = [=] {
        in_bulk ? low_latency_dispatch_bulk(args, mesh, shape) : low_latency_dispatch(args, mesh, shape);
      };
    }
    machine_.launch(rank, std::move(made));
  }

  bool is_right(uint32_t rank, uint32_t number) {
    const Call& call = calls_[rank][number];
    for (uint32_t t = 0; t < call.tokens; ++t) {
      float weight = 0;
      for (uint32_t k = 0; k < kTopK; ++k)
        if (call.ids[t * kTopK + k] >= 0) weight += call.weights[t * kTopK + k];
      for (uint32_t c = 0; c < kChannels; ++c)
        if (!is_value(machine_, &call.combined[t * kChannels + c],
                      bf16_of(static_cast<uint32_t>(weight) * value_of(rank, number, t, c)),
                      "channel " + std::to_string(c) + " of token " + std::to_string(t) + " of call " +
                          std::to_string(number) + " of rank " + std::to_string(rank)))
          return false;
    }
    return is_value(machine_, &faults_[rank]->raised, uint32_t{0}, "the fault box");
  }

  Machine& machine_;
  const Setting setting_;
  std::deque<Buffer> buffers_;
  std::byte* bases_[kRanks];
  FaultBox* faults_[kRanks];
  Call calls_[kRanks][kCalls];
};

bool play_low_latency(Machine& machine, Way way) {
  Setting setting{};
  setting.way = way;
  setting.max_tokens = static_cast<uint32_t>(1 + machine.memory().draw(3));
  setting.blocks = static_cast<uint32_t>(1 + machine.memory().draw(2));
  setting.warps = static_cast<uint32_t>(1 + machine.memory().draw(2));
  setting.weights_travel = way == Way::kBulk || machine.memory().draw(2) == 0;
  // Calls' numbers of 32 bits end in the run, or it is the first one.
  setting.first_number = machine.memory().draw(2) == 0 ? 0 : ~uint32_t{1};
  // A rank with more tokens than that sends words.
  for (uint32_t& tokens : setting.line_tokens)
    tokens = way == Way::kLines ? static_cast<uint32_t>(1 + machine.memory().draw(setting.max_tokens)) : 0;
  return LowLatencyRun(machine, setting).play();
}

}  // namespace

bool play_low_latency_words(Machine& machine, uint64_t /*seed*/) {
  return play_low_latency(machine, Way::kWords);
}
bool play_low_latency_lines(Machine& machine, uint64_t /*seed*/) {
  return play_low_latency(machine, Way::kLines);
}
bool play_low_latency_bulk(Machine& machine, uint64_t /*seed*/) {
  return play_low_latency(machine, Way::kBulk);
}

}  // namespace weft::weak
