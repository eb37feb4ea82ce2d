// SPDX-License-Identifier: Apache-2.0
//
// A Provider is a network stack that Weft opens at run time: libfabric, libibverbs, or the in-process
// loopback. It lists the NICs it can use and opens one of them as a Rail; the transfer engine drives rails
// and knows no other word of any network.
//   for (const Nic& nic : provider->probe()) if (nic.usable()) rail = std::move(*provider->open(nic, {}));
//   const Route to = *rail->resolve(address_of_the_other_rail);
//   RmaOp write{.to = to, .piece = {p, mine.lkey, theirs.base, theirs.rkey, bytes}, .context = &mine_until_it_ends};
//   if (rail->post_write(write) == Posted::kOk) ...
//   Event events[16];
//   for (size_t i = 0, count = rail->poll(events, 16); i < count; ++i) ...
// To add one: providers/README.md.
//
// Every rail promises: writes and sends arrive intact and once, in any order; the immediate of a write is
// seen only after the write's bytes. Anything more is a capability. No rail promises that an operation
// towards a dead peer ever ends. Deadlines belong to the engine. Threads: one at a time per rail (the
// engine's progress token); different rails may be used at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/owner_process.h"
#include "base/status.h"

namespace weft::provider {

// How the rail itself knows the sender of an arrival.
enum class Source : uint8_t {
  kUnknown,  // it does not: any process that reaches the rail may have sent it
  kRoute,    // Event::from names the sender, and it cannot be forged
  kAddress,  // the NIC lets in only what shows a key that is part of this rail's address
};

// The abilities of a rail, as data. The engine chooses by these fields, never by a provider's name.
struct Caps {
  bool ordered_writes = false;  // writes to one peer become visible in the order they were posted
  bool write_imm = true;        // a write can carry an immediate to the target's completion queue,
  uint32_t imm_bits = 32;       // of 32 or 64 bits
  Source source = Source::kUnknown;
  bool device_memory = false;   // register() takes CUDA memory
  bool dmabuf = false;          // CUDA memory is registered through DMA-BUF rather than peer memory
  bool manual_progress = true;  // nothing moves, also at the target, unless poll() is called
  // A message costs more than copying a page: small pages travel better packed.
  bool packs_small_pages = false;
  bool pages_apart = false;  // post_pages() takes another way than writes: no order between the two
  // post_temporary(), and enroll() of kTemporary memory of the host at next to no cost.
  bool takes_temporary = false;
  bool same_host = false;     // reaches processes of this host alone: packs travel through shared memory
  bool same_process = false;  // reaches this process alone
  bool copy_engines =
      false;  // a GPU's engines move the bytes, which are in place before anybody hears of them
  uint64_t write_bytes_max = UINT64_MAX;  // longest write or read
  uint64_t message_bytes_max = 8192;      // longest send
  uint64_t imm_only_bytes = 0;            // bytes a write must have to carry an immediate (0: none)
  uint32_t tx_depth = 256;                // operations in flight that the rail takes before it answers kAgain
  uint32_t cq_depth = 1024;               // completions that fit before the queue may overrun
};

// Whether an immediate proves who sent it: by a token in it, or by what the rail knows of its sender.
inline bool proves_imm(const Caps& caps) {
  return caps.imm_bits >= 64 || caps.source != Source::kUnknown;
}

struct Nic {
  std::string provider;  // "fabric:tcp"
  std::string name;      // "lo", "mlx5_0"
  std::string pci;       // "0000:17:00.0", empty for software
  int numa_node = -1;
  double gbit_per_s = 0;  // 0: unknown
  Caps caps;
  std::string unusable_because;  // empty when the NIC can be opened
  bool usable() const { return unusable_because.empty(); }
};

enum class MemoryKind { kHost, kCuda };

enum Access : uint32_t {
  kLocal = 0,  // source of writes, target of own reads
  kRemoteRead = 1,
  kRemoteWrite = 2,
  kTemporary = 4,  // for a moment: written and read by post_temporary() alone
  kReadOnly = 8,   // nothing writes to it, this process included: its pages may be such
};

struct Range {
  void* data = nullptr;
  uint64_t bytes = 0;
  MemoryKind kind = MemoryKind::kHost;
  int device = -1;
};

// One range registered with one rail.
struct Registration {
  void* handle = nullptr;  // the rail's own
  void* lkey = nullptr;    // goes into WriteOp::lkey
  uint64_t base = 0;       // what a peer adds its offset to
  uint64_t rkey = 0;       // what a peer must show
  bool is_dmabuf = false;  // device memory that was exported, where the rail knows
};

using Route = uint64_t;  // a peer's rail as this rail knows it
constexpr Route kNoRoute = UINT64_MAX;

// First member of everything whose address goes into an operation: some providers keep their own notes there.
struct Context {
  void* provider_space[8] = {};
};

struct Piece {
  void* local = nullptr;
  void* lkey = nullptr;
  uint64_t remote = 0;
  uint64_t rkey = 0;
  uint64_t bytes = 0;
};

// A write (or, without imm, a read). The context comes back in exactly one kDone or kFailed event.
struct RmaOp {
  Route to = 0;
  Piece piece;
  bool has_imm = false;
  uint64_t imm = 0;        // Caps::imm_bits of it
  bool delivered = false;  // kDone only once the bytes are visible at the target
  Context* context = nullptr;
};

enum class Posted {
  kOk,
  kDone,   // writes and reads: through with it already, no event follows
  kAgain,  // no room now: poll, then try again
  kFatal,  // refused for good; refusal() says why
};

enum class EventKind : uint8_t {
  kDone,      // a write, read or send of ours: its source is reusable, its target (of a read) filled
  kFailed,    // the same, failed; text and peer_gone say why
  kReceived,  // a posted receive holds `bytes` bytes
  kImm,       // a peer's write with an immediate has arrived
  kServed,    // bytes of a peer came or went; polling again soon is worth while. Not every rail can tell
};

struct Event {
  EventKind kind = EventKind::kDone;
  bool peer_gone =
      false;  // the failure means that the connection is broken, not that the operation was wrong
  // kFailed: the peer's registration is over. What the peer said before has come in earlier events.
  bool key_refused = false;
  uint64_t imm = 0;
  Route from =
      kNoRoute;  // kImm, on rails whose Caps::source is kRoute: whose. kNoRoute: of none that is resolved
  uint64_t bytes = 0;
  Context* context = nullptr;
  std::string text;  // kFailed: the provider's code and words
};

class Rail {
 public:
  virtual ~Rail() = default;

