// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/peer_watch.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>

#include "bootstrap/fd_exchange.h"

namespace weft {

// One page of each rank, which its peers can read when the rank is no more.
struct PeerWatch::Note {
  static constexpr uint64_t kBytes = 4096;
  enum State : uint32_t { kHere, kExits, kLeft };

  uint64_t key;  // of SharedMemory
  std::atomic<uint32_t> state;
  int32_t pid;
  char host[64];
  // By rank: what a peer says to this one. Ranks beyond have no place here, and this rank is not told.
  enum Says : uint8_t { kMasked = 1, kGaveUp = 2 };
  static constexpr int kSpeakers = 2048;
  std::atomic<uint8_t> said_by[kSpeakers];
};

namespace {

constexpr double kEnding_s =
    1;  // a process that ends closes its sockets a little before it is known to have ended

// The notes of this process, for process_ends(). Never destroyed: ranks may end after everything else.
struct OwnNotes {
  std::mutex mutex;
  std::set<std::atomic<uint32_t>*> states;
  bool process_ends = false;
};
OwnNotes& own_notes() {
  static OnePerProcess<OwnNotes> notes;
  return notes.get();
}

}  // namespace

PeerWatch::Alarm& PeerWatch::Alarm::operator=(Alarm&& other) noexcept {
  if (this == &other) return *this;
  end();
  watch_ = std::exchange(other.watch_, nullptr);
  number_ = other.number_;
  return *this;
}

void PeerWatch::Alarm::end() {
  if (!watch_) return;
  if (watch_->is_of_this_process()) {
    std::lock_guard lock(watch_->mutex_);
    watch_->alarms_.erase(number_);
  }
  watch_ = nullptr;
}

Result<std::unique_ptr<PeerWatch>> PeerWatch::open(int rank) {
  static_assert(sizeof(Note) <= Note::kBytes);
  std::unique_ptr<PeerWatch> watch(new PeerWatch(rank));
  WEFT_TRY_ASSIGN(watch->own_, SharedMemory::create(Note::kBytes));
  auto* note = reinterpret_cast<Note*>(watch->own_.data());
  note->pid = getpid();
  gethostname(note->host, sizeof(note->host) - 1);
  OwnNotes& notes = own_notes();
  std::lock_guard lock(notes.mutex);
  notes.states.insert(&note->state);
  return watch;
}

PeerWatch::~PeerWatch() {
  if (!is_of_this_process()) return;
  for (const Peer& peer : peers_)
    if (peer.process.is_open()) processes_->remove(peer.watched);
  OwnNotes& notes = own_notes();
  std::lock_guard lock(notes.mutex);
  auto* note = reinterpret_cast<Note*>(own_.data());
  notes.states.erase(&note->state);
  // Whoever is destroyed because the process ends has left only if the process ends well.
  note->state.store(notes.process_ends ? Note::kExits : Note::kLeft, std::memory_order_release);
}

void PeerWatch::process_ends() {
  OwnNotes& notes = own_notes();
  std::lock_guard lock(notes.mutex);
  notes.process_ends = true;
  for (std::atomic<uint32_t>* state : notes.states) state->store(Note::kExits, std::memory_order_release);
}

Status PeerWatch::meet(FdExchange& exchange, const std::vector<bool>& is_other_process, Deadline until) {
  exchange.begin_call();
  WEFT_TRY_ASSIGN(FileDescriptor note, own_.descriptor());
  WEFT_TRY_ASSIGN(std::vector<FdMessage> notes,
                  exchange.all_gather({"", std::move(note)}, "communicator.peers", until));
  WEFT_TRY_ASSIGN(std::vector<FdMessage> processes,
                  exchange.all_gather({"", open_process(getpid())}, "communicator.peers", until));
  peers_.resize(notes.size());
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    if (rank == rank_ || !notes[rank].fd.is_open()) continue;
    Peer& peer = peers_[rank];
    WEFT_TRY_ASSIGN(peer.note, SharedMemory::open(std::move(notes[rank].fd), Note::kBytes));
    if (is_other_process[rank]) peer.process = std::move(processes[rank].fd);
  }
  for (Peer& peer : peers_) {
    if (!peer.process.is_open()) continue;
    if (!processes_) processes_ = ProcessWatch::shared();
    peer.watched = processes_->add(peer.process.get(), [this] { look(); });
  }
  return {};
}

