// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer target: every parser of bytes that come from another process. tools/fuzz builds and runs it, from
// one valid message of each kind on (tests/fuzz/corpus; the first byte chooses the parser). What parses must
// also survive being written again.
#include <cstdlib>

#include "transfer/wire.h"

using namespace weft;
using namespace weft::transfer;

namespace {

void require(bool holds) {
  if (!holds) std::abort();  // what libFuzzer reports
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 13) {
    case 0:
      if (auto a = parse_address(bytes); a.ok()) require(to_bytes(*a) == bytes);
      break;
    case 1:
      if (auto d = parse_descriptor(bytes); d.ok()) require(to_bytes(*d) == bytes);
      break;
    case 2:
      if (auto h = parse_head(bytes); h.ok()) require(bytes.size() == kHeadBytes + h->body_bytes);
      break;
    case 3:
      if (auto h = parse_hello(bytes); h.ok()) require(to_body(*h) == bytes);
      break;
    case 4:
      if (auto a = parse_attach(bytes); a.ok()) require(to_body(*a) == bytes);
      break;
    case 5:
      if (auto a = parse_attached(bytes); a.ok()) require(a->rails.size() <= kRailsMax);
      break;
    case 6:
      if (auto o = parse_offer(bytes); o.ok()) require(to_body(*o) == bytes);
      break;
    case 7:
      if (auto o = parse_outcome(bytes); o.ok()) require(to_body(*o) == bytes);
      break;
    case 8:
      if (auto n = parse_notify(bytes); n.ok()) require(to_body(*n) == bytes);
      break;
    case 9:
      if (auto g = parse_stage_grant(bytes); g.ok()) require(to_body(*g) == bytes);
      break;
    case 10:
      (void)parse_number(bytes);
      break;
    case 12:
      if (auto t = parse_text(bytes); t.ok()) require(text_body(*t) == bytes);
      break;
    case 11:
      if (auto p = parse_pack(bytes); p.ok()) {
        uint64_t payload = 0;
        for (const PackedPiece& piece : p->pieces) payload += piece.bytes;
        require(pack_bytes(p->pieces.size(), payload) <= bytes.size());
      }
      break;
  }
  return 0;
}
