// SPDX-License-Identifier: Apache-2.0
//
// Engine moves bytes between processes: one-sided writes and reads on registered memory, sends and receives,
// counted immediates, barriers; over any provider, with one to many NICs ("rails"), which need not be as many
// on both sides.
//
//   Result<std::unique_ptr<Engine>> engine = Engine::open({.provider = network, .nics = {nic}});
//   std::shared_ptr<Memory> mine = *(*engine)->enroll({data, bytes}, kRemoteWrite);
//   give((*engine)->address(), (*engine)->describe(*mine));                       // by any means, as bytes
//   std::shared_ptr<Peer> peer = *(*engine)->connect(their_address, Deadline::after_s(10));
//   std::shared_ptr<Remote> theirs = *(*engine)->attach(their_descriptor, Deadline::after_s(10));
//   (*engine)->write({mine, 0, theirs, 0, bytes, {.imm = 7}});
//   // there:  (*engine)->wait_imm(*(*engine)->imm_counter(peer, 7), 1, deadline)
//
// One engine per device: it owns that device's rails, one worker thread and one progress token. The holder of
// the token posts and polls. A thread that waits takes the token and so makes its own progress; the worker
// takes it when no thread waits. Order: none between transfers. The immediate of a write is counted after all
// bytes of that write are visible. Errors: a mistake in arguments is a kInvalid Status of the call, and
// nothing is written. Later failures belong to the Transfer; those of a lost peer are kPeerLost and name it.
// The engine stays usable. Handles (memory, peers, transfers, counters) go to the engine that made them;
// others are kInvalid. Threads: every method from any thread. Callbacks run on a thread of their own and may
// call every method.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/deadline.h"
#include "base/status.h"
#include "providers/provider.h"
#include "transfer/handles.h"

namespace weft::transfer {

using provider::Access;
using provider::kLocal;
using provider::kReadOnly;
using provider::kRemoteRead;
using provider::kRemoteWrite;
using provider::kTemporary;

struct Options {
  std::shared_ptr<provider::Provider> provider;
  std::vector<provider::Nic> nics;  // one rail each, in this order; a NIC may appear more than once
  std::string name;                 // what error messages of peers call this engine; empty: host:process
  std::string secret = config().job_secret;   // peers must prove to know it; empty: any engine may connect
  double timeout_s = config().timeout_s;      // of transfers that do not say otherwise
  double heartbeat_s = config().heartbeat_s;  // longest silence towards a peer
  double peer_dead_s = config().peer_dead_s;  // longest silence of a peer
  uint64_t shard_bytes_min = 8192;            // a write is cut over rails in multiples of this
  bool has_worker = true;  // false: progress only inside of calls that wait, and in progress()
  int worker_cpu = -1;     // pin the worker; -1: wherever the system likes
  uint32_t stage_slots = 4;
  uint32_t stage_slot_bytes = 256 << 10;  // small enough that all slots stay in a core's cache
  uint32_t tx_depth = 0;                  // operations in flight per rail; 0: what the rail likes
};

constexpr uint32_t kAnyRail = UINT32_MAX;

// How to carry out one request and how to tell of its end.
struct How {
  std::optional<uint32_t> imm;  // 0 to kImmIdMax
  Notify notify = Notify::kOnce;
  uint32_t rail = kAnyRail;                     // pin to one local rail, while its path to the peer works
  double timeout_s = 0;                         // 0: the engine's
  std::shared_ptr<Counter> counter;             // is advanced, or
  std::function<void(const Status&)> callback;  // is called once, on the callback thread
};

struct WriteRequest {
  std::shared_ptr<Memory> src;
  uint64_t src_offset = 0;
  std::shared_ptr<Remote> dst;
  uint64_t dst_offset = 0;
  uint64_t bytes = 0;
  How how;
};
struct ReadRequest {
  std::shared_ptr<Memory> dst;
  uint64_t dst_offset = 0;
  std::shared_ptr<Remote> src;
  uint64_t src_offset = 0;
  uint64_t bytes = 0;
  How how;  // no imm: the owner of the memory is not told of reads
};
struct PagedRequest {
  std::shared_ptr<Memory> local;
  Pages local_pages;
  std::shared_ptr<Remote> remote;
  Pages remote_pages;
  uint64_t page_bytes = 0;
  How how;
};
struct ScatterTarget {
  std::shared_ptr<Remote> remote;
  uint64_t remote_offset = 0;
  uint64_t local_offset = 0;
  uint64_t bytes = 0;
};
struct ScatterRequest {
  std::shared_ptr<Memory> local;
  std::vector<ScatterTarget> targets;  // scatter(): one immediate for each, also when two share a peer
  How how;
};

class Engine {
 public:
  // Errors: kInvalid (no provider, no NIC), kSystem and kUnsupported (a NIC that does not open).
  static Result<std::unique_ptr<Engine>> open(Options options);
  ~Engine();

  Status check_owner() const { return owner_.check("engine"); }
  const std::string& name() const;
  std::string address() const;
  std::vector<const provider::Rail*> rails() const;
  RailPlan rail_plan() const;  // for expected_imms()

