// SPDX-License-Identifier: Apache-2.0
#include "providers/loopback/loopback.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <set>

namespace weft::provider {
namespace {

enum class Kind : uint8_t { kWrite, kPages, kRead, kSend, kReply };

constexpr const char* kNoSuchKey = "loopback: remote access error: no memory has this key";

struct Packet {
  Kind kind = Kind::kWrite;
  uint64_t from = 0;
  RmaOp op;
  std::vector<Piece> pieces;
  std::string message;  // kSend
  std::string refusal;  // kReply: why it failed; empty when it worked
  bool peer_gone = false;
  bool is_temporary = false;  // post_temporary()
  bool damaged = false;       // the fault plan's `fail`
  uint64_t due_poll = 0;      // not before the target's poll of this number
};

struct Enrolled {
  Range range;
  uint32_t access = 0;
};

struct Inbox {
  std::deque<Packet> packets;
  std::map<uint64_t, Enrolled> regions;  // by rkey
  uint64_t polls = 0;
  uint64_t sent = 0;
  bool dead = false;
  bool is_unplugged = false;
};

constexpr char kAddressTag[] = "loop";

}  // namespace

// Everything shared by the rails of one network, under one mutex. Bytes are copied under it too, so that
// memory which was released on either side is never touched again.
struct Loopback::Impl {
  explicit Impl(Options given) : options(std::move(given)), random(options.plan.seed) {}

  Options options;
  std::mutex mutex;
  std::mt19937_64 random;
  std::map<uint64_t, Inbox> inboxes;
  uint64_t next_id = 1;

  // Changes the inbox of a rail, by its address.
  template <class Change>
  void at(std::string_view address, Change change) {
    uint64_t id = 0;
    if (address.size() != 12) return;
    std::memcpy(&id, address.data() + 4, sizeof id);
    std::lock_guard lock(mutex);
    if (auto found = inboxes.find(id); found != inboxes.end()) change(found->second);
  }

  bool chance(double probability) {
    return probability > 0 && std::uniform_real_distribution<double>(0, 1)(random) < probability;
  }

  bool deliver(uint64_t to, Packet packet) {
    auto found = inboxes.find(to);
    if (found == inboxes.end() || found->second.dead) return false;  // as sending to a machine that is off
    const FaultPlan& plan = options.plan;
    Inbox& inbox = found->second;
    if (chance(plan.delay)) packet.due_poll = inbox.polls + plan.delay_polls;
    size_t place = inbox.packets.size();
    if (chance(plan.reorder)) place -= std::min<size_t>(place, random() % (plan.reorder_window + 1));
    inbox.packets.insert(inbox.packets.begin() + static_cast<std::ptrdiff_t>(place), std::move(packet));
    return true;
  }

  // Applies the plan to a packet that is about to leave `from`; false when it is lost.
  bool transmit(uint64_t from, uint64_t to, Packet packet) {
    const FaultPlan& plan = options.plan;
    Inbox& self = inboxes[from];
    if (plan.dies_after && ++self.sent > plan.dies_after) self.dead = true;
    if (self.dead) return false;
    const bool spared = packet.kind == Kind::kReply || (plan.spare_messages && packet.kind == Kind::kSend);
    if (!spared) {
      if (chance(plan.drop)) return false;
      if (chance(plan.fail)) packet.damaged = true;
      if (!packet.damaged && chance(plan.duplicate)) {
        Packet twin = packet;
        twin.op.context = nullptr;  // the copy completes nothing, and carries what the first one carried
        if (twin.kind == Kind::kWrite && twin.op.piece.bytes)
          twin.message.assign(static_cast<const char*>(twin.op.piece.local), twin.op.piece.bytes);
        (void)deliver(to, std::move(twin));
      }
    }
    return deliver(to, std::move(packet));
  }
};

Result<FaultPlan> parse_fault_plan(std::string_view words) {
  FaultPlan plan;
  const auto set = [&](std::string_view name, double value) {
    const bool is_chance = value >= 0 && value <= 1;
    if (name == "drop" && is_chance)
      plan.drop = value;
    else if (name == "duplicate" && is_chance)
      plan.duplicate = value;
    else if (name == "reorder" && is_chance)
      plan.reorder = value;
    else if (name == "fail" && is_chance)
      plan.fail = value;
    else if (name == "delay" && is_chance)
      plan.delay = value;
    else if (name == "seed")
      plan.seed = static_cast<uint64_t>(value);
    else if (name == "reorder_window")
      plan.reorder_window = static_cast<uint32_t>(value);
    else if (name == "delay_polls")
      plan.delay_polls = static_cast<uint32_t>(value);
    else if (name == "dies_after")
      plan.dies_after = static_cast<uint64_t>(value);
    else
      return false;
    return value >= 0;
  };
  while (!words.empty()) {
    const std::string word(words.substr(0, words.find(',')));
    words.remove_prefix(std::min(words.size(), word.size() + 1));
    const size_t at = word.find('=');
    char* end = nullptr;
    const char* number = at == std::string::npos ? "" : word.c_str() + at + 1;
    const double value = std::strtod(number, &end);
    if (end == number || *end || !set(std::string_view(word).substr(0, at), value))
      return Status::invalid(
          "loopback: got fault '{}', allowed: drop, duplicate, reorder, fail or delay=0 to 1, seed, "
          "reorder_window, "
          "delay_polls or dies_after=NUMBER",
          word);
  }
  return plan;
}

class LoopbackRail : public Rail {
 public:
  LoopbackRail(std::shared_ptr<Loopback> network, Nic nic, uint64_t id)
      : network_(std::move(network)), impl_(*network_->impl_), nic_(std::move(nic)), id_(id) {}

