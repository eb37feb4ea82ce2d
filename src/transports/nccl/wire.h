// SPDX-License-Identifier: Apache-2.0
//
// wire.h: how the value of a word travels through NCCL's GIN, and what device code knows of its peers. Both sides share
// this header.
//
// GIN adds to words and sets none behind earlier puts, and nothing but GIN may touch a word that it adds to. So a value
// travels as data. Each rank has an inbox for every other: a ring of records. A record says which word, and to what it is
// set or what is added. It is put there, and a strong signal counts it. Waiting threads of the receiver apply records
// in their order and write the words (channel.cuh). Another signal tells the sender how many records were applied,
// which frees their places.
//   head of a record: add 1 | slot of the window at the receiver 8 | its use 11 | word's offset / 8 44
// Signals of a context, by number: [ranks] records that came from a rank, [ranks] records that a rank has taken.
// Counters, by number: [ranks] puts and gets to a rank whose bytes have been read here.
#pragma once

#include "kernels/core/channel.cuh"

namespace weft::nccl_gin {

struct alignas(16) Record {
  uint64_t value;
  uint64_t head;
};
static_assert(sizeof(Record) == 16);

inline constexpr uint32_t kWindows = 256;  // at a time
inline constexpr uint32_t kUses = 1 << 11;
inline constexpr uint64_t kAdd = uint64_t{1} << 63;
inline constexpr uint64_t kWordMask = (uint64_t{1} << 44) - 1;

// A window as records name it, at its place in the head.
WEFT_DEVICE constexpr uint64_t window_bits(uint32_t slot, uint32_t use) {
  return static_cast<uint64_t>(slot) << 55 | static_cast<uint64_t>(use % kUses) << 44;
}
WEFT_DEVICE constexpr uint32_t slot_of(uint64_t head) {
  return static_cast<uint32_t>(head >> 55 & (kWindows - 1));
}
WEFT_DEVICE constexpr uint64_t use_of(uint64_t head) {
  return head >> 44 & (kUses - 1);
}
WEFT_DEVICE constexpr uint64_t word_of(uint64_t head) {
  return (head & kWordMask) * 8;
}

inline constexpr uint64_t kPutBytes = uint64_t{1} << 29;  // of one: one descriptor of NCCL's

// NCCL's proxy keeps a queue of descriptors to each peer, and a call that finds it full waits without an end. So a descriptor
// is reserved here first, and posted when there is room for it. A few are left for NCCL's own posts.
WEFT_DEVICE constexpr uint64_t usable(uint32_t room) {
  return room < 32 ? room - room / 4 : room - 8;
}

// The sending state of one peer, in memory of the device: counts since the communicator was made.
struct alignas(64) Outgoing {
  uint64_t reserved;  // records that somebody has taken to write
  uint64_t posted;    // ... and that are on their way, in order
  uint64_t asked_puts;
  uint64_t descriptors;  // of NCCL's queue that somebody has taken
  uint64_t done;         // ... and that NCCL is done with, as last seen
  uint64_t may_reach;    // ... and how many there is room for, by that
  uint32_t is_broken;    // nothing is sent any more: the fault box says why
};
static_assert(sizeof(Outgoing) == 64);

// The receiving state of one peer.
struct alignas(64) Incoming {
  uint64_t taken;    // records
  uint64_t told;     // ... and that the peer knows of
  uint32_t is_busy;  // somebody takes records
};
static_assert(sizeof(Incoming) == 64);

// A window of this rank, by slot. One that is gone has no bytes.
struct alignas(32) KnownWindow {
  std::byte* base;
  uint64_t bytes;
  uint64_t use;  // % kUses
};

// On CPUs there is no GIN. A library that stands in for NCCL in tests (tests/support) fills this in place of ncclDevComm;
// it calls back for what device code asks for.
struct HostGin {
  void* self;
  uint32_t contexts;
  uint32_t ranks, rank;
  void (*put)(void* self, uint32_t context, uint32_t peer, void* dst_window, uint64_t dst, void* src_window,
              uint64_t src, uint64_t bytes, uint32_t counter);
  void (*put_value)(void* self, uint32_t context, uint32_t peer, void* window, uint64_t dst, uint64_t value,
                    int64_t strong_signal);  // -1: none, else 1 is added to it
  void (*signal_add)(void* self, uint32_t context, uint32_t peer, uint32_t signal, uint64_t n);
  void (*get)(void* self, uint32_t context, uint32_t peer, void* window, uint64_t dst, uint64_t src,
              uint64_t bytes);
  uint64_t (*read_signal)(void* self, uint32_t context, uint32_t signal);
  uint64_t (*read_counter)(void* self, uint32_t context, uint32_t counter);
  uint32_t (*queue_done)(void* self, uint32_t context, uint32_t peer);  // descriptors, in their order
  uint32_t queue_room;
};

}  // namespace weft::nccl_gin
