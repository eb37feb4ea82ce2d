// SPDX-License-Identifier: Apache-2.0
#include "providers/cuda/rail.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/log.h"

namespace weft::provider::cuda {
namespace {

constexpr char kAddressTag[] = "cuda";
constexpr size_t kTagBytes = 4;
constexpr uint64_t kAtOnceBytes = 64 << 10;  // between hosts: shorter ones are copied when they are posted
constexpr uint64_t kPartBytes = 1 << 20;     // longer ones in parts, one a poll
constexpr uint32_t kPollsPerLook = 256;
constexpr double kLastCopies_s = 5;

constexpr char kNoLocalKey[] = "cuda: local protection error: the local memory is not registered";
constexpr char kNoGpu[] = "cuda: a rail without a GPU reaches memory of hosts alone";

std::string copy_failure(const PeerMemory& peer, int error) {
  return text("cuda: copying to or from {}: {}", peer.who(), std::strerror(error));
}

uint64_t word_of(uint64_t number, uint32_t imm) {
  return (number / kWords + 1) << 32 | imm;
}

// For the rest of the process: what a copy that did not end may still touch.
template <class T>
void leave_behind(T& held) {
  (void)new T(std::move(held));
}

}  // namespace

Status CudaRail::open() {
  if (device_ >= 0) {
    WEFT_TRY_ASSIGN(copies_, Copies::open(device_));
  }
  WEFT_TRY_ASSIGN(shared_, SharedMemory::create(sizeof(ControlPage), "weft-cuda-control"));
  own_ = std::make_unique<OwnMemory>(*reinterpret_cast<ControlPage*>(shared_.data()), copies_.get());
  contact_ = {shared_.name(), this_process(), this_process_name()};
  return {};
}

CudaRail::~CudaRail() {
  for (const auto& [route, out] : outs_) out->lane().is_closed.store(1, std::memory_order_release);
  if (!copies_ || copies_->drain(kLastCopies_s)) return;
  log_warn("cuda: copies of {} do not end: what they use is not freed", nic_.name);
  leave_behind(outs_);
  leave_behind(leaving_);
  leave_behind(ins_);
  leave_behind(running_);
  leave_behind(own_);
}

std::string CudaRail::address() const {
  return std::string(kAddressTag, kTagBytes) +
         std::string(reinterpret_cast<const char*>(&contact_), sizeof contact_);
}

Result<std::shared_ptr<PeerMemory>> CudaRail::memory_of(const Contact& contact) {
  std::weak_ptr<PeerMemory>& known = memories_[contact.page.key];
  if (auto memory = known.lock()) return memory;
  WEFT_TRY_ASSIGN(std::shared_ptr<PeerMemory> opened, PeerMemory::open(contact));
  known = opened;
  return opened;
}

Result<Route> CudaRail::resolve(std::string_view address) {
  Contact contact;
  if (address.size() != kTagBytes + sizeof contact ||
      !address.starts_with(std::string_view(kAddressTag, kTagBytes)))
    return Status::invalid("address: got {} bytes that no cuda rail made, allowed: {}", address.size(),
                           kTagBytes + sizeof contact);
  std::memcpy(&contact, address.data() + kTagBytes, sizeof contact);
  auto out = std::make_shared<Out>();
  WEFT_TRY_ASSIGN(out->peer, memory_of(contact));
  WEFT_TRY_ASSIGN(out->shared, SharedMemory::create(sizeof(Lane), "weft-cuda-lane"));
  if (copies_) {
    WEFT_TRY_ASSIGN(out->pinned, Pinned::make(*copies_, out->shared.data(), sizeof(Lane)));
  }
  outs_[next_route_] = out;
  return next_route_++;
}

std::shared_ptr<CudaRail::Out> CudaRail::find(Route route) const {
  const auto found = outs_.find(route);
  return found == outs_.end() ? nullptr : found->second;
}

// What it still owes is written off. Copies that run keep their memory until they have passed.
void CudaRail::forget(Route route) {
  const std::shared_ptr<Out> out = find(route);
  if (!out) return;
  outs_.erase(route);
  out->lane().is_closed.store(1, std::memory_order_release);
  in_flight_ -= static_cast<uint32_t>(operations_of(*out).size());
  const auto is_its = [&](const HostCopy& copy) { return copy.out == out; };
  in_flight_ -= static_cast<uint32_t>(std::count_if(host_copies_.begin(), host_copies_.end(), is_its));
  std::erase_if(host_copies_, is_its);
  leaving_.push_back(out);
}

Result<Registration> CudaRail::enroll(const Range& range, uint32_t access) {
  WEFT_TRY_ASSIGN(const Enrolled* enrolled, own_->enroll(range, access));
  Registration made;
  made.handle = range.data;
  made.lkey = reinterpret_cast<void*>(enrolled->key);
  made.base = reinterpret_cast<uint64_t>(range.data);
  made.rkey = enrolled->key;
  return made;
}

void CudaRail::release(Registration& registration) {
  own_->release(registration.rkey);
  registration = {};
}

// A place on the peer's control page; false while all are taken.
bool CudaRail::greet(Out& out) {
  if (out.is_greeted) return true;
  ControlPage& page = out.peer->page();
  Hello& hello = page.hellos[page.next_hello.fetch_add(1) % kHellos];
  uint32_t empty = Hello::kEmpty;
  if (!hello.state.compare_exchange_strong(empty, Hello::kBeingWritten)) return false;
  hello.lane = out.shared.name();
  hello.from = contact_;
  hello.state.store(Hello::kFull, std::memory_order_release);
  page.hellos_put.fetch_add(1, std::memory_order_release);
  return out.is_greeted = true;
}

Posted CudaRail::no_route(const std::shared_ptr<Out>& out) {
  refusal_ = out ? text("cuda: {} has ended", out->peer->who()) : "cuda: no such route";
  is_route_broken_ = true;
  return Posted::kFatal;
}

// As a NIC would: taken, and then a completion that says no.
Posted CudaRail::failed(Context* context, std::string why) {
  Event event;
  event.kind = EventKind::kFailed;
  event.context = context;
  event.text = std::move(why);
  events_.push_back(std::move(event));
  return Posted::kOk;
}

Posted CudaRail::post(const RmaOp& op, Access way) {
  is_route_broken_ = false;
  const std::shared_ptr<Out> out = find(op.to);
  if (!out || out->is_lost) return no_route(out);
  if (in_flight_ >= nic_.caps.tx_depth || !greet(*out)) return Posted::kAgain;
  if (op.piece.bytes == 0) return post_word(*out, op);
  const Result<Found> theirs = out->peer->find(op.piece.rkey, op.piece.remote, op.piece.bytes, way);
  if (!theirs.ok()) return failed(op.context, theirs.status().message());
  const Enrolled* own = own_->find(reinterpret_cast<uint64_t>(op.piece.lkey));
  if (!own) return failed(op.context, kNoLocalKey);
  const bool has_device = theirs->is_device() || own->is_device();
  if (has_device && !copies_) return failed(op.context, kNoGpu);
  if (theirs->is_device()) return post_copy(*out, op, way, *theirs);
  if (own->is_device()) return post_requests(*out, op, way, &op.piece, 1);
  return post_host_copy(out, op, way);
}

bool CudaRail::has_word(const Out& out, uint32_t row) const {
  return out.words[row] - out.lane().words_taken[row].value.load(std::memory_order_acquire) < kWords;
}

void CudaRail::put_word(Out& out, uint32_t imm) {
  const uint64_t number = out.words[kStreams]++;
  out.lane().words[kStreams][number % kWords].store(word_of(number, imm), std::memory_order_release);
}

Posted CudaRail::post_word(Out& out, const RmaOp& op) {
  if (op.has_imm && !has_word(out, kStreams)) return Posted::kAgain;
  if (op.has_imm) put_word(out, op.imm);
  return Posted::kDone;
}

Posted CudaRail::post_copy(Out& out, const RmaOp& op, Access way, const Found& theirs) {
  const uint32_t stream = next_stream();
  if (op.has_imm && !has_word(out, stream)) return Posted::kAgain;
  const Result<char*> mapped = out.peer->map(theirs, *copies_);
  if (!mapped.ok()) return failed(op.context, mapped.status().message());
  const bool is_write = way == kRemoteWrite;
  Status status = copies_->copy(stream, is_write ? *mapped : op.piece.local,
                                is_write ? op.piece.local : *mapped, op.piece.bytes);
  if (status.ok() && op.has_imm) {
    const uint64_t number = out.words[stream];
    status = copies_->store(stream, out.pinned.at(&out.lane().words[stream][number % kWords]),
                            word_of(number, op.imm));
    if (status.ok()) ++out.words[stream];
  }
  if (status.ok()) status = mark_running(out, stream, op.context, op.piece.bytes);
  return status.ok() ? Posted::kOk : failed(op.context, status.message());
}

// The end of what the stream was given last is that of an operation.
Status CudaRail::mark_running(Out& out, uint32_t stream, Context* context, uint64_t bytes) {
  WEFT_TRY_ASSIGN(const uint64_t mark, copies_->mark(stream));
  out.marks[stream] = mark;
  running_[stream].push_back({.mark = mark, .context = context, .bytes = bytes, .served = nullptr});
  ++in_flight_;
  return {};
}

Posted CudaRail::post_requests(Out& out, const RmaOp& op, Access way, const Piece* pieces, uint32_t count) {
  Lane& lane = out.lane();
  uint64_t number = lane.requests_put.value.load(std::memory_order_relaxed);
  // A request has its place until it is answered, so that replies have theirs.
  if (out.requested.size() + count > kRequests) return Posted::kAgain;
  const auto asked = std::make_shared<Asked>(Asked{op.context, count, ""});
  for (const Piece* piece = pieces; piece < pieces + count; ++piece, ++number) {
    lane.requests[number % kRequests] = {way == kRemoteRead,
                                         op.has_imm,
                                         static_cast<uint32_t>(op.imm),
                                         piece->remote,
                                         piece->rkey,
                                         reinterpret_cast<uint64_t>(piece->local),
                                         reinterpret_cast<uint64_t>(piece->lkey),
                                         piece->bytes};
    out.requested[number] = asked;
  }
  lane.requests_put.value.store(number, std::memory_order_release);
  ++in_flight_;
  return Posted::kOk;
}

// All pages are checked before the first is written. They are of few registrations, often of one at each end.
Posted CudaRail::post_pages(Route to, Piece* pieces, uint32_t count, Context* context) {
  is_route_broken_ = false;
  const std::shared_ptr<Out> out = find(to);
  if (!out || out->is_lost) return no_route(out);
  if (in_flight_ >= nic_.caps.tx_depth || !greet(*out)) return Posted::kAgain;
  PageEnds ends;
  for (uint32_t i = 0; i < count; ++i)
    if (const std::string why = look_at(*out, pieces[i], ends); !why.empty()) return failed(context, why);
  if ((ends.has_their_device || ends.has_own_device) && !copies_) return failed(context, kNoGpu);
  if (ends.has_their_device) return post_page_copies(*out, pieces, count, context, ends.for_kernel);
  if (ends.has_own_device)
    return post_requests(*out, {.to = to, .piece = {}, .context = context}, kRemoteWrite, pieces, count);
  return post_host_pages(*out, pieces, count, context);
}

// Adds a page to what is known of its ends; why it may not be written, or empty.
std::string CudaRail::look_at(const Out& out, const Piece& piece, PageEnds& ends) const {
  if (piece.rkey != ends.theirs.key || ends.theirs.key == 0) {
    Result<Found> found = out.peer->find(piece.rkey, piece.remote, piece.bytes, kRemoteWrite);
    if (!found.ok()) return found.status().message();
    ends.theirs = *found;
    ends.has_their_device = ends.has_their_device || found->is_device();
  } else if (!is_within(ends.theirs.base, ends.theirs.bytes, piece.remote, piece.bytes)) {
    return kBeyond;
  }
  const auto key = reinterpret_cast<uint64_t>(piece.lkey);
  if (!ends.own || key != ends.own->key) {
    ends.own = own_->find(key);
    if (!ends.own) return kNoLocalKey;
    const bool is_here =
        ends.own->is_device() ? ends.own->range.device == device_ : ends.own->pinned.is_held();
    ends.has_own_device = ends.has_own_device || ends.own->is_device();
    ends.for_kernel = ends.for_kernel && is_here && !out.peer->is_this_process();
  }
  return "";
}

Posted CudaRail::post_page_copies(Out& out, const Piece* pieces, uint32_t count, Context* context,
                                  bool for_kernel) {
  const uint32_t stream = next_stream();
  stretches_.clear();
  uint64_t bytes = 0;
  PageEnds ends;
  uint64_t theirs_moved = 0, own_moved = 0;  // from an address as it is given to that of the GPU's kernels
  for (const Piece* piece = pieces; piece < pieces + count; ++piece) {
    const uint64_t key_before = ends.theirs.key;
    const Enrolled* own_before = ends.own;
    if (const std::string why = look_at(out, *piece, ends); !why.empty()) return failed(context, why);
    if (ends.theirs.key != key_before) {
      const Result<char*> mapped = out.peer->map(ends.theirs, *copies_);
      if (!mapped.ok()) return failed(context, mapped.status().message());
      theirs_moved = reinterpret_cast<uint64_t>(*mapped) - piece->remote;
    }
    const auto local = reinterpret_cast<uint64_t>(piece->local);
    if (ends.own != own_before)
      own_moved = for_kernel && !ends.own->is_device() ? ends.own->pinned.at(piece->local) - local : 0;
    stretches_.push_back({local + own_moved, piece->remote + theirs_moved, piece->bytes});
    bytes += piece->bytes;
  }
  const Result<bool> started = copies_->copy_all(stream, stretches_, for_kernel);
  if (started.ok() && !*started) return Posted::kAgain;
  const Status status = started.ok() ? mark_running(out, stream, context, bytes) : started.status();
  return status.ok() ? Posted::kOk : failed(context, status.message());
}

Posted CudaRail::post_host_pages(const Out& out, const Piece* pieces, uint32_t count, Context* context) {
  for (const Piece* piece = pieces; piece < pieces + count; ++piece)
    if (const int error = out.peer->move(Across::kWrite, piece->local, piece->remote, piece->bytes))
      return failed(context, copy_failure(*out.peer, error));
  return Posted::kDone;
}

Posted CudaRail::post_host_copy(std::shared_ptr<Out> out, const RmaOp& op, Access way) {
  if (op.has_imm && !has_word(*out, kStreams)) return Posted::kAgain;
  HostCopy copy{out, op, way};
  if (op.piece.bytes > kAtOnceBytes) {
    host_copies_.push_back(std::move(copy));
    ++in_flight_;
    return Posted::kOk;
  }
  ++in_flight_;  // advance() ends it
  const size_t before = events_.size();
  advance(copy);
  if (events_.size() == before + 1 && events_.back().kind == EventKind::kDone) {
    events_.pop_back();
    return Posted::kDone;
  }
  return Posted::kOk;
}

// Moves one part; true once the copy is over, and its event is made.
bool CudaRail::advance(HostCopy& copy) {
  const Piece& piece = copy.op.piece;
  std::string why;
  if (!copy.is_moved()) {
    const uint64_t part = std::min(kPartBytes, piece.bytes - copy.done);
    const auto check = [&] { return copy.out->peer->find(piece.rkey, piece.remote, piece.bytes, copy.way); };
    const bool is_write = copy.way == kRemoteWrite;
    // A write looks for the key before it copies; a read after it, as memory is not used again before its key is taken back.
    if (const auto found = is_write ? check() : Result<Found>(Found{}); !found.ok())
      why = found.status().message();
    if (why.empty())
      if (const int error = copy.out->peer->move(is_write ? Across::kWrite : Across::kRead,
                                                 static_cast<char*>(piece.local) + copy.done,
                                                 piece.remote + copy.done, part))
        why = copy_failure(*copy.out->peer, error);
    if (why.empty() && !is_write)
      if (const auto found = check(); !found.ok()) why = found.status().message();
    copy.done += part;
  }
  if (why.empty() && (!copy.is_moved() || (copy.op.has_imm && !has_word(*copy.out, kStreams)))) return false;
  --in_flight_;
  if (!why.empty()) {
    failed(copy.op.context, std::move(why));
    return true;
  }
  if (copy.op.has_imm) put_word(*copy.out, copy.op.imm);
  Event event;
  event.context = copy.op.context;
  event.bytes = piece.bytes;
  events_.push_back(std::move(event));
  return true;
}

Posted CudaRail::post_send(Route to, const void* data, uint64_t bytes, void*, Context* context) {
  is_route_broken_ = false;
  const std::shared_ptr<Out> out = find(to);
  if (!out || out->is_lost) return no_route(out);
  if (bytes > kMessageBytes)
    return failed(context, text("cuda: got a message of {} bytes, allowed: {}", bytes, kMessageBytes));
  Lane& lane = out->lane();
  const uint64_t number = lane.messages_put.value.load(std::memory_order_relaxed);
  if (!greet(*out) || number - lane.messages_taken.value.load(std::memory_order_acquire) >= kMessages)
    return Posted::kAgain;
  Message& message = lane.messages[number % kMessages];
  message.bytes = static_cast<uint32_t>(bytes);
  std::memcpy(message.text, data, bytes);
  lane.messages_put.value.store(number + 1, std::memory_order_release);
  Event event;
  event.context = context;
  event.bytes = bytes;
  events_.push_back(std::move(event));
  return Posted::kOk;
}

Posted CudaRail::post_recv(void* data, uint64_t bytes, void*, Context* context) {
  receives_.push_back({data, bytes, context});
  return Posted::kOk;
}

size_t CudaRail::poll(Event* events, size_t max) {
  take_hellos();
  if (events_.size() < max) {
    for (const auto& in : ins_) {
      take_words(*in);
      take_messages(*in);
      take_requests(in);
    }
    for (const auto& [route, out] : outs_) take_replies(*out);
    take_passed();
    move_host_copies();
    if (++polls_ % kPollsPerLook == 0) look_around();
  }
  const size_t count = std::min(max, events_.size());
  std::move(events_.begin(), events_.begin() + static_cast<std::ptrdiff_t>(count), events);
  events_.erase(events_.begin(), events_.begin() + static_cast<std::ptrdiff_t>(count));
  return count;
}

void CudaRail::take_hellos() {
  ControlPage& page = *reinterpret_cast<ControlPage*>(shared_.data());
  const uint32_t put = page.hellos_put.load(std::memory_order_acquire);
  if (put == hellos_taken_) return;
  hellos_taken_ = put;
  for (Hello& hello : page.hellos) {
    if (hello.state.load(std::memory_order_acquire) != Hello::kFull) continue;
    const SharedMemory::Name lane = hello.lane;
    const Contact from = hello.from;
    hello.state.store(Hello::kEmpty, std::memory_order_release);
    auto in = std::make_shared<In>();
    auto peer = memory_of(from);
    auto shared = SharedMemory::open(lane, sizeof(Lane));
    const bool is_its_own =
        lane.pid == from.page.pid && from.page.pid == static_cast<uint32_t>(from.memory.pid);
    if (!is_its_own || !peer.ok() || !shared.ok()) {
      log_info(
          "cuda: a hello of pid {} leads nowhere: {}", from.memory.pid,
          !is_its_own ? "it names another process" : (peer.ok() ? shared.status() : peer.status()).message());
      continue;
    }
    in->peer = std::move(*peer);
    in->shared = std::move(*shared);
    ins_.push_back(std::move(in));
  }
}

// The route to the rail that a lane is of, if the engine has one.
Route CudaRail::route_to(const In& in) const {
  const uint64_t page = in.peer->contact().page.key;
  for (auto at = outs_.rbegin(); at != outs_.rend(); ++at)
    if (at->second->peer->contact().page.key == page) return at->first;
  return kNoRoute;
}

void CudaRail::take_words(In& in) {
  Lane& lane = in.lane();
  for (uint32_t row = 0; row < kRows; ++row) {
    std::atomic<uint64_t>& taken = lane.words_taken[row].value;
    for (uint64_t number = taken.load(std::memory_order_relaxed);; ++number) {
      const uint64_t word = lane.words[row][number % kWords].load(std::memory_order_acquire);
      if (word >> 32 != ((number / kWords + 1) & 0xffffffff)) break;
      taken.store(number + 1, std::memory_order_release);
      Event event;
      event.kind = EventKind::kImm;
      event.imm = static_cast<uint32_t>(word);
      event.from = route_to(in);
      events_.push_back(std::move(event));
    }
  }
}

void CudaRail::take_messages(In& in) {
  Lane& lane = in.lane();
  std::atomic<uint64_t>& taken = lane.messages_taken.value;
  for (uint64_t number = taken.load(std::memory_order_relaxed);
       !receives_.empty() && number < lane.messages_put.value.load(std::memory_order_acquire); ++number) {
    const Message& message = lane.messages[number % kMessages];
    const Receive receive = receives_.front();
    receives_.pop_front();
    Event event;
    event.kind = EventKind::kReceived;
    event.context = receive.context;
    event.bytes = std::min<uint64_t>({message.bytes, kMessageBytes, receive.bytes});
    std::memcpy(receive.data, message.text, event.bytes);
    taken.store(number + 1, std::memory_order_release);
    events_.push_back(std::move(event));
  }
}

void CudaRail::take_requests(const std::shared_ptr<In>& in) {
  Lane& lane = in->lane();
  std::atomic<uint64_t>& taken = lane.requests_taken.value;
  for (uint64_t number = taken.load(std::memory_order_relaxed);
       number < lane.requests_put.value.load(std::memory_order_acquire); ++number) {
    const Request request = lane.requests[number % kRequests];
    taken.store(number + 1, std::memory_order_release);
    if (const std::string error = serve(in, request, number); !error.empty()) reply(*in, number, error);
  }
}

// Starts the copy of a peer's request, or says why not.
std::string CudaRail::serve(const std::shared_ptr<In>& in, const Request& request, uint64_t number) {
  const auto own = own_->check(request.readers_key, request.readers, request.bytes,
                               request.is_read ? kRemoteRead : kRemoteWrite);
  if (!own.ok()) return own.status().message();
  const auto theirs = in->peer->find(request.writers_key, request.writers, request.bytes, kLocal);
  if (!theirs.ok()) return theirs.status().message();
  if (!copies_ || !theirs->is_device() || (*own)->is_device())
    return "cuda: this copy is not the reader's to make";
  const Result<char*> mapped = in->peer->map(*theirs, *copies_);
  if (!mapped.ok()) return mapped.status().message();
  const uint32_t stream = next_stream();
  char* const here = reinterpret_cast<char*>(request.readers);
  const Status status = copies_->copy(stream, request.is_read ? *mapped : here,
                                      request.is_read ? here : *mapped, request.bytes);
  const Result<uint64_t> mark = status.ok() ? copies_->mark(stream) : Result<uint64_t>(status);
  if (!mark.ok()) return mark.status().message();
  in->marks[stream] = *mark;
  running_[stream].push_back(
      {.mark = *mark, .served = in, .request = number, .has_imm = request.has_imm, .imm = request.imm});
  return "";
}

void CudaRail::reply(In& in, uint64_t request, const std::string& error) {
  Lane& lane = in.lane();
  const uint64_t number = lane.replies_put.value.load(std::memory_order_relaxed);
  Reply& reply = lane.replies[number % kRequests];
  reply.request = request;
  const size_t length = std::min<size_t>(error.size(), kErrorBytes - 1);
  std::memcpy(reply.error, error.data(), length);
  reply.error[length] = 0;
  lane.replies_put.value.store(number + 1, std::memory_order_release);
}

void CudaRail::take_replies(Out& out) {
  Lane& lane = out.lane();
  std::atomic<uint64_t>& taken = lane.replies_taken.value;
  for (uint64_t number = taken.load(std::memory_order_relaxed);
       number < lane.replies_put.value.load(std::memory_order_acquire); ++number) {
    const Reply reply = lane.replies[number % kRequests];
    taken.store(number + 1, std::memory_order_release);
    const auto asked = out.requested.find(reply.request);
    if (asked == out.requested.end()) continue;
    const std::shared_ptr<Asked> operation = asked->second;
    out.requested.erase(asked);
    if (reply.error[0]) operation->error.assign(reply.error, strnlen(reply.error, kErrorBytes));
    if (--operation->left > 0) continue;
    Event event;
    event.kind = operation->error.empty() ? EventKind::kDone : EventKind::kFailed;
    event.context = operation->context;
    event.text = operation->error;
    events_.push_back(std::move(event));
    --in_flight_;
  }
}

void CudaRail::take_passed() {
  for (uint32_t stream = 0; copies_ && stream < kStreams; ++stream) {
    std::deque<Running>& running = running_[stream];
    for (; !running.empty() && copies_->has_passed(stream, running.front().mark); running.pop_front()) {
      const Running& ended = running.front();
      Event event;
      if (ended.served) {
        reply(*ended.served, ended.request, "");
        if (!ended.has_imm) continue;
        event.kind = EventKind::kImm;
        event.imm = ended.imm;
        event.from = route_to(*ended.served);
      } else {
        --in_flight_;
        event.context = ended.context;
        event.bytes = ended.bytes;
      }
      events_.push_back(std::move(event));
    }
  }
}

void CudaRail::move_host_copies() {
  if (host_copies_.empty()) return;
  HostCopy copy = std::move(host_copies_.front());
  host_copies_.pop_front();
  if (!advance(copy)) host_copies_.push_back(std::move(copy));  // the others get their turn
}

// Now and then: who has ended, whether the GPU still copies, what can be unmapped.
void CudaRail::look_around() {
  const auto has_passed = [this](const std::array<uint64_t, kStreams>& marks) {
    for (uint32_t stream = 0; copies_ && stream < kStreams; ++stream)
      if (!copies_->has_passed(stream, marks[stream])) return false;
    return true;
  };
  for (const auto& [route, out] : outs_)
    if (!out->is_lost && out->peer->has_ended()) lose(*out);
  std::erase_if(leaving_, [&](const auto& out) { return has_passed(out->marks); });
  std::erase_if(ins_, [&](const auto& in) {
    const bool is_over = in->lane().is_closed.load(std::memory_order_acquire) || in->peer->has_ended();
    return is_over && has_passed(in->marks);
  });
  const bool is_idle = std::ranges::all_of(running_, [](const auto& running) { return running.empty(); });
  if (is_idle) {
    for (const auto& [key, memory] : memories_)
      if (const auto held = memory.lock()) held->sweep();
    std::erase_if(memories_, [](const auto& known) { return known.second.expired(); });
  } else if (const Status health = copies_->health(); !health.ok()) {
    for (auto& running : running_) {
      for (const Running& lost : running) {
        if (lost.served) continue;
        --in_flight_;
        failed(lost.context, health.message());
      }
      running.clear();
    }
  }
}

// Those that wait for replies.
std::set<Context*> CudaRail::operations_of(const Out& out) {
  std::set<Context*> contexts;
  for (const auto& [request, asked] : out.requested) contexts.insert(asked->context);
  return contexts;
}

void CudaRail::lose(Out& out) {
  out.is_lost = true;
  const auto fail = [&](Context* context) {
    --in_flight_;
    failed(context, text("cuda: {} has ended", out.peer->who()));
    events_.back().peer_gone = true;
  };
  for (Context* context : operations_of(out)) fail(context);
  out.requested.clear();
  for (const HostCopy& copy : host_copies_)
    if (copy.out.get() == &out) fail(copy.op.context);
  std::erase_if(host_copies_, [&](const HostCopy& copy) { return copy.out.get() == &out; });
}

}  // namespace weft::provider::cuda
