// SPDX-License-Identifier: Apache-2.0
#include "transfer/wire.h"

#include <cstring>

#include "base/random.h"

namespace weft::transfer {
namespace {

constexpr uint32_t kMessageMagic = 0x54464557;     // "WEFT"
constexpr uint32_t kAddressMagic = 0x41464557;     // "WEFA"
constexpr uint32_t kDescriptorMagic = 0x44464557;  // "WEFD"
constexpr uint32_t kSealAt = kHeadBytes - sizeof(uint64_t);

class Writer {
 public:
  template <class T>
  Writer& put(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Writer& text(std::string_view value) {
    put<uint32_t>(static_cast<uint32_t>(value.size()));
    bytes_ += value;
    return *this;
  }
  Writer& raw(const void* data, size_t bytes) {
    bytes_.append(static_cast<const char*>(data), bytes);
    return *this;
  }
  Writer& keys(const std::vector<RailKey>& keys) {
    put<uint32_t>(static_cast<uint32_t>(keys.size()));
    for (const RailKey& key : keys) put(key.base).put(key.rkey);
    return *this;
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Reads from bytes that anybody may have sent. After the first thing that does not fit, everything reads as
// zero and done() says so.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  template <class T>
  T get() {
    T value{};
    raw(&value, sizeof value);
    return value;
  }
  template <class T>
  void get(T& value) {
    value = get<T>();
  }
  void raw(void* data, size_t bytes) {
    if (bytes > bytes_.size()) return fail();
    std::memcpy(data, bytes_.data(), bytes);
    bytes_.remove_prefix(bytes);
  }
  std::string text(uint32_t bytes_max) {
    const uint32_t bytes = get<uint32_t>();
    if (bytes > bytes_max || bytes > bytes_.size()) {
      fail();
      return "";
    }
    std::string value(bytes_.substr(0, bytes));
    bytes_.remove_prefix(bytes);
    return value;
  }
  uint32_t count(uint32_t max, size_t bytes_each) {
    const uint32_t count = get<uint32_t>();
    if (count > max || count * bytes_each > bytes_.size()) {
      fail();
      return 0;
    }
    return count;
  }
  void keys(std::vector<RailKey>& keys) {
    keys.resize(count(kRailsMax, sizeof(RailKey)));
    for (RailKey& key : keys) {
      get(key.base);
      get(key.rkey);
    }
  }
  void fail() {
    failed_ = true;
    bytes_ = {};
  }
  Status done(const char* what) const {
    if (failed_) return Status::invalid("{}: too short, or a length in it is out of range", what);
    if (!bytes_.empty()) return Status::invalid("{}: {} bytes too many", what, bytes_.size());
    return {};
  }
  size_t left() const { return bytes_.size(); }
  bool failed() const { return failed_; }

 private:
  std::string_view bytes_;
  bool failed_ = false;
};

// Checks magic and version of what travels outside of connections.
Status check_front(Reader& in, uint32_t magic, const char* what) {
  if (in.get<uint32_t>() != magic) return Status::invalid("{}: these bytes are not a Weft {}", what, what);
  const uint32_t version = in.get<uint32_t>();
  if (version != kWireVersion)
    return Status::invalid("{}: made by wire version {}, allowed: {} (both sides need the same Weft)", what,
                           version, kWireVersion);
  return {};
}

void put_address(Writer& out, const Address& address) {
  out.raw(address.engine.bytes.data(), 16).text(address.name).text(address.provider);
  out.raw(address.mark.data(), address.mark.size()).raw(&address.process, sizeof address.process);
  out.put<uint32_t>(static_cast<uint32_t>(address.rails.size()));
  for (const std::string& rail : address.rails) out.text(rail);
}

void get_address(Reader& in, Address& address) {
  in.raw(address.engine.bytes.data(), 16);
  address.name = in.text(kNameBytesMax);
  address.provider = in.text(kNameBytesMax);
  in.raw(address.mark.data(), address.mark.size());
  in.raw(&address.process, sizeof address.process);
  const uint32_t rails = in.count(kRailsMax, 4);
  for (uint32_t i = 0; i < rails; ++i) address.rails.push_back(in.text(kRailAddressBytesMax));
  if (!in.failed() && rails == 0) in.fail();
}

uint64_t seal_of(std::string_view message, const MacKey& key) {
  return message_mac(key, message.substr(0, kSealAt), message.substr(kHeadBytes));
}

template <class T>
Result<T> finish(const Reader& in, const char* what, T value) {
  WEFT_TRY(in.done(what));
  return value;
}

}  // namespace

std::string to_text(const EngineId& id) {
  static const char digits[] = "0123456789abcdef";
  std::string out;
  for (size_t i = 0; i < 4; ++i) {
    out += digits[id.bytes[i] >> 4];
    out += digits[id.bytes[i] & 15];
  }
  return out;
}

EngineId random_id() {
  EngineId id;
  for (size_t i = 0; i < id.bytes.size(); i += sizeof(uint64_t)) {
    const uint64_t random = random_key();
    std::memcpy(id.bytes.data() + i, &random, sizeof random);
  }
  return id;
}

Nonce mark_of(std::string_view secret, const EngineId& engine) {
  const Proof proof = prove(secret, "engine", {bytes_of(engine.bytes)});
  Nonce mark;
  std::memcpy(mark.data(), proof.data(), mark.size());
  return mark;
}

SenderKeys sender_keys(std::string_view secret, const EngineId& sender, const EngineId& receiver,
                       const Nonce& salt_of_receiver) {
  const Proof proof = prove(secret, "messages",
                            {bytes_of(sender.bytes), bytes_of(receiver.bytes), bytes_of(salt_of_receiver)});
  SenderKeys keys{mac_key(proof), 0};
  std::memcpy(&keys.token, proof.data() + sizeof keys.mac, sizeof keys.token);
  return keys;
}

bool same_secret(const Secret& a, const Secret& b) {
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

std::string to_bytes(const Address& address) {
  Writer out;
  out.put(kAddressMagic).put(kWireVersion);
  put_address(out, address);
  return out.take();
}

Result<Address> parse_address(std::string_view bytes) {
  Reader in(bytes);
  WEFT_TRY(check_front(in, kAddressMagic, "address"));
  Address address;
  get_address(in, address);
  return finish(in, "address", std::move(address));
}

std::string to_bytes(const Descriptor& d) {
  Writer out;
  out.put(kDescriptorMagic).put(kWireVersion).raw(d.engine.bytes.data(), 16).put(d.region);
  return out.raw(d.secret.data(), 16).put(d.bytes).put(d.access).take();
}

Result<Descriptor> parse_descriptor(std::string_view bytes) {
  Reader in(bytes);
  WEFT_TRY(check_front(in, kDescriptorMagic, "descriptor"));
  Descriptor d;
  in.raw(d.engine.bytes.data(), 16);
  in.get(d.region);
  in.raw(d.secret.data(), 16);
  in.get(d.bytes);
  in.get(d.access);
  return finish(in, "descriptor", d);
}

std::string to_bytes(const MessageHead& head, std::string_view body) {
  Writer out;
  out.put(kMessageMagic).put<uint16_t>(kWireVersion).put(static_cast<uint8_t>(head.type)).put<uint8_t>(0);
  out.raw(head.sender.bytes.data(), 16).put(head.life).put(head.sequence);
  return out.put<uint32_t>(static_cast<uint32_t>(body.size()))
      .put<uint32_t>(0)
      .put<uint64_t>(0)
      .raw(body.data(), body.size())
      .take();
}

void seal(std::string& message, const MacKey& key) {
  const uint64_t mac = seal_of(message, key);
  std::memcpy(message.data() + kSealAt, &mac, sizeof mac);
}

bool is_sealed(std::string_view message, const MacKey& key) {
  uint64_t mac = 0;
  std::memcpy(&mac, message.data() + kSealAt, sizeof mac);
  return mac == seal_of(message, key);
}

Result<MessageHead> parse_head(std::string_view message) {
  Reader in(message);
  if (in.get<uint32_t>() != kMessageMagic) return Status::invalid("message: not from a Weft engine");
  const uint16_t version = in.get<uint16_t>();
  const uint8_t type = in.get<uint8_t>();
  (void)in.get<uint8_t>();
  MessageHead head;
  in.raw(head.sender.bytes.data(), 16);
  in.get(head.life);
  in.get(head.sequence);
  in.get(head.body_bytes);
  (void)in.get<uint32_t>();
  (void)in.get<uint64_t>();
  if (in.failed())
    return Status::invalid("message: {} bytes, allowed: {} or more", message.size(), kHeadBytes);
  if (version != kWireVersion)
    return Status::make(Code::kUnsupported,
                        "message: wire version {}, allowed: {} (both sides need the same Weft)", version,
                        kWireVersion);
  if (type == 0 || type > static_cast<uint8_t>(MessageType::kLast))
    return Status::invalid("message: unknown type {}", static_cast<int>(type));
  if (head.body_bytes != in.left())
    return Status::invalid("message: body of {} bytes, its head says {}", in.left(), head.body_bytes);
  head.type = static_cast<MessageType>(type);
  return head;
}

std::string to_body(const Hello& hello) {
  Writer out;
  put_address(out, hello.address);
  out.put(hello.slot).keys(hello.inbox).raw(hello.nonce.data(), hello.nonce.size());
  out.raw(hello.salt.data(), hello.salt.size());
  return out.raw(hello.proof.data(), hello.proof.size()).take();
}

Proof prove_hello(std::string_view secret, const MessageHead& head, const Hello& hello, const EngineId& to) {
  const std::string body = to_body(hello);
  const std::string_view said = std::string_view(body).substr(0, body.size() - sizeof(Proof));
  const char* role = head.type == MessageType::kWelcome ? "welcome" : "hello";
  return prove(secret, role,
               {bytes_of(head.sender.bytes), std::to_string(head.life), bytes_of(to.bytes), said});
}

Result<Hello> parse_hello(std::string_view body) {
  Reader in(body);
  Hello hello;
  get_address(in, hello.address);
  in.get(hello.slot);
  in.keys(hello.inbox);
  in.raw(hello.nonce.data(), hello.nonce.size());
  in.raw(hello.salt.data(), hello.salt.size());
  in.raw(hello.proof.data(), hello.proof.size());
  WEFT_TRY(in.done("hello"));
  if (hello.slot >= kPeersMax)
    return Status::invalid("hello: slot {}, allowed: below {}", hello.slot, kPeersMax);
  if (hello.inbox.size() != hello.address.rails.size())
    return Status::invalid("hello: {} inbox keys for {} rails", hello.inbox.size(),
                           hello.address.rails.size());
  return hello;
}

std::string to_body(const Attach& attach) {
  return Writer().put(attach.request_id).put(attach.region).raw(attach.secret.data(), 16).take();
}
Result<Attach> parse_attach(std::string_view body) {
  Reader in(body);
  Attach attach;
  in.get(attach.request_id);
  in.get(attach.region);
  in.raw(attach.secret.data(), 16);
  return finish(in, "attach", attach);
}

std::string to_body(const Attached& a) {
  Writer out;
  out.put(a.request_id).text(a.refusal).put(a.bytes).put(a.access).put<uint8_t>(a.must_stage);
  return out.keys(a.rails).take();
}
Result<Attached> parse_attached(std::string_view body) {
  Reader in(body);
  Attached a;
  in.get(a.request_id);
  a.refusal = in.text(kTextBytesMax);
  in.get(a.bytes);
  in.get(a.access);
  a.must_stage = in.get<uint8_t>() != 0;
  in.keys(a.rails);
  return finish(in, "attached", std::move(a));
}

std::string to_body(const Offer& offer) {
  return Writer().put(offer.request_id).put(offer.bytes).keys(offer.rails).take();
}
Result<Offer> parse_offer(std::string_view body) {
  Reader in(body);
  Offer offer;
  in.get(offer.request_id);
  in.get(offer.bytes);
  in.keys(offer.rails);
  return finish(in, "offer", std::move(offer));
}

std::string to_body(const Outcome& outcome) {
  return Writer().put(outcome.request_id).put(outcome.slot).text(outcome.refusal).take();
}
Result<Outcome> parse_outcome(std::string_view body) {
  Reader in(body);
  Outcome outcome;
  in.get(outcome.request_id);
  in.get(outcome.slot);
  outcome.refusal = in.text(kTextBytesMax);
  return finish(in, "outcome", std::move(outcome));
}

std::string to_body(const Notified& notified) {
  return Writer().put(notified.key).put(notified.count).take();
}
Result<Notified> parse_notify(std::string_view body) {
  Reader in(body);
  Notified notify;
  in.get(notify.key);
  in.get(notify.count);
  WEFT_TRY(in.done("notify"));
  if (notify.key > kCounterKeyMax)
    return Status::invalid("notify: counter {}, allowed: 0 to {}", notify.key, kCounterKeyMax);
  return notify;
}

std::string to_body(const StageGrant& grant) {
  return Writer()
      .text(grant.refusal)
      .put(grant.slots)
      .put(grant.slot_bytes)
      .keys(grant.rails)
      .put(grant.shared.pid)
      .put(grant.shared.fd)
      .put(grant.shared.key)
      .take();
}
Result<StageGrant> parse_stage_grant(std::string_view body) {
  Reader in(body);
  StageGrant grant;
  grant.refusal = in.text(kTextBytesMax);
  in.get(grant.slots);
  in.get(grant.slot_bytes);
  in.keys(grant.rails);
  in.get(grant.shared.pid);
  in.get(grant.shared.fd);
  in.get(grant.shared.key);
  WEFT_TRY(in.done("stage grant"));
  if (grant.refusal.empty() &&
      (grant.slots == 0 || grant.slots > 1024 || grant.slot_bytes < 2 * kPackHeadBytes))
    return Status::invalid("stage grant: {} slots of {} bytes", grant.slots, grant.slot_bytes);
  return grant;
}

std::string number_body(uint64_t number) {
  return Writer().put(number).take();
}
Result<uint64_t> parse_number(std::string_view body) {
  Reader in(body);
  const uint64_t number = in.get<uint64_t>();
  return finish(in, "number", number);
}

std::string text_body(std::string_view words) {
  return Writer().text(words.substr(0, kTextBytesMax)).take();
}
Result<std::string> parse_text(std::string_view body) {
  Reader in(body);
  std::string words = in.text(kTextBytesMax);
  return finish(in, "text", std::move(words));
}

uint64_t pack_bytes(size_t pieces, uint64_t payload_bytes) {
  return kPackHeadBytes + pieces * kPackedPieceBytes + payload_bytes;
}

void write_pack_head(char* slot, const PackHead& head) {
  Writer out;
  out.put(kMessageMagic).put<uint32_t>(head.has_imm).put(head.request_id).put(head.pack).put(head.packs);
  out.put(head.imm_id).put(head.imm_each).put(head.imm_last);
  out.put<uint32_t>(static_cast<uint32_t>(head.pieces.size())).put(head.turn);
  for (const PackedPiece& piece : head.pieces) out.put(piece.region).put(piece.offset).put(piece.bytes);
  const std::string bytes = out.take();
  std::memcpy(slot, bytes.data(), bytes.size());
}

Result<PackHead> parse_pack(std::string_view slot) {
  Reader in(slot);
  if (in.get<uint32_t>() != kMessageMagic) return Status::invalid("pack: the slot holds none");
  PackHead head;
  head.has_imm = in.get<uint32_t>() != 0;
  in.get(head.request_id);
  in.get(head.pack);
  in.get(head.packs);
  in.get(head.imm_id);
  in.get(head.imm_each);
  in.get(head.imm_last);
  const uint32_t pieces = in.get<uint32_t>();
  in.get(head.turn);
  if (in.failed() || pieces > kPackedPiecesMax || uint64_t{pieces} * kPackedPieceBytes > in.left())
    return Status::invalid("pack: {} pieces do not fit a slot of {} bytes", pieces, slot.size());
  if (head.imm_id > kImmIdMax || head.pack >= head.packs)
    return Status::invalid("pack: number {} of {}, immediate id {}", head.pack, head.packs, head.imm_id);
  head.pieces.resize(pieces);
  for (PackedPiece& piece : head.pieces) {
    in.get(piece.region);
    in.get(piece.offset);
    in.get(piece.bytes);
  }
  uint64_t room = in.left();
  for (const PackedPiece& piece : head.pieces) {
    if (piece.bytes > room) return Status::invalid("pack: its pieces reach beyond the slot");
    room -= piece.bytes;
  }
  return head;
}

}  // namespace weft::transfer