  ~LoopbackRail() override {
    std::lock_guard lock(impl_.mutex);
    impl_.inboxes.erase(id_);
  }

  const Caps& caps() const override { return nic_.caps; }
  const Nic& nic() const override { return nic_; }

  std::string address() const override {
    std::string bytes(kAddressTag, 4);
    bytes.append(reinterpret_cast<const char*>(&id_), sizeof id_);
    return bytes;
  }

  Result<Route> resolve(std::string_view address) override {
    if (address.size() != 12 || address.substr(0, 4) != kAddressTag)
      return Status::invalid("address: got {} bytes that no loopback rail made, allowed: 12", address.size());
    Route route = 0;
    std::memcpy(&route, address.data() + 4, sizeof route);
    return route;
  }
  void forget(Route route) override {  // what it still owes is written off
    in_flight_ -= in_flight_to_[route];
    in_flight_to_.erase(route);
  }

  Result<Registration> enroll(const Range& range, uint32_t access) override {
    if (range.kind != MemoryKind::kHost && !nic_.caps.device_memory)
      return Status::make(Code::kUnsupported, "loopback: {} cannot reach device memory", nic_.name);
    std::lock_guard lock(impl_.mutex);
    const uint64_t rkey = std::uniform_int_distribution<uint64_t>()(impl_.random);
    impl_.inboxes[id_].regions[rkey] = {range, access};
    Registration made;
    made.handle = range.data;
    made.lkey = reinterpret_cast<void*>(rkey);
    made.base = reinterpret_cast<uint64_t>(range.data);
    made.rkey = rkey;
    return made;
  }

  void release(Registration& registration) override {
    std::lock_guard lock(impl_.mutex);
    impl_.inboxes[id_].regions.erase(registration.rkey);
    registration = {};
  }

  Posted post_write(const RmaOp& op) override { return write(op, false); }
  // One copy, under the mutex that release() takes too.
  Posted post_temporary(const RmaOp& op) override { return write(op, true); }
  Posted post_read(const RmaOp& op) override { return post(op.to, rma(Kind::kRead, op)); }

  uint32_t pages_per_post(Route) const override { return impl_.options.pages_per_post; }
  Posted post_pages(Route to, Piece* pieces, uint32_t count, Context* context) override {
    Packet packet = rma(Kind::kPages, {.to = to, .piece = {}, .context = context});
    packet.pieces.assign(pieces, pieces + count);
    return post(to, std::move(packet));
  }

  Posted post_send(Route to, const void* data, uint64_t bytes, void*, Context* context) override {
    Packet packet = rma(Kind::kSend, {.to = to, .piece = {}, .context = context});
    packet.message.assign(static_cast<const char*>(data), bytes);
    return post(to, std::move(packet));
  }

  Posted post_recv(void* data, uint64_t bytes, void*, Context* context) override {
    receives_.push_back({data, bytes, context});
    return Posted::kOk;
  }
  std::string refusal() const override { return "loopback: refused"; }