  virtual const Caps& caps() const = 0;
  virtual const Nic& nic() const = 0;
  // Opaque bytes that another rail of the same provider can resolve.
  virtual std::string address() const = 0;

  // Makes a peer's rail reachable. Errors: kInvalid for bytes that are no address of this provider.
  virtual Result<Route> resolve(std::string_view address) = 0;
  virtual void forget(Route route) = 0;

  virtual Result<Registration> enroll(const Range& range, uint32_t access) = 0;
  virtual void release(Registration& registration) = 0;

  virtual Posted post_write(const RmaOp& op) = 0;
  virtual Posted post_read(const RmaOp& op) = 0;
  virtual Posted post_send(Route to, const void* data, uint64_t bytes, void* lkey, Context* context) = 0;
  virtual Posted post_recv(void* data, uint64_t bytes, void* lkey, Context* context) = 0;
  virtual std::string refusal() const = 0;
  // Whether that was because the way to the peer is broken, and not because the operation is wrong.
  virtual bool is_route_broken() const { return false; }

  // How many pieces post_pages() moves to `to` in one call for the price of one write; 1 means: do not call
  // it.
  virtual uint32_t pages_per_post(Route to) const { return 1; }
  // Writes all pieces, no immediate; one event for all, kDone only once they are visible at the target. Only
  // where pages_per_post(to) > 1.
  // May reorder `pieces`.
  virtual Posted post_pages(Route to, Piece* pieces, uint32_t count, Context* context) {
    return Posted::kFatal;
  }

  // A write from or to kTemporary memory, on rails that take such registrations. Once such memory is released here,
  // nothing is written to it or read from it any more, also of a write that is in the middle; that one fails over there
  // with key_refused. kDone only once the bytes are in place. A write from what was released may end the way to the
  // peer.
  virtual Posted post_temporary(const RmaOp& op) { return Posted::kFatal; }

  // Fills at most `max` events and makes progress, also for peers' operations on our memory.
  virtual size_t poll(Event* events, size_t max) = 0;

  // Sleeps until poll() is worth while, `most_ns` (less than a second) at most. Events that another thread polls
  // meanwhile do not end the sleep. False, and no sleep: the rail cannot tell, or has nothing under way. Threads: any.
  virtual bool sleep(uint64_t most_ns) const { return false; }

  // Before the registrations of posted receives are released: what comes later reaches none of them. Only release() may
  // follow.
  virtual void stop() {}
};

struct RailOptions {
  uint32_t tx_depth = 0;  // 0: what the provider likes
  uint32_t rail_id = 0;   // this rail's number in its engine
  std::string secret;  // for connections of the provider's own: their maker proves that it knows the secret
};

class Provider {
 public:
  virtual ~Provider() = default;
  virtual std::string name() const = 0;
  // Every NIC, usable or not. Never fails: a missing library is one unusable entry that says so.
  virtual std::vector<Nic> probe() = 0;
  virtual Result<std::unique_ptr<Rail>> open(const Nic& nic, const RailOptions& options) = 0;
  Status check_owner() const { return owner_.check("provider"); }

 private:
  const OwnerProcess owner_;
};

// The providers of this process by name: "loopback", "fabric:tcp", "fabric:shm", "fabric:efa",
// "fabric:verbs", "fabric:cxi", "verbs". find("auto") takes the first that has a usable NIC, hardware before
// software.
std::vector<std::string> provider_names();
Result<std::shared_ptr<Provider>> find_provider(const std::string& name);

}  // namespace weft::provider
