// SPDX-License-Identifier: Apache-2.0
#include "comm/window.h"

#include <algorithm>
#include <cstring>

#include "base/config.h"
#include "base/log.h"
#include "base/random.h"
#include "comm/link_range.h"

namespace weft {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr uint64_t kReserveBytes = uint64_t{4} << 30;  // ThreadSanitizer leaves programs little address space
#else
constexpr uint64_t kReserveBytes = uint64_t{256} << 30;
#endif

uint64_t reserve_bytes() {
  return config().window_reserve_bytes > 0 ? static_cast<uint64_t>(config().window_reserve_bytes)
                                           : kReserveBytes;
}

// Addresses are set aside in whole multiples of this: the largest page size of any device.
constexpr uint64_t kReserveMultiple = kPartMultiple;
constexpr uint64_t kMostBytes = uint64_t{1} << 46;

uint64_t round_up(uint64_t bytes, uint64_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

}  // namespace

// The record that a rank sends beside the descriptor of its new segment; MappedRange's own words follow it.
// A failure travels too, so that all ranks fail alike.
struct SegmentOffer {
  uint64_t asked_bytes = 0;    // at_least_bytes of the call
  uint64_t segment_bytes = 0;  // 0: the window is large enough
  uint64_t process = 0;        // process_key()
  uint64_t local_name = 0;     // MappedRange::local_name()
  uint64_t code = 0;           // of the Status
  char message[320] = {};
};

namespace {

FdMessage to_message(const Status& status, SegmentOffer offer, FdMessage segment) {
  offer.code = static_cast<uint64_t>(status.code());
  std::memcpy(offer.message, status.message().data(),
              std::min(status.message().size(), sizeof offer.message - 1));
  segment.bytes.insert(0, reinterpret_cast<const char*>(&offer), sizeof offer);
  return segment;
}

// Splits each message: the offers are returned, in the order of `ranks`; messages keep what
// MappedRange::import() needs.
Result<std::vector<SegmentOffer>> take_offers(std::vector<FdMessage>& messages,
                                              const std::vector<int>& ranks) {
  std::vector<SegmentOffer> offers;
  for (int rank : ranks) {
    SegmentOffer offer;
    std::string& bytes = messages[rank].bytes;
    if (bytes.size() < sizeof offer)
      return Status::make(Code::kInvalid, "rank {} makes another call on this communicator", rank);
    std::memcpy(&offer, bytes.data(), sizeof offer);
    offer.message[sizeof offer.message - 1] = 0;
    bytes.erase(0, sizeof offer);
    offers.push_back(offer);
  }
  return offers;
}

// The failure that all ranks report: that of the lowest rank that has one, or a disagreement about the size.
Status common_failure(const std::vector<SegmentOffer>& offers, const std::vector<int>& ranks,
                      std::string_view operation) {
  for (size_t i = 0; i < offers.size(); ++i) {
    const Code code = static_cast<Code>(offers[i].code);
    if (code != Code::kOk)
      return Status::make(code, "{}, on rank {}: {}", operation, ranks[i], offers[i].message);
  }
  for (size_t i = 1; i < offers.size(); ++i) {
    if (offers[i].asked_bytes == offers[0].asked_bytes && offers[i].segment_bytes == offers[0].segment_bytes)
      continue;
    return Status::invalid("bytes: got {} on rank {} and {} on rank {}, allowed: the same on all ranks",
                           offers[0].asked_bytes, ranks[0], offers[i].asked_bytes, ranks[i]);
  }
  return Status();
}

}  // namespace

Window::Window(std::shared_ptr<Communicator> comm, uint64_t port_bytes, uint64_t word_bytes)
    : comm_(std::move(comm)), number_(comm_->take_window_number()) {
  if (!comm_->port_windows().have_host_part) return;
  const bool is_short = word_bytes > 0 && comm_->port_windows().are_in_device;
  port_bytes_ = round_up(port_bytes, kPartMultiple);
  host_bytes_ = round_up(is_short ? word_bytes : port_bytes, kPartMultiple);
}

Result<std::unique_ptr<Window>> Window::create(std::shared_ptr<Communicator> comm, uint64_t bytes,
                                               uint64_t port_bytes, uint64_t word_bytes) {
  WEFT_TRY(comm->check_owner());
  auto window = std::unique_ptr<Window>(new Window(std::move(comm), port_bytes, word_bytes));
  WEFT_TRY(window->change_size(bytes, "window.create"));
  window->comm_->add_window(window->number_, window->local(), window->bytes(), window->table());
  window->is_known_ = true;
  return window;
}

Window::~Window() {
  if (is_known_) comm_->remove_window(number_);
  // Kernels in flight may still use what is about to be unmapped, and put from it; their waits are bounded, so this
  // one is too.
  if (!comm_->device().is_host() && bytes_ > 0) (void)logged(wait_for_device(comm_->device().ordinal));
  if (Link* ports = comm_->port_link()) ports->forget(number_, 0);
}

Status Window::grow(uint64_t at_least_bytes) {
  WEFT_TRY(change_size(at_least_bytes, "window.grow"));
  comm_->resize_window(number_, bytes_);
  return Status();
}

// The first segment of every range, among ranks that map each other.
Status Window::add_host_part(uint64_t at_least_bytes, std::string_view operation) {
  comm_->fd_exchange().begin_call();
  SegmentOffer offer;
  offer.asked_bytes = at_least_bytes;
  FdMessage segment;
  Status added = make_ranges(at_least_bytes);
  if (added.ok()) {
    Result<FdMessage> made = own_->extend(host_bytes_);
    added = made.status();
    if (made.ok()) segment = std::move(*made);
  }
  offer.segment_bytes = host_bytes_;
  offer.process = process_key();
  offer.local_name = own_ ? own_->local_name() : 0;
  return exchange(added, offer, std::move(segment), operation);
}

// Every rank adds a segment and offers it, all import all offers, all agree that it worked. A failure
// anywhere is told in one of the exchanges, and then every rank goes back to where it was.
Status Window::change_size(uint64_t at_least_bytes, std::string_view operation) {
  const Status begun = has_host_part() && !own_ ? add_host_part(at_least_bytes, operation) : Status();
  comm_->fd_exchange().begin_call();
  SegmentOffer offer;
  offer.asked_bytes = at_least_bytes;
  FdMessage segment;
  const Status added = begun.ok() ? add_segment(at_least_bytes, offer, segment) : begun;
  Status outcome = exchange(added, offer, std::move(segment), operation);
  const uint64_t bytes = bytes_ + (outcome.ok() ? offer.segment_bytes : 0);
  if (Link* ports = comm_->port_link()) {
    outcome = exchange_ports(outcome, at_least_bytes, bytes, operation);
    if (!outcome.ok()) ports->forget(number_, bytes_);
  }
  if (!logged(outcome).ok()) {
    cut_to(bytes_);
    return outcome;
  }
  bytes_ = bytes;
  return make_mesh();
}

WindowView Window::view(uint64_t bytes) const {
  WindowView view{number_, bytes, local(), bases_.data(), table_, is_pinned() ? Device{} : comm_->device()};
  view.port_bytes = has_host_part() ? std::min(port_bytes_, bytes) : bytes;
  view.host_bytes = host_bytes_;
  view.before = before_base(host_bytes_);
  view.payload_in_place = has_host_part() && comm_->port_windows().are_in_device;
  view.memory = own_;
  return view;
}

namespace {

// The record that a rank sends to ranks that do not map it: its result so far. The data for its ports follows.
struct PortOffer {
  uint64_t asked_bytes = 0;
  uint64_t bytes = 0;
  uint64_t code = 0;
  char message[320] = {};
};

std::string to_bytes(const Status& mine, PortOffer offer, const std::string& more) {
  offer.code = static_cast<uint64_t>(mine.code());
  std::memcpy(offer.message, mine.message().data(),
              std::min(mine.message().size(), sizeof offer.message - 1));
  return std::string(reinterpret_cast<const char*>(&offer), sizeof offer) + more;
}

// Cuts the PortOffers off. Errors: the failure of the lowest rank that has one; kInvalid when sizes differ.
Status take_port_offers(std::vector<std::string>& all) {
  PortOffer first;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    PortOffer offer;
    if (all[rank].size() < sizeof offer)
      return Status::make(Code::kInvalid, "rank {} makes another call on this communicator", rank);
    std::memcpy(&offer, all[rank].data(), sizeof offer);
    offer.message[sizeof offer.message - 1] = 0;
    all[rank].erase(0, sizeof offer);
    if (rank == 0) first = offer;
    if (static_cast<Code>(offer.code) != Code::kOk)
      return Status(static_cast<Code>(offer.code), offer.message);
    if (offer.asked_bytes != first.asked_bytes || offer.bytes != first.bytes)
      return Status::invalid("bytes: got {} on rank 0 and {} on rank {}, allowed: the same on all ranks",
                             first.asked_bytes, offer.asked_bytes, rank);
  }
  return Status();
}

}  // namespace