PeerWatch::Alarm PeerWatch::alarm(std::function<void(int)> lost) {
  std::lock_guard lock(mutex_);
  if (!first_lost_.empty()) lost(first_lost_[0]);
  alarms_[next_alarm_] = std::move(lost);
  return {this, next_alarm_++};
}

void PeerWatch::lose(int peer, std::string how) {
  std::lock_guard lock(mutex_);
  look_locked();
  Peer& lost = peers_[peer];
  if (lost.is_lost) return;
  lost.is_lost = true;
  lost.how = std::move(how);
  if (!first_lost_.empty()) return;
  first_lost_ = {peer};
  for (const auto& [number, tell] : alarms_) tell(peer);
}

void PeerWatch::tell(std::function<void(int, const std::string&)> tell) {
  if (!is_of_this_process()) return;
  std::lock_guard lock(mutex_);
  tell_ = std::move(tell);
  for (int peer = 0; tell_ && peer < static_cast<int>(peers_.size()); ++peer)
    if (peers_[peer].is_lost && peers_[peer].how.empty()) tell_(peer, to_words(peers_[peer].end));
}

void PeerWatch::introduce(std::vector<std::string> who) {
  std::lock_guard lock(mutex_);
  who_ = std::move(who);
}

std::string PeerWatch::who_am_i() {
  char host[64] = {};
  gethostname(host, sizeof host - 1);
  return text("pid {} on {}", getpid(), host);
}

PeerWatch::Note* PeerWatch::note_of(int peer) const {
  const bool is_known = peer >= 0 && peer < static_cast<int>(peers_.size());
  return is_known ? reinterpret_cast<Note*>(peers_[peer].note.data()) : nullptr;
}

void PeerWatch::say_to(int peer, uint8_t what, bool is_so) {
  if (!is_of_this_process()) return;
  std::lock_guard lock(mutex_);
  Note* const note = note_of(peer);
  if (!note || rank_ >= Note::kSpeakers) return;
  if (is_so)
    note->said_by[rank_].fetch_or(what, std::memory_order_release);
  else
    note->said_by[rank_].fetch_and(static_cast<uint8_t>(~what), std::memory_order_release);
}

bool PeerWatch::says(int peer, uint8_t what) const {
  const auto* own = reinterpret_cast<const Note*>(own_.data());
  const bool has_place = peer >= 0 && peer < std::min(static_cast<int>(peers_.size()), Note::kSpeakers);
  return has_place && (own->said_by[peer].load(std::memory_order_acquire) & what);
}

std::string PeerWatch::who_says(uint8_t what) const {
  std::string all;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer)
    if (says(peer, what)) all += (all.empty() ? "" : ", ") + name(peer);
  return all;
}

void PeerWatch::mask(int peer, bool is_masked) {
  say_to(peer, Note::kMasked, is_masked);
}

std::string PeerWatch::maskers() {
  std::lock_guard lock(mutex_);
  return who_says(Note::kMasked);
}

void PeerWatch::give_up(int peer) {
  say_to(peer, Note::kGaveUp, true);
}

bool PeerWatch::is_given_up_by(int peer) {
  std::lock_guard lock(mutex_);
  return says(peer, Note::kGaveUp);
}

std::string PeerWatch::given_up_by() {
  std::lock_guard lock(mutex_);
  look_locked();
  if (const std::string who = who_says(Note::kGaveUp); !who.empty())
    return "this rank was given up by " + who;
  std::string all;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer)
    if (is_over_now(peer)) all += (all.empty() ? "" : ", ") + fate_locked(peer);
  return all;
}

bool PeerWatch::has_left(int peer) const {
  const Note* note = note_of(peer);
  return note && note->state.load(std::memory_order_acquire) == Note::kLeft;
}

void PeerWatch::look() {
  std::lock_guard lock(mutex_);
  look_locked();
}

