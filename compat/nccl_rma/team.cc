// SPDX-License-Identifier: Apache-2.0
//
// What all ranks of a team do together, its contexts, and its end. The work is in team_work.cc.
#include "compat/nccl_rma/team.h"

#include <algorithm>
#include <cstring>

#include "base/config.h"
#include "base/log.h"
#include "compat/nccl_rma/rma.h"

namespace weft::nccl_rma {
namespace {

constexpr double kDrain_s = 5;

// Settings that all ranks must share, before the address of a rank's engine.
std::string introduction(const proxy::Network& network) {
  return text("weft rma {} {}\n", kProtocol, network.provider->name());
}

// The stream for copies, and what the driver makes at the first one, are there before a kernel waits for a copy.
Status warm_copies(const Region& region) {
  uint64_t word = 0;
  return transfer::copy_to_host(&word, region.range.data, std::min<uint64_t>(region.range.bytes, sizeof word),
                                region.range);
}

}  // namespace

Team::Team(int rank, int ranks, std::unique_ptr<transfer::Engine> engine,
           std::shared_ptr<RendezvousBootstrap> rendezvous)
    : rank_(rank),
      timeout_s_(config().timeout_s),
      engine_(std::move(engine)),
      rendezvous_(std::move(rendezvous)),
      links_(static_cast<size_t>(ranks)) {}

Result<std::shared_ptr<Team>> Team::connect(const proxy::Network& network, const provider::Nic& nic,
                                            const UniqueId& unique_id, int rank, int ranks) {
  const Deadline until = Deadline::after_s(config().timeout_s);
  WEFT_TRY_ASSIGN(std::shared_ptr<RendezvousBootstrap> rendezvous,
                  join_rendezvous(unique_id, rank, ranks, until));
  transfer::Options options;
  options.provider = network.provider;
  options.nics = {nic};
  options.name = text("rank {}", rank);
  WEFT_TRY_ASSIGN(std::unique_ptr<transfer::Engine> engine, transfer::Engine::open(std::move(options)));
  std::shared_ptr<Team> team(new Team(rank, ranks, std::move(engine), std::move(rendezvous)));
  WEFT_TRY_ASSIGN(team->mail_, Mail::open(*team->engine_));
  team->ways_.reset(new Ways{*team->engine_, *team->mail_, team->requests_, network.pace.bytes_in_flight,
                             network.pace.writes_in_flight});
  WEFT_TRY(team->meet(introduction(network)));
  team->worker_ = std::thread([self = team.get()] { self->run(); });
  return team;
}

Status Team::meet(const std::string& introduction) {
  const Deadline until = Deadline::after_s(timeout_s_);
  WEFT_TRY_ASSIGN(const std::vector<std::string> addresses,
                  exchange("connect", introduction + engine_->address()));
  Status first;
  for (int peer = 0; peer < ranks() && first.ok(); ++peer) {
    const std::string& address = addresses[static_cast<size_t>(peer)];
    if (!address.starts_with(introduction)) {
      first = Status::invalid("rank {}: got '{}', allowed: '{}' as here", peer,
                              address.substr(0, address.find('\n')),
                              introduction.substr(0, introduction.size() - 1));
    } else if (peer != rank_) {
      auto connected = engine_->connect(std::string_view(address).substr(introduction.size()), until);
      if (!connected.ok()) {
        first = connected.status();
        continue;
      }
      links_[static_cast<size_t>(peer)].peer = *connected;
      rank_of_[connected->get()] = peer;
    }
  }
  return exchange("connect", first.ok() ? Result<std::string>(std::string()) : Result<std::string>(first))
      .status();
}

// Every rank's bytes, or why one has none: then all ranks fail alike.
Result<std::vector<std::string>> Team::exchange(const char* what, const Result<std::string>& mine) {
  const std::string answer = mine.ok() ? "+" + *mine : "-" + mine.status().message();
  WEFT_TRY_ASSIGN(std::vector<std::string> all,
                  rendezvous_->all_gather(answer, Deadline::after_s(timeout_s_)));
  if (!mine.ok()) return mine.status();
  for (size_t peer = 0; peer < all.size(); ++peer) {
    if (!all[peer].starts_with('+'))
      return Status::make(Code::kSystem, "{}: rank {} cannot: {}", what, peer,
                          all[peer].empty() ? "no reason given" : all[peer].substr(1));
    all[peer].erase(0, 1);
  }
  return all;
}

Result<uint32_t> Team::enroll(void* data, uint64_t bytes, int pointer_kind, uint64_t flags) {
  std::lock_guard together(collective_);
  if (!rendezvous_) return closed();
  auto region = std::make_shared<Region>();
  region->never_reset = (flags & kSignalNeverReset) != 0;
  region->parts.resize(links_.size());
  const auto prepare = [&]() -> Result<std::string> {
    WEFT_TRY_ASSIGN(region->range, range_of(data, bytes, pointer_kind));
    if (region->is_on_gpu()) WEFT_TRY(warm_copies(*region));
    WEFT_TRY_ASSIGN(region->memory,
                    engine_->enroll(region->range, transfer::kRemoteRead | transfer::kRemoteWrite));
    WEFT_TRY_ASSIGN(const std::string descriptor, engine_->describe(*region->memory));
    return text("{} {}\n", regions_made_, bytes) + descriptor;
  };
  const auto descriptors = exchange("regMrSym", prepare());
  Status status = descriptors.status();
  if (status.ok()) {
    std::lock_guard lock(mutex_);
    region->number = regions_made_;
    regions_[regions_made_++] = region;  // a rank that is ahead may put to it from here on
  }
  if (status.ok()) {
    status = attach(*region, *descriptors);
    const Status all =
        exchange("regMrSym", status.ok() ? Result<std::string>(std::string()) : Result<std::string>(status))
            .status();
    if (status.ok()) status = all;
    if (!status.ok()) {
      std::lock_guard lock(mutex_);
      regions_.erase(region->number);
    }
  }
  if (status.ok()) return region->number;
  if (region->memory) (void)engine_->unregister(region->memory, Deadline::after_s(kDrain_s));
  return status;
}

Status Team::attach(Region& region, const std::vector<std::string>& descriptors) {
  const Deadline until = Deadline::after_s(timeout_s_);
  for (int peer = 0; peer < ranks(); ++peer) {
    const std::string& descriptor = descriptors[static_cast<size_t>(peer)];
    const size_t end = descriptor.find('\n');
    uint32_t number = 0;
    unsigned long long bytes = 0;
    if (end == std::string::npos || std::sscanf(descriptor.c_str(), "%u %llu", &number, &bytes) != 2 ||
        number != region.number)
      return Status::invalid("regMrSym: rank {} registers its region '{}', allowed: number {} as here", peer,
                             descriptor.substr(0, std::min<size_t>(end, 40)), region.number);
    Region::Part part{bytes, region.memory->is_staged(), nullptr};
    if (peer != rank_) {
      WEFT_TRY_ASSIGN(part.remote, engine_->attach(std::string_view(descriptor).substr(end + 1), until));
      part.is_staged = part.remote->is_staged();
      if (part.is_staged || region.memory->is_staged())
        WEFT_TRY(open_slots(region, peer, part.remote, until));
    }
    std::lock_guard lock(mutex_);
    region.parts[static_cast<size_t>(peer)] = std::move(part);
  }
  return {};
}

// Staged writes go through pinned slots of both ends, made at the first write. By then a kernel may spin for its bytes,
// and the driver may pin nothing before that kernel ends. So a write of nothing makes them here.
Status Team::open_slots(const Region& region, int peer, const std::shared_ptr<transfer::Remote>& remote,
                        Deadline until) {
  if (slots_open_.contains(peer)) return {};
  WEFT_TRY_ASSIGN(const auto nothing, engine_->write({region.memory, 0, remote, 0, 0, {}}));
  WEFT_TRY(engine_->wait(nothing, until));
  slots_open_.insert(peer);
  return {};
}

Status Team::withdraw(uint32_t number) {
  std::shared_ptr<Region> gone;
  {
    std::lock_guard lock(mutex_);
    WEFT_TRY_ASSIGN(gone, region("mhandle", number));
    regions_.erase(number);
  }
  // A peer that is lost confirms nothing; the memory is given back all the same.
  if (Status status = engine_->unregister(gone->memory, Deadline::after_s(kDrain_s)); !status.ok())
    log_info("nccl_rma: deregMrSym: {}", status.message());
  return {};
}

Result<uint32_t> Team::create_context(int channels, int stride) {
  if (channels < 1 || stride < 1 || ranks() % stride != 0)
    return Status::invalid(
        "config: got {} contexts and stride {}, allowed: 1 or more, and a divisor of {} ranks", channels,
        stride, ranks());
  std::lock_guard lock(mutex_);
  contexts_[contexts_made_] = {channels, stride, std::vector<Outgoing*>(size_t(channels) * links_.size())};
  return contexts_made_++;
}

bool Team::is_idle(const Context& context) const {
  return std::ranges::all_of(context.streams,
                             [](const Outgoing* stream) { return !stream || stream->is_idle(); });
}

// Works until `is_done` or kDrain_s have passed, and lets others at the team in between.
void Team::drain(Lock& lock, const std::function<bool()>& is_done) {
  const Deadline until = Deadline::after_s(kDrain_s);
  for (unsigned polls = 0; !is_done() && !until.passed(); ++polls) {
    const bool has_moved = turn();
    lock.unlock();
    back_off(has_moved ? polls = 0 : polls);
    lock.lock();
  }
}

Status Team::destroy_context(uint32_t number) {
  Lock lock(mutex_);
  const auto found = contexts_.find(number);
  if (found == contexts_.end()) return Status::invalid("context: got one that was destroyed");
  drain(lock, [&] { return is_idle(found->second); });
  for (Outgoing* stream : found->second.streams) {
    if (!stream) continue;
    // One that still waits for its peer keeps its number: what it sent may still be taken.
    if (stream->is_idle() && stream->status().ok())
      links_[static_cast<size_t>(stream->rank())].spare.push_back(stream);
    else
      stream->drop_queue();
  }
  contexts_.erase(found);
  return {};
}

Status Team::status() {
  std::lock_guard lock(mutex_);
  return is_closed_ ? closed() : status_;
}

Status Team::closed() {
  return Status(Code::kClosed, "collComm: used after closeColl");
}

// The thread that calls for progress does the work; this is for the time when nobody does.
void Team::run() {
  uint64_t seen = 0;
  while (!stops_.load(std::memory_order_acquire)) {
    const uint64_t now = turns_seen_.load(std::memory_order_relaxed);
    if (now == seen && mutex_.try_lock()) {
      turn();
      mutex_.unlock();
    }
    seen = turns_seen_.load(std::memory_order_relaxed);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Team::close() {
  std::lock_guard together(collective_);
  if (stops_.exchange(true)) return;
  if (worker_.joinable()) worker_.join();
  if (mail_) {
    Lock lock(mutex_);
    const auto is_done = [&] {
      const bool is_idle = std::ranges::all_of(links_, [](const Link& link) {
        return std::ranges::all_of(link.out, [](const auto& stream) { return stream->is_idle(); });
      });
      return is_idle && serving_.empty() && mail_->is_sent();
    };
    drain(lock, is_done);
    is_closed_ = true;
  }
  engine_->close();
  rendezvous_.reset();
}

}  // namespace weft::nccl_rma