// The same among all ranks, through the bootstrap: ranks that map each other have done their part already.
Status Window::exchange_ports(const Status& mapped, uint64_t asked_bytes, uint64_t bytes,
                              std::string_view operation) {
  Link& ports = *comm_->port_link();
  const PortOffer offer{asked_bytes, bytes, 0, {}};
  const auto named = [&](const Status& status) {
    return status.ok() ? status
                       : Status::make(status.code(), "{}, on rank {}: {}", operation, comm_->rank(),
                                      status.message());
  };
  const Result<std::string> mine =
      mapped.ok() ? ports.offer(view(bytes)) : Result<std::string>(std::string());
  WEFT_TRY_ASSIGN(std::vector<std::string> offers,
                  comm_->bootstrap().all_gather(to_bytes(mapped.ok() ? named(mine.status()) : mapped, offer,
                                                         mine.ok() ? *mine : std::string()),
                                                comm_->deadline()));
  WEFT_TRY(take_port_offers(offers));
  const Status accepted = named(ports.accept(view(bytes), offers));
  WEFT_TRY_ASSIGN(std::vector<std::string> outcomes,
                  comm_->bootstrap().all_gather(to_bytes(accepted, offer, ""), comm_->deadline()));
  return take_port_offers(outcomes);
}

Status Window::make_mesh() {
  WEFT_TRY_ASSIGN(MeshPart mapped, comm_->mapped_link().mesh(view(bytes_)));
  Link* ports = comm_->port_link();
  if (!ports) {
    mesh_ = std::move(mapped);
    return Status();
  }
  WEFT_TRY_ASSIGN(MeshPart port, ports->mesh(view(bytes_)));
  mesh_ = comm_->mapped_ranks().size() > 1 ? hybrid_mesh(mapped, port) : std::move(port);
  return Status();
}