// Looks at all peers, also when one has ended: of several that are over, the one that took the others with it
// is to be named.
void PeerWatch::look_locked() {
  std::vector<int> lost;
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    Peer& peer = peers_[rank];
    if (!peer.process.is_open() || peer.end.how != ProcessEnd::How::kRuns) continue;
    peer.end = process_end(peer.process.get());
    const bool exited_well = peer.end.how == ProcessEnd::How::kExited && peer.end.number == 0;
    if (peer.end.how == ProcessEnd::How::kRuns || exited_well || has_left(rank)) continue;
    // It has said that it exits, and nobody knows with which status: it is taken to be a good one.
    const bool said_so = note_of(rank)->state.load(std::memory_order_acquire) == Note::kExits;
    if (said_so && peer.end.how == ProcessEnd::How::kUnknown) continue;
    peer.is_lost = true;
    lost.push_back(rank);
    if (tell_) tell_(rank, to_words(peer.end));
  }
  if (lost.empty() || !first_lost_.empty()) return;
  const auto was_killed = [&](int rank) { return peers_[rank].end.how == ProcessEnd::How::kKilled; };
  const auto others = std::stable_partition(lost.begin(), lost.end(), was_killed);
  if (others != lost.begin()) lost.erase(others, lost.end());
  first_lost_ = lost;
  for (const auto& [number, tell] : alarms_) tell(lost[0]);
}

bool PeerWatch::is_over_now(int peer) const {
  const bool is_known = peer >= 0 && peer < static_cast<int>(peers_.size());
  if (is_known && peers_[peer].is_lost) return true;
  return note_of(peer) && (has_left(peer) || peers_[peer].end.how != ProcessEnd::How::kRuns);
}

bool PeerWatch::is_over(int peer) {
  std::lock_guard lock(mutex_);
  look_locked();
  return is_over_now(peer);
}

std::string PeerWatch::name(int peer) const {
  const Note* note = note_of(peer);
  const bool is_named = peer >= 0 && peer < static_cast<int>(who_.size());
  if (!note) return is_named ? text("rank {} ({})", peer, who_[peer]) : text("rank {}", peer);
  const std::string host(note->host, strnlen(note->host, sizeof note->host));
  return text("rank {} (pid {} on {})", peer, note->pid, host);
}

std::string PeerWatch::fate_locked(int peer) const {
  const bool is_known = peer >= 0 && peer < static_cast<int>(peers_.size());
  if (is_known && !peers_[peer].how.empty()) return name(peer) + " " + peers_[peer].how;
  if (!note_of(peer)) return {};
  const Peer& known = peers_[peer];
  if (known.is_lost) return name(peer) + " " + to_words(known.end);
  if (has_left(peer)) return name(peer) + " has left";
  if (is_over_now(peer)) return name(peer) + " " + to_words(known.end);
  const bool stopped = known.process.is_open() && is_stopped(known.process.get());
  return name(peer) + (stopped ? " is stopped" : " is running");
}

std::string PeerWatch::fate(int peer) {
  std::lock_guard lock(mutex_);
  look_locked();
  return fate_locked(peer);
}

std::string PeerWatch::lost() {
  std::lock_guard lock(mutex_);
  look_locked();
  std::string all;
  for (int peer : first_lost_) all += (all.empty() ? "" : ", ") + fate_locked(peer);
  return all;
}

std::string PeerWatch::lost_by_now() {
  std::string words;
  wait_until(Deadline::after_s(kEnding_s), [&] { return !(words = lost()).empty(); });
  return words;
}

std::string PeerWatch::fates(const std::vector<int>& peers, std::string_view otherwise) {
  const auto is_known = [&](int peer) { return note_of(peer) == nullptr || is_over(peer); };
  wait_until(Deadline::after_s(kEnding_s), [&] { return std::all_of(peers.begin(), peers.end(), is_known); });
  if (std::string first = lost(); !first.empty()) return first;
  std::string all;
  std::lock_guard lock(mutex_);
  for (int peer : peers) {
    const std::string fate = is_over_now(peer) ? fate_locked(peer) : text("{} {}", name(peer), otherwise);
    all += (all.empty() ? "" : ", ") + fate;
  }
  return all;
}

}  // namespace weft
