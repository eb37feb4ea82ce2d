// SPDX-License-Identifier: Apache-2.0
//
// A Transport is one way for ranks to reach each other. What it can do is data (Caps); which one is used for
// a peer is a pure function of that data and the facts of the two ranks; and it connects: a Link is one
// rank's half of the ways to all peers that a communicator reaches through one transport.
//   for (const Candidate& c : candidates(device)) show(c.transport->name(), c.caps);       // `weft info`
//   WEFT_TRY_ASSIGN(auto to_peer, select_transports(candidates(device), facts, rank, "auto"));
//   WEFT_TRY_ASSIGN(std::unique_ptr<Link> link, transport->connect(group));
//   offers = all ranks' link->offer(window); WEFT_TRY(link->accept(window, offers));
//   WEFT_TRY_ASSIGN(MeshPart part, link->mesh(window));                  // what kernels are launched with
// Adding one: a folder transports/<name>/ and one line in transports/list.h.
// Threads: a Transport is constant; a Link is called by one thread at a time, but for help().
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/device.h"
#include "base/status.h"
#include "bootstrap/bootstrap.h"
#include "topology/topology.h"

namespace weft {

// How device code gets at a peer: by loads and stores into its window, or through something that carries them
// out.
enum class Reach { kMapped, kPort };

// Which earlier writes are visible to a reader that sees a later one, without a signal in between.
enum class Ordering {
  kNone,     // any order
  kSignals,  // a signal comes after every earlier put on its channel; puts among themselves in any order
};

struct Caps {
  Reach reach = Reach::kMapped;
  bool needs_registration = false;  // memory outside windows must be registered before it is used
  bool has_atomics = false;         // 64-bit add at the peer
  bool only_by_name = false;        // "auto" never takes it
  bool brings_memory = false;       // windows lie in memory of its library: Link::allocate(), Link::map()
  // Threads of the host store words and small puts: on GPUs, windows have a host part for what ports write (Window).
  bool hosts_store_words = false;
  bool reaches_gpus = false;  // windows of GPUs may lie in their memory: Link::try_device_memory() decides
  Ordering ordering = Ordering::kNone;
  uint64_t max_put_bytes = 0;    // of one put
  double latency_us = 0;         // estimate: small put with signal until the peer sees it
  double bandwidth_gb_s = 0;     // estimate: large puts of one rank to all its peers, 10^9 bytes per second
  std::string details;           // for people: what it goes through here, and how it is paced
  std::string unusable_because;  // empty where it can be used on this machine

