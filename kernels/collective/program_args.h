// SPDX-License-Identifier: Apache-2.0
//
// program_args.h: what the interpreter of collective programs is given. Host and device share it.
//
// Connections. (sender, receiver, channel) is one FIFO of messages, a ring of slots in the receiver's window.
// Messages are numbered from 0 for ever: `sent` and `received` live in local memory, so a captured graph that
// is replayed goes on counting. A sender may write message n once the receiver has freed n - slots; it learns
// that from a counter in its own window. Each protocol has rings of its own:
//   Simple   a message is bytes; a counter in the receiver's window says how many have arrived
//   LL       a 16-byte line holds 8 bytes and the message's number twice; a line is there when both agree
//   LL128    a 128-byte line holds 120 bytes and the message's number; needs stores of a line to arrive whole
// Direct messages. A Simple message need not lie in its slot: a header beside every slot says where the bytes
// are. The receiver may read them from the sender's memory, or the sender may have stored them at their
// destination, of which the receiver tells it in a grant at the start of a run. A step says what its program
// allows (weft.collectives.direct). For each message the buffers' place decides between that and the slot, so
// ranks need not agree on it.
// Ports. A message to a peer that this rank does not map is built in the outbox, a part of this rank's window, and
// put into the slot as one range. Its header's first word and its counter follow. Such messages are Simple. Large
// calls of the host register their buffers at the link for their time. Then a message that may be referred to is put
// from where it lies. One that may be stored goes to its destination, which a grant names. Calls. Every message carries
// a salt beside its number: a digest of the call (what, element type, operation, count, root, algorithm) and of how
// many calls came before. A receiver takes a message only if the salt is its own, so calls that do not belong together
// never exchange data, whatever numbers their messages have. An LL line holds the number in its first half, alone,
// and in its second half together with the salt: the first tells that the line is of this message, the second that
// it is of this call.
#pragma once

#include "kernels/collective/link_delays.h"
#include "kernels/core/grid.cuh"
#include "kernels/core/wait.cuh"

