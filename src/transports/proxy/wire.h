// SPDX-License-Identifier: Apache-2.0
//
// wire.h: the 16 bytes in which device code asks for something, what a peer is told, and the queue between
// device code and host threads. Both sides share this header.
//
// A command is two words; places of puts count units of 16 bytes, words count 8:
//   put         a: source 32 | destination 32
//               b: commit 1 | op 4 | peer 14 | src region 4 | dst region 4 | length 22 | src use 6 | dst use 6 | dst
//               temporary 1 | src temporary 1 | more 1 temporary: use and region are a registration of its owner
//               (Link::register_temporary), less one more: the same thread asks for something else of the same peer
//   right away get         as put, the other way around: the source is the peer's
//   value, add  a: the 64-bit value
//               b: commit 1 | op 4 | peer 14 | unused 4 | dst region 4 | word 37
//   got         as value, of this rank's own word, once all gets before it have come
//   announce    a: a temporary registration of this rank, less one, of which the peer is told
//               b: commit 1 | op 4 | peer 14 | unused 45
//   flush       a: unused
//               b: commit 1 | op 4 | peer 14 | unused 45; close, which hosts alone send, the same
// On the way to a peer, a small put is followed by its bytes, and an announcement by the registration's keys (Record).
// The commit bit is the inverse of the lap's parity, so that zeroed memory reads as empty and slots are never
// cleared.
#pragma once

#include "kernels/core/channel.cuh"