  size_t poll(Event* events, size_t max) override {
    size_t made = 0;
    for (size_t budget = max; made < max && budget > 0; --budget) {
      Packet packet;
      if (!take(packet)) break;
      if (packet.kind == Kind::kReply) {
        if (auto owed = in_flight_to_.find(packet.op.to); owed != in_flight_to_.end() && owed->second > 0) {
          --owed->second;
          --in_flight_;
        }
        writes_.erase(packet.op.context);
        if (packet.op.context) finish(packet, events[made++]);
      } else if (apply(packet, events[made])) {
        ++made;
      }
    }
    return made;
  }

 private:
  struct Receive {
    void* data;
    uint64_t bytes;
    Context* context;
  };

  Posted write(const RmaOp& op, bool is_temporary) {
    Packet packet = rma(Kind::kWrite, op);
    packet.is_temporary = is_temporary;
    packet.damaged = is_over_its_pace();
    const Posted posted = post(op.to, std::move(packet));
    if (posted == Posted::kOk) writes_.insert(op.context);
    return posted;
  }

  bool is_over_its_pace() {
    std::lock_guard lock(impl_.mutex);
    const uint32_t most = impl_.options.plan.most_writes;
    return most > 0 && writes_.size() >= most;
  }

  static Packet rma(Kind kind, const RmaOp& op) {
    Packet packet;
    packet.kind = kind;
    packet.op = op;
    return packet;
  }

  Posted post(Route to, Packet packet) {
    if (in_flight_ >= nic_.caps.tx_depth) return Posted::kAgain;
    packet.from = id_;
    std::lock_guard lock(impl_.mutex);
    const auto there = impl_.inboxes.find(to);
    const bool is_gone = there == impl_.inboxes.end();  // the process, and its machine says so
    if (is_gone || there->second.is_unplugged || impl_.inboxes[id_].is_unplugged) {
      Packet reply;
      reply.kind = Kind::kReply;
      reply.op = packet.op;
      reply.refusal = is_gone ? "loopback: connection refused" : "loopback: no link";
      reply.peer_gone = true;
      impl_.inboxes[id_].packets.push_back(std::move(reply));
    } else if (!impl_.transmit(id_, to, std::move(packet))) {
      return Posted::kOk;  // as far as anybody can see
    }
    ++in_flight_;
    ++in_flight_to_[to];
    return Posted::kOk;
  }

  // The first packet that is due; messages wait for a posted receive.
  bool take(Packet& packet) {
    std::lock_guard lock(impl_.mutex);
    Inbox& inbox = impl_.inboxes[id_];
    ++inbox.polls;
    if (inbox.dead) return false;
    for (auto at = inbox.packets.begin(); at != inbox.packets.end(); ++at) {
      if (at->due_poll > inbox.polls || (at->kind == Kind::kSend && receives_.empty())) continue;
      packet = std::move(*at);
      inbox.packets.erase(at);
      return true;
    }
    return false;
  }

  static void finish(const Packet& packet, Event& event) {
    event.kind = packet.refusal.empty() ? EventKind::kDone : EventKind::kFailed;
    event.context = packet.op.context;
    event.bytes = packet.op.piece.bytes;
    event.text = packet.refusal;
    event.peer_gone = packet.peer_gone;
    event.key_refused = packet.is_temporary && packet.refusal == kNoSuchKey;
  }

  // Carries out a peer's packet on our memory and answers it; true when `event` tells our engine something.
  bool apply(Packet& packet, Event& event) {
    std::string refusal = packet.damaged ? "loopback: damaged by the fault plan" : "";
    if (refusal.empty()) refusal = perform(packet);
    bool reported = false;
    if (refusal.empty() && packet.kind == Kind::kSend) {
      const Receive receive = receives_.front();
      receives_.pop_front();
      const uint64_t bytes = std::min<uint64_t>(receive.bytes, packet.message.size());
      std::memcpy(receive.data, packet.message.data(), bytes);
      event.kind = EventKind::kReceived;
      event.context = receive.context;
      event.bytes = bytes;
      reported = true;
    } else if (refusal.empty() && packet.kind == Kind::kWrite && packet.op.has_imm) {
      event.kind = EventKind::kImm;
      event.imm = packet.op.imm;
      event.from = packet.from;
      reported = true;
    }
    if (packet.op.context) reply(packet, std::move(refusal));
    return reported;
  }

