// SPDX-License-Identifier: Apache-2.0
//
// Memory of the weak machine. Each aligned word of 4 bytes has the list of its writes, in the order in which they took
// effect. A load may return any of them that its thread does not know to be overwritten. An access that is not strong, or by
// a bulk copy, and that is in no order with another one of the same bytes is a race: the list says between which.
// Ranges that share() names are such memory; all else, stacks above all, is the agent's own.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

#include "weak/clocks.h"

namespace weft::weak {

enum class Scope : uint8_t { kBlock, kGpu, kSystem };

inline constexpr uint32_t kHost = ~0u;  // the rank of threads of a host, and of NICs

struct Place {
  uint32_t rank = 0, block = 0, warp = 0, lane = 0;
  bool operator==(const Place&) const = default;
};
// The scope that two agents need to hear of each other.
inline Scope scope_between(const Place& a, const Place& b) {
  if (a.rank != b.rank) return Scope::kSystem;
  return a.block != b.block ? Scope::kGpu : Scope::kBlock;
}

using Spot = std::source_location;
// What an access is in the source: a primitive's call, or an instruction of a plain access.
struct Origin {
  const char* call = "";
  Spot spot = {};
  const void* code = nullptr;
};

struct Write {
  uint32_t agent, time;
  uint32_t step;
  Proxy proxy;
  bool is_strong;
  Scope scope;
  Place place;
  Origin origin;
  std::shared_ptr<const View> knew;  // of strong writes: all that the writer knew, published or not
  std::array<std::shared_ptr<const View>, 3>
      released;  // what it publishes to who needs that scope; null: nothing
};

struct Message {
  uint32_t bytes;
  uint8_t mask;        // of the bytes that the write wrote
  const Write* write;  // null: there before the run
};
struct Read {
  uint32_t agent, time;
  uint64_t index;  // of the message, counted from the first
  bool is_strong;
  uint8_t mask;
  Place place;
  Origin origin;
  Proxy proxy;
};
struct Cell {
  std::vector<Message> history;
  uint64_t dropped = 0;     // messages that were too many
  std::vector<Read> reads;  // the newest of each agent

  uint64_t end() const { return dropped + history.size(); }
  const Message& at(uint64_t index) const { return history[index - dropped]; }
};

// Who makes an access, and what it knows.
struct Access {
  uint32_t agent, time;
  Proxy proxy = kGeneric;
  bool is_strong = false;
  Scope scope = Scope::kSystem;
  uint32_t whole = 4;  // bytes that are read from one write, or from several only where these overlap
  Place place;
  const View* view;
  const Clock* also = nullptr;  // more that it knows, for this access alone
  bool is_fresh = false;        // it reads the newest
  Origin origin;

  bool knows(uint32_t other, uint32_t at) const {
    return view->of[proxy].of(other) >= at || (also && also->of(other) >= at);
  }
};

struct Region {
  std::string name;
  std::byte* base;
  uint64_t bytes;
  std::vector<std::unique_ptr<std::array<Cell, 64>>> pages;  // made at first touch
};

// A race: the access that found it, and the earlier one.
struct Race {
  const Access* access;
  bool is_write;
  const Write* write;  // the earlier access; null: it is `read`
  const Read* read;
  const std::byte* at;
};

class Memory {
 public:
  struct Rules {
    uint64_t seed = 0;
    bool finds_races = true;
    uint32_t kept = 8;  // messages of a cell
  };
  using OnRace = void (*)(const Race&);

  Memory(const Rules& rules, OnRace on_race) : rules_(rules), on_race_(on_race), random_(rules.seed) {}

  void share(std::string name, void* base, uint64_t bytes);
  void forget(const void* base);
  Region* region_of(const void* at);
  Cell& cell_of(Region& region, uint64_t offset);  // of the aligned word that `offset` is in

  // Reads bytes, and lists the writes that they are from. The oldest that may be read, or any: by the seed.
  void read(const Access& access, Region& region, const std::byte* at, uint64_t bytes, std::byte* out,
            std::vector<const Write*>* from);
  // Appends to every cell. The write must outlive this.
  void write(const Access& access, Region& region, std::byte* at, uint64_t bytes, const std::byte* in,
             const Write* write);
  // The value and the write that an atomic operation changes: the newest.
  uint64_t newest(Region& region, const std::byte* at, uint32_t bytes, const Write** write);
  // How far a reader has come: the first message that it may still read.
  uint64_t floor_of(const Access& access, const Cell& cell) const;

  Write* make_write() { return &writes_.emplace_back(); }
  uint64_t draw(uint64_t below) { return random_() % below; }
  // How many messages newer than those that the last read() returned its first word had.
  uint32_t newer() const { return newer_; }

 private:
  // xorshift*: one state of 64 bits, so that a machine is made quickly.
  struct Random {
    uint64_t state;
    explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15ull + 0x1234567ull) {}
    uint64_t operator()() {
      state += 0x9e3779b97f4a7c15ull;
      uint64_t z = state;
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
      return z ^ (z >> 31);
    }
  };

  uint64_t choose(const Access& access, Region& region, const std::byte* at, uint64_t bytes);
  void note_read(const Access& access, Cell& cell, uint64_t index, uint8_t mask);
  void check_read(const Access& access, const Cell& cell, const std::byte* at, uint8_t mask);
  void check_write(const Access& access, const Cell& cell, const std::byte* at, uint8_t mask);

  Rules rules_;
  OnRace on_race_;
  Random random_;
  std::deque<Region> regions_;
  Region* last_ = nullptr;
  std::deque<Write> writes_;
  uint32_t newer_ = 0;
};

}  // namespace weft::weak
