// SPDX-License-Identifier: Apache-2.0
#include "moe/fault_text.h"

#include <cstdio>
#include <iterator>

#include "base/log.h"
#include "base/text.h"
#include "kernels/moe/high_throughput_args.h"
#include "kernels/moe/low_latency_layout.h"
#include "moe/handle_id.h"
#include "moe/low_latency_call_word.h"

namespace weft {
namespace {

const char* operation(Site site) {
  switch (site) {
    case Site::kNone:
      return "nothing";
    case Site::kCounts:
      return "dispatch.counts";
    case Site::kCountsDisagree:
      return "dispatch.counts";
    case Site::kDispatchRendezvous:
      return "dispatch.rendezvous";
    case Site::kDispatchRecv:
      return "dispatch.recv";
    case Site::kDispatchCapacity:
      return "dispatch.capacity";
    case Site::kCombineRendezvous:
      return "combine.rendezvous";
    case Site::kCombineRecv:
      return "combine.recv";
    case Site::kCombineHandle:
      return "combine.handle";
    case Site::kDispatchHandle:
      return "dispatch.handle";
    case Site::kLowLatencyDispatchSlot:
      return "low_latency_dispatch.slot";
    case Site::kLowLatencyDispatchRecv:
      return "low_latency_dispatch.recv";
    case Site::kLowLatencyCombineSlot:
      return "low_latency_combine.slot";
    case Site::kLowLatencyCombineRecv:
      return "low_latency_combine.recv";
    case Site::kLowLatencyCapacity:
    case Site::kExpertCapacity:
    case Site::kPackedCapacity:
      return "low_latency_dispatch.capacity";
    case Site::kLowLatencyAgree:
      return "low_latency.agree";
    case Site::kBarrier:
      return "barrier";
    case Site::kRingSend:
      return "pp_send";
    case Site::kRingReceive:
      return "pp_recv";
    case Site::kRingBytes:
      return "pp_recv.bytes";
    case Site::kEngramIndex:
    case Site::kEngramFetch:
      return "engram_fetch";
    case Site::kLowLatencySignal:
      return "low_latency_combine.signal";
    case Site::kCombineExpert:
      return "low_latency_combine.ids";
    case Site::kCollective:
    case Site::kPeerMemory:
    case Site::kPeerWindow:
    case Site::kPeerDied:
    case Site::kCollectiveCall:
    case Site::kTakenBack:
      return "collective";
    case Site::kGaveUp:
      return "gave up";
    case Site::kPortFull:
      return "proxy.push";
    case Site::kPortFlush:
      return "proxy.flush";
    case Site::kPortRange:
      return "proxy.range";
    case Site::kPortLayout:
      return "port.layout";
    case Site::kQueueRoom:
      return "ibgda.post";
    case Site::kQueueOrder:
      return "ibgda.publish";
    case Site::kQueueFlush:
      return "ibgda.flush";
    case Site::kQueueRefused:
      return "ibgda";
    case Site::kChannelLoop:
      return "channel loop";
    case Site::kDispatchSlot:
      return "dispatch.slot";
    case Site::kDispatchForward:
      return "dispatch.forward";
    case Site::kCombineSlot:
      return "combine.slot";
    case Site::kCombineSum:
      return "combine.sum";
    case Site::kExchangeFloor:
      return "exchange floor";
  }
  return "unknown";
}

const char* work_name(Work work) {
  switch (work) {
    case Work::kNotify:
      return "dispatch.notify";
    case Work::kPushRows:
      return "dispatch.rows";
    case Work::kPushMeta:
      return "dispatch.meta";
    case Work::kDispatch:
      return "dispatch";
    case Work::kPushBack:
      return "combine.push";
    case Work::kSum:
      return "combine.sum";
    case Work::kCombine:
      return "combine";
    case Work::kSendBatch:
      return "low_latency_dispatch.send";
    case Work::kUnpack:
      return "low_latency_dispatch.unpack";
    case Work::kLowLatencyBegin:
      return "low_latency.begin";
    case Work::kAnswer:
      return "low_latency_combine.answer";
    case Work::kLowLatencySum:
      return "low_latency_combine.sum";
    case Work::kLowLatencyCall:
      return "low_latency";
    case Work::kTellCounts:
      return "low_latency_dispatch.counts";
    case Work::kStoreLines:
      return "low_latency_dispatch.store";
    case Work::kSegments:
      return "low_latency_dispatch.segments";
  }
  return "unknown";
}

// What LowLatencyHandshake::words hold.
const char* handshake_word_name(uint64_t word) {
  static constexpr const char* kNames[] = {"num_max_dispatch_tokens_per_rank", "x (bytes per row)",
                                           "topk_idx (top-k)", "num_experts", "x (bytes of scales per row)"};
  return word < std::size(kNames) ? kNames[word] : "arguments";
}

Status handshakes_differ(const FaultBox& box) {
  const bool is_call_word = box.waited_ns + 1 == LowLatencyHandshake::kWords;
  const WordDifference what =
      is_call_word ? word_difference(box.expected, box.seen)
                   : WordDifference{handshake_word_name(box.waited_ns), box.expected, box.seen};
  return Status::invalid("{}: rank {} was given {}, rank {} {}, allowed: the same on all ranks",
                         what.argument, box.self, what.mine, box.peer, what.theirs);
}

std::string seconds(uint64_t ns) {
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%.1f", static_cast<double>(ns) * 1e-9);
  return digits;
}

Status differ(const char* argument, uint32_t self, uint64_t mine, uint32_t peer, uint64_t theirs) {
  return Status::invalid("{}: got {} on rank {} and {} on rank {}, allowed: the same on all ranks", argument,
                         mine, self, theirs, peer);
}

// Of two row_extras(), what differs first.
Status extras_differ(const FaultBox& box) {
  struct Part {
    const char* name;
    uint32_t shift, bits;
  };
  static constexpr Part kParts[] = {
      {"x (scale words per row)", 0, 32}, {"topk_idx (top-k)", 32, 24}, {"topk_idx (bytes per id)", 56, 8}};
  static_assert(row_extras(1, 2, 3) == (1 | uint64_t{2} << 32 | uint64_t{3} << 56));
  for (const Part& part : kParts) {
    const uint64_t mask = (uint64_t{1} << part.bits) - 1;
    const uint64_t mine = box.expected >> part.shift & mask, theirs = box.seen >> part.shift & mask;
    const bool is_weights = part.bits == 24 && box.site == Site::kCombineHandle;
    if (mine != theirs)
      return differ(is_weights ? "topk_weights (how many travel with a row)" : part.name, box.self, mine,
                    box.peer, theirs);
  }
  return differ("arguments", box.self, box.expected, box.peer, box.seen);
}

// What a rank refused a peer's RendezvousRecord for.
Status record_differs(const FaultBox& box) {
  if (box.waited_ns == kLacksRoom)
    return no_room(box.peer, box.site == Site::kCombineHandle ? "combine" : "dispatch",
                   {box.expected, box.seen});
  if (box.waited_ns == kOtherExtras) return extras_differ(box);
  if (box.waited_ns == kOtherRowBytes)
    return differ("x (bytes per row)", box.self, box.expected, box.peer, box.seen);
  if (handle_buffer(box.expected) != handle_buffer(box.seen))
    return Status::invalid(
        "handle: ranks {} and {} were given those of different buffers, allowed: of one dispatch", box.self,
        box.peer);
  return differ("handle (number of the dispatch)", box.self, handle_number(box.expected), box.peer,
                handle_number(box.seen));
}

// What a wait was for, and how far it got. Several messages, or lines, make an epoch: some may be there, and others not.
std::string progress(const FaultBox& box) {
  return box.expected == box.seen ? text("epoch {} has begun there, and not all of it came", box.expected)
                                  : text("expected epoch {}, saw {}", box.expected, box.seen);
}

// Of FaultRecord::claimed: a lost peer that a call has reported. Every later call is refused for it.
constexpr uint32_t kReported = 2;

// What the caller of this rank did wrong in a call that went on without it.
Status mistake_status(const FaultRecord& mistake) {
  return Status::invalid(
      "topk_idx: rank {}: slot {} of token {} names expert {}, to which the dispatch did not send that "
      "token, "
      "allowed: experts that the token had at the dispatch, in any slots, or ids below 0 for none",
      mistake.self, mistake.peer, mistake.expected, mistake.seen);
}

void clear(FaultRecord& record) {
  store_relaxed(&record.raised, uint32_t{0});
  store_release(&record.claimed, uint32_t{0});
}

}  // namespace

Status disagreement(uint64_t word, uint32_t self, uint64_t mine, uint32_t peer, uint64_t theirs) {
  static constexpr const char* kNames[kAgreedWords] = {"x (bytes per row)", "x (scale words per row)",
                                                       "topk_idx (top-k)", "num_experts",
                                                       "x (bytes per element)"};
  return differ(word < kAgreedWords ? kNames[word] : "arguments", self, mine, peer, theirs);
}

Status no_room(uint32_t rank, std::string_view call, const Lacking& lacking) {
  return Status::make(
      Code::kCapacity,
      "num_nvl_bytes: rank {}: {} needs {} bytes in one piece, and {} are free; make it larger, free earlier "
      "outputs, or dispatch once with a new handle and outside a graph, which grows it",
      rank, call, lacking.bytes, lacking.free_bytes);
}

Status fault_status(const FaultBox& box, PeerWatch& peers) {
  const char* what = operation(box.site);
  if (box.site == Site::kDispatchCapacity)
    return Status::make(Code::kCapacity,
                        "num_worst_tokens: got {}, allowed: at least the {} rows that rank {} received",
                        box.expected, box.seen, box.self);
  if (box.site == Site::kLowLatencyCapacity)
    return Status::invalid(
        "topk_idx: rank {}: {} rows for its expert {}, allowed: {}; tokens that name an expert more than "
        "once need a larger num_max_dispatch_tokens_per_rank",
        box.self, box.seen, box.peer, box.expected);
  if (box.site == Site::kExpertCapacity)
    return Status::make(Code::kCapacity,
                        "max_tokens_per_expert: got {}, allowed: at least the {} rows that rank {} received "
                        "for its expert {}",
                        box.expected, box.seen, box.self, box.peer);
  if (box.site == Site::kPackedCapacity)
    return Status::make(Code::kCapacity,
                        "max_recv_tokens: got {}, allowed: at least the {} rows, expert_padding included, "
                        "that rank {} received",
                        box.expected, box.seen, box.self);
  if (box.site == Site::kLowLatencyAgree) return handshakes_differ(box);
  if (box.site == Site::kRingBytes)
    return Status::invalid("t: rank {} receives {} bytes, rank {} sent {}, allowed: the same on both",
                           box.self, box.expected, box.peer, box.seen);
  if (box.site == Site::kEngramIndex)
    return Status::invalid("indices: rank {} was given entry {}, allowed: 0 to {}", box.self,
                           static_cast<int64_t>(box.seen), static_cast<int64_t>(box.expected) - 1);
  if (box.site == Site::kLowLatencySignal)
    return Status::make(
        Code::kPeerLost,
        "rank {}, low_latency_combine.signal, waited {} s for this rank's own kernels: local expert "
        "{}: expected signal {}, saw {}; a kernel's first use waits for those that run, so use it once "
        "before, and num_sms must leave it SMs",
        box.self, seconds(box.waited_ns), box.peer, box.expected, box.seen);
  if (box.site == Site::kCombineHandle || box.site == Site::kDispatchHandle) return record_differs(box);
  if (box.site == Site::kCountsDisagree)
    return disagreement(box.waited_ns, box.self, box.expected, box.peer, box.seen);
  if (box.site == Site::kGaveUp)
    return Status::make(Code::kPeerLost, "rank {}: an earlier call gave up waiting, allowed: a new buffer",
                        box.self);
  if (box.site == Site::kPeerDied)
    return Status::make(Code::kPeerLost, "rank {}: {}", box.self, peers.lost());
  const std::string lost = peers.lost();
  return Status::make(Code::kPeerLost, "rank {}, {}, waited {} s for rank {}: {}; {}", box.self, what,
                      seconds(box.waited_ns), box.peer, progress(box),
                      lost.empty() ? peers.fate(static_cast<int>(box.peer)) : lost);
}

Status take_fault(FaultBox& box, PeerWatch& peers) {
  if (load_acquire(&box.raised) != 0) {
    const Status status = fault_status(box, peers);
    const bool is_known = load_relaxed(&box.claimed) == kReported;
    if (is_known)
      return Status(status.code(), text("not made, as an earlier call failed: {}", status.message()));
    if (status.code() == Code::kPeerLost)
      store_relaxed(&box.claimed, kReported);
    else
      clear(box);
    return logged(status);
  }
  if (load_acquire(&box.mistake.raised) == 0) return {};
  Status status = logged(mistake_status(box.mistake));
  clear(box.mistake);
  return status;
}

std::string span_name(uint32_t what) {
  if (what >= kFirstWork) return work_name(static_cast<Work>(what - kFirstWork));
  return std::string("wait ") + operation(static_cast<Site>(what));
}

}  // namespace weft