  void reply(const Packet& packet, std::string refusal) {
    Packet answer;
    answer.kind = Kind::kReply;
    answer.op = packet.op;
    answer.is_temporary = packet.is_temporary;
    answer.refusal = std::move(refusal);
    std::lock_guard lock(impl_.mutex);
    (void)impl_.transmit(id_, packet.from, std::move(answer));
  }

  std::string perform(const Packet& packet) {
    std::lock_guard lock(impl_.mutex);
    switch (packet.kind) {
      case Kind::kWrite:
        return move(packet, packet.op.piece, kRemoteWrite);
      case Kind::kRead:
        return move(packet, packet.op.piece, kRemoteRead);
      case Kind::kPages:
        for (const Piece& piece : packet.pieces)
          if (std::string refusal = check(packet.from, piece, kRemoteWrite); !refusal.empty()) return refusal;
        for (const Piece& piece : packet.pieces) (void)move(packet, piece, kRemoteWrite);
        return "";
      default:
        return "";
    }
  }

  // Why `from` may not do this to our memory, or with its own; empty when it may. Called under the mutex.
  std::string check(uint64_t from, const Piece& piece, Access wanted) {
    const auto& regions = impl_.inboxes[id_].regions;
    const auto found = regions.find(piece.rkey);
    if (found == regions.end()) return kNoSuchKey;
    const Enrolled& region = found->second;
    const uint64_t base = reinterpret_cast<uint64_t>(region.range.data);
    if (!(region.access & wanted)) return "loopback: remote access error: not registered for this access";
    if (piece.remote < base || piece.bytes > region.range.bytes ||
        piece.remote - base > region.range.bytes - piece.bytes)
      return "loopback: remote access error: beyond the registration";
    const auto sender = impl_.inboxes.find(from);
    if (piece.bytes && (sender == impl_.inboxes.end() ||
                        sender->second.regions.count(reinterpret_cast<uint64_t>(piece.lkey)) == 0))
      return "loopback: local protection error: the local memory is not registered";
    return "";
  }

  std::string move(const Packet& packet, const Piece& piece, Access wanted) {
    if (std::string refusal = check(packet.from, piece, wanted); !refusal.empty()) return refusal;
    if (piece.bytes == 0) return "";
    void* remote = reinterpret_cast<void*>(piece.remote);
    if (wanted == kRemoteRead) {
      std::memcpy(piece.local, remote, piece.bytes);
      return "";
    }
    const void* bytes = packet.message.empty() ? piece.local : packet.message.data();
    // Whoever saw the first copy of a write may be reading it: the second stores only what differs.
    if (impl_.options.plan.duplicate > 0 && std::memcmp(remote, bytes, piece.bytes) == 0) return "";
    std::memcpy(remote, bytes, piece.bytes);
    return "";
  }

  std::shared_ptr<Loopback> network_;
  Loopback::Impl& impl_;
  Nic nic_;
  uint64_t id_;
  std::deque<Receive> receives_;
  uint32_t in_flight_ = 0;
  std::set<Context*> writes_;  // under way
  std::map<Route, uint32_t> in_flight_to_;
};

Loopback::Loopback(Options options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Loopback::~Loopback() = default;

std::vector<Nic> Loopback::probe() {
  std::vector<Nic> nics(impl_->options.nics);
  for (size_t i = 0; i < nics.size(); ++i) {
    nics[i].provider = "loopback";
    nics[i].name = "loop" + std::to_string(i);
    nics[i].caps = impl_->options.caps;
    nics[i].caps.takes_temporary = true;
    nics[i].caps.same_process = true;
  }
  return nics;
}

Result<std::unique_ptr<Rail>> Loopback::open(const Nic& nic, const RailOptions&) {
  std::lock_guard lock(impl_->mutex);
  const uint64_t id = impl_->next_id++;
  impl_->inboxes[id];
  return std::unique_ptr<Rail>(std::make_unique<LoopbackRail>(shared_from_this(), nic, id));
}

void Loopback::set_plan(const FaultPlan& plan) {
  std::lock_guard lock(impl_->mutex);
  impl_->options.plan = plan;
  for (auto& [id, inbox] : impl_->inboxes) inbox.sent = 0;
}

void Loopback::kill(std::string_view address) {
  impl_->at(address, [](Inbox& inbox) { inbox.dead = true; });
}

void Loopback::unplug(std::string_view address) {
  impl_->at(address, [](Inbox& inbox) {
    inbox.is_unplugged = true;
    inbox.packets.clear();
  });
}

}  // namespace weft::provider
