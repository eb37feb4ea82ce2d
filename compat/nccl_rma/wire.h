// SPDX-License-Identifier: Apache-2.0
//
// What ranks of a team say to each other, as messages of the transfer engine (which arrive once, and in order per
// peer), in the host's byte order: a Head, then `count` of what its kind says.
//
//   kRecord    RecordHead, then units: a Unit each, a put with its bytes behind it (to the next multiple of 8), a get
//              with a GetTail. Number `number` of stream `stream`.
//   kCredits   Credit: so many numbers of a stream have been taken, and all they asked for has been done
//   kAnswers   Answer: how a get ended
//
// A stream is the way from one context to one peer. What it sends has numbers from 0: a put of its own is a write whose
// immediate is imm_of(stream, number), all else travels in records. The first number is a record.
#pragma once

#include <cstdint>

namespace weft::nccl_rma {

constexpr uint32_t kProtocol = 1;
constexpr uint32_t kNumbers = 128;  // that immediates tell apart
constexpr uint32_t kWindow = 64;    // numbers of a stream that are not confirmed, at most
static_assert(kWindow * 2 == kNumbers);
constexpr uint32_t kStreams = (1u << 20) / kNumbers;
constexpr uint32_t kMessageBytes = 4096;
constexpr uint32_t kInlineBytes = 1024;  // longer puts are writes of their own

constexpr uint32_t imm_of(uint32_t stream, uint64_t number) {
  return stream * kNumbers + static_cast<uint32_t>(number % kNumbers);
}

enum class Kind : uint32_t { kRecord = 1, kCredits, kAnswers };
struct Head {
  Kind kind;
  uint32_t count;
};
struct RecordHead {
  uint32_t stream;
  uint32_t reserved;
  uint64_t number;
};
enum class Do : uint32_t { kPut = 1, kAdd, kGet };
struct Unit {
  Do what;
  uint32_t region;  // of the receiver
  uint64_t offset;
  uint64_t value;  // kAdd: what is added; else bytes
};
struct GetTail {
  uint32_t region;  // of the sender: where the bytes go
  uint32_t reserved;
  uint64_t offset;
  uint64_t request;
};
struct Credit {
  uint32_t stream;
  uint32_t reserved;
  uint64_t taken;
};
struct Answer {
  uint64_t request;
  uint32_t is_done;
  uint32_t reserved;
};
static_assert(sizeof(Head) == 8 && sizeof(RecordHead) == 16 && sizeof(Unit) == 24 && sizeof(GetTail) == 24 &&
              sizeof(Credit) == 16 && sizeof(Answer) == 16);

constexpr uint64_t padded(uint64_t bytes) {
  return (bytes + 7) / 8 * 8;
}
static_assert(sizeof(Head) + sizeof(RecordHead) + sizeof(Unit) * 2 + padded(kInlineBytes) <= kMessageBytes);

}  // namespace weft::nccl_rma
