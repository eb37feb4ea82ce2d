// SPDX-License-Identifier: Apache-2.0
//
// wire.h: the formats of an mlx5 send queue, as the NIC reads and writes them, and the state of a queue that device
// code keeps. Both sides share this header. Not run on hardware: the formats are checked byte by byte against those of
// rdma-core's header and by a model of the NIC (tests/support/nic_model.h).
//
// An entry (WQE) is one block of 64 bytes here: up to four units of 16 bytes, big-endian but for inline values.
//   control         opmod 8 | index 16 | opcode 8;  queue number 24 | units 8;  signature 8, stream channel 16 (both 0),
//                   flags 8;  immediate 32
//   remote address  address 64;  key 32;  0
//   data            bytes 31;  key 32;  address 64
//   inline          1 << 31 | bytes;  the bytes as they are in memory; zeros up to 16
//   atomic          addend 64;  0
// A completion (CQE) is 64 bytes; wire::Completion has the fields that are read.
// The doorbell record has two words: of receives, which are not used, and the next free index of sends, modulo 2^16.
// The doorbell register takes index << 8 and queue number << 8, both as above.
#pragma once

#include "kernels/core/fault.h"

namespace weft::ibgda {

inline constexpr uint32_t kBlockBytes = 64, kUnitBytes = 16;
inline constexpr uint32_t kBlocksMax =
    1 << 15;  // of a queue: indices of 16 bits are compared by their distance

enum class Opcode : uint32_t {
  kNop = 0x00,
  kWrite = 0x08,
  kWriteImmediate = 0x09,
  kRead = 0x10,
  kCompareSwap = 0x11,
  kFetchAdd = 0x12,
  kDump = 0x23,
};

// Bits of a control segment's flags.
inline constexpr uint32_t kSignalled = 2 << 2;  // a completion always
inline constexpr uint32_t kFenced = 4 << 5;     // after earlier reads and atomics are done

inline constexpr uint32_t kInline = 1u << 31;

// A 64-byte entry, in the units that are stored one after the other. Units that are not used are zero.
struct Entry {
  Vec16 units[kBlockBytes / kUnitBytes];
};
static_assert(sizeof(Entry) == kBlockBytes);

// Where an entry stands, and what its control segment says of it.
struct Heading {
  uint32_t index;  // 16 bits count
  uint32_t queue;
  uint32_t flags;
};

WEFT_DEVICE constexpr uint32_t high_word(uint64_t value) {
  return static_cast<uint32_t>(value >> 32);
}
WEFT_DEVICE constexpr uint32_t low_word(uint64_t value) {
  return static_cast<uint32_t>(value);
}
WEFT_DEVICE constexpr Vec16 control_unit(Heading at, Opcode opcode, uint32_t units, uint32_t immediate = 0) {
  return {{big_endian((at.index & 0xffffu) << 8 | static_cast<uint32_t>(opcode)),
           big_endian(at.queue << 8 | units), at.flags << 24, big_endian(immediate)}};
}
// Keys are as the NIC reads them already: big_endian(key).
WEFT_DEVICE constexpr Vec16 remote_unit(uint64_t address, uint32_t key) {
  return {{big_endian(high_word(address)), big_endian(low_word(address)), key, 0}};
}
WEFT_DEVICE constexpr Vec16 data_unit(uint64_t address, uint32_t key, uint32_t bytes) {
  return {{big_endian(bytes), key, big_endian(high_word(address)), big_endian(low_word(address))}};
}
WEFT_DEVICE constexpr Vec16 inline_unit(uint64_t value) {
  return {{big_endian(kInline | 8), low_word(value), high_word(value), 0}};
}
WEFT_DEVICE constexpr Vec16 add_unit(uint64_t addend) {
  return {{big_endian(high_word(addend)), big_endian(low_word(addend)), 0, 0}};
}

// A place in registered memory, as the NIC is told of it.
struct Place {
  uint64_t address;
  uint32_t key;  // big_endian()
};

WEFT_DEVICE constexpr Entry write_entry(Heading at, Place dst, Place src, uint32_t bytes) {
  return {{control_unit(at, Opcode::kWrite, 3),
           remote_unit(dst.address, dst.key),
           data_unit(src.address, src.key, bytes),
           {}}};
}
// Reads from `src`, which is the peer's, into `dst`.
WEFT_DEVICE constexpr Entry read_entry(Heading at, Place dst, Place src, uint32_t bytes) {
  return {{control_unit(at, Opcode::kRead, 3),
           remote_unit(src.address, src.key),
           data_unit(dst.address, dst.key, bytes),
           {}}};
}
// Writes 8 bytes that are in the entry itself.
WEFT_DEVICE constexpr Entry value_entry(Heading at, Place dst, uint64_t value) {
  return {{control_unit(at, Opcode::kWrite, 3), remote_unit(dst.address, dst.key), inline_unit(value), {}}};
}
// Adds to 8 bytes; what was there goes to `sink`.
WEFT_DEVICE constexpr Entry add_entry(Heading at, Place dst, uint64_t addend, Place sink) {
  return {{control_unit(at, Opcode::kFetchAdd, 4), remote_unit(dst.address, dst.key), add_unit(addend),
           data_unit(sink.address, sink.key, 8)}};
}

// The doorbell record's word for sends, and what the doorbell register takes: both say which index is free next.
WEFT_DEVICE constexpr uint32_t record_word(uint64_t next) {
  return big_endian(static_cast<uint32_t>(next & 0xffffu));
}
WEFT_DEVICE constexpr uint64_t doorbell_word(uint64_t next, uint32_t queue) {
  return static_cast<uint64_t>(big_endian(queue << 8)) << 32 |
         big_endian(static_cast<uint32_t>(next & 0xffffu) << 8);
}
inline constexpr uint32_t kRecordOfSends = 1;  // of the two words

// A completion, as the NIC writes it for a signalled entry; the last word is written last.
struct Completion {
  uint8_t unused[54];
  uint8_t vendor;             // of an error: the vendor's number
  uint8_t syndrome;           // of an error
  uint32_t opcode_and_queue;  // big-endian: opcode 8 | queue number 24
  // Big-endian: index of the entry's first block 16 | signature 8 | opcode 4, format 2, solicited 1, owner 1.
  uint32_t last;
};
static_assert(sizeof(Completion) == kBlockBytes && alignof(Completion) == 4);
inline constexpr uint32_t kCompleted = 0, kRefused = 13, kNotYet = 15;
inline constexpr uint8_t kNotYetByte = kNotYet << 4;  // fills fresh queues: nothing has completed

// Of Completion::last as it was read.
WEFT_DEVICE constexpr uint32_t index_of(uint32_t last) {
  return big_endian(last) >> 16;
}
WEFT_DEVICE constexpr uint32_t opcode_of(uint32_t last) {
  return last >> 28;
}

// Syndromes: the reasons for refusals in a NIC's completions.
enum class Syndrome : uint8_t {
  kLocalLength = 0x01,
  kLocalQueue = 0x02,
  kLocalProtection = 0x04,
  kFlushed = 0x05,
  kWindowBind = 0x06,
  kBadResponse = 0x10,
  kLocalAccess = 0x11,
  kRemoteInvalid = 0x12,
  kRemoteAccess = 0x13,
  kRemoteOperation = 0x14,
  kRetryExceeded = 0x15,
  kReceiverNotReady = 0x16,
  kAborted = 0x22,
};

// Device code's state of a queue, in the device's own memory: counts of entries since the queue was made, which do
// not wrap.
struct alignas(64) QueueState {
  uint64_t reserved;   // entries that somebody has taken to write
  uint64_t published;  // ... and that the NIC was told of, in order
  uint64_t completed;  // ... and that the NIC is done with
  uint64_t rung;       // doorbells
  uint32_t is_broken;  // nothing is posted any more: the queue's fault box says why
  uint32_t reserved_word;
};
static_assert(sizeof(QueueState) == 64);

// A queue, as device code is given it.
struct Queue {
  std::byte* ring;           // [blocks * 64], memory that the NIC reads
  const std::byte* entries;  // completions: [completions * 64], memory that the NIC writes
  uint32_t* record;          // the doorbell record
  uint64_t* doorbell;        // the register, or a word that a thread of the host passes on
  QueueState* state;
  FaultBox* fault;      // why the queue is broken; memory of the host
  uint64_t sink;        // address of 8 bytes for what words held before an add
  uint32_t sink_key;    // big_endian()
  uint32_t number;      // the NIC's
  uint32_t block_mask;  // blocks - 1; a power of two less one
  uint32_t entry_mask;  // completions - 1, at least block_mask: every entry has its own. 0: all share one
};
static_assert(sizeof(Queue) == 72);

// A peer's part of a window.
struct RemotePart {
  uint64_t base;  // the address of its first byte, as its NIC knows it
  uint32_t key;   // big_endian()
  uint32_t reserved;
};
static_assert(sizeof(RemotePart) == 16);

}  // namespace weft::ibgda
