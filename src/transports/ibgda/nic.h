// SPDX-License-Identifier: Apache-2.0
//
// A Nic is one RDMA adapter whose queues device code writes itself: it makes queue pairs and keys for memory. The only
// one that the library has is mlx5_nic.h's; tests put a model in its place.
//   WEFT_TRY_ASSIGN(std::unique_ptr<Nic> nic, nic_source().open(device));
//   WEFT_TRY_ASSIGN(std::unique_ptr<QueuePair> pair, nic->create_queue(1024));
//   all ranks exchange pair->address(); WEFT_TRY(pair->connect(theirs));
// Threads: a Nic and its queue pairs are used by one thread at a time, but for ring().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/device.h"
#include "base/status.h"
#include "transports/ibgda/wire.h"

namespace weft::ibgda {

// Memory of a queue pair that device code is given: all of it readable and writable by kernels of the device.
struct QueueMemory {
  std::byte* ring = nullptr;         // [blocks * 64], 64-byte aligned
  std::byte* completions = nullptr;  // [entries * 64]
  uint32_t* record = nullptr;        // doorbell record, two words
  uint64_t* doorbell = nullptr;      // the NIC's register, or a word of the host's memory
  uint32_t blocks = 0;               // a power of two
  uint32_t entries = 0;  // a power of two, at least as many as blocks; 1: all completions share one
  uint32_t number = 0;
};

class QueuePair {
 public:
  virtual ~QueuePair() = default;
  virtual const QueueMemory& memory() const = 0;
  // Where it is, for the other end; changes with reset().
  virtual std::string address() const = 0;
  // Joins it to the other end, which does the same. Errors: kInvalid for bytes that are no address, kSystem.
  virtual Status connect(std::string_view address) = 0;
  // Puts the pair into its first state: nothing is under way, the ring's indices begin at 0, completions are fresh.
  // Posters must have stopped, and begin at 0 too.
  virtual Status reset() = 0;
  // Whether memory().doorbell is a word of the host's memory that a thread of the host has to pass on by ring().
  virtual bool is_rung_by_host() const { return false; }
  virtual void ring(uint64_t /*doorbell*/) {}

  // The host's access to memory(), which is host memory unless the queue overrides these. Whether an access
  // takes many microseconds: then do not poll.
  virtual bool is_far() const { return false; }
  // The record's next free index, of 16 bits.
  virtual uint32_t posted() const { return big_endian(load_acquire(memory().record + kRecordOfSends)); }
  // That of an entry; its last word is read first.
  virtual Completion completion(uint32_t index) const;
  // Writes an entry and the record of it. The doorbell is the caller's.
  virtual Status put_entry(uint32_t index, const Entry& entry);
};

// Memory that a NIC may reach. Valid until it is released.
struct Enrolled {
  void* handle = nullptr;
  uint32_t local_key = 0, remote_key = 0;
  uint64_t base = 0;  // what the NIC calls its first byte
};

class Nic {
 public:
  virtual ~Nic() = default;
  virtual const std::string& name() const = 0;
  // `blocks` and as many completions. Errors: kSystem.
  virtual Result<std::unique_ptr<QueuePair>> create_queue(uint32_t blocks) = 0;
  // For local use and for writes and atomics of peers, in order: writes of a peer are seen in the order in which it
  // made them. `place`: whose memory it is, the host's or that of the device for which the NIC was opened. Errors: kSystem;
  // kUnsupported where memory of the device cannot be reached; a NIC takes it only where its queues lie there, too.
  virtual Result<Enrolled> enroll(std::byte* data, uint64_t bytes, Device place) = 0;
  virtual void release(Enrolled& enrolled) = 0;
  // One entry moves 2^this bytes at most.
  virtual uint32_t put_shift() const { return 30; }
};

// What a machine has.
struct NicFinding {
  std::string unusable_because;  // empty: it can be used
  std::string details;           // for people
  std::string
      network;  // ranks whose NICs have the same network reach each other; "process:...": within a process
  double gbit_per_s = 0;
};

class NicSource {
 public:
  virtual ~NicSource() = default;
  virtual NicFinding find(Device device) = 0;
  virtual Result<std::unique_ptr<Nic>> open(Device device) = 0;
};

// mlx5 NICs, unless a test has put something else there. Null puts them back. Threads: set while nobody uses it.
NicSource& nic_source();
void set_nic_source(NicSource* source);

const char* to_string(uint32_t syndrome);

}  // namespace weft::ibgda
