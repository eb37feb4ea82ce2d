// SPDX-License-Identifier: Apache-2.0
//
// Checks arguments and turns requests into transfers; what happens to those is in core.h.
#include "transfer/engine.h"

#include <algorithm>

#include "base/log.h"
#include "transfer/builder.h"
#include "transfer/core.h"
#include "transfer/staging.h"

namespace weft::transfer {
namespace {

bool fits(uint64_t offset, uint64_t bytes, uint64_t all) {
  return offset <= all && bytes <= all - offset;
}

Status check_range(const char* argument, uint64_t offset, uint64_t bytes, uint64_t all, const char* what) {
  if (fits(offset, bytes, all)) return {};
  return Status::invalid("{}: got {} bytes at offset {}, allowed: within the {} bytes of the {}", argument,
                         bytes, offset, all, what);
}

Status check_readable(const Memory& local, const Remote& remote) {
  if (!local.is_staged() && !remote.is_staged()) return {};
  return Status::make(Code::kUnsupported,
                      "read: device memory that no NIC reaches cannot be read; let its owner write");
}

How imm_only(uint32_t id) {
  How how;
  how.imm = id;
  return how;
}

}  // namespace

Engine::Engine(std::unique_ptr<Core> core) : core_(std::move(core)) {}
Engine::~Engine() {
  close();
}

Result<std::unique_ptr<Engine>> Engine::open(Options options) {
  if (!options.provider) return Status::invalid("provider: got nothing, allowed: a provider");
  if (options.nics.empty() || options.nics.size() > kRailsMax)
    return Status::invalid("nics: got {}, allowed: 1 to {}", options.nics.size(), kRailsMax);
  if (options.stage_slots == 0 || options.stage_slots > 1024 || options.stage_slot_bytes < 4096)
    return Status::invalid("stage_slots, stage_slot_bytes: got {} of {}, allowed: 1 to 1024 of 4096 or more",
                           options.stage_slots, options.stage_slot_bytes);
  auto core = std::make_unique<Core>(std::move(options));
  WEFT_TRY(core->open());
  return std::unique_ptr<Engine>(new Engine(std::move(core)));
}

const std::string& Engine::name() const {
  return core_->name;
}
std::string Engine::address() const {
  return core_->address_bytes();
}
RailPlan Engine::rail_plan() const {
  return {core_->rail_count(), core_->options.shard_bytes_min, core_->write_bytes_max()};
}
std::vector<const Rail*> Engine::rails() const {
  std::vector<const Rail*> out;
  for (const RailState& state : core_->rails) out.push_back(state.rail.get());
  return out;
}

Result<std::shared_ptr<Memory>> Engine::enroll(const provider::Range& range, uint32_t access) {
  if (!range.data || range.bytes == 0)
    return Status::invalid("memory: got {} bytes at {}, allowed: 1 byte or more", range.bytes, range.data);
  if ((access & ~uint32_t{kRemoteRead | kRemoteWrite | kReadOnly}) &&
      access != uint32_t{kRemoteWrite | kTemporary})
    return Status::invalid("access: got {}, allowed: local, remote read, remote write, temporary for writes",
                           access);
  if ((access & kReadOnly) && (access & kRemoteWrite))
    return Status::invalid("access: got remote write of memory that is read-only, allowed: remote read");
  for (const RailState& state : core_->rails)
    if ((access & kTemporary) && !state.rail->caps().takes_temporary)
      return Status::make(Code::kUnsupported, "memory: {} takes no temporary registrations",
                          state.rail->nic().name);
  return core_->enroll(range, access);
}

Result<std::string> Engine::describe(const Memory& memory) const {
  WEFT_TRY(core_->check_own("memory", memory.maker_));
  if (!memory.is_registered()) return Status::invalid("memory: got memory that was unregistered");
  if (memory.access() == kLocal)
    return Status::invalid(
        "memory: got memory for local use, allowed: memory registered for remote reads or writes");
  return to_bytes(core_->describe(memory));
}

Result<TemporaryKeys> Engine::keys(const Memory& memory) const {
  WEFT_TRY(core_->check_own("memory", memory.maker_));
  return core_->keys(memory);
}

Result<std::shared_ptr<Remote>> Engine::adopt(const std::shared_ptr<Peer>& peer,
                                              const TemporaryKeys& keys) const {
  WEFT_TRY(check_handle("peer", peer != nullptr));
  WEFT_TRY(core_->check_own("peer", peer->maker_));
  return core_->adopt(peer, keys);
}

Status Engine::unregister(const std::shared_ptr<Memory>& memory, Deadline until) {
  WEFT_TRY(check_handle("memory", memory != nullptr));
  WEFT_TRY(core_->check_own("memory", memory->maker_));
  return core_->unregister(memory, until);
}

Result<std::shared_ptr<Peer>> Engine::connect(std::string_view address, Deadline until) {
  return core_->connect(address, until);
}
std::vector<std::shared_ptr<Peer>> Engine::peers() const {
  return core_->connected_peers();
}
Result<std::shared_ptr<Remote>> Engine::attach(std::string_view descriptor, Deadline until) {
  return core_->attach(descriptor, until);
}
Status Engine::disconnect(const std::shared_ptr<Peer>& peer) {
  WEFT_TRY(check_handle("peer", peer != nullptr));
  WEFT_TRY(core_->check_own("peer", peer->maker_));
  core_->disconnect(peer);
  return {};
}

void Engine::lose(const std::shared_ptr<Peer>& peer, Status why) {
  core_->lose(peer, std::move(why));
}

Result<std::shared_ptr<Transfer>> Engine::write(WriteRequest r) {
  if (!r.src || !r.dst) return check_handle(r.src ? "dst" : "src", false);
  Builder build(*core_, OpKind::kWrite, r.how);
  if (!fits(r.src_offset, r.bytes, r.src->bytes()))
    return check_range("src_offset", r.src_offset, r.bytes, r.src->bytes(), "source");
  if (!fits(r.dst_offset, r.bytes, r.dst->bytes()))
    return check_range("dst_offset", r.dst_offset, r.bytes, r.dst->bytes(), "destination");
  WEFT_TRY(build.begin(std::move(r.src)));
  WEFT_TRY(build.add_target(std::move(r.dst), kRemoteWrite).status());
  build.add_range(0, r.src_offset, r.dst_offset, r.bytes, core_->rail_count());
  return build.submit();
}

Result<std::shared_ptr<Transfer>> Engine::read(ReadRequest r) {
  WEFT_TRY(check_handle("dst", r.dst != nullptr));
  WEFT_TRY(check_handle("src", r.src != nullptr));
  WEFT_TRY(check_readable(*r.dst, *r.src));
  Builder build(*core_, OpKind::kRead, r.how);
  WEFT_TRY(check_range("dst_offset", r.dst_offset, r.bytes, r.dst->bytes(), "destination"));
  WEFT_TRY(check_range("src_offset", r.src_offset, r.bytes, r.src->bytes(), "source"));
  WEFT_TRY(build.begin(std::move(r.dst), false));
  WEFT_TRY(build.add_target(std::move(r.src), kRemoteRead).status());
  build.add_range(0, r.dst_offset, r.src_offset, r.bytes, core_->rail_count());
  return build.submit();
}

Result<std::shared_ptr<Transfer>> Engine::paged(OpKind kind, PagedRequest r) {
  WEFT_TRY(check_handle("local", r.local != nullptr));
  WEFT_TRY(check_handle("remote", r.remote != nullptr));
  const bool is_write = kind == OpKind::kWrite;
  if (!is_write) WEFT_TRY(check_readable(*r.local, *r.remote));
  if (r.page_bytes == 0) return Status::invalid("page_bytes: got 0, allowed: 1 or more");
  const bool is_each = r.how.imm && r.how.notify == Notify::kEach;
  WEFT_TRY_ASSIGN(const std::vector<PagePair> pairs,
                  pair_pages(r.local_pages, r.remote_pages, r.page_bytes, !is_each));
  if (pairs.empty()) return Status::invalid("pages: got none, allowed: 1 or more");
  for (const PagePair& pair : pairs) {
    WEFT_TRY(check_range("local_pages", pair.src, pair.bytes, r.local->bytes(), "local memory"));
    WEFT_TRY(check_range("remote_pages", pair.dst, pair.bytes, r.remote->bytes(), "remote memory"));
  }
  Builder build(*core_, kind, r.how);
  WEFT_TRY(build.begin(std::move(r.local), is_write));
  WEFT_TRY(build.add_target(std::move(r.remote), is_write ? kRemoteWrite : kRemoteRead).status());
  build->rest_.reserve(pairs.size());
  for (const PagePair& pair : pairs) build.add_range(0, pair.src, pair.dst, pair.bytes, 1);
  return build.submit();
}

Result<std::shared_ptr<Transfer>> Engine::write_pages(PagedRequest r) {
  return paged(OpKind::kWrite, std::move(r));
}
Result<std::shared_ptr<Transfer>> Engine::read_pages(PagedRequest r) {
  return paged(OpKind::kRead, std::move(r));
}

Result<std::shared_ptr<Transfer>> Engine::spread(OpKind kind, ScatterRequest r) {
  WEFT_TRY(check_handle("local", r.local != nullptr));
  const bool is_write = kind == OpKind::kWrite;
  if (r.targets.empty()) return Status::invalid("targets: got none, allowed: 1 or more");
  for (const ScatterTarget& target : r.targets) {
    WEFT_TRY(check_handle("remote", target.remote != nullptr));
    WEFT_TRY(
        check_range("local_offset", target.local_offset, target.bytes, r.local->bytes(), "local memory"));
    WEFT_TRY(check_range("remote_offset", target.remote_offset, target.bytes, target.remote->bytes(),
                         "remote memory"));
    if (!is_write) WEFT_TRY(check_readable(*r.local, *target.remote));
  }
  Builder build(*core_, kind, r.how);
  WEFT_TRY(build.begin(std::move(r.local), is_write));
  for (ScatterTarget& target : r.targets) {
    WEFT_TRY_ASSIGN(const uint32_t number,
                    build.add_target(std::move(target.remote), is_write ? kRemoteWrite : kRemoteRead));
    build.add_range(number, target.local_offset, target.remote_offset, target.bytes, 1);
  }
  return build.submit();
}

Result<std::shared_ptr<Transfer>> Engine::scatter(ScatterRequest r) {
  return spread(OpKind::kWrite, std::move(r));
}
Result<std::shared_ptr<Transfer>> Engine::gather(ScatterRequest r) {
  return spread(OpKind::kRead, std::move(r));
}

Result<std::shared_ptr<Transfer>> Engine::notify(const std::shared_ptr<Peer>& peer, How how) {
  return signal(peer, ImmClass::kCount, std::move(how));
}

Result<std::shared_ptr<Transfer>> Engine::signal(const std::shared_ptr<Peer>& peer, ImmClass kind, How how) {
  if (!how.imm) return Status::invalid("imm: got none, allowed: 0 to {}", kImmIdMax);
  Builder build(*core_, OpKind::kNotify, how);
  WEFT_TRY(build.set_peer(peer));
  WEFT_TRY(build.begin(nullptr));
  build->imm_key_ = counter_key(kind, *how.imm);
  build->first_.rail = static_cast<uint16_t>(how.rail == kAnyRail ? 0 : how.rail);
  return build.submit();
}

Result<std::shared_ptr<Transfer>> Engine::send(const std::shared_ptr<Peer>& peer, std::shared_ptr<Memory> src,
                                               uint64_t offset, uint64_t bytes, How how) {
  WEFT_TRY(check_handle("src", src != nullptr));
  WEFT_TRY(check_range("offset", offset, bytes, src->bytes(), "source"));
  Builder build(*core_, OpKind::kSend, how);
  WEFT_TRY(build.set_peer(peer));
  WEFT_TRY(build.begin(std::move(src), false));
  build.add_piece({offset, 0, bytes, 0, 0, false});
  return build.submit();
}

Result<std::shared_ptr<Transfer>> Engine::recv(const std::shared_ptr<Peer>& peer, std::shared_ptr<Memory> dst,
                                               uint64_t offset, uint64_t bytes, How how) {
  WEFT_TRY(check_handle("dst", dst != nullptr));
  WEFT_TRY(check_range("offset", offset, bytes, dst->bytes(), "destination"));
  Builder build(*core_, OpKind::kRecv, how);
  WEFT_TRY(build.begin(std::move(dst), false));
  if (peer) WEFT_TRY(build.set_peer(peer));
  build->recv_offset_ = offset;
  build.add_piece({offset, 0, bytes, 0, 0, false});
  return build.submit();
}

Result<std::shared_ptr<ImmCounter>> Engine::imm_counter(const std::shared_ptr<Peer>& peer, uint32_t id) {
  return counter(peer, ImmClass::kCount, id);
}

Result<std::shared_ptr<ImmCounter>> Engine::counter(const std::shared_ptr<Peer>& peer, ImmClass kind,
                                                    uint32_t id) {
  WEFT_TRY(check_handle("peer", peer != nullptr));
  WEFT_TRY(core_->check_own("peer", peer->maker_));
  if (id > kImmIdMax) return Status::invalid("imm: got {}, allowed: 0 to {}", id, kImmIdMax);
  return core_->imm_counter(peer, counter_key(kind, id));
}

Status Engine::wait_imm(const std::shared_ptr<ImmCounter>& counter, uint64_t at_least, Deadline until) {
  WEFT_TRY(check_handle("counter", counter != nullptr));
  WEFT_TRY(core_->check_own("counter", counter->maker_));
  const double allowed_s = until.left_s();
  const bool came = core_->wait(until, [&] {
    return counter->value() >= at_least || counter->lost_.load(std::memory_order_acquire) ||
           core_->is_closed();
  });
  if (counter->value() >= at_least) return {};
  const std::shared_ptr<Peer> peer = counter->peer_.lock();
  const std::string who = peer ? peer->name() : "?";
  const char* what = key_class(counter->key_) == ImmClass::kBarrier ? "barrier" : "immediate";
  if (!came)
    return logged(Status::make(
        Code::kPeerLost, "transfer.wait_imm: '{}' waited {} s for peer '{}', {} {}: expected {}, saw {}",
        core_->name, allowed_s, who, what, counter->id(), at_least, counter->value()));
  if (counter->lost_.load(std::memory_order_acquire))
    return Status::make(Code::kPeerLost, "transfer.wait_imm: {} {}: expected {}, saw {}: {}", what,
                        counter->id(), at_least, counter->value(), counter->why_.message());
  return core_->closed_status();
}

Status Engine::on_imm(const std::shared_ptr<ImmCounter>& counter, uint64_t at_least,
                      std::function<void(const Status&)> callback) {
  WEFT_TRY(check_handle("counter", counter != nullptr));
  WEFT_TRY(core_->check_own("counter", counter->maker_));
  return core_->on_imm(counter, at_least, std::move(callback));
}

Status Engine::barrier(const std::vector<std::shared_ptr<Peer>>& group, uint32_t id, Deadline until) {
  std::vector<std::pair<std::shared_ptr<ImmCounter>, uint64_t>> expected;
  std::vector<std::shared_ptr<Transfer>> signals;
  for (const auto& peer : group) {
    WEFT_TRY_ASSIGN(std::shared_ptr<ImmCounter> arrivals, counter(peer, ImmClass::kBarrier, id));
    WEFT_TRY_ASSIGN(signals.emplace_back(), signal(peer, ImmClass::kBarrier, imm_only(id)));
    expected.emplace_back(std::move(arrivals), core_->next_barrier_round(peer, id));
  }
  for (auto& [arrivals, round] : expected) WEFT_TRY(wait_imm(arrivals, round, until));
  // What this engine says next, a farewell above all, must not overtake its part of the barrier. Every peer has
  // come: one that has left since does not matter here.
  for (const auto& signal : signals) WEFT_TRY(wait_for_end(*signal, until));
  return {};
}

Status Engine::wait(const std::shared_ptr<Transfer>& transfer, Deadline until) {
  WEFT_TRY(check_handle("transfer", transfer != nullptr));
  WEFT_TRY(core_->check_own("transfer", transfer->maker_));
  WEFT_TRY(wait_for_end(*transfer, until));
  return transfer->status();
}

// Until the transfer has ended, well or badly.
Status Engine::wait_for_end(const Transfer& transfer, Deadline until) {
  if (transfer.is_finished()) return {};
  const double allowed_s = until.left_s();
  if (core_->wait(until, [&] { return transfer.is_finished(); })) return {};
  const std::shared_ptr<Peer> peer = transfer.remote_ ? transfer.remote_->peer() : transfer.peer_;
  const bool is_one = peer && transfer.more_.empty();  // a scatter goes to several, and anyone may send
  const std::string whom = is_one ? text(", peer '{}'", peer->name()) : "";
  return Status::make(Code::kPeerLost,
                      "transfer.wait: waited {} s for a {} of {} bytes{}: expected done, saw {}", allowed_s,
                      to_string(transfer.kind()), transfer.bytes(), whom, to_string(transfer.phase()));
}

Status Engine::wait(const Counter& counter, uint64_t finished_at_least, Deadline until) {
  const bool is_there = counter.finished() >= finished_at_least;
  const double allowed_s = is_there ? 0 : until.left_s();
  if (!is_there && !core_->wait(until, [&] { return counter.finished() >= finished_at_least; }))
    return Status::make(Code::kPeerLost,
                        "transfer.wait: waited {} s for transfers: expected {} finished, saw {}", allowed_s,
                        finished_at_least, counter.finished());
  return counter.failed() ? counter.first_failure() : Status();
}

void Engine::on_done(const std::shared_ptr<Transfer>& transfer, std::function<void(const Status&)> callback) {
  Status own = check_handle("transfer", transfer != nullptr);
  if (own.ok()) own = core_->check_own("transfer", transfer->maker_);
  if (own.ok()) return core_->on_done(*transfer, std::move(callback));
  core_->callbacks.post([call = std::move(callback), own] { call(own); });
}

Phase Engine::cancel(const std::shared_ptr<Transfer>& transfer) {
  return transfer->maker_ == core_->serial ? core_->cancel(transfer) : transfer->phase();
}
bool Engine::sleep(uint64_t most_ns) const {
  return core_->rails.size() == 1 && core_->rails[0].rail->sleep(most_ns);
}

void Engine::progress() {
  core_->progress();
}
std::string Engine::dump() const {
  return core_->dump();
}
void Engine::close() {
  core_->close();
}

}  // namespace weft::transfer