  bool is_usable() const { return unusable_because.empty(); }
};

// A window as a transport sees it.
struct WindowView {
  int number = 0;      // of the window in its communicator, the same on all ranks
  uint64_t bytes = 0;  // of every rank's part
  std::byte* local = nullptr;
  std::byte* const* bases = nullptr;  // by rank; null where not mapped
  std::byte* const* table = nullptr;  // the same, where kernels of this rank can read it
  Device place = {};                  // whose memory `local` is: the rank's device, or the host
  uint64_t port_bytes = 0;            // the first so many are what port peers reach
  // Where the window has a host part: so many bytes of it, which begin so far before `local`; and whether what ports put
  // beside words and records goes to `place`, and not to the host part.
  uint64_t host_bytes = 0;
  uint64_t before = 0;
  bool payload_in_place = false;
  // Keeps `local` alive, for a link through which peers may reach it after the window is gone.
  std::shared_ptr<const void> memory = {};
};

// Device code that is compiled apart from kernels, once, and linked with each: a library's calls under names of Weft's.
struct DeviceUnit {
  std::string name;  // as files of the cache and messages have it
  std::string text;
  std::vector<std::pair<std::string, std::string>> headers;
  std::vector<std::string> options;
};

// The sources that kernels with a mesh are compiled with beside Weft's own headers, on GPUs.
struct DeviceSources {
  std::vector<std::pair<std::string, std::string>> headers;  // (name as #include spells it, text)
  std::vector<std::string> options;                          // of the compiler
  // Where kernels are linked with a library's device code: that code's file, and the unit that calls it. An option has to
  // tell one release of the library from another, as it is part of a kernel's name in the cache.
  std::string archive = {};
  DeviceUnit unit = {};
  // Called with each module (CUmodule) that was loaded, its context current. Null: nothing is to be done.
  Status (*on_load)(void* module) = nullptr;
};

// The mesh that kernels get to reach peers: a value of the device type `type`, which transports/list.h names.
struct MeshPart {
  std::string type;
  std::vector<std::byte> value;
  std::shared_ptr<const DeviceSources> sources = {};  // null: Weft's own suffice
};

template <class Mesh>
MeshPart mesh_part(std::string type, const Mesh& mesh, std::shared_ptr<const DeviceSources> sources = {}) {
  MeshPart part{std::move(type), std::vector<std::byte>(sizeof mesh), std::move(sources)};
  std::memcpy(part.value.data(), &mesh, sizeof mesh);
  return part;
}

// The ranks of a communicator that is being made.
struct Group {
  int rank = 0;
  const std::vector<RankFacts>* facts = nullptr;
  std::vector<int> peers;  // those that this rank reaches through this transport
  Bootstrap* bootstrap = nullptr;
  bool has_ports = false;  // of any rank, for a transport that brings memory: peers are those that it maps
  double timeout_s = 0;
  std::string secret;  // of this communicator, the same on all ranks: for connections between them
};

class Link {
 public:
  virtual ~Link() = default;
  // Carries out what kernels have asked for, and takes leave of the peers; bounded. The last call but lose(), which ends
  // the wait for a peer that is lost. Idempotent.
  virtual void finish() {}

  // Of a transport with Caps::reaches_gpus or hosts_store_words, asked once, before windows are made: whether peers and this
  // rank put to and from memory of the rank's device. `probe` is such memory, as windows would have it. Errors: kUnsupported
  // and others say why not.
  virtual Status try_device_memory(std::byte* /*probe*/, uint64_t /*bytes*/) {
    return Status::make(Code::kUnsupported, "this transport does not reach memory of a GPU");
  }
  // A window was made or has grown: what peers need to reach this rank's part. All ranks call it.
  virtual Result<std::string> offer(const WindowView& window) { return std::string(); }
  // ... and what the others offered, by rank. Afterwards, kernels of this rank may use the window.
  virtual Status accept(const WindowView& window, const std::vector<std::string>& offers) { return {}; }
  // The window's memory beyond the first `bytes` bytes is about to go away, 0 for all of it.
  virtual void forget(int window, uint64_t bytes) {}

  // For a window whose offers have been accepted; lives until forget(). Of a link that brings memory, for those peers that
  // it does not map.
  virtual Result<MeshPart> mesh(const WindowView& window) {
    return Status::make(Code::kUnsupported, "this transport has no mesh of its own");
  }

  // ---- a transport that brings the memory of windows (Caps::brings_memory) ----
  // A window of `bytes` bytes, a multiple of 2 MiB, is about to be: what can fail on this rank alone. Local. forget()
  // undoes it.
  virtual Status allocate(int window, uint64_t bytes) {
    return Status::make(Code::kUnsupported, "this transport brings no memory");
  }
  // allocate() has worked on every rank: zero-filled memory on each, and where this rank finds it, by rank; null for ports. Collective
  // over the ranks of the communicator; bounded by its deadline. Errors: kUnsupported with the reason, kPeerLost,
  // kSystem; then forget() is called.
  virtual Result<std::vector<std::byte*>> map(int window) {
    return Status::make(Code::kUnsupported, "this transport brings no memory");
  }

  // Carries out some commands of kernels, and takes in some arrivals from peers: threads of host kernels call
  // it while they wait. Never waits; true: it did some work. Threads: any.
  virtual bool help() { return false; }
  // For threads whose help() is in vain: sleeps until more has come, for a fraction of a millisecond at most. False, and no sleep:
  // awake, they would hear of it sooner. Threads: any.
  virtual bool rest() { return false; }

