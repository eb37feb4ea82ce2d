// SPDX-License-Identifier: Apache-2.0
//
// A FaultBox is where a kernel says why it gave up: one record, in memory that the host can read while the
// kernel runs. The first fault is written; later ones are dropped. A second record is for mistakes of this rank's
// caller: a mistake ends no wait, so the call goes on, and other ranks notice nothing. Host and device share this
// header.
#pragma once

#include "kernels/target/target.h"

namespace weft {

// Which wait failed. The host turns it into words (src/moe/fault_text.cc).
enum class Site : uint32_t {
  kNone = 0,
  kCounts,                  // dispatch: the counts of a peer
  kCountsDisagree,          // dispatch: a peer's sizes differ from this rank's
  kDispatchRendezvous,      // dispatch: a peer's address for its rows
  kDispatchRecv,            // dispatch: the rows of a peer
  kDispatchCapacity,        // dispatch: more rows came than num_worst_tokens allows
  kCombineRendezvous,       // combine: a peer's address for its rows
  kCombineRecv,             // combine: the rows of a peer
  kCombineHandle,           // combine: the peer combines another dispatch than this rank
  kDispatchHandle,          // cached dispatch: the peer repeats another dispatch than this rank
  kLowLatencyDispatchSlot,  // low latency: the peer has not read the messages of two calls ago
  kLowLatencyDispatchRecv,
  kLowLatencyCombineSlot,
  kLowLatencyCombineRecv,
  kLowLatencyCapacity,  // low latency: local expert `peer` received more rows than its output holds
  kLowLatencyAgree,  // low latency: the peer was called with other sizes; waited_ns is the index of the first
  kBarrier,
  kCollective,  // a collective program's step
  kPeerMemory,  // a collective program: the memory of the peer's process cannot be read
  kRingSend,    // a neighbour has not read the message whose slot is needed
  kRingReceive,
  kRingBytes,         // the neighbour sent a message of another size
  kEngramIndex,       // engram: an index names no entry
  kLowLatencySignal,  // low latency: this rank's own kernels have not said that the rows of expert `peer` are
                      // there
  kPeerWindow,      // a collective program: the peer's message lies in a window that this rank has destroyed
  kCollectiveCall,  // a collective program: the peer's message is of another call
  kPeerDied,        // raised by the host: the peer's process is no more
  kGaveUp,          // an earlier launch of this rank gave up waiting
  kTakenBack,       // a collective program: the peer gave up waiting and took its message back
  kPortFull,        // a port: the proxy thread has not taken a command for too long
  kPortFlush,       // ... or not finished reading this rank's memory
  kPortRange,       // a port: a place outside the window (expected: its bytes), or not aligned
  kChannelLoop,     // the loop of `weft bench channel`
  kExpertCapacity,  // a dispatch into bounded outputs: local expert `peer` received more rows than these hold
  kPackedCapacity,  // ... packed: all experts together did
  kDispatchSlot,    // dispatch over nodes: a rail peer has not read what was sent to it before
  kDispatchForward,  // ... the messages of a peer that this rank forwards
  kCombineSlot,      // combine over nodes: the peer has not read the sums that this rank sent it before
  kCombineSum,       // ... the sums of another node, from its rail peer
  kExchangeFloor,    // the exchange of `weft bench floor`
  kQueueRoom,        // a NIC's queue: no room until entry `expected` is done; `seen` are
  kQueueOrder,       // ... entries before `expected` have not been published; `seen` are
  kQueueFlush,       // ... entry `expected` is not done; `seen` are
  kQueueRefused,     // ... the NIC refused entry `expected`; detail: vendor's number << 8 | syndrome
  kEngramFetch,      // engram: an entry of a peer behind a port
  kPortLayout,       // a port: a library's structure is not laid out as its headers say
  kCombineExpert,  // low latency, a mistake: slot `peer` of token `expected` names expert `seen` at combine, to which
                   // the dispatch did not send the token
};

struct FaultRecord {
  uint32_t claimed;  // not 0 once somebody writes the record
  uint32_t raised;   // 1 once the record is complete
  Site site;
  uint32_t self;
  uint32_t peer;
  uint32_t detail;  // of a collective program: block << 16 | step; of a NIC: see kQueueRefused
  uint64_t expected;
  uint64_t seen;
  uint64_t waited_ns;
};
static_assert(sizeof(FaultRecord) == 48);

struct FaultBox : FaultRecord {
  FaultRecord mistake;
};
static_assert(sizeof(FaultBox) == 96);

WEFT_DEVICE void raise(FaultRecord* box, Site site, uint32_t self, uint32_t peer, uint64_t expected,
                       uint64_t seen, uint64_t waited_ns, uint32_t detail = 0) {
  if (exchange_local(&box->claimed, uint32_t{1}) != 0) return;
  box->site = site;
  box->self = self;
  box->peer = peer;
  box->detail = detail;
  box->expected = expected;
  box->seen = seen;
  box->waited_ns = waited_ns;
  store_release(&box->raised, uint32_t{1});
}

}  // namespace weft
