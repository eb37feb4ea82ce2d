// SPDX-License-Identifier: Apache-2.0
//
// The commands that make an mlx5 queue pair whose memory the caller chooses (DevX): where their fields lie, in bits from
// the start of a command, big-endian. Only fields that are set or read. Not run on hardware: the places are those of the
// vendor's published layouts; tests/unit/ibgda_devx_test.cc has the bytes.
//   Command<kCreateQpBytes> command(Opcode::kCreateQp);
//   command.set(kQpContext + qp::kPd, pd); ... command.data(), command.size()
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace weft::ibgda::mlx5 {

enum class CommandCode : uint32_t {
  kCreateCq = 0x400,
  kCreateQp = 0x500,
  kResetToInit = 0x502,
  kInitToReceive = 0x503,
  kReceiveToSend = 0x504,
};

// `bits` of them from bit `at`; at most 32 within a word, or 64 from the start of one.
struct Field {
  uint32_t at, bits;
  friend constexpr Field operator+(uint32_t from, Field field) { return {from + field.at, field.bits}; }
};

inline uint64_t get_field(const void* command, Field field) {
  const auto* bytes = static_cast<const uint8_t*>(command) + field.at / 32 * 4;
  const auto word = [&](int i) {
    return uint64_t{bytes[4 * i]} << 24 | uint64_t{bytes[4 * i + 1]} << 16 | uint64_t{bytes[4 * i + 2]} << 8 |
           bytes[4 * i + 3];
  };
  if (field.bits == 64) return word(0) << 32 | word(1);
  return word(0) >> (32 - field.at % 32 - field.bits) & ((uint64_t{1} << field.bits) - 1);
}
inline void set_field(void* command, Field field, uint64_t value) {
  if (field.bits == 64) {
    set_field(command, {field.at, 32}, value >> 32);
    return set_field(command, {field.at + 32, 32}, value & 0xffffffffu);
  }
  const uint64_t mask = ((uint64_t{1} << field.bits) - 1) << (32 - field.at % 32 - field.bits);
  const uint64_t placed = value << (32 - field.at % 32 - field.bits) & mask;
  const uint64_t word = (get_field(command, {field.at / 32 * 32, 32}) & ~mask) | placed;
  auto* bytes = static_cast<uint8_t*>(command) + field.at / 32 * 4;
  for (int i = 0; i < 4; ++i) bytes[i] = static_cast<uint8_t>(word >> (24 - 8 * i));
}

inline constexpr Field kCommandCode{0x00, 16};
inline constexpr Field kStatus{0x00, 8}, kSyndrome{0x20, 32};  // of an answer
inline constexpr size_t kCommandBytes = 0x880 / 8, kAnswerBytes = 0x80 / 8;

struct Command {
  explicit Command(CommandCode code) { set(kCommandCode, static_cast<uint32_t>(code)); }
  void set(Field field, uint64_t value) { set_field(bytes.data(), field, value); }
  std::array<uint8_t, kCommandBytes> bytes{};
};

// Of the command that makes a completion queue.
namespace cq {
inline constexpr uint32_t kContext = 0x80;
inline constexpr Field kRecordIsUmem{0x06, 1}, kIgnoresOverrun{0x0e, 1}, kRecordUmem{0x20, 32},
    kLogEntries{0x63, 5}, kUar{0x68, 24}, kEventQueue{0xb8, 8}, kLogPage{0xc3, 5}, kRecordAt{0x1c0, 64};
inline constexpr Field kUmemOffset{0x280, 64}, kUmem{0x2c0, 32}, kIsUmem{0x2e0, 1};  // of the command
inline constexpr Field kNumber{0x48, 24};                                            // of the answer
}  // namespace cq

// Of the commands that make and change a queue pair.
namespace qp {
inline constexpr Field kNumber{0x48, 24};  // of changes, and of the answer that makes one
inline constexpr uint32_t kContext = 0xc0;
inline constexpr Field kService{0x08, 8}, kPathState{0x13, 2}, kPd{0x28, 24}, kMtu{0x40, 3},
    kLogMessageMax{0x43, 5}, kLogBlocks{0x51, 4}, kUar{0x68, 24}, kRemoteNumber{0xa8, 24},
    kLogReadsOut{0x388, 3}, kRetries{0x38d, 3}, kNotReadyRetries{0x390, 3}, kSendPsn{0x3c8, 24},
    kSendCq{0x3e8, 24}, kLogReadsIn{0x488, 3}, kAtomicMode{0x48c, 4}, kTakesReads{0x490, 1},
    kTakesWrites{0x491, 1}, kTakesAtomics{0x492, 1}, kNotReadyTimer{0x4a3, 5}, kReceivePsn{0x4a8, 24},
    kReceiveCq{0x4e8, 24}, kRecordAt{0x500, 64}, kReceives{0x565, 3}, kRecordIsUmem{0x683, 1},
    kRecordUmem{0x720, 32};
inline constexpr Field kUmemOffset{0x800, 64}, kUmem{0x840, 32}, kIsUmem{0x860, 1};  // of the command
inline constexpr uint32_t kPath = kContext + 0xc0;
inline constexpr Field kPathPkey{0x10, 16}, kPathIsGlobal{0x28, 1}, kPathLid{0x30, 16},
    kPathAckTimeout{0x40, 5}, kPathSourceGid{0x48, 8}, kPathHops{0x58, 8}, kPathClass{0x64, 8},
    kPathGid{0x80, 32}, kPathDscp{0x10a, 6}, kPathSourcePort{0x110, 16}, kPathPriority{0x121, 3},
    kPathLevel{0x124, 4}, kPathPort{0x128, 8}, kPathMacHigh{0x130, 16}, kPathMacLow{0x140, 32};
inline constexpr uint32_t kReliable = 0, kMigrated = 3, kNoReceives = 3, kAtomicsOf8Bytes = 1;
}  // namespace qp

}  // namespace weft::ibgda::mlx5