  // Memory. `range` must stay allocated until unregister() or close() has returned. Device memory that no
  // rail can reach is staged through pinned host memory. Errors: kInvalid, kSystem (the provider refused).
  Result<std::shared_ptr<Memory>> enroll(const provider::Range& range, uint32_t access);
  // Bytes that let a connected peer attach. Errors: kInvalid for memory without remote access.
  Result<std::string> describe(const Memory& memory) const;
  // For kTemporary memory, without a round trip: the caller sends keys() to the peer by its own way, and adopt() there
  // makes a Remote of it, as attach() does. unregister() takes the memory back without telling the peer. Nothing is
  // written to it from then on; a later write fails at the peer, and is_revoked() of its Remote is then true. Errors:
  // kInvalid, kUnsupported for more than TemporaryKeys::kRailsMax rails.
  Result<TemporaryKeys> keys(const Memory& memory) const;
  Result<std::shared_ptr<Remote>> adopt(const std::shared_ptr<Peer>& peer, const TemporaryKeys& keys) const;
  // Takes the memory back: peers that attached it are told and confirm, after which none can touch it.
  // Errors: kPeerLost names peers that did not confirm until the deadline; the memory is unregistered in any
  // case.
  Status unregister(const std::shared_ptr<Memory>& memory, Deadline until);

  // Peers. connect() gives the same Peer until that is lost, and makes a new life of the connection
  // afterwards.
  Result<std::shared_ptr<Peer>> connect(std::string_view address, Deadline until);
  std::vector<std::shared_ptr<Peer>> peers() const;  // connected ones, also those that connected to us
  Result<std::shared_ptr<Remote>> attach(std::string_view descriptor, Deadline until);
  Status disconnect(const std::shared_ptr<Peer>& peer);
  // Call it when the peer is known to be lost: every operation that involves the peer fails now, with that reason. The
  // peer is not told.
  void lose(const std::shared_ptr<Peer>& peer, Status why);

  Result<std::shared_ptr<Transfer>> write(WriteRequest request);
  Result<std::shared_ptr<Transfer>> write_pages(PagedRequest request);
  Result<std::shared_ptr<Transfer>> scatter(ScatterRequest request);
  Result<std::shared_ptr<Transfer>> read(ReadRequest request);
  Result<std::shared_ptr<Transfer>> read_pages(PagedRequest request);
  Result<std::shared_ptr<Transfer>> gather(ScatterRequest request);  // reads; the opposite of scatter()
  Result<std::shared_ptr<Transfer>> notify(const std::shared_ptr<Peer>& peer, How how);  // an immediate alone
  // Two-sided. Messages of one peer arrive in order. `bytes` of memory at `offset`; long ones are read by the
  // receiver.
  Result<std::shared_ptr<Transfer>> send(const std::shared_ptr<Peer>& peer, std::shared_ptr<Memory> src,
                                         uint64_t offset, uint64_t bytes, How how);
  // From `peer`, or from anyone when null, into memory. Fails with kCapacity when what arrives is longer.
  Result<std::shared_ptr<Transfer>> recv(const std::shared_ptr<Peer>& peer, std::shared_ptr<Memory> dst,
                                         uint64_t offset, uint64_t bytes, How how);

  // Immediates of `peer` with `id`, counted since the connection was made.
  Result<std::shared_ptr<ImmCounter>> imm_counter(const std::shared_ptr<Peer>& peer, uint32_t id);
  Status wait_imm(const std::shared_ptr<ImmCounter>& counter, uint64_t at_least, Deadline until);
  // Calls once when the counter has reached `at_least`, or its peer is lost.
  Status on_imm(const std::shared_ptr<ImmCounter>& counter, uint64_t at_least,
                std::function<void(const Status&)> callback);
  // Waits until every peer of the group has called barrier() with this id as often as this engine has, and what this
  // engine told them of it has arrived. Ids of barriers, 0 to kImmIdMax, have nothing to do with those of immediates.
  Status barrier(const std::vector<std::shared_ptr<Peer>>& group, uint32_t id, Deadline until);

  Status wait(const std::shared_ptr<Transfer>& transfer, Deadline until);
  Status wait(const Counter& counter, uint64_t finished_at_least, Deadline until);
  // Calls once when the transfer has ended, also if it has already. How::callback is called besides.
  void on_done(const std::shared_ptr<Transfer>& transfer, std::function<void(const Status&)> callback);
  // kQueued: dropped, nothing was written. kPosted: the rest is dropped, wait for the end. Finished: no
  // effect. Returns the phase that cancel() found.
  Phase cancel(const std::shared_ptr<Transfer>& transfer);

  // One round of posting and polling, unless another thread holds the token. For engines without a worker.
  void progress();
  // Sleeps until progress() is worth while, or `most_ns` (less than a second). False, and no sleep: the rails cannot tell. Where
  // others call progress() meanwhile, it may sleep to its end.
  bool sleep(uint64_t most_ns) const;
  // Lists everything under way, one line per peer and transfer: for error reports.
  std::string dump() const;
  // Fails all operations under way with kClosed, tells peers, stops the threads. Idempotent.
  void close();

  Core& core() { return *core_; }

 private:
  Status wait_for_end(const Transfer& transfer, Deadline until);
  Result<std::shared_ptr<Transfer>> paged(OpKind kind, PagedRequest request);
  Result<std::shared_ptr<Transfer>> spread(OpKind kind, ScatterRequest request);
  Result<std::shared_ptr<Transfer>> signal(const std::shared_ptr<Peer>& peer, ImmClass kind, How how);
  Result<std::shared_ptr<ImmCounter>> counter(const std::shared_ptr<Peer>& peer, ImmClass kind, uint32_t id);
  explicit Engine(std::unique_ptr<Core> core);
  const OwnerProcess owner_;
  std::unique_ptr<Core> core_;
};

}  // namespace weft::transfer
