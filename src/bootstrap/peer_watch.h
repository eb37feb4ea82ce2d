// SPDX-License-Identifier: Apache-2.0
//
// PeerWatch knows which ranks of this host have died, and how, moments after it happened; and which others
// were lost, once the links to them say so.
//   WEFT_TRY_ASSIGN(auto peers, PeerWatch::open(rank));
//   WEFT_TRY(peers->meet(*exchange, in_other_processes, until));    // collective
//   PeerWatch::Alarm alarm = peers->alarm([&](int peer) { raise(fault, ...); });
//   peers->lost();   // "rank 3 (pid 4711 on node7) was killed by signal 9"
// A rank dies when a signal ends its process, or its process exits with another status than 0. A rank leaves
// when its PeerWatch ends or its process exits with status 0: that raises no alarm. One that is stopped is
// alive. Threads: every method but meet() from any.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/deadline.h"
#include "base/owner_process.h"
#include "base/process_watch.h"
#include "base/shared_memory.h"
#include "base/status.h"

namespace weft {

class FdExchange;

class PeerWatch {
 public:
  // Ends the alarm with its life: the function does not run after that.
  class Alarm {
   public:
    Alarm() = default;
    Alarm(PeerWatch* watch, uint64_t number) : watch_(watch), number_(number) {}
    Alarm(Alarm&& other) noexcept { *this = std::move(other); }
    Alarm& operator=(Alarm&& other) noexcept;
    ~Alarm() { end(); }

   private:
    void end();
    PeerWatch* watch_ = nullptr;
    uint64_t number_ = 0;
  };

  static Result<std::unique_ptr<PeerWatch>> open(int rank);
  ~PeerWatch();  // tells the peers that this rank leaves

  // Learns who the peers are, by rank; those of other processes are watched from then on. Errors: those of
  // FdExchange::all_gather.
  Status meet(FdExchange& exchange, const std::vector<bool>& is_other_process, Deadline until);

  // Calls `lost(peer)` when a peer has died, at once for one that has died before. It runs under a lock: it
  // must be short, and call nothing of this object.
  Alarm alarm(std::function<void(int peer)> lost);

  // Somebody else has found that a peer is lost, and how: "is lost: silent for 10 s". Of the own rank: that the
  // others have given it up.
  void lose(int peer, std::string how);
  // Calls `tell` for each peer that this object finds dead by itself, under its lock: it must call nothing of
  // this object. An empty function ends that.
  void tell(std::function<void(int peer, const std::string& how)> tell);
  // "pid 4711 on node7" of every rank, for those that are on other hosts; who_am_i() is this rank's.
  void introduce(std::vector<std::string> who);
  static std::string who_am_i();

  // Whether nothing more can come from a peer: it has died or left.
  bool is_over(int peer);
  // The first death, and how; empty while nobody has died. A rank that dies of another's death is not named.
  std::string lost();
  // The same where a death is likely: a process that ends loses its memory and its connections a moment before it is
  // known to have ended. Waits at most a second.
  std::string lost_by_now();
  // What became of a peer: "rank 3 (pid 4711 on node7) is stopped", or was killed, has left, is running.
  std::string fate(int peer);
  // The same of peers that look as if they were over, after a moment for those that are just ending;
  // `otherwise` is said of who has not ended then. Where somebody has died, lost() instead.
  std::string fates(const std::vector<int>& peers, std::string_view otherwise);

  // This rank has masked a peer of this host, which had stayed silent, or takes it back; the peer sees it in
  // maskers().
  void mask(int peer, bool is_masked);
  // Who has masked this rank: "rank 0 (pid 4711 on node7), rank 2 (...)"; empty for nobody.
  std::string maskers();

  // This rank has waited for a peer of this host until the deadline; the peer sees it in given_up_by().
  void give_up(int peer);
  bool is_given_up_by(int peer);
  // Who has given this rank up: "this rank was given up by rank 0 (pid 4711 on node7), rank 2 (...)". Where nobody has,
  // who of this host is over: "rank 0 (...) has left"; else empty.
  std::string given_up_by();

  // The process is about to exit: what ends from now on ends because of that. For an exit handler.
  static void process_ends();

 private:
  struct Note;
  struct Peer {
    SharedMemory note;
    FileDescriptor process;  // none: a thread of this process, or the system cannot watch it
    uint64_t watched = 0;
    ProcessEnd end;
    bool is_lost = false;
    std::string how;  // as lose() was told
  };

  explicit PeerWatch(int rank) : rank_(rank) {}
  Note* note_of(int peer) const;
  bool is_of_this_process() const { return owner_.is_this(); }
  bool has_left(int peer) const;
  bool is_over_now(int peer) const;
  void say_to(int peer, uint8_t what, bool is_so);
  bool says(int peer, uint8_t what) const;
  std::string who_says(uint8_t what) const;
  void look();
  void look_locked();
  std::string name(int peer) const;
  std::string fate_locked(int peer) const;

  const int rank_;
  const OwnerProcess owner_;  // a forked child has neither the rank nor the threads
  SharedMemory own_;
  std::shared_ptr<ProcessWatch> processes_;
  std::vector<Peer> peers_;
  std::vector<std::string> who_;
  std::function<void(int, const std::string&)> tell_;
  std::mutex mutex_;
  std::vector<int> first_lost_;
  std::map<uint64_t, std::function<void(int)>> alarms_;
  uint64_t next_alarm_ = 0;
};

}  // namespace weft
