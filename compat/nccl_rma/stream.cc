// SPDX-License-Identifier: Apache-2.0
#include "compat/nccl_rma/stream.h"

#include <cstring>

#include "base/log.h"

namespace weft::nccl_rma {
namespace {

template <class T>
void append(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace

bool Outgoing::goes_in_record(const Command& command) {
  return command.what != Do::kPut || (command.value <= kInlineBytes && !command.here->is_on_gpu());
}

uint64_t Outgoing::record_bytes(const Command& command) {
  return sizeof(Unit) + (command.what == Do::kPut   ? padded(command.value)
                         : command.what == Do::kGet ? sizeof(GetTail)
                                                    : 0);
}

bool Outgoing::send() {
  bool has_sent = false;
  while (status_.ok() && !queue_.empty() && next_ - confirmed_ < kWindow) {
    const bool is_record = next_ == 0 || goes_in_record(queue_.front());  // the first announces the stream
    if (!(is_record ? post_record() : post_write())) break;
    has_sent = true;
  }
  return has_sent;
}

bool Outgoing::post_record() {
  if (!ways_.mail.has_room()) return false;
  std::string bytes;
  bytes.reserve(kMessageBytes);
  append(bytes, Head{Kind::kRecord, 0});
  append(bytes, RecordHead{id_, 0, next_});
  Sent sent{nullptr, {}, 0, false, false, Deadline::Clock::now()};
  uint32_t units = 0;
  while (!queue_.empty() && goes_in_record(queue_.front()) &&
         bytes.size() + record_bytes(queue_.front()) <= kMessageBytes) {
    const Command& command = queue_.front();
    append(bytes, Unit{command.what, command.region, command.offset, command.value});
    if (command.what == Do::kPut) {
      bytes.append(command.here->at(command.here_offset), command.value);
      bytes.resize(bytes.size() + padded(command.value) - command.value);
    } else if (command.what == Do::kGet) {
      append(bytes, GetTail{command.here->number, 0, command.here_offset, command.request});
    }
    // A get ends with its answer.
    if (command.request && command.what != Do::kGet) sent.requests.push_back(command.request);
    queue_.pop_front();
    ++units;
  }
  std::memcpy(bytes.data() + offsetof(Head, count), &units, sizeof units);
  auto transfer = ways_.mail.send(peer_, bytes);
  under_way_.push_back(std::move(sent));
  if (!transfer.ok()) {
    fail(transfer.status());
    return false;
  }
  under_way_.back().transfer = *transfer;
  ++next_;
  return true;
}

bool Outgoing::post_write() {
  const Command& command = queue_.front();
  if (ways_.writes >= ways_.writes_max || ways_.bytes >= ways_.bytes_max) return false;
  transfer::WriteRequest write{command.here->memory, command.here_offset, command.there->parts[rank_].remote,
                               command.offset,       command.value,       {}};
  write.how.imm = imm_of(id_, next_);
  auto transfer = ways_.engine.write(std::move(write));
  if (!transfer.ok()) {
    fail(transfer.status());
    return false;
  }
  Sent sent{*transfer, {}, command.value, true, false, Deadline::Clock::now()};
  if (command.request) sent.requests.push_back(command.request);
  ways_.bytes += command.value;
  ++ways_.writes;
  under_way_.push_back(std::move(sent));
  queue_.pop_front();
  ++next_;
  return true;
}

void Outgoing::through(Sent& sent) {
  if (sent.is_through) return;
  sent.is_through = true;
  if (!sent.is_write) return;
  ways_.bytes -= sent.bytes;
  --ways_.writes;
}

bool Outgoing::settle() {
  for (Sent& sent : under_way_) {
    if (sent.is_through) continue;
    if (!sent.transfer->is_finished()) break;
    through(sent);
    if (sent.transfer->phase() == transfer::Phase::kDone) continue;
    fail(sent.transfer->status());
    return true;
  }
  return false;
}

void Outgoing::confirm(uint64_t taken) {
  while (confirmed_ < taken && !under_way_.empty()) {
    Sent& sent = under_way_.front();
    through(sent);
    for (const uint64_t request : sent.requests) ways_.requests.end(request, {});
    under_way_.pop_front();
    ++confirmed_;
  }
}

void Outgoing::fail(const Status& why) {
  if (status_.ok()) status_ = why;
  for (Sent& sent : under_way_) {
    through(sent);
    for (const uint64_t request : sent.requests) ways_.requests.end(request, why);
  }
  for (const Command& command : queue_)
    if (command.request) ways_.requests.end(command.request, why);
  under_way_.clear();
  queue_.clear();
}

double Outgoing::waited_s() const {
  if (under_way_.empty()) return 0;
  return std::chrono::duration<double>(Deadline::Clock::now() - under_way_.front().since).count();
}

std::string Outgoing::progress() const {
  return text("expected {} of stream {} to be taken, saw {}", next_, id_, confirmed_);
}

Status Incoming::keep(uint64_t number, std::string_view units) {
  const uint64_t least = records_.empty() ? next_ : records_.back().first + 1;
  if (number < least || number >= next_ + kWindow)
    return Status::invalid("record: got number {} of stream {}, allowed: {} to {}", number, id_, least,
                           next_ + kWindow - 1);
  records_.emplace_back(number, units);
  return {};
}

Result<bool> Incoming::has_written(uint64_t number) {
  const size_t place = number % kNumbers;
  std::shared_ptr<transfer::ImmCounter>& counter = written_[place];
  if (!counter) {
    auto made = engine_.imm_counter(peer_, imm_of(id_, number));
    if (!made.ok() && !peer_->is_alive()) return false;  // its loss is seen elsewhere
    if (!made.ok()) return made.status();
    counter = *made;
  }
  return counter->value() != known_[place];
}

// The number half a lap on is not sent before this one is confirmed: what was counted in its place belongs to the lap
// before. So an immediate that comes twice is known for that until kWindow later numbers have been taken.
void Incoming::forget_lap_before(uint64_t number) {
  const size_t place = (number + kWindow) % kNumbers;
  if (written_[place]) known_[place] = written_[place]->value();
}

Result<bool> Incoming::advance(const std::function<Status(std::string_view)>& carry_out) {
  const uint64_t before = next_;
  while (true) {
    if (!records_.empty() && records_.front().first == next_) {
      WEFT_TRY(carry_out(records_.front().second));
      records_.pop_front();
    } else {
      if (next_ == 0) break;
      WEFT_TRY_ASSIGN(const bool has_come, has_written(next_));
      if (!has_come) break;
    }
    forget_lap_before(next_++);
  }
  return next_ != before;
}

}  // namespace weft::nccl_rma
