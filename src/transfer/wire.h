// SPDX-License-Identifier: Apache-2.0
//
// Every byte that two transfer engines exchange, in one place: addresses, descriptors, messages, packed
// pages.
//   std::string bytes = to_bytes(descriptor);
//   Result<Descriptor> again = parse_descriptor(bytes);   // bytes from outside: every length is checked
// Numbers are little-endian; texts and lists carry a 32-bit count. kWireVersion changes when anything here
// does, and engines of different versions refuse each other by name. Threads: pure functions. The fuzz target
// tests/fuzz/wire_fuzz.cc calls every parser here.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/message_mac.h"
#include "base/process_name.h"
#include "base/proof.h"
#include "base/shared_memory.h"
#include "base/status.h"

namespace weft::transfer {

constexpr uint32_t kWireVersion = 6;

// Limits that a parser enforces before it allocates.
constexpr uint32_t kRailsMax = 64;
constexpr uint32_t kNameBytesMax = 256;
constexpr uint32_t kRailAddressBytesMax = 1024;
constexpr uint32_t kTextBytesMax = 2048;

// The lower 32 bits of an immediate: class 2 | number of the sender at the receiver 10 | id 20. On rails whose immediates
// have 64, SenderKeys::token stands above.
enum class ImmClass : uint32_t { kCount = 0, kBarrier = 1, kStage = 2 };
constexpr uint32_t kImmIdBits = 20;
constexpr uint32_t kImmIdMax = (1u << kImmIdBits) - 1;
constexpr uint32_t kPeersMax = 1u << 10;
constexpr uint32_t encode_imm(ImmClass kind, uint32_t sender, uint32_t id) {
  return static_cast<uint32_t>(kind) << 30 | sender << kImmIdBits | id;
}
constexpr uint64_t with_token(uint32_t imm, uint32_t token) {
  return uint64_t{token} << 32 | imm;
}
constexpr uint32_t imm_token(uint64_t imm) {
  return static_cast<uint32_t>(imm >> 32);
}
constexpr ImmClass imm_class(uint32_t imm) {
  return static_cast<ImmClass>(imm >> 30);
}
constexpr uint32_t imm_sender(uint32_t imm) {
  return imm >> kImmIdBits & (kPeersMax - 1);
}
constexpr uint32_t imm_id(uint32_t imm) {
  return imm & kImmIdMax;
}
// The key of a counter: barriers and writes have separate counters, even with equal ids.
constexpr uint32_t counter_key(ImmClass kind, uint32_t id) {
  return static_cast<uint32_t>(kind) << kImmIdBits | id;
}
constexpr ImmClass key_class(uint32_t key) {
  return static_cast<ImmClass>(key >> kImmIdBits);
}
constexpr uint32_t kCounterKeyMax = counter_key(ImmClass::kBarrier, kImmIdMax);

struct EngineId {
  std::array<uint8_t, 16> bytes{};
  bool operator==(const EngineId& other) const { return bytes == other.bytes; }
  bool operator<(const EngineId& other) const { return bytes < other.bytes; }
};
std::string to_text(const EngineId& id);  // first eight hexadecimal digits
EngineId random_id();                     // from the system's random source

using Secret = std::array<uint8_t, 16>;
bool same_secret(const Secret& a, const Secret& b);  // takes the same time whatever the bytes

// Where an engine is reached: what address() returns and connect() takes.
struct Address {
  EngineId engine;
  std::string name;
  std::string provider;
  Nonce
      mark{};  // mark_of() its job's secret: an engine with another one sees that here, and need not connect
  ProcessName process;  // that the engine is in
  std::vector<std::string> rails;
};
Nonce mark_of(std::string_view secret, const EngineId& engine);

// The name of a piece of remote memory: describe() returns it, attach() takes it.
struct Descriptor {
  EngineId engine;
  uint64_t region = 0;
  Secret secret{};
  uint64_t bytes = 0;
  uint32_t access = 0;
};

struct RailKey {
  uint64_t base = 0;
  uint64_t rkey = 0;
};

// The keys by which a peer writes to a temporary registration without attach(): Engine::keys(), Engine::adopt().
struct TemporaryKeys {
  static constexpr uint32_t kRailsMax = 3;
  uint64_t bytes = 0;  // of the memory
  uint32_t rails = 0;  // 0: the memory was taken back meanwhile
  uint32_t reserved = 0;
  RailKey keys[kRailsMax];
};
static_assert(sizeof(TemporaryKeys) == 64);

enum class MessageType : uint8_t {
  kHello = 1,
  kWelcome,
  kHeartbeat,
  kBye,
  kAttach,
  kAttached,
  kRevoke,
  kRevoked,
  kEager,
  kOffer,
  kTaken,
  kNotify,
  kStageAsk,
  kStageGrant,
  kStageFilled,
  kStageDone,
  kLast = kStageDone,
};

// The keys by which a sender proves its messages and immediates to one receiver, in one life of their connection.
// Both derive them from the secret and the salt that the receiver made up for that life and sent in its hello or
// welcome. So the receiver can check messages that arrive before any other, and keys of another life are worthless.
struct SenderKeys {
  MacKey mac{};        // seals messages
  uint32_t token = 0;  // in immediates
};
SenderKeys sender_keys(std::string_view secret, const EngineId& sender, const EngineId& receiver,
                       const Nonce& salt_of_receiver);

// Head of every message: magic 4 | version 2 | type 1 | flags 1 | sender 16 | life 4 | sequence 4 | body
// bytes 4 | 0 4 | seal 8. `sequence` counts the ordered messages of one life of a connection from 1, and heartbeats and byes by
// themselves. The seal is message_mac() of everything else; hellos and welcomes have a proof in its place, and 0 in both.
struct MessageHead {
  MessageType type = MessageType::kHeartbeat;
  EngineId sender;
  uint32_t life = 0;
  uint32_t sequence = 0;
  uint32_t body_bytes = 0;
};
constexpr uint32_t kHeadBytes = 48;

struct Hello {  // also kWelcome
  Address address;
  uint32_t slot = 0;  // the number that the receiver puts into its immediates towards the sender of this
  std::vector<RailKey> inbox;  // a page that takes writes of zero bytes, per rail
  Nonce nonce{};               // made up for this hello; in a welcome, the one of the hello that it answers
  Nonce salt{};                // of the SenderKeys of what comes to the sender of this
  Proof proof{};               // prove_hello() of all that and the head
};
struct Attach {
  uint64_t request_id = 0;
  uint64_t region = 0;
  Secret secret{};
};
struct Attached {
  uint64_t request_id = 0;
  std::string refusal;  // empty: granted
  uint64_t bytes = 0;
  uint32_t access = 0;
  bool must_stage = false;  // the owner's NIC cannot reach this memory: only packed writes arrive
  std::vector<RailKey> rails;
};
struct Offer {  // a long send: the receiver reads it
  uint64_t request_id = 0;
  uint64_t bytes = 0;
  std::vector<RailKey> rails;
};
struct Outcome {  // kTaken, kStageDone
  uint64_t request_id = 0;
  uint32_t slot = 0;
  std::string refusal;
};
struct Notified {    // an immediate where writes cannot carry one
  uint32_t key = 0;  // counter_key()
  uint32_t count = 0;
};
struct StageGrant {
  std::string refusal;
  uint32_t slots = 0;
  uint32_t slot_bytes = 0;
  std::vector<RailKey> rails;
  SharedMemory::Name shared;  // of the slots, where the sender can open it; pid 0: it cannot
};

struct PackedPiece {
  uint64_t region = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};
// Head of a staging slot; the pieces' bytes follow one another right behind it.
struct PackHead {
  uint64_t request_id = 0;  // the transfer, at its sender
  uint32_t pack = 0;        // of `packs`
  uint32_t packs = 0;
  bool has_imm = false;
  uint32_t imm_id = 0;
  uint32_t imm_each = 0;  // count so many once this pack is in place
  uint32_t imm_last = 0;  // count so many once all packs of the request are
  uint64_t turn = 0;      // grows with every use of a slot, from 1
  std::vector<PackedPiece> pieces;
};
constexpr uint32_t kPackHeadBytes = 48;
constexpr uint32_t kPackedPieceBytes = 24;
constexpr uint32_t kPackedPiecesMax = 4096;

std::string to_bytes(const Address& address);
std::string to_bytes(const Descriptor& descriptor);
Result<Address> parse_address(std::string_view bytes);
Result<Descriptor> parse_descriptor(std::string_view bytes);

std::string to_bytes(const MessageHead& head, std::string_view body);
void seal(std::string& message, const MacKey& key);  // `message`: of to_bytes()
bool is_sealed(std::string_view message, const MacKey& key);
Result<MessageHead> parse_head(std::string_view message);  // the body is message.substr(kHeadBytes)

std::string to_body(const Hello& hello);
// Proves that the sender of `hello` under `head`, to the engine `to`, knows the job's secret. An overheard
// hello proves nothing to another engine, nor as a welcome.
Proof prove_hello(std::string_view secret, const MessageHead& head, const Hello& hello, const EngineId& to);
std::string to_body(const Attach& attach);
std::string to_body(const Attached& attached);
std::string to_body(const Offer& offer);
std::string to_body(const Outcome& outcome);
std::string to_body(const Notified& notified);
std::string to_body(const StageGrant& grant);
std::string number_body(uint64_t number);       // kRevoke, kRevoked: region; kStageFilled: slot
std::string text_body(std::string_view words);  // kBye: why it leaves; at most kTextBytesMax

Result<Hello> parse_hello(std::string_view body);
Result<Attach> parse_attach(std::string_view body);
Result<Attached> parse_attached(std::string_view body);
Result<Offer> parse_offer(std::string_view body);
Result<Outcome> parse_outcome(std::string_view body);
Result<Notified> parse_notify(std::string_view body);
Result<StageGrant> parse_stage_grant(std::string_view body);
Result<uint64_t> parse_number(std::string_view body);
Result<std::string> parse_text(std::string_view body);

uint64_t pack_bytes(size_t pieces, uint64_t payload_bytes);  // what a slot must hold
void write_pack_head(char* slot, const PackHead& head);      // slot: pack_bytes(pieces, 0) bytes
Result<PackHead> parse_pack(std::string_view slot);          // checks that all payload lies inside the slot

}  // namespace weft::transfer