namespace weft::proxy {

enum class Op : uint32_t {
  kPut = 1,
  kValue = 2,
  kAdd = 3,
  kFlush = 4,
  kClose = 5,
  kGet = 6,
  kGot = 7,
  kAnnounce = 8
};

struct alignas(16) Command {
  uint64_t a, b;
};
static_assert(sizeof(Command) == 16);

inline constexpr uint64_t kUnit = 16;
inline constexpr uint32_t kRegions = 16;                                  // windows at a time
inline constexpr uint64_t kWindowBytesMax = (uint64_t{1} << 32) * kUnit;  // 64 GiB
inline constexpr uint64_t kCommandBytesMax = ((uint64_t{1} << 22) - 1) * kUnit;
inline constexpr uint32_t kPeersMax = 1 << 14;
inline constexpr uint64_t kCommit = uint64_t{1} << 63;

WEFT_DEVICE constexpr uint64_t head_of(Op op, uint32_t peer) {
  return static_cast<uint64_t>(op) << 59 | static_cast<uint64_t>(peer) << 45;
}
// All within the limits above: the channel checks.
WEFT_DEVICE constexpr Command range_command(Op op, uint32_t peer, uint32_t region, uint64_t dst, uint64_t src,
                                            uint64_t bytes) {
  return {(src / kUnit) << 32 | dst / kUnit, head_of(op, peer) | static_cast<uint64_t>(region) << 41 |
                                                 static_cast<uint64_t>(region) << 37 | (bytes / kUnit) << 15};
}
// In the b of a put.
inline constexpr uint64_t kMore = 1, kSrcTemporary = 2, kDstTemporary = 4;
// A temporary registration is a place, of kTemporaries, and how often that place was used before: a late command for
// one that is over does not find the one that has its place now.
inline constexpr uint32_t kTemporaries = 16, kTemporaryUses = 64;
WEFT_DEVICE constexpr uint64_t src_temporary_bits(uint32_t registration) {
  return kSrcTemporary | static_cast<uint64_t>(registration % kTemporaries) << 41 |
         static_cast<uint64_t>(registration / kTemporaries) << 9;
}
WEFT_DEVICE constexpr uint64_t dst_temporary_bits(uint32_t registration) {
  return kDstTemporary | static_cast<uint64_t>(registration % kTemporaries) << 37 |
         static_cast<uint64_t>(registration / kTemporaries) << 3;
}
WEFT_DEVICE constexpr Command word_command(Op op, uint32_t peer, uint32_t region, uint64_t word,
                                           uint64_t value) {
  return {value, head_of(op, peer) | static_cast<uint64_t>(region) << 37 | word / 8};
}

WEFT_DEVICE constexpr Op op_of(Command c) {
  return static_cast<Op>(c.b >> 59 & 15);
}
WEFT_DEVICE constexpr uint32_t peer_of(Command c) {
  return static_cast<uint32_t>(c.b >> 45 & (kPeersMax - 1));
}
WEFT_DEVICE constexpr uint32_t src_region_of(Command c) {
  return static_cast<uint32_t>(c.b >> 41 & (kRegions - 1));
}
WEFT_DEVICE constexpr uint32_t dst_region_of(Command c) {
  return static_cast<uint32_t>(c.b >> 37 & (kRegions - 1));
}
WEFT_DEVICE constexpr uint32_t src_temporary_of(Command c) {
  return src_region_of(c) + kTemporaries * static_cast<uint32_t>(c.b >> 9 & (kTemporaryUses - 1));
}
WEFT_DEVICE constexpr uint32_t dst_temporary_of(Command c) {
  return dst_region_of(c) + kTemporaries * static_cast<uint32_t>(c.b >> 3 & (kTemporaryUses - 1));
}
WEFT_DEVICE constexpr uint64_t src_of(Command c) {
  return (c.a >> 32) * kUnit;
}
WEFT_DEVICE constexpr uint64_t dst_of(Command c) {
  return (c.a & 0xffffffffu) * kUnit;
}
WEFT_DEVICE constexpr uint64_t bytes_of(Command c) {
  return (c.b >> 15 & ((uint64_t{1} << 22) - 1)) * kUnit;
}
WEFT_DEVICE constexpr uint64_t word_of(Command c) {
  return (c.b & ((uint64_t{1} << 37) - 1)) * 8;
}

// On the way to a peer a command names the window as the peer does: its region, and in place of the source's the
// use of that region, of which there is one per window that had it.
inline constexpr uint32_t kUses = 16;
WEFT_DEVICE constexpr Command addressed(Command c, uint32_t region, uint32_t use) {
  c.b &= ~(uint64_t{0xff} << 37);
  c.b |= static_cast<uint64_t>(use % kUses) << 41 | static_cast<uint64_t>(region) << 37;
  return c;
}
WEFT_DEVICE constexpr uint32_t use_of(Command c) {
  return src_region_of(c);
}

// A queue of commands of one proxy thread. Positions only grow; slot = position % capacity, a power of two.
// A thread has several, and a peer has one of them: threads that ask for peers of their own rarely meet at a word.
inline constexpr uint32_t kFifosPerProxy = 4;
// Proxy number peer % proxies serves the peer, as proxies divides the number of FIFOs.
WEFT_DEVICE constexpr uint32_t fifo_of(uint32_t peer, uint32_t proxies) {
  return proxies == 1 ? peer % kFifosPerProxy : peer % (proxies * kFifosPerProxy);
}
struct Fifo {
  Command* slots;        // memory of the host that device code writes
  const uint64_t* tail;  // positions below it have been taken; the host publishes it, in its memory
  uint64_t* head;        // the next free position, and
  uint64_t* tail_seen;   // what device code last saw of tail: both in memory of the device
  uint64_t capacity;
};

WEFT_DEVICE constexpr Command* slot_of(const Fifo& fifo, uint64_t position) {
  return fifo.slots + (position & (fifo.capacity - 1));
}
WEFT_DEVICE constexpr uint64_t commit_of(const Fifo& fifo, uint64_t position) {
  return (position & fifo.capacity) == 0 ? kCommit : 0;
}

// What a peer is told between writes of data: values, adds, and small puts, each followed by its bytes. Only
// the units that are used travel.
inline constexpr uint32_t kRecordUnits = 31;
struct Record {
  uint64_t sequence;  // number of this write among all that go this way
  uint32_t count;     // of units
  uint32_t reserved;
  Command units[kRecordUnits];
};
static_assert(sizeof(Record) == 512);
WEFT_DEVICE constexpr uint64_t record_bytes(uint32_t units) {
  return sizeof(Record) - (kRecordUnits - units) * sizeof(Command);
}
// A put of at most so many bytes goes in a record: itself, and what is said behind it.
inline constexpr uint64_t kSmallPutBytesMax = (kRecordUnits - 3) * kUnit;

// Every write on the way to a peer has a number; its immediate is the number modulo kRing, in one of two
// ranges. At most kWindow are not confirmed, so an immediate that comes twice is known for what it is until
// kWindow later writes have come.
inline constexpr uint32_t kRing = 128, kWindow = kRing / 2, kCreditEvery = 32, kCredits = 8;
inline constexpr uint32_t kDataImm = 0, kSignalImm = kRing, kCreditImm = 2 * kRing,
                          kClosedImm = kCreditImm + kCredits, kImms = kClosedImm + 1;
static_assert(kWindow / kCreditEvery <= kCredits / 2);

}  // namespace weft::proxy
