// SPDX-License-Identifier: Apache-2.0
#include "comm/link_range.h"

#include "base/log.h"

namespace weft {

Result<FdMessage> LinkRange::extend(uint64_t bytes) {
  if (bytes_ > 0)
    return Status::make(Code::kUnsupported,
                        "window: memory that a transport brings cannot grow beyond its {} bytes "
                        "(WEFT_WINDOW_BYTES makes windows of buffers larger from the start)",
                        bytes_);
  const Status allocated = link_.allocate(window_, bytes);
  if (!allocated.ok()) {
    link_.forget(window_, 0);
    return logged(allocated);
  }
  bytes_ = bytes;
  return FdMessage{};
}

// Peers' parts come by map(), all at once.
Status LinkRange::import(const FdMessage&, uint64_t) {
  return Status::make(Code::kUnsupported, "window: memory that a transport brings is not imported");
}

void LinkRange::cut(uint64_t bytes) {
  if (bytes >= bytes_) return;
  link_.forget(window_, 0);
  bytes_ = 0;
  base_ = nullptr;
}

Result<std::vector<std::byte*>> LinkRange::map() {
  WEFT_TRY_ASSIGN(std::vector<std::byte*> bases, link_.map(window_));
  base_ = bases[static_cast<size_t>(rank_)];
  return bases;
}

}  // namespace weft