Status Window::exchange(const Status& added, const SegmentOffer& offer, FdMessage segment,
                        std::string_view operation) {
  WEFT_TRY_ASSIGN(std::vector<FdMessage> messages,
                  comm_->fd_exchange().all_gather(to_message(added, offer, std::move(segment)), operation,
                                                  comm_->deadline()));
  WEFT_TRY_ASSIGN(const std::vector<SegmentOffer> offers, take_offers(messages, comm_->mapped_ranks()));
  WEFT_TRY(common_failure(offers, comm_->mapped_ranks(), operation));
  if (offer.segment_bytes == 0) return Status();
  return agree(import_all(offers, messages), operation);
}

// Extends the own range so that it holds at_least_bytes; fills `offer` and `segment` with what peers need.
Status Window::add_segment(uint64_t at_least_bytes, SegmentOffer& offer, FdMessage& segment) {
  if (at_least_bytes == 0) return Status::invalid("bytes: got 0, allowed: at least 1");
  if (at_least_bytes > kMostBytes)
    return Status::make(Code::kCapacity, "bytes: got {}, allowed: at most {}", at_least_bytes, kMostBytes);
  if (!own_) WEFT_TRY(make_ranges(at_least_bytes));
  if (at_least_bytes <= bytes_) return Status();
  const uint64_t more = round_up(at_least_bytes - bytes_, own_->granularity());
  WEFT_TRY_ASSIGN(segment, own_->extend(more));
  offer.segment_bytes = more;
  offer.process = process_key();
  offer.local_name = own_->local_name();
  return Status();
}

