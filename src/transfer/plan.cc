// SPDX-License-Identifier: Apache-2.0
#include "transfer/plan.h"

#include <algorithm>

namespace weft::transfer {
namespace {

uint64_t ceil_div(uint64_t a, uint64_t b) {
  return a / b + (a % b != 0);
}

uint64_t shard_bytes(uint64_t bytes, const RailPlan& plan) {
  const uint64_t even = ceil_div(bytes, std::max<uint32_t>(plan.rails, 1));
  const uint64_t unit = std::max<uint64_t>(plan.shard_bytes_min, 1);
  return plan.rails <= 1 ? std::max<uint64_t>(bytes, 1)
                         : std::max<uint64_t>(ceil_div(even, unit) * unit, unit);
}

}  // namespace

std::vector<Shard> shard_range(uint64_t bytes, const RailPlan& plan, uint32_t first_rail) {
  const uint32_t rails = std::max<uint32_t>(plan.rails, 1);
  if (bytes == 0) return {{0, 0, first_rail % rails}};
  const uint64_t each = shard_bytes(bytes, plan);
  const uint64_t piece = std::max<uint64_t>(plan.piece_bytes_max, 1);
  std::vector<Shard> out;
  bool more = true;
  for (uint64_t round = 0; more; ++round) {  // round k takes the k-th piece of every shard
    more = false;
    for (uint64_t start = 0, shard = 0; start < bytes; start += each, ++shard) {
      const uint64_t length = std::min(each, bytes - start);
      if (round >= ceil_div(length, piece)) continue;
      const uint64_t within = round * piece;
      const uint64_t take = std::min(piece, length - within);
      out.push_back({start + within, take, static_cast<uint32_t>((first_rail + shard) % rails)});
      more = true;
    }
  }
  return out;
}

Result<std::vector<PagePair>> pair_pages(const Pages& src, const Pages& dst, uint64_t page_bytes,
                                         bool merge) {
  if (src.size() != dst.size())
    return Status::invalid("pages: got {} source and {} destination pages, allowed: as many of each",
                           src.size(), dst.size());
  std::vector<PagePair> pairs;
  pairs.reserve(src.size());
  auto place = [](const Pages& pages, uint64_t i, uint64_t& at) {
    const uint64_t index = pages.indices.empty() ? i : pages.indices[i];
    return !__builtin_mul_overflow(pages.stride_bytes, index, &at) &&
           !__builtin_add_overflow(at, pages.offset, &at);
  };
  for (uint64_t i = 0; i < src.size(); ++i) {
    PagePair pair{0, 0, page_bytes};
    if (!place(src, i, pair.src) || !place(dst, i, pair.dst))
      return Status::invalid("pages: page {} lies beyond 64 bits", i);
    PagePair* last = pairs.empty() ? nullptr : &pairs.back();
    if (merge && last && last->src + last->bytes == pair.src && last->dst + last->bytes == pair.dst)
      last->bytes += page_bytes;
    else
      pairs.push_back(pair);
  }
  return pairs;
}

const char* to_string(MemoryPath path) {
  switch (path) {
    case MemoryPath::kHost:
      return "host";
    case MemoryPath::kDmabuf:
      return "dmabuf";
    case MemoryPath::kPeerMemory:
      return "peer memory";
    case MemoryPath::kStaged:
      return "staged";
  }
  return "?";
}

MemoryChoice choose_memory_path(provider::MemoryKind kind, const std::vector<provider::Nic>& nics) {
  if (kind == provider::MemoryKind::kHost) return {MemoryPath::kHost, "host memory"};
  bool all_export = true;
  for (const provider::Nic& nic : nics) {
    if (!nic.caps.device_memory)
      return {MemoryPath::kStaged, text("{} on {} does not reach device memory", nic.provider, nic.name)};
    all_export = all_export && nic.caps.dmabuf;
  }
  if (all_export) return {MemoryPath::kDmabuf, "every NIC takes DMA-BUF"};
  return {MemoryPath::kPeerMemory, "every NIC reaches device memory, not every one by DMA-BUF"};
}

uint64_t expected_imms(uint64_t bytes, const RailPlan& sender) {
  return shard_range(bytes, sender, 0).size();
}

uint64_t expected_page_imms(uint64_t pages, uint64_t page_bytes, const RailPlan& sender) {
  const RailPlan one_rail{1, sender.shard_bytes_min, sender.piece_bytes_max};
  return pages * shard_range(page_bytes, one_rail, 0).size();
}

}  // namespace weft::transfer