namespace weft {

enum class StepOp : uint32_t {  // numbered as MSCCL numbers them
  kSend = 0,
  kRecv,
  kRecvCopySend,
  kRecvReduceSend,
  kRecvReduceCopy,
  kRecvReduceCopySend,
  kCopy,
  kReduce,
};

enum class Element : uint32_t {
  kFp32 = 0,
  kFp16,
  kBf16,
  kE4m3,
  kE5m2,
  kFp64,
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kInt16,
  kUint16,
};
inline constexpr uint32_t kElements = 14;
enum class Reduction : uint32_t { kSum = 0, kProduct, kMin, kMax, kAverage, kAnd, kOr, kXor };
inline constexpr uint32_t kReductions = 8;
enum class Protocol : uint32_t { kSimple = 0, kLl, kLl128 };
inline constexpr uint32_t kProtocols = 3;
enum class BufferId : uint32_t { kInput = 0, kOutput, kScratch };

// What a step's messages may be instead of bytes in a slot; bits of ProgramStep::direct.
enum Direct : uint32_t {
  kMayRefer = 1,     // nothing overwrites the source before the receiver has read it
  kMayStore = 2,     // nothing touches the destination before: the sender may write it
  kMayBeStored = 4,  // the receiving end of such a message
};

// One instruction. Indices and counts are in chunks.
struct ProgramStep {
  uint32_t op;
  uint32_t src_buffer;
  uint32_t src_index;
  uint32_t dst_buffer;
  uint32_t dst_index;
  uint32_t count;
  uint32_t first_wait;  // into the list of waits
  uint32_t waits;
  uint32_t needed;  // 1 if another block waits for this step
  uint32_t direct;
  uint32_t remote_buffer;  // of kMayStore: where the receiver puts the message
  uint32_t remote_index;
  uint32_t fused;     // of kReduce: so many steps that follow add to the same chunks, all in one pass
  uint32_t ends_sum;  // 1 if what it combines is then of all ranks: an average divides it here
};
inline constexpr uint32_t kMaxSources = 16;  // of such a pass

// A step of another block that must be finished.
struct ProgramWait {
  uint32_t block;
  uint32_t step;
  uint32_t steps;  // that the block has
};

struct ProgramBlock {
  int32_t send_peer;  // -1: none
  int32_t recv_peer;
  uint32_t channel;
  uint32_t first_step;
  uint32_t steps;
  uint32_t grants;  // bit b: the sender may store some of its receives, into buffer b
};

// A chunk with a size of its own: elements [first, first + length). `mark` is the same where it is sent and
// where it is received, and differs where the sizes do.
struct ChunkSpan {
  uint64_t first;
  uint64_t length;
  uint32_t mark;
  uint32_t reserved;
};

// Where chunk c of a buffer is. Uniform: `parts` of part_elems elements, each cut into per_part chunks of
// chunk_elems, the last ones shorter. With a table: as table[c] says.
struct BufferLayout {
  std::byte* base;
  uint64_t part_elems;
  uint32_t per_part;  // 32 bits, as every step divides by it
  uint32_t window;    // the window's number plus one; 0: in none that peers map
  const ChunkSpan* table;
  uint64_t window_at;  // offset of base in the window that holds it
};

// Where the bytes of a Simple message are.
enum class Place : uint16_t { kSlot = 0, kDestination, kWindow, kProcess };
struct MessageHeader {
  Place place;
  uint16_t window;  // number plus one
  uint32_t salt;
  uint64_t address;  // offset in the sender's window, or address in the sender's process
  uint64_t bytes;    // that exist there
};

// Where a receiver's buffers are during one run; in the sender's window.
struct Grant {
  uint64_t tag;  // message_tag of the run's first message, plus one
  uint64_t window_at[3];
  uint32_t window[3];
  uint32_t registration[3];  // to a port peer: of these buffers, announced before; 0: none
  uint32_t reserved[2];
};
static_assert(sizeof(Grant) == 64);

// A message's tag: its number in the low half, the salt of its call in the high half.
WEFT_DEVICE constexpr uint64_t message_tag(uint64_t number, uint32_t salt) {
  return uint64_t{salt} << 32 | static_cast<uint32_t>(number);
}
inline constexpr uint32_t kSaltOfCall = 0x9e3779b9;  // odd, so that 2^32 calls have salts of their own

// Messages that a ring holds. A constant power of two, so that a message's slot needs no division.
inline constexpr uint32_t kRingSlots = 8;
static_assert((kRingSlots & (kRingSlots - 1)) == 0);

// Offsets in every rank's window, and sizes.
struct RingLayout {
  uint64_t slots_at[kProtocols];  // ring (channel * ranks + sender) of the receiver
  uint64_t slot_bytes[kProtocols];
  uint32_t channels;
  uint32_t has_outbox;  // some rank of the communicator has port peers
  uint64_t arrived_at;  // u64[channels * ranks], of the receiver
  uint64_t freed_at;    // u64[kProtocols * channels * ranks], of the sender
  uint64_t headers_at;  // MessageHeader[kRingSlots] of every Simple ring, of the receiver
  uint64_t grants_at;   // Grant[channels * ranks], of the sender
  uint64_t outbox_at;   // of the sender, for port peers: Simple's slots of ring (channel * ranks + peer)
};

// How messages may bypass their slots.
struct DirectRule {
  std::byte* const* const* windows;  // [window]: base addresses by rank; null: this rank destroyed it
  const uint32_t* processes;         // [rank]: the process whose memory this rank can read, or 0; host only
  const uint32_t* readers;           // [rank]: 1 if that rank can read this process's memory
  std::byte* bounce;                 // what is read from another process to be reduced
  uint64_t bounce_bytes;             // multiple of 16
  uint64_t least_bytes;              // of a message; smaller ones go through slots
  uint32_t prefers_stores;  // where both work: stores pay on GPUs; on the host there is nothing to wait for
  uint32_t reserved;
};

struct ProgramArgs {
  const ProgramBlock* blocks;
  const ProgramStep* steps;
  const ProgramWait* waits;
  uint64_t* progress;  // u64[blocks]: the last needed step that is finished, as progress_value()
  uint64_t* sent;      // u64[kProtocols * channels * ranks], local
  uint64_t* received;
  GridState* state;
  uint64_t*
      calls;  // that ran before, alike on all ranks; null: calls of pairs, which only their messages count
  BufferLayout buffers[3];
  uint64_t chunk_elems;
  uint64_t slice_elems;  // of every chunk, per iteration
  uint64_t iterations;
  uint32_t num_blocks;
  uint32_t group;           // chunks of one message; above 1 only where chunks are contiguous
  uint32_t skip_empty;      // sizes differ by chunk: nothing is sent for an empty slice
  uint32_t streams_output;  // results are too large for the caches: write past them
  uint32_t digest;          // of the call
  RingLayout rings;
  DirectRule direct;
  WaitRule wait;
  LinkDelays* delays;           // null: links are as fast as they are; host only
  uint32_t uses_registrations;  // 1: port peers grant each other registrations; the same on all ranks
  uint32_t registrations[3];    // that are the buffers; 0: none
};

struct ScaleArgs {
  std::byte* data;
  uint64_t elems;
  const void* factor_at;  // one element, read by the kernel; null: the first bytes of factor_bits
  uint64_t factor_bits;
};

// Constants on GPUs, fields on the host.
struct ProgramShape {
  int64_t element;
  int64_t reduction;
  int64_t protocol;
};

}  // namespace weft
