// SPDX-License-Identifier: Apache-2.0
#include "weak/memory.h"

#include <cstring>

namespace weft::weak {
namespace {

bool covers(const std::byte* at, const Region& region) {
  return at >= region.base && at < region.base + region.bytes;
}
// The bytes of the aligned word `cell` that a range has, one bit each.
uint8_t mask_of(const std::byte* cell, const std::byte* at, uint64_t bytes) {
  uint8_t mask = 0;
  for (uint32_t i = 0; i < 4; ++i)
    if (cell + i >= at && cell + i < at + bytes) mask |= static_cast<uint8_t>(1 << i);
  return mask;
}
std::byte* word_at(const std::byte* at) {
  return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(at) & ~uintptr_t{3});
}

}  // namespace

void Memory::share(std::string name, void* base, uint64_t bytes) {
  regions_.push_back({std::move(name), static_cast<std::byte*>(base), bytes, {}});
  regions_.back().pages.resize(bytes / 256 + 1);
}
void Memory::forget(const void* base) {
  for (auto it = regions_.begin(); it != regions_.end(); ++it)
    if (it->base == base) {
      regions_.erase(it);
      break;
    }
  last_ = nullptr;
}

Region* Memory::region_of(const void* at) {
  const auto* byte = static_cast<const std::byte*>(at);
  if (last_ && covers(byte, *last_)) return last_;
  for (Region& region : regions_)
    if (covers(byte, region)) return last_ = &region;
  return nullptr;
}

Cell& Memory::cell_of(Region& region, uint64_t offset) {
  const uint64_t word = offset / 4;
  auto& page = region.pages[word / 64];
  if (!page) page = std::make_unique<std::array<Cell, 64>>();
  Cell& cell = (*page)[word % 64];
  if (cell.history.empty()) {
    uint32_t bytes;
    std::memcpy(&bytes, region.base + word * 4, 4);
    cell.history.push_back({bytes, 0xf, nullptr});
  }
  return cell;
}

uint64_t Memory::floor_of(const Access& access, const Cell& cell) const {
  uint64_t floor = cell.end() - 1;
  for (; floor > cell.dropped; --floor) {
    const Write* write = cell.at(floor).write;
    if (!write || access.knows(write->agent, write->time)) break;
  }
  for (const Read& read : cell.reads)
    if (read.index > floor && access.knows(read.agent, read.time)) floor = read.index;
  return floor;
}

// The index in the first word's history.
uint64_t Memory::choose(const Access& access, Region& region, const std::byte* at, uint64_t bytes) {
  Cell& first = cell_of(region, static_cast<uint64_t>(word_at(at) - region.base));
  const uint64_t newest = first.end() - 1;
  const uint64_t floor = floor_of(access, first);
  if (floor == newest || access.is_fresh || draw(2) == 0) return newest;
  const uint64_t index = floor + draw(newest - floor + 1);
  // Others of the same whole must have that write, and be allowed to be read so.
  for (const std::byte* word = word_at(at) + 4; word < at + bytes; word += 4) {
    Cell& cell = cell_of(region, static_cast<uint64_t>(word - region.base));
    bool found = false;
    for (uint64_t i = floor_of(access, cell); i < cell.end() && !found; ++i)
      found = cell.at(i).write == first.at(index).write;
    if (!found) return newest;
  }
  return index;
}

void Memory::note_read(const Access& access, Cell& cell, uint64_t index, uint8_t mask) {
  const Read read{access.agent, access.time,  index,         access.is_strong,
                  mask,         access.place, access.origin, access.proxy};
  for (Read& other : cell.reads)
    if (other.agent == access.agent && other.is_strong == access.is_strong) {
      const uint64_t most = std::max(index, other.index);
      other = read;
      other.index = most;
      return;
    }
  cell.reads.push_back(read);
}

void Memory::check_read(const Access& access, const Cell& cell, const std::byte* at, uint8_t mask) {
  if (!rules_.finds_races) return;
  for (const Message& message : cell.history) {
    const Write* write = message.write;
    if (!write || (message.mask & mask) == 0 || (write->is_strong && access.is_strong)) continue;
    if (!access.knows(write->agent, write->time)) on_race_({&access, false, write, nullptr, at});
  }
}

