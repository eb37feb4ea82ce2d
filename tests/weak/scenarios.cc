// SPDX-License-Identifier: Apache-2.0
#include "weak/scenarios.h"

#include <cstring>

#include "kernels/moe/ring.cuh"
#include "transports/mapped/channel.cuh"
#include "weak/buffers.h"

namespace weft::weak {
namespace {

std::byte byte_of(uint64_t seed, uint64_t message, uint64_t i) {
  return static_cast<std::byte>(seed * 7 + message * 37 + i * 11 + 1);
}
void fill(std::byte* at, uint64_t bytes, uint64_t seed, uint64_t message) {
  for (uint64_t i = 0; i < bytes; ++i) at[i] = byte_of(seed, message, i);
}
bool is_right(Machine& machine, const std::byte* at, uint64_t bytes, uint64_t seed, uint64_t message) {
  std::vector<std::byte> got(bytes);
  if (!machine.read_at_end(at, bytes, got.data())) return false;
  for (uint64_t i = 0; i < bytes; ++i)
    if (got[i] != byte_of(seed, message, i)) {
      machine.fail("wrong result: byte " + std::to_string(i) + " of message " + std::to_string(message) +
                   " is " + std::to_string(static_cast<uint32_t>(got[i])) + ", not " +
                   std::to_string(static_cast<uint32_t>(byte_of(seed, message, i))));
      return false;
    }
  return true;
}

// Two ranks send each other messages through two slots for each direction, all at once: slots are used again.
constexpr uint32_t kRingMessages = 4, kRingSlots = 2;

NeighbourLayout ring_layout(uint64_t slot_bytes) {
  Carver carver;
  NeighbourLayout at{};
  at.states = carver.take(2 * kRingSides * sizeof(GridState));
  at.arrived = carver.take(kRingSides * 8);
  at.released = carver.take(kRingSides * 8);
  at.sizes = carver.take(kRingSides * kRingSlots * 8);
  at.slots = carver.take(kRingSides * kRingSlots * slot_bytes);
  at.end = carver.end();
  return at;
}

bool play_ring(Machine& machine, uint64_t seed) {
  // Whether each rank's buffers are aligned, for sends and for receives: bulk copies, or loads and stores.
  bool is_aligned[2][2];
  for (auto& of_rank : is_aligned)
    for (bool& aligned : of_rank) aligned = machine.memory().draw(4) != 0;
  const uint64_t bytes =
      machine.memory().draw(4) != 0 ? 16 * (1 + machine.memory().draw(4)) : 1 + machine.memory().draw(40);
  const auto blocks = static_cast<uint32_t>(1 + machine.memory().draw(2));
  const auto warps = static_cast<uint32_t>(1 + machine.memory().draw(2));
  const uint64_t slot_bytes = 128;
  const NeighbourLayout at = ring_layout(slot_bytes);

  std::deque<Buffer> windows, faults, data;
  std::byte* bases[2];
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const std::string of = " of rank " + std::to_string(rank);
    bases[rank] = windows.emplace_back(machine, "window" + of, at.end, kPoison).at();
    std::memset(bases[rank], 0, at.slots);
    faults.emplace_back(machine, "fault box" + of, sizeof(FaultBox), std::byte{0});
  }
  std::vector<std::byte*> received;
  for (uint32_t rank = 0; rank < 2; ++rank)
    for (const bool receives : {false, true}) {
      for (uint32_t message = 0; message < kRingMessages; ++message) {
        Buffer& buffer = data.emplace_back(
            machine,
            (receives ? "output " : "input ") + std::to_string(message) + " of rank " + std::to_string(rank),
            bytes, kPoison);
        const uint64_t number = (receives ? 1 - rank : rank) * kRingMessages + message;
        if (receives)
          received.push_back(buffer.at());
        else
          fill(buffer.at(), bytes, seed, number);
        const RingShape shape{is_aligned[rank][receives ? 1 : 0] && bytes % 16 == 0 ? 1 : 0};
        RingArgs args{};
        args.wait = {.timeout_ns = ~uint64_t{0},
                     .fault = reinterpret_cast<FaultBox*>(faults[rank].at()),
                     .self = rank,
                     .reserved = 0};
        args.at = at;
        args.state = reinterpret_cast<GridState*>(bases[rank] + at.states) + (receives ? kRingSides : 0);
        args.data = buffer.at();
        args.bytes = bytes;
        args.slot_bytes = slot_bytes;
        args.in_flight = kRingSlots;
        args.peer = 1 - rank;
        const MappedMesh mesh = MappedMesh::of(bases, nullptr, rank, 2);
        machine.launch(
            rank * 2 + (receives ? 1 : 0),
            {.name = receives ? "ring_receive" : "ring_send",
             .rank = rank,
             .first_block = receives ? 64u : 0u,
             .blocks = blocks,
             .warps = warps,
             .lanes = Warp::kMaxSize,
             .shared_bytes = kPipeBarrierBytes + warps * pipe_bytes(kRingPieceBytes),
             .body = [=] { receives ? ring_receive(args, mesh, shape) : ring_send(args, mesh, shape); }});
      }
    }
  if (!machine.run()) return false;
  for (uint32_t i = 0; i < received.size(); ++i) {
    const uint32_t rank = i / kRingMessages, message = i % kRingMessages;
    if (!is_right(machine, received[i], bytes, seed, (1 - rank) * kRingMessages + message)) return false;
  }
  return true;
}

// Rows of a rank through the stages of a RowPipe into a peer, in small pieces, so that stages are used again; a signal
// follows. The peer sums nothing: it streams them on, so that its copies read what came by bulk copies.
constexpr uint32_t kPipeItems = 9, kPipePiece = 32;

void push_rows(std::byte* to, const std::byte* from, uint64_t* signal, const uint64_t* awaited) {
  const Warp warp;
  RowPipe<kPipeStages> pipe(warp, Block{}.shared(), kPipePiece);
  if (awaited) {
    if (warp.rank() == 0)
      while (load_acquire(awaited) != 1) pause(0);
    pipe.fence_acquired();
  }
  uint32_t item = 0;
  pipe.run(
      [&] {
        const uint32_t mine = item++;
        if (mine >= kPipeItems) return RowItem<uint32_t>{};
        return RowItem<uint32_t>{{from + mine * kPipePiece, kPipePiece}, mine};
      },
      [&](uint32_t mine, RowPiece stage) {
        pipe.store(warp.rank() == mine % warp.size() ? to + mine * kPipePiece : nullptr, stage);
      });
  pipe.drain();
  if (signal && warp.rank() == 0) store_release(signal, uint64_t{1});
}

bool play_pipe(Machine& machine, uint64_t seed) {
  constexpr uint64_t kBytes = kPipeItems * kPipePiece;
  const Buffer input(machine, "input of rank 0", kBytes, kPoison),
      window(machine, "window of rank 1", kBytes, kPoison),
      output(machine, "output of rank 1", kBytes, kPoison),
      words(machine, "signals of rank 1", 128, std::byte{0});
  fill(input.at(), kBytes, seed, 0);
  auto* signal = reinterpret_cast<uint64_t*>(words.at());
  Launch launch{
      .name = "push_rows", .lanes = Warp::kMaxSize, .shared_bytes = pipe_bytes(kPipePiece), .body = {}};
  launch.body = [&, signal] { push_rows(window.at(), input.at(), signal, nullptr); };
  machine.launch(0, launch);
  launch.rank = 1;
  launch.body = [&, signal] { push_rows(output.at(), window.at(), nullptr, signal); };
  machine.launch(1, launch);
  return machine.run() && is_right(machine, output.at(), kBytes, seed, 0);
}

// Pieces that came from a peer, read in shared memory by all lanes and written out again (RowQueue, RowWriter).
// Asked at once, a slot is loaded over before RowWriter's fence, which would order that, too.
template <bool kAsksAtOnce>
void copy_queued(std::byte* to, const std::byte* from) {
  const Warp warp;
  RowQueue queue(warp, Block{}.shared(), 2);
  RowWriter writer(warp, Block{}.shared() + queue_bytes(2));
  uint32_t asked = 0;
  for (uint32_t done = 0; done < kPipeItems; ++done) {
    while (asked < kPipeItems && queue.has_room()) queue.ask(from + asked++ * kPipePiece, kPipePiece);
    const Vec16* piece = queue.front();
    Vec16* out = writer.begin(to + done * kPipePiece);
    for (uint32_t i = warp.rank(); i < kPipePiece / 16; i += warp.size()) out[i] = piece[i];
    queue.pop();
    if (kAsksAtOnce && asked < kPipeItems) queue.ask(from + asked++ * kPipePiece, kPipePiece);
    writer.finish(to + done * kPipePiece, kPipePiece);
  }
  writer.drain();
}
template <bool kAsksAtOnce>
bool play_queue(Machine& machine, uint64_t seed) {
  constexpr uint64_t kBytes = kPipeItems * kPipePiece;
  const Buffer input(machine, "input", kBytes, kPoison), output(machine, "output", kBytes, kPoison);
  fill(input.at(), kBytes, seed, 0);
  machine.launch(0, {.name = "copy_queued",
                     .lanes = Warp::kMaxSize,
                     .shared_bytes = queue_bytes(2) + kWriterBytes,
                     .body = [&] { copy_queued<kAsksAtOnce>(output.at(), input.at()); }});
  return machine.run() && is_right(machine, output.at(), kBytes, seed, 0);
}

}  // namespace

const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> all = {
      {"ring", play_ring},
      {"low latency by words", play_low_latency_words},
      {"low latency by lines", play_low_latency_lines},
      {"low latency by bulk copies", play_low_latency_bulk},
      {"high throughput", play_high_throughput},
      {"exchange", play_exchange},
      {"row pipe", play_pipe},
      {"row queue", play_queue<false>},
      {"row queue, asked at once", play_queue<true>},
  };
  return all;
}

}  // namespace weft::weak
