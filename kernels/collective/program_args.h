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
//   LL128    for now LL's wire, in rings of its own
#pragma once

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
};
enum class Reduction : uint32_t { kSum = 0, kProduct, kMin, kMax };
enum class Protocol : uint32_t { kSimple = 0, kLl, kLl128 };
inline constexpr uint32_t kProtocols = 3;
enum class BufferId : uint32_t { kInput = 0, kOutput, kScratch };

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
};

// A step of another block that must be finished.
struct ProgramWait {
  uint32_t block;
  uint32_t step;
};

struct ProgramBlock {
  int32_t send_peer;  // -1: none
  int32_t recv_peer;
  uint32_t channel;
  uint32_t first_step;
  uint32_t steps;
};

// Where chunk c of a buffer is. Uniform: `parts` of part_elems elements, each cut into per_part chunks of
// chunk_elems, the last ones shorter. With a table: elements [table[2c], table[2c] + table[2c + 1]).
struct BufferLayout {
  std::byte* base;
  uint64_t part_elems;
  uint64_t per_part;
  const uint64_t* table;
};

// Offsets in every rank's window, and sizes.
struct RingLayout {
  uint64_t slots_at[kProtocols];  // ring (channel * ranks + sender) of the receiver
  uint64_t slot_bytes[kProtocols];
  uint32_t slots;
  uint32_t channels;
  uint64_t arrived_at;  // u64[channels * ranks], of the receiver
  uint64_t freed_at;    // u64[kProtocols * channels * ranks], of the sender
};

struct ProgramArgs {
  const ProgramBlock* blocks;
  const ProgramStep* steps;
  const ProgramWait* waits;
  uint64_t* progress;  // u64[blocks]: the last needed step that is finished, as progress_value()
  uint64_t* sent;      // u64[kProtocols * channels * ranks], local
  uint64_t* received;
  GridState* state;
  BufferLayout buffers[3];
  uint64_t chunk_elems;
  uint64_t slice_elems;  // of every chunk, per iteration
  uint64_t iterations;
  uint32_t num_blocks;
  uint32_t group;           // chunks of one message; above 1 only where chunks are contiguous
  uint32_t skip_empty;      // sizes differ by chunk: nothing is sent for an empty slice
  uint32_t streams_output;  // results are too large for the caches: write past them
  RingLayout rings;
  WaitRule wait;
};

struct ScaleArgs {
  std::byte* data;
  uint64_t elems;
  double divisor;
};

// Constants on GPUs, fields on the host.
struct ProgramShape {
  int64_t element;
  int64_t reduction;
  int64_t protocol;
};

}  // namespace weft