Status Window::make_ranges(uint64_t bytes) {
  if (Link* memory = comm_->memory_link()) {
    own_ = brought_ = std::make_shared<LinkRange>(*memory, number_, comm_->rank());
  } else {
    WEFT_TRY_ASSIGN(own_, new_range(bytes));
  }
  ranges_.assign(comm_->size(), nullptr);
  bases_.assign(comm_->size(), nullptr);
  ranges_[comm_->rank()] = own_;
  return Status();
}

Result<std::shared_ptr<MappedRange>> Window::new_range(uint64_t bytes) const {
  RangeOptions options;
  options.device = comm_->device();
  options.sharing = has_host_part() ? comm_->near_sharing() : comm_->sharing();
  options.host_bytes = host_bytes_;
  options.reserve_bytes = round_up(reserve_bytes(), kReserveMultiple);
  options.least_bytes = round_up(bytes, kReserveMultiple);
  return make_range(options);
}

// Maps the new segment of every peer after what is mapped of it already.
Status Window::import_all(const std::vector<SegmentOffer>& offers, const std::vector<FdMessage>& messages) {
  if (brought_) {
    WEFT_TRY_ASSIGN(const std::vector<std::byte*> bases, brought_->map());
    std::ranges::copy(bases, bases_.begin());
    return publish_table();
  }
  const std::vector<int>& ranks = comm_->mapped_ranks();
  for (size_t i = 0; i < ranks.size(); ++i)
    if (ranks[i] != comm_->rank()) WEFT_TRY(import_from(ranks[i], offers[i], messages[ranks[i]]));
  for (int rank : ranks) bases_[rank] = ranges_[rank]->base();
  return publish_table();
}

Status Window::import_from(int rank, const SegmentOffer& offer, const FdMessage& handle) {
  std::shared_ptr<MappedRange>& range = ranges_[rank];
  if (offer.process == process_key() &&
      offer.local_name != 0) {  // a thread of this process: its range serves both
    if (!range) range = find_range(offer.local_name);
    return range ? Status() : Status::make(Code::kPeerLost, "rank {}'s window is gone", rank);
  }
  if (!range) {
    WEFT_TRY_ASSIGN(range, new_range(offer.asked_bytes));
    imported_.push_back(range);
  }
  return range->import(handle, offer.segment_bytes);
}

// Tells all ranks how it went here; returns the failure of the lowest rank that has one.
Status Window::agree(const Status& mine, std::string_view operation) {
  WEFT_TRY_ASSIGN(std::vector<FdMessage> messages,
                  comm_->fd_exchange().all_gather(to_message(mine, {}, {}), operation, comm_->deadline()));
  WEFT_TRY_ASSIGN(const std::vector<SegmentOffer> outcomes, take_offers(messages, comm_->mapped_ranks()));
  return common_failure(outcomes, comm_->mapped_ranks(), operation);
}

// Device code reads the bases from its own memory; on the host the vector itself serves.
Status Window::publish_table() {
  if (table_) return Status();
  if (comm_->device().is_host()) {
    table_ = bases_.data();
    return Status();
  }
  WEFT_TRY_ASSIGN(device_table_, DeviceCopy::create(comm_->device().ordinal, bases_.data(),
                                                    bases_.size() * sizeof bases_[0]));
  table_ = reinterpret_cast<std::byte* const*>(device_table_->data());
  return Status();
}

// Goes back to the first `bytes` bytes everywhere. Ranges of other threads are theirs to cut.
void Window::cut_to(uint64_t bytes) {
  if (own_) own_->cut(bytes);
  for (const auto& range : imported_) range->cut(bytes);
}

}  // namespace weft
