// SPDX-License-Identifier: Apache-2.0
//
// The records of a PeerQueue: signals, small puts and keys of temporary registrations, on their way out and where they
// arrive.
#include <cstring>
#include <utility>

#include "transports/proxy/peer_queue.h"

namespace weft::proxy {

namespace {

// Threads of the host touch no other memory, whoever asks.
Status outside_host_part(const char* what, uint64_t place) {
  return Status::make(Code::kSystem, "proxy: {} for place {} of a window, outside what the host stores to",
                      what, place);
}

}  // namespace

// As many as stand next to each other in the queue and fit: how many. None: the peer is lost.
uint32_t PeerQueue::write_record(Record& record) {
  uint32_t taken = 0;
  for (; taken < queue_.size() && goes_in_record(queue_[taken]); ++taken) {
    const Command command = queue_[taken].command;
    if (record.count + 1 + bytes_behind(command) / kUnit > kRecordUnits) break;
    if (is_signal(command))
      record.units[record.count++] = as_peer_names(command);
    else if (op_of(command) == Op::kAnnounce)
      add_keys(record, command);
    else if (!add_put(record, command))
      return 0;
  }
  return taken;
}

Command PeerQueue::as_peer_names(Command command) const {
  if (op_of(command) == Op::kClose) return command;
  const Regions::Name name = traffic_.regions.name_at(dst_region_of(command), rank_);
  return addressed(command, name.region, name.use);
}

// What comes late for a window that is gone does not reach the one that has its region now.
bool PeerQueue::is_current(Command command) const {
  return op_of(command) == Op::kClose || traffic_.regions.own(dst_region_of(command)).use == use_of(command);
}

bool PeerQueue::add_put(Record& record, Command put) {
  const Regions::Own window = traffic_.regions.own(src_region_of(put));
  const uint64_t bytes = bytes_of(put);
  const std::byte* from = window.at(src_of(put), bytes);
  if (!from) {
    lose(Status::invalid("proxy: a put from window {}, which is gone", src_region_of(put)));
    return false;
  }
  record.units[record.count++] = as_peer_names(put);
  std::memcpy(&record.units[record.count], from, bytes);
  record.count += static_cast<uint32_t>(bytes / kUnit);
  return true;
}

// No keys where the registration has ended meanwhile.
void PeerQueue::add_keys(Record& record, Command announced) {
  transfer::TemporaryKeys keys;
  if (const auto memory = traffic_.registrations.own(static_cast<uint32_t>(announced.a)))
    if (const auto known = traffic_.engine.keys(*memory); known.ok()) keys = *known;
  record.units[record.count++] = announced;
  std::memcpy(&record.units[record.count], &keys, sizeof keys);
  record.count += static_cast<uint32_t>(sizeof keys / kUnit);
}

void PeerQueue::apply(const Record& record) {
  if (record.sequence != next_in_ || record.count > kRecordUnits)
    return lose(Status::make(Code::kSystem, "proxy: rank {} sent record {} where {} was due", rank_,
                             record.sequence, next_in_));
  for (uint32_t i = 0; i < record.count; ++i) {
    const Command command = record.units[i];
    if (is_signal(command)) {
      if (is_current(command)) apply(command);
      continue;
    }
    const uint64_t units = bytes_behind(command) / kUnit;
    const bool is_temporary = op_of(command) == Op::kAnnounce;
    if ((op_of(command) != Op::kPut && !is_temporary) || units >= record.count - i)
      return lose(Status::make(Code::kSystem, "proxy: rank {} sent a record that cannot be read", rank_));
    if (is_temporary)
      apply_keys(command, &record.units[i + 1]);
    else if (is_current(command))
      apply_put(command, &record.units[i + 1]);
    i += static_cast<uint32_t>(units);
  }
}

// Nothing where the window is gone: nobody looks.
void PeerQueue::apply_put(Command put, const void* bytes) {
  const Regions::Own window = traffic_.regions.own(dst_region_of(put));
  std::byte* to = window.at(dst_of(put), bytes_of(put));
  if (to) return (void)std::memmove(to, bytes, bytes_of(put));
  if (window.base) lose(outside_host_part("a put", dst_of(put)));
}

void PeerQueue::apply_keys(Command announced, const void* bytes) {
  transfer::TemporaryKeys keys;
  std::memcpy(&keys, bytes, sizeof keys);
  std::shared_ptr<transfer::Remote> theirs;
  if (keys.rails > 0) {
    auto adopted = traffic_.engine.adopt(peer_, keys);
    if (!adopted.ok()) return lose(adopted.status());
    theirs = std::move(*adopted);
  }
  traffic_.registrations.set(static_cast<uint32_t>(announced.a), rank_, std::move(theirs));
}

void PeerQueue::apply(Command signal) {
  const Op op = op_of(signal);
  if (op == Op::kClose) {
    has_farewell_ = true;
    return notify(kClosedImm);
  }
  store_word(signal);
}

void PeerQueue::store_word(Command signal) {
  const Regions::Own window = traffic_.regions.own(dst_region_of(signal));
  auto* word = reinterpret_cast<uint64_t*>(window.at(word_of(signal), sizeof(uint64_t)));
  if (!word) {  // where the window is gone nobody looks
    if (window.base) lose(outside_host_part("a word", word_of(signal)));
    return;
  }
  if (op_of(signal) == Op::kAdd)
    add_release(word, signal.a);
  else
    store_release(word, signal.a);
}

}  // namespace weft::proxy
