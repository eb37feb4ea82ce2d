// SPDX-License-Identifier: Apache-2.0
//
// The work of a team: what it is asked for, what it sends, and what it does for others.
#include <cstring>

#include "base/log.h"
#include "compat/nccl_rma/team.h"

namespace weft::nccl_rma {
namespace {

constexpr uint32_t kTestsPerTurn = 8;     // NCCL asks about each request before it asks for progress
constexpr uint32_t kTurnsPerCheck = 256;  // of deadlines
constexpr size_t kQueuedMax = 32;         // longer queues are sent at once

template <class T>
bool cut(std::string_view& bytes, T& value) {
  if (bytes.size() < sizeof value) return false;
  std::memcpy(static_cast<void*>(&value), bytes.data(), sizeof value);
  bytes.remove_prefix(sizeof value);
  return true;
}

Status malformed(const char* what) {
  return Status::invalid("got a {} that is cut short or of another version", what);
}

}  // namespace

Result<std::shared_ptr<Region>> Team::region(const char* argument, uint32_t number) const {
  const auto found = regions_.find(number);
  if (found == regions_.end())
    return Status::invalid("{}: got a handle that was never made, or was given back", argument);
  return found->second;
}

Status Team::check_range(const char* argument, const Region& region, int rank, uint64_t offset,
                         uint64_t bytes) const {
  const uint64_t all = region.parts[static_cast<size_t>(rank)].bytes;
  if (fits(offset, bytes, all)) return {};
  return Status::invalid("{}: got {} bytes at {}, allowed: within the {} bytes of rank {}", argument, bytes,
                         offset, all, rank);
}

Result<Team::Context*> Team::context(uint32_t number, uint32_t channel, uint32_t rank) {
  if (is_closed_) return closed();
  const auto found = contexts_.find(number);
  if (found == contexts_.end()) return Status::invalid("context: got one that was destroyed");
  Context& context = found->second;
  if (channel >= static_cast<uint32_t>(context.channels))
    return Status::invalid("context: got {}, allowed: 0 to {}", static_cast<int>(channel),
                           context.channels - 1);
  const auto ranks = static_cast<uint32_t>(links_.size());
  if (rank >= ranks ||
      (rank + ranks - static_cast<uint32_t>(rank_)) % static_cast<uint32_t>(context.stride) != 0)
    return Status::invalid("rank: got {}, allowed: those of {} that are {} plus a multiple of {}", rank,
                           ranks, rank_, context.stride);
  return &context;
}

Outgoing& Team::stream(Context& context, uint32_t channel, uint32_t rank) {
  Outgoing*& stream = context.streams[size_t{channel} * links_.size() + rank];
  if (stream) return *stream;
  Link& link = links_[rank];
  if (!link.spare.empty()) {
    stream = link.spare.back();
    link.spare.pop_back();
    return *stream;
  }
  const auto id = static_cast<uint32_t>(link.out.size());
  link.out.push_back(std::make_unique<Outgoing>(id, static_cast<int>(rank), link.peer, *ways_));
  stream = link.out.back().get();
  if (!link.status.ok()) stream->fail(link.status);
  if (id >= kStreams)
    stream->fail(Status::make(Code::kCapacity, "context: {} streams to rank {} are in use, allowed: {}", id,
                              rank, kStreams));
  return *stream;
}

Result<uint64_t> Team::put(uint32_t number, const Put& put) {
  std::lock_guard lock(mutex_);
  WEFT_TRY_ASSIGN(Context * context, this->context(number, put.channel, put.rank));
  const int rank = static_cast<int>(put.rank);
  std::shared_ptr<Region> src, dst, signal;
  if (put.bytes > 0) {
    WEFT_TRY_ASSIGN(src, region("srcMhandle", put.src));
    WEFT_TRY_ASSIGN(dst, region("dstMhandle", put.dst));
    WEFT_TRY(check_range("srcOff", *src, rank_, put.src_offset, put.bytes));
    WEFT_TRY(check_range("dstOff", *dst, rank, put.dst_offset, put.bytes));
  }
  if (put.signal != kNoRegion) {
    WEFT_TRY_ASSIGN(signal, region("signalMhandle", put.signal));
    WEFT_TRY(check_range("signalOff", *signal, rank, put.signal_offset, sizeof(uint64_t)));
    if (put.signal_offset % sizeof(uint64_t))
      return Status::invalid("signalOff: got {}, allowed: multiples of 8", put.signal_offset);
  }
  if (rank == rank_) WEFT_TRY(put_here(put, src, dst, signal));
  const uint64_t request = requests_.begin();
  if (rank == rank_ || (!src && !signal)) {
    requests_.end(request, {});
    return request;
  }
  Outgoing& out = stream(*context, put.channel, put.rank);
  if (!out.status().ok()) {
    requests_.release(request);
    return out.status();
  }
  if (src)
    out.add(
        {Do::kPut, dst->number, put.dst_offset, put.bytes, src, dst, put.src_offset, signal ? 0 : request});
  if (signal) out.add({Do::kAdd, signal->number, put.signal_offset, put.value, nullptr, nullptr, 0, request});
  if (out.queued() >= kQueuedMax) out.send();
  return request;
}

Status Team::put_here(const Put& put, const std::shared_ptr<Region>& src, const std::shared_ptr<Region>& dst,
                      const std::shared_ptr<Region>& signal) {
  if (src) WEFT_TRY(placer_.copy(*dst, put.dst_offset, *src, put.src_offset, put.bytes));
  if (src && signal) WEFT_TRY(placer_.finish());
  if (signal) WEFT_TRY(placer_.add(*signal, put.signal_offset, put.value));
  return placer_.finish();
}

// Memory that NICs reach is read; other memory is written by its owner, who is asked for it.
Result<uint64_t> Team::get(uint32_t number, const Get& get) {
  std::lock_guard lock(mutex_);
  WEFT_TRY_ASSIGN(Context * context, this->context(number, get.channel, get.rank));
  const int rank = static_cast<int>(get.rank);
  WEFT_TRY_ASSIGN(const std::shared_ptr<Region> src, region("remoteMhandle", get.src));
  WEFT_TRY_ASSIGN(const std::shared_ptr<Region> dst, region("localMhandle", get.dst));
  WEFT_TRY(check_range("remoteOff", *src, rank, get.src_offset, get.bytes));
  WEFT_TRY(check_range("localOff", *dst, rank_, get.dst_offset, get.bytes));
  if (rank == rank_ && get.bytes > 0) {
    WEFT_TRY(placer_.copy(*dst, get.dst_offset, *src, get.src_offset, get.bytes));
    WEFT_TRY(placer_.finish());
  }
  const uint64_t request = requests_.begin();
  if (rank == rank_ || get.bytes == 0) {
    requests_.end(request, {});
    return request;
  }
  const Region::Part& theirs = src->parts[get.rank];
  if (!theirs.is_staged && !dst->memory->is_staged()) {
    auto read = engine_->read({dst->memory, get.dst_offset, theirs.remote, get.src_offset, get.bytes, {}});
    if (!read.ok()) {
      requests_.release(request);
      return read.status();
    }
    requests_.find(request)->read = *read;
    return request;
  }
  Outgoing& out = stream(*context, get.channel, get.rank);
  if (!out.status().ok()) {
    requests_.release(request);
    return out.status();
  }
  gets_.emplace(request, std::pair(rank, Deadline::after_s(timeout_s_)));
  out.add({Do::kGet, src->number, get.src_offset, get.bytes, dst, nullptr, get.dst_offset, request});
  return request;
}

Result<uint64_t> Team::done_already(uint32_t number) {
  std::lock_guard lock(mutex_);
  WEFT_TRY(context(number, 0, static_cast<uint32_t>(rank_)).status());
  const uint64_t request = requests_.begin();
  requests_.end(request, {});
  return request;
}

Result<bool> Team::test(uint64_t id) {
  std::lock_guard lock(mutex_);
  Request* request = requests_.find(id);
  if (!request) return Status::invalid("request: got one that was never made, or has ended");
  const auto has_ended = [&] {
    return request->has_ended || (request->read && request->read->is_finished());
  };
  if (is_closed_ && !has_ended()) return closed();
  if (!has_ended() && ++tests_ % kTestsPerTurn == 0) turn();
  if (!has_ended()) return false;
  const Status status = request->read ? request->read->status() : request->status;
  requests_.release(id);
  if (!status.ok()) return status;
  return true;
}

Status Team::progress() {
  std::lock_guard lock(mutex_);
  if (is_closed_) return closed();
  turn();
  return status_;
}

bool Team::turn() {
  turns_seen_.fetch_add(1, std::memory_order_relaxed);
  const auto send = [&](Link& link) {
    bool has_sent = false;
    for (const auto& stream : link.out) has_sent = stream->send() || has_sent;
    return has_sent;
  };
  bool has_moved = false;
  for (Link& link : links_) has_moved = send(link) || has_moved;
  engine_->progress();
  auto came = mail_->receive([this](const auto& from, std::string_view bytes) { take(from, bytes); });
  has_mail_ = came.ok() && *came;
  if (came.ok())
    has_moved = has_mail_ || has_moved;
  else if (status_.ok())
    status_ = came.status();
  for (int rank = 0; rank < ranks(); ++rank) has_moved = advance(rank) || has_moved;
  if (Status status = placer_.finish(); !status.ok() && status_.ok()) status_ = logged(status);
  for (int rank = 0; rank < ranks(); ++rank) {
    tell_credits(rank);
    check(rank);
  }
  has_moved = answer_gets() || has_moved;
  for (Link& link : links_) has_moved = send(link) || has_moved;
  ++turns_;
  return has_moved;
}

void Team::take(const std::shared_ptr<transfer::Peer>& from, std::string_view bytes) {
  const auto found = rank_of_.find(from.get());
  if (found == rank_of_.end()) return;  // not one of the team
  if (Status status = read(found->second, bytes); !status.ok()) lose(found->second, status);
}

Status Team::read(int rank, std::string_view bytes) {
  Link& link = links_[static_cast<size_t>(rank)];
  Head head;
  if (!cut(bytes, head)) return malformed("message");
  if (head.kind == Kind::kRecord) {
    RecordHead record;
    if (!cut(bytes, record) || record.stream >= kStreams) return malformed("record");
    std::unique_ptr<Incoming>& in = link.in[record.stream];
    if (!in) in = std::make_unique<Incoming>(record.stream, link.peer, *engine_);
    return in->keep(record.number, bytes);
  }
  for (uint32_t i = 0; i < head.count; ++i) {
    Credit credit;
    Answer answer;
    if (head.kind == Kind::kCredits) {
      if (!cut(bytes, credit) || credit.stream >= link.out.size()) return malformed("confirmation");
      link.out[credit.stream]->confirm(credit.taken);
    } else if (head.kind == Kind::kAnswers) {
      if (!cut(bytes, answer)) return malformed("answer");
      if (gets_.erase(answer.request) == 0) continue;
      requests_.end(
          answer.request,
          answer.is_done ? Status() : Status::make(Code::kSystem, "iget: rank {} could not serve it", rank));
    } else {
      return malformed("message");
    }
  }
  return {};
}

bool Team::advance(int rank) {
  Link& link = links_[static_cast<size_t>(rank)];
  if (!link.status.ok()) return false;
  bool has_taken = false;
  for (auto& [id, in] : link.in) {
    auto taken = in->advance([&](std::string_view units) { return carry_out(rank, units); });
    if (!taken.ok()) {
      lose(rank, taken.status());
      return has_taken;
    }
    has_taken = *taken || has_taken;
  }
  return has_taken;
}

Status Team::carry_out(int rank, std::string_view units) {
  while (!units.empty()) {
    Unit unit;
    GetTail tail{};
    if (!cut(units, unit)) return malformed("unit");
    if (unit.what == Do::kGet && !cut(units, tail)) return malformed("get");
    const bool is_put = unit.what == Do::kPut;
    if (is_put && (unit.value > kInlineBytes || units.size() < padded(unit.value))) return malformed("put");
    const char* payload = units.data();
    if (is_put) units.remove_prefix(padded(unit.value));
    const auto found = regions_.find(unit.region);
    if (found == regions_.end() && unit.region >= regions_made_)
      return Status::invalid("got a region {} that was never registered", unit.region);
    if (unit.what == Do::kGet) {
      WEFT_TRY(serve(rank, unit, tail));
      continue;
    }
    if (found == regions_.end()) {
      log_info("nccl_rma: rank {} put to memory that is deregistered here", rank);
      continue;
    }
    Region& region = *found->second;
    const uint64_t bytes = is_put ? unit.value : sizeof(uint64_t);
    if (!fits(unit.offset, bytes, region.range.bytes))
      return Status::invalid("got {} bytes at {} of a region of {}", bytes, unit.offset, region.range.bytes);
    if (is_put)
      WEFT_TRY(placer_.put(region, unit.offset, payload, bytes));
    else if (unit.what == Do::kAdd && unit.offset % sizeof(uint64_t) == 0)
      WEFT_TRY(placer_.add(region, unit.offset, unit.value));
    else
      return malformed("unit");
  }
  return {};
}

Status Team::serve(int rank, const Unit& unit, const GetTail& tail) {
  const auto from = regions_.find(unit.region), to = regions_.find(tail.region);
  serving_.push_back({nullptr, tail.request, rank});
  if (from == regions_.end() || to == regions_.end()) return {};
  auto written = engine_->write({from->second->memory,
                                 unit.offset,
                                 to->second->parts[static_cast<size_t>(rank)].remote,
                                 tail.offset,
                                 unit.value,
                                 {}});
  if (written.ok()) serving_.back().transfer = *written;
  return {};
}

bool Team::answer_gets() {
  bool has_answered = false;
  for (size_t i = 0; i < serving_.size() && mail_->has_room();) {
    const Serving& serving = serving_[i];
    if (serving.transfer && !serving.transfer->is_finished()) {
      ++i;
      continue;
    }
    const bool is_done = serving.transfer && serving.transfer->phase() == transfer::Phase::kDone;
    struct {
      Head head;
      Answer answer;
    } message{{Kind::kAnswers, 1}, {serving.request, is_done, 0}};
    if (const Link& link = links_[static_cast<size_t>(serving.rank)]; link.status.ok())
      (void)mail_->send(link.peer, {reinterpret_cast<const char*>(&message), sizeof message});
    serving_.erase(serving_.begin() + static_cast<std::ptrdiff_t>(i));
    has_answered = true;
  }
  return has_answered;
}

void Team::tell_credits(int rank) {
  Link& link = links_[static_cast<size_t>(rank)];
  constexpr size_t kMost = (kMessageBytes - sizeof(Head)) / sizeof(Credit);
  std::string message(sizeof(Head), '\0');
  uint32_t count = 0;
  if (!link.status.ok() || !mail_->has_room()) return;
  for (auto& [id, in] : link.in) {
    if (!in->owes_credit() || count == kMost) continue;
    const Credit credit{id, 0, in->taken()};
    message.append(reinterpret_cast<const char*>(&credit), sizeof credit);
    in->credited();
    ++count;
  }
  if (count == 0) return;
  const Head head{Kind::kCredits, count};
  std::memcpy(message.data(), &head, sizeof head);
  (void)mail_->send(link.peer, message);  // fails where the peer is lost, which check() sees
}

// Whether the peer is still there, and takes what it is sent.
void Team::check(int rank) {
  Link& link = links_[static_cast<size_t>(rank)];
  if (!link.peer || !link.status.ok()) return;
  for (const auto& stream : link.out) {
    if (!stream->settle()) continue;
    return lose(rank, stream->status());
  }
  // What it said before it left is heard first.
  if (const transfer::PeerState state = link.peer->state(); state >= transfer::PeerState::kLost && !has_mail_)
    return lose(rank, Status::make(Code::kPeerLost, "rank {} {}: {}", rank,
                                   state == transfer::PeerState::kLost ? "is lost" : "has left",
                                   link.peer->why().message()));
  if (turns_ % kTurnsPerCheck) return;
  for (const auto& stream : link.out)
    if (stream->waited_s() > timeout_s_)
      return lose(rank, Status::make(Code::kPeerLost, "rank {} waited {} s for rank {}: {}", rank_,
                                     timeout_s_, rank, stream->progress()));
  for (const auto& [request, waits] : gets_)
    if (waits.first == rank && waits.second.passed())
      return lose(rank, Status::make(Code::kPeerLost, "iget: rank {} waited {} s for an answer of rank {}",
                                     rank_, timeout_s_, rank));
}

// All requests to the rank fail, once for all. One that left in peace, and was owed nothing, is no failure of the
// team's.
void Team::lose(int rank, const Status& why) {
  Link& link = links_[static_cast<size_t>(rank)];
  if (!link.status.ok()) return;
  link.status = why;
  bool was_busy = false;
  for (const auto& stream : link.out) {
    was_busy = was_busy || !stream->is_idle() || !stream->status().ok();
    stream->fail(why);
  }
  for (auto at = gets_.begin(); at != gets_.end();) {
    if (at->second.first != rank) {
      ++at;
      continue;
    }
    was_busy = true;
    requests_.end(at->first, why);
    at = gets_.erase(at);
  }
  const bool has_left = link.peer && link.peer->state() == transfer::PeerState::kClosed;
  if (has_left && !was_busy) return;
  log_warn("nccl_rma: rank {} of {}: {}", rank_, ranks(), why.message());
  if (status_.ok()) status_ = why;
}

}  // namespace weft::nccl_rma
