// SPDX-License-Identifier: Apache-2.0
//
// rendezvous.cuh: the rendezvous that starts every transfer of rows. Each rank gives all peers a record: where its
// rows go, and which dispatch it means. A rank writes to a peer only after that peer's record has come.
#pragma once

#include "kernels/core/grid.cuh"
#include "kernels/core/reach.cuh"
#include "kernels/moe/high_throughput_args.h"

namespace weft {

struct Rendezvous {
  uint64_t signal_at;
  uint64_t record_at;
  Site silent;    // the peer's record never came
  Site mistaken;  // it names another dispatch, or a rank that has no room
};

template <class MeshT>
WEFT_DEVICE const RendezvousRecord* rendezvous_record(const Rendezvous& x, const MeshT& mesh, uint64_t epoch,
                                                      uint32_t peer) {
  const auto* records =
      reinterpret_cast<const RendezvousRecord*>(mesh.local() + x.record_at + records_of(mesh, peer));
  return records + (epoch & 1) * mesh.ranks() + peer;
}

// One lane per peer. Peers behind ports get this rank's own copy of its record, which is written before them and not again.
template <class MeshT>
WEFT_DEVICE void post_record(const Rendezvous& x, Warp warp, const MeshT& mesh, const RendezvousRecord& mine,
                             uint64_t epoch) {
  const uint64_t offset = x.record_at + ((epoch & 1) * mesh.ranks() + mesh.rank()) * sizeof(RendezvousRecord);
  const auto* words = reinterpret_cast<const uint64_t*>(&mine);
  const auto write = [&](std::byte* at) {
    auto* record = reinterpret_cast<uint64_t*>(at);
    for (uint32_t i = 0; i < sizeof(RendezvousRecord) / 8; ++i) store_relaxed(record + i, words[i]);
  };
  const int64_t places = port_places(mesh).records;
  constexpr bool kPutsOwn = kHasPorts<MeshT>;
  if (kPutsOwn && warp.rank() == 0) {
    write(mesh.local() + offset);
    if (places != 0) write(mesh.local() + places + offset);
  }
  if (kPutsOwn) warp.sync();
  for (uint32_t peer = warp.rank(); peer < mesh.ranks(); peer += warp.size()) {
    const Outgoing<MeshT> record(mesh, peer, near_window(mesh, peer), offset, offset, places);
    if (!kPutsOwn || (record.is_near() && peer != mesh.rank())) write(record.at());
    record.send(OneThread{}, sizeof(RendezvousRecord), x.signal_at + mesh.rank() * 8, epoch);
  }
}

WEFT_DEVICE bool agrees(const RendezvousRecord& theirs, const RendezvousRecord& mine) {
  return theirs.handle == mine.handle && theirs.row_bytes == mine.row_bytes && theirs.extras == mine.extras &&
         (theirs.lacking_bytes | mine.lacking_bytes) == 0;
}

WEFT_DEVICE void raise_mistaken(const Rendezvous& x, const WaitRule& rule, uint32_t peer,
                                const RendezvousRecord& mine, const RendezvousRecord& theirs) {
  if (mine.lacking_bytes != 0) return;  // its host has said so
  if (theirs.lacking_bytes != 0)
    raise(rule.fault, x.mistaken, rule.self, peer, theirs.lacking_bytes, theirs.free_bytes, kLacksRoom);
  else if (theirs.handle != mine.handle)
    raise(rule.fault, x.mistaken, rule.self, peer, mine.handle, theirs.handle, kOtherHandle);
  else if (theirs.row_bytes != mine.row_bytes)
    raise(rule.fault, x.mistaken, rule.self, peer, mine.row_bytes, theirs.row_bytes, kOtherRowBytes);
  else
    raise(rule.fault, x.mistaken, rule.self, peer, mine.extras, theirs.extras, kOtherExtras);
}

// Returns, in every thread of the block, whether all peers have come to the same transfer as this rank.
template <class MeshT>
WEFT_DEVICE bool meet_peers(const Rendezvous& x, Block block, Warp warp, const MeshT& mesh,
                            const RendezvousRecord& mine, uint64_t epoch, const WaitRule& rule,
                            uint32_t* shared_flag) {
  if (warp.index() == 0) {
    const bool takes_part = !is_void(rule, load_gave_up(rule));
    if (block.index() == 0 && takes_part) post_record(x, warp, mesh, mine, epoch);
    bool came = takes_part && wait_all_peers(warp, mesh.ranks(), epoch, x.silent, rule, [&](uint32_t peer) {
                  return word_from(mesh, peer, x.signal_at) + peer;
                });
    bool same = true;
    for (uint32_t peer = warp.rank(); came && peer < mesh.ranks(); peer += warp.size()) {
      const RendezvousRecord* theirs = rendezvous_record(x, mesh, epoch, peer);
      if (agrees(*theirs, mine)) continue;
      if (block.index() == 0) raise_mistaken(x, rule, peer, mine, *theirs);
      same = false;
    }
    const bool is_agreed = came && !warp.any(!same);
    if (warp.rank() == 0) *shared_flag = is_agreed ? 1 : 0;
  }
  block.sync();
  return *shared_flag != 0;
}

// Where the records of dispatches and of combines stand, and the sites of their waits.
WEFT_DEVICE Rendezvous rendezvous_of(const DispatchArgs& a) {
  return {a.at.rendezvous_signal, a.at.rendezvous_record, Site::kDispatchRendezvous, Site::kDispatchHandle};
}
WEFT_DEVICE Rendezvous rendezvous_of(const CombineArgs& a) {
  return {a.at.combine_signal, a.at.combine_record, Site::kCombineRendezvous, Site::kCombineHandle};
}

// meet_peers() for a kernel of arguments `a`: where it returns false the launch is finished, and the kernel returns.
// If ranks disagree, all of them notice, and stay in step. flags: u32[2], shared.
template <class MeshT, class Args>
WEFT_DEVICE bool begin_rendezvous(const Args& a, const Rendezvous& ready, Block block, Warp warp,
                                  const MeshT& mesh, uint64_t epoch, uint32_t* flags) {
  if (meet_peers(ready, block, warp, mesh, a.mine, epoch, a.wait, &flags[0])) return true;
  finish_launch(block, a.state, &flags[1]);
  return false;
}

// The first row at `rank` that comes from `source`, and how many do. prefix is i32[R][R], inclusive over
// sources.
struct RowSpan {
  uint32_t first;
  uint32_t count;
};
WEFT_DEVICE RowSpan row_span(const int32_t* prefix, uint32_t ranks, uint32_t source, uint32_t rank) {
  const uint32_t first = source == 0 ? 0 : static_cast<uint32_t>(prefix[(source - 1) * ranks + rank]);
  return {first, static_cast<uint32_t>(prefix[source * ranks + rank]) - first};
}

// How a row is cut into pieces that fit a RowPipe's stage.
struct Pieces {
  uint64_t row_bytes;
  uint64_t piece_bytes;

  WEFT_DEVICE uint64_t per_row() const { return (row_bytes + piece_bytes - 1) / piece_bytes; }
  WEFT_DEVICE uint64_t offset(uint64_t item) const { return item % per_row() * piece_bytes; }
  WEFT_DEVICE uint64_t row(uint64_t item) const { return item / per_row(); }
  WEFT_DEVICE uint32_t bytes(uint64_t item) const {
    const uint64_t left = row_bytes - offset(item);
    return static_cast<uint32_t>(left < piece_bytes ? left : piece_bytes);
  }
};

}  // namespace weft
