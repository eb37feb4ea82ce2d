// SPDX-License-Identifier: Apache-2.0
//
// What rails of the provider `cuda` share in memory of the host. Each rail has a control page, which peers of the same
// user read: its registrations, and places where they say hello. A rail that writes to another makes a lane to it:
// words and messages to the reader, requests that the reader carries out, and its replies. The writer's GPU stores the
// words, behind its copies.
//   page:  owner writes exports; peers write hellos          lane:  one writer, one reader
// Counters of a lane only grow. Each is written by one side, and stands in a cache line of its own.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/process_name.h"
#include "base/same_host.h"
#include "base/shared_memory.h"

namespace weft::provider::cuda {

constexpr uint32_t kHellos = 256;
constexpr uint32_t kExports = 1 << 14;
constexpr uint32_t kStreams = 4;          // of a rail: copies of one are done in order
constexpr uint32_t kRows = kStreams + 1;  // of words: one for each stream, and the last for the writer's host
constexpr uint32_t kWords = 256;          // immediates of a row that the reader has not taken
constexpr uint32_t kRequests = 1024;      // and the most pages of a post
constexpr uint32_t kMessages = 32;
constexpr uint32_t kMessageBytes = 8192;
constexpr uint32_t kHandleBytes = 64;

// How a rail is found: its address, and what it says when it says hello.
struct Contact {
  SharedMemory::Name page;
  Neighbour memory;     // for copies between processes
  ProcessName process;  // for its end
};

enum class Place : uint32_t { kHost, kIpc, kVmm };

// A registration, as peers find it. `key` is written last and cleared first.
struct Export {
  std::atomic<uint64_t> key;  // 0: none here
  uint64_t base, bytes;
  uint32_t access;
  Place place;
  uint64_t block, block_bytes;  // of a GPU: the allocation, or the mapped stretches, that hold it
  uint64_t segments_at;         // kVmm: so many Segments, in the memory of the owner
  uint32_t segments;
  char handle[kHandleBytes];  // kIpc
};

// One physical allocation under a range of addresses.
struct Segment {
  uint64_t bytes;
  int32_t fd;  // of the owner's process
};

struct Hello {
  enum State : uint32_t { kEmpty, kBeingWritten, kFull };
  std::atomic<uint32_t> state;
  SharedMemory::Name lane;
  Contact from;
};

struct ControlPage {
  uint64_t key;                      // SharedMemory's
  std::atomic<uint32_t> next_hello;  // the place of the next one
  std::atomic<uint32_t> hellos_put;  // grows after a hello was written
  Hello hellos[kHellos];
  Export exports[kExports];  // a key has one place: key % kExports
};

// An operation between memory of the writer's GPU and the reader's host, which only the reader's process reaches.
struct Request {
  bool is_read;  // from the reader's memory into the writer's
  bool has_imm;
  uint32_t imm;
  uint64_t readers, readers_key, writers, writers_key, bytes;
};
constexpr uint32_t kErrorBytes = 120;
struct Reply {
  uint64_t request;
  char error[kErrorBytes];  // "": it worked
};
struct Message {
  uint32_t bytes;
  char text[kMessageBytes];
};

struct alignas(64) Count {
  std::atomic<uint64_t> value;
};

struct Lane {
  uint64_t key;                     // SharedMemory's
  std::atomic<uint32_t> is_closed;  // by the writer, who puts nothing more
  Count messages_put, messages_taken;
  Count requests_put, requests_taken;
  Count replies_put, replies_taken;
  Count words_taken[kRows];
  // Word n of a row is n / kWords + 1 in its upper half, and the immediate in the lower.
  std::atomic<uint64_t> words[kRows][kWords];
  Request requests[kRequests];
  Reply replies[kRequests];  // never more than requests that are open
  Message messages[kMessages];
};

}  // namespace weft::provider::cuda