  // ok while every peer is there: else who was lost, where, expected and seen. fault(): the same, but a peer that is
  // lost is none: what kernels asked for could not be handed over.
  virtual Status status() { return {}; }
  virtual Status fault() { return {}; }
  // Tells the link that a peer is lost, and how: operations that involve it fail now, and its farewell is not
  // awaited. Never waits. Threads: any.
  virtual void lose(int peer, const std::string& how) {}
  // `tell` is called once for each peer that is lost, at once for those that are, from threads of the link.
  // Short: it runs under a lock.
  virtual void on_lost(std::function<void(int peer, const std::string& how)> tell) {}

  // ---- temporary registrations of memory, on the host ----
  // Whether a registration costs little against sending some hundred KiB; the same on all ranks that have this link.
  virtual bool takes_temporary() const { return false; }
  // Kernels may put from this memory of the process, and peers to which a kernel announces it may put to it, until
  // reclaim(). Returns the registration: a number above 0. Errors: kUnsupported, kCapacity, kSystem. Threads: any.
  virtual Result<uint32_t> register_temporary(std::byte* /*memory*/, uint64_t /*bytes*/) {
    return Status::make(Code::kUnsupported, "this transport takes no temporary registrations");
  }
  // Takes the memory back: afterwards the network does not touch it, whatever was under way. `is_done`: all peers
  // that were told of it are known to be done with it; else queued writes are waited for, a second at most, and a
  // peer that was not sent everything is lost.
  // Threads: any.
  virtual void reclaim(const std::vector<uint32_t>& /*registrations*/, bool /*is_done*/) {}
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* name() const = 0;        // as in WEFT_TRANSPORT
  virtual const char* carried_by() const = 0;  // one line for people
  // Probes this machine; never fails: says why it is unusable instead.
  virtual Caps caps(Device device) const = 0;
  // This rank's facts for all other ranks before transports are chosen: RankFacts::descriptors.
  virtual std::string descriptor(Device device) const { return {}; }
  // Why it cannot carry data from `self` to `peer`; empty when it can. Pure.
  virtual std::string refuses(const RankFacts& self, const RankFacts& peer) const = 0;
  // The capabilities between two ranks, where they differ from pair to pair: how kernels reach the peer, and the
  // estimates. The same in both directions. Pure.
  virtual Caps towards(const Caps& caps, const RankFacts& self, const RankFacts& peer) const { return caps; }
  // Collective over all ranks of the group, those without peers here included. Errors: kPeerLost naming the
  // rank that stayed away, kSystem, kUnsupported with the reason; the same ranks may disagree about it.
  virtual Result<std::unique_ptr<Link>> connect(const Group& group) const = 0;
};

// Every transport that Weft has, best first.
const std::vector<const Transport*>& transports();

struct Candidate {
  const Transport* transport;
  Caps caps;
};

// transports() with their capabilities for `device` on this machine.
std::vector<Candidate> candidates(Device device);

// Numbers the nodes: ranks of one host share a node; with ranks_per_node > 0, only that many consecutive
// ranks of it do. Fills RankFacts::node. Pure.
void number_nodes(std::vector<RankFacts>& facts, int64_t ranks_per_node);

// The transport to each rank, in rank order; null at `self`: the first usable candidate that `wanted` admits
// and that refuses in neither direction. `wanted` is "auto", or names with commas between. Pure. Errors:
// kInvalid for a name that does not exist, kUnsupported when a peer cannot be reached, with the reason of every
// candidate.
Result<std::vector<const Transport*>> select_transports(const std::vector<Candidate>& candidates,
                                                        const std::vector<RankFacts>& facts, int self,
                                                        std::string_view wanted);

// A mesh of both parts: mapped peers through `mapped`, the others through `port`.
MeshPart hybrid_mesh(const MeshPart& mapped, const MeshPart& port);

}  // namespace weft