void Memory::check_write(const Access& access, const Cell& cell, const std::byte* at, uint8_t mask) {
  if (!rules_.finds_races) return;
  for (const Message& message : cell.history) {
    const Write* write = message.write;
    if (!write || (message.mask & mask) == 0 || (write->is_strong && access.is_strong)) continue;
    if (!access.knows(write->agent, write->time)) on_race_({&access, true, write, nullptr, at});
  }
  for (const Read& read : cell.reads) {
    if ((read.mask & mask) == 0 || (read.is_strong && access.is_strong)) continue;
    if (!access.knows(read.agent, read.time)) on_race_({&access, true, nullptr, &read, at});
  }
}

void Memory::read(const Access& access, Region& region, const std::byte* at, uint64_t bytes, std::byte* out,
                  std::vector<const Write*>* from) {
  newer_ = 0;
  const std::byte* const end = at + bytes;
  for (const std::byte* unit = at; unit < end;) {
    const auto place = reinterpret_cast<uintptr_t>(unit);
    const std::byte* next = unit + (access.whole - place % access.whole);
    next = next < end ? next : end;
    const uint64_t chosen = choose(access, region, unit, static_cast<uint64_t>(next - unit));
    const Write* write = nullptr;
    for (std::byte* word = word_at(unit); word < next; word += 4) {
      Cell& cell = cell_of(region, static_cast<uint64_t>(word - region.base));
      uint64_t index = chosen;
      if (word == word_at(unit)) {
        write = cell.at(chosen).write;
      } else {
        for (index = cell.end() - 1; index > cell.dropped && cell.at(index).write != write;) --index;
        if (cell.at(index).write != write) index = cell.end() - 1;  // of several writes: the newest
        index = std::max(index, floor_of(access, cell));
      }
      const uint8_t mask = mask_of(word, unit, static_cast<uint64_t>(next - unit));
      check_read(access, cell, word, mask);
      note_read(access, cell, index, mask);
      const Message& message = cell.at(index);
      newer_ = std::max(newer_, static_cast<uint32_t>(cell.end() - 1 - index));
      for (uint32_t i = 0; i < 4; ++i)
        if (mask >> i & 1) out[word + i - at] = static_cast<std::byte>(message.bytes >> (8 * i));
      if (from && message.write && (from->empty() || from->back() != message.write))
        from->push_back(message.write);
    }
    unit = next;
  }
}

void Memory::write(const Access& access, Region& region, std::byte* at, uint64_t bytes, const std::byte* in,
                   const Write* write) {
  for (std::byte* word = word_at(at); word < at + bytes; word += 4) {
    Cell& cell = cell_of(region, static_cast<uint64_t>(word - region.base));
    const uint8_t mask = mask_of(word, at, bytes);
    check_write(access, cell, word, mask);
    // Reads of copies order nothing later but writes.
    if (cell.reads.size() > 8)
      std::erase_if(cell.reads, [&](const Read& read) {
        return read.proxy != kGeneric && access.knows(read.agent, read.time);
      });
    uint32_t value = cell.history.back().bytes;
    for (uint32_t i = 0; i < 4; ++i)
      if (mask >> i & 1) {
        value &= ~(0xffu << (8 * i));
        value |= static_cast<uint32_t>(in[word + i - at]) << (8 * i);
      }
    cell.history.push_back({value, mask, write});
    if (cell.history.size() > rules_.kept) {
      cell.history.erase(cell.history.begin());
      ++cell.dropped;
    }
  }
}

uint64_t Memory::newest(Region& region, const std::byte* at, uint32_t bytes, const Write** write) {
  uint64_t value = 0;
  for (uint32_t i = 0; i < bytes; i += 4) {
    const Cell& cell = cell_of(region, static_cast<uint64_t>(at + i - region.base));
    value |= uint64_t{cell.history.back().bytes} << (8 * i);
    *write = cell.history.back().write;
  }
  return value;
}

}  // namespace weft::weak
