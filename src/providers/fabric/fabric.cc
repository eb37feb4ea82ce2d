// SPDX-License-Identifier: Apache-2.0
#include "providers/fabric/fabric.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <optional>

#include "base/log.h"
#include "base/random.h"
#include "base/same_host.h"
#include "providers/fabric/address.h"
#include "providers/fabric/key_cache.h"
#include "providers/fabric/library.h"
#include "providers/fabric/listener_guard.h"
#include "providers/fabric/nic.h"
#include "providers/fabric/page_streams.h"
#include "providers/fabric/region_name.h"
#include "providers/fabric/shm_rails.h"

namespace weft::provider {
namespace {

constexpr size_t kEntriesPerRead = 32;
constexpr uint32_t kPollsPerLook = 64;  // at lifelines
// Of verbs: what a completion says of a peer that does not answer, or takes nothing.
constexpr int kRetryExceeded = 12, kRnrExceeded = 13;

class FabricRail : public Rail {
 public:
  FabricRail(const fi::Library& library, Nic nic, bool may_copy_across, std::string secret)
      : fi_(library), nic_(std::move(nic)), may_copy_across_(may_copy_across), secret_(std::move(secret)) {
    if (nic_.caps.same_host) ShmRails::of_process().opened();
  }

  ~FabricRail() override {
    FabricRail::stop();
    const RailParts parts{ep_ ? &ep_->fid : nullptr, cq_ ? &cq_->fid : nullptr, av_ ? &av_->fid : nullptr,
                          domain_ ? &domain_->fid : nullptr, fabric_ ? &fabric_->fid : nullptr};
    if (nic_.caps.same_host)
      ShmRails::of_process().closed(fi_, nic_.name, parts);
    else
      close_parts(fi_, nic_.name, parts);
  }

  Status open(fi_info& info) {
    auto step = [&](const char* what, int code) {
      return code == 0 ? Status() : logged(fi::failure(fi_, code, text("fabric: {} on {}", what, nic_.name)));
    };
    mr_mode_ = info.domain_attr->mr_mode;
    key_bytes_ = info.domain_attr->mr_key_size;
    // Where the CPU copies. Not on tcp, and not even an immediate without bytes: if the peer dies while injected writes wait
    // for its connection, libfabric 1.17 reports them without their context and then reads it, which ends this process.
    if (!nic_.caps.device_memory && nic_.provider != "fabric:tcp") inject_bytes_ = info.tx_attr->inject_size;
    WEFT_TRY(step("fi_fabric", fi_.fabric(info.fabric_attr, &fabric_, nullptr)));
    WEFT_TRY(step("fi_domain", fabric_->ops->domain(fabric_, &info, &domain_, nullptr)));
    fi_cq_attr cq{};
    cq.size = nic_.caps.cq_depth;
    cq.format = FI_CQ_FORMAT_DATA;
    WEFT_TRY(step("fi_cq_open", domain_->ops->cq_open(domain_, &cq, &cq_, nullptr)));
    fi_av_attr av{};
    av.type = FI_AV_TABLE;
    WEFT_TRY(step("fi_av_open", domain_->ops->av_open(domain_, &av, &av_, nullptr)));
    WEFT_TRY(step("fi_endpoint", domain_->ops->endpoint(domain_, &info, &ep_, nullptr)));
    WEFT_TRY(step("binding addresses", ep_->fid.ops->bind(&ep_->fid, &av_->fid, 0)));
    WEFT_TRY(step("binding completions", ep_->fid.ops->bind(&ep_->fid, &cq_->fid, FI_SEND | FI_RECV)));
    if (nic_.provider == "fabric:efa") forbid_detours();
    const int enabled = ep_->fid.ops->control(&ep_->fid, FI_ENABLE, nullptr);
    WEFT_TRY(
        step(enabled == -EINVAL && nic_.provider == "fabric:verbs"
                 ? "fi_enable (FI_UNIVERSE_SIZE=16 makes completion queues shorter than the device's limit)"
                 : "fi_enable",
             enabled));
    if (mr_mode_ & FI_MR_PROV_KEY) WEFT_TRY(check_keys_end());
    char bytes[512];
    size_t count = sizeof bytes;
    WEFT_TRY(step("fi_getname", ep_->cm->getname(&ep_->fid, bytes, &count)));
    own_address_.assign(bytes, count);
    if (nic_.provider == "fabric:tcp") guard_ = ListenerGuard::of(own_address_);
    // libfabric closes a connection in silence while nothing is under way on it, and what is posted then has to wait for
    // another one, which a process that has ended never takes. Addresses of other kinds are no addresses of IP.
    if (nic_.provider == "fabric:tcp" || nic_.provider == "fabric:verbs")
      lifelines_ = Listener::at(line_address_of(own_address_, 0));
    if (nic_.caps.pages_apart) {
      WEFT_TRY_ASSIGN(pages_, PageStreams::listen(interface_of(own_address_), secret_));
    }
    return {};
  }

  const Caps& caps() const override { return nic_.caps; }
  const Nic& nic() const override { return nic_; }
  FabricObjects objects() const { return {ep_, cq_}; }
  uint64_t address_of(Route route) const { return destinations_[route].address; }

  std::string address() const override {
    const Neighbour self = this_process();
    AddressHead head;
    head.pid = static_cast<uint32_t>(self.pid);
    head.host = self.host;
    head.witness_at = self.witness_at;
    head.witness = self.witness;
    head.grants_at = self.grants_at;
    head.page_port = pages_ ? pages_->port() : 0;
    head.line_port = lifelines_.port();
    return std::string(reinterpret_cast<const char*>(&head), sizeof head) + own_address_;
  }

  Result<Route> resolve(std::string_view address) override {
    AddressHead head;
    if (address.size() <= sizeof head || address.substr(0, 4) != std::string_view(head.tag, 4))
      return Status::invalid("address: got {} bytes that no fabric rail made", address.size());
    std::memcpy(&head, address.data(), sizeof head);
    // libfabric reads as many bytes as the format has; a short one must not make it read past ours.
    std::string bytes(address.substr(sizeof head));
    if (bytes.size() != own_address_.size() && bytes.size() > 512)
      return Status::invalid("address: got {} bytes for {}, allowed: as long as {}", bytes.size(), nic_.name,
                             own_address_.size());
    bytes.resize(std::max<size_t>(bytes.size(), 512));
    Destination destination;
    const int inserted = av_->ops->insert(av_, bytes.data(), 1, &destination.address, 0, nullptr);
    if (inserted != 1)
      return logged(
          fi::failure(fi_, inserted < 0 ? inserted : -EINVAL, text("fabric: fi_av_insert on {}", nic_.name)));
    const Neighbour neighbour{static_cast<pid_t>(head.pid), head.host, head.witness_at, head.witness,
                              head.grants_at};
    if (grants_keys() && can_copy_across(neighbour)) destination.neighbour = neighbour;
    if (pages_ && head.page_port) {
      destination.has_pages = true;
      destination.pages = pages_->open(interface_of(bytes), static_cast<uint16_t>(head.page_port));
    }
    // Of a process of this host the engine knows itself.
    if (head.host != this_process().host) destination.line.dial(line_address_of(bytes, head.line_port));
    for (Route route = 0; route < destinations_.size(); ++route) {
      if (destinations_[route].is_used) continue;
      destinations_[route] = std::move(destination);
      return route;
    }
    destinations_.push_back(std::move(destination));
    return destinations_.size() - 1;
  }

  void forget(Route route) override {
    if (route >= destinations_.size() || !destinations_[route].is_used) return;
    // Removing the address of a peer that was killed can block some providers' progress; it is left to the
    // rail's end.
    destinations_[route].is_used = false;
    destinations_[route].line = {};
    std::erase_if(ready_, [route](const Event& event) { return event.is_gone(route); });
    if (destinations_[route].has_pages) pages_->close(destinations_[route].pages);
  }

  Result<Registration> enroll(const Range& range, uint32_t access) override {
    if (access & kTemporary) return register_temporary(range, access);
    const iovec part{range.data, range.bytes};
    fi_mr_attr attr{};
    attr.mr_iov = &part;
    attr.iov_count = 1;
    attr.access = FI_SEND | FI_WRITE;
    if (!(access & kReadOnly)) attr.access |= FI_RECV | FI_READ;
    if (access & kRemoteRead) attr.access |= FI_REMOTE_READ;
    if (access & kRemoteWrite) attr.access |= FI_REMOTE_WRITE;
    if (!(mr_mode_ & FI_MR_PROV_KEY)) {
      WEFT_TRY_ASSIGN(attr.requested_key, make_key());
    }
    if (range.kind == MemoryKind::kCuda) {
      attr.iface = FI_HMEM_CUDA;
      attr.device.cuda = range.device;
    }
    fid_mr* mr = nullptr;
    int code = domain_->mr->regattr(&domain_->fid, &attr, 0, &mr);
    if (code == 0 && (mr_mode_ & FI_MR_ENDPOINT)) {
      code = mr->fid.ops->bind(&mr->fid, &ep_->fid, 0);
      if (code == 0) code = mr->fid.ops->control(&mr->fid, FI_ENABLE, nullptr);
      if (code != 0) fi::close(mr->fid);
    }
    if (code != 0) {
      if (grants_keys()) take_back(attr.requested_key);
      return logged(
          fi::failure(fi_, code, text("fabric: registering {} bytes on {}", range.bytes, nic_.name)));
    }
    Registration made;
    made.handle = mr;
    made.lkey = mr->mem_desc;
    made.rkey = mr->key;
    made.base = (mr_mode_ & FI_MR_VIRT_ADDR) ? reinterpret_cast<uint64_t>(range.data) : 0;
    if (pages_) pages_->allow(made, range, access);
    return made;
  }

  void release(Registration& registration) override {
    if (grants_keys() && registration.handle) take_back(registration.rkey);
    if (pages_ && registration.rkey) pages_->forbid(registration);
    if (registration.handle) fi::close(static_cast<fid_mr*>(registration.handle)->fid);
    registration = {};
  }

  // Closing the endpoint takes in what has come, and libfabric looks then at the registrations of the receives that it
  // goes to. Not where a registration is a part of the endpoint, nor over shm, where the endpoint may outlive the rail.
  void stop() override {
    if (!ep_ || nic_.caps.same_host || (mr_mode_ & FI_MR_ENDPOINT)) return;
    if (guard_) guard_->end_of_listener();
    close_parts(fi_, nic_.name, {&ep_->fid});
    ep_ = nullptr;
  }

  Posted post_write(const RmaOp& op) override {
    const Piece& p = op.piece;
    const uint64_t to = destinations_[op.to].address;
    const bool is_injected = inject_bytes_ && p.bytes <= *inject_bytes_ && !op.delivered;
    if (destinations_[op.to].neighbour.pid && !(op.has_imm && is_injected))
      return post_across(Across::kWrite, op);
    if (op.delivered) return post_delivered(op, to);
    if (is_injected) return post_inject(op, to);
    if (op.has_imm)
      return answer(
          ep_->rma->writedata(ep_, p.local, p.bytes, p.lkey, op.imm, to, p.remote, p.rkey, op.context));
    return answer(ep_->rma->write(ep_, p.local, p.bytes, p.lkey, to, p.remote, p.rkey, op.context));
  }

  Posted post_read(const RmaOp& op) override {
    const Piece& p = op.piece;
    if (destinations_[op.to].neighbour.pid) return post_across(Across::kRead, op);
    return answer(ep_->rma->read(ep_, p.local, p.bytes, p.lkey, destinations_[op.to].address, p.remote,
                                 p.rkey, op.context));
  }

  Posted post_send(Route to, const void* data, uint64_t bytes, void* lkey, Context* context) override {
    return answer(ep_->msg->send(ep_, data, bytes, lkey, destinations_[to].address, context));
  }

  Posted post_recv(void* data, uint64_t bytes, void* lkey, Context* context) override {
    return answer(ep_->msg->recv(ep_, data, bytes, lkey, FI_ADDR_UNSPEC, context));
  }

  std::string refusal() const override { return fi::failure(fi_, refused_with_, "fabric").message(); }

  bool is_route_broken() const override { return fi::means_peer_gone(-refused_with_); }

  uint32_t pages_per_post(Route to) const override {
    if (destinations_[to].neighbour.pid) return kStretchesMax;
    return destinations_[to].has_pages ? kPagesPerFrame : 1;
  }

  Posted post_pages(Route to, Piece* pieces, uint32_t count, Context* context) override {
    if (destinations_[to].neighbour.pid) return post_pages_across(to, pieces, count, context);
    pages_->post(destinations_[to].pages, pieces, count, context);
    return Posted::kOk;
  }

  // By a stream of pages: what libfabric's tcp has begun to write, nobody can stop.
  Posted post_temporary(const RmaOp& op) override {
    if (!destinations_[op.to].has_pages) return answer(-EOPNOTSUPP);
    pages_->post(destinations_[op.to].pages, &op.piece, 1, op.context,
                 op.has_imm ? std::optional(op.imm) : std::nullopt, true);
    return Posted::kOk;
  }

  size_t poll(Event* events, size_t max) override {
    size_t made = 0;
    if (guard_) guard_->look();
    if (++polls_ % kPollsPerLook == 0) look_at_lines();
    if (pages_ && pages_->progress(ready_) && max > 0) events[made++].kind = EventKind::kServed;
    while (made < max && !ready_.empty()) {
      events[made++] = std::move(ready_.front());
      ready_.pop_front();
    }
    fi_cq_data_entry entries[kEntriesPerRead];
    const size_t room = std::min(max - made, kEntriesPerRead);
    if (room == 0) return made;
    const ssize_t count = cq_->ops->read(cq_, entries, room);
    if (count == -FI_EAVAIL) return made + take_error(events[made]);
    // Last: why the peer has taken its memory back may lie in the queue.
    for (; count <= 0 && made < max && !refused_.empty(); refused_.pop_front())
      events[made++] = std::move(refused_.front());
    for (ssize_t i = 0; i < count; ++i)
      if (translate(entries[i], events[made])) ++made;
    return made;
  }

  bool sleep(uint64_t most_ns) const override { return pages_ && pages_->sleep(most_ns); }

 private:
  struct Destination {
    uint64_t address = 0;
    Neighbour neighbour;  // a process whose memory this one may read and write; number 0: it may not
    bool has_pages = false;
    size_t pages = 0;  // the page stream there
    bool is_used = true;
    Lifeline line;
  };

  void look_at_lines() {
    const auto now = Lifeline::Clock::now();
    for (Route route = 0; route < destinations_.size(); ++route) {
      if (!destinations_[route].line.is_over(now)) continue;
      destinations_[route].line = {};
      Event event;
      event.kind = EventKind::kGone;
      event.from = route;
      event.text = kLineIsOver;
      ready_.push_back(std::move(event));
    }
  }

  Status check_keys_end() {
    WEFT_TRY_ASSIGN(
        const bool are_cached,
        fi::caches_keys([&](void* data, uint64_t bytes) { return enroll({data, bytes}, kRemoteRead); },
                        [&](Registration& registration) { release(registration); }));
    if (!are_cached) return {};
    return logged(Status::make(
        Code::kUnsupported,
        "fabric: {}: memory that is given back stays within peers' reach, as libfabric's cache of "
        "registrations is on; "
        "FI_MR_CACHE_MAX_COUNT=0 (efa: FI_EFA_MR_CACHE_ENABLE=0) before the program starts turns it off",
        nic_.name));
  }

  // libfabric does not learn of it.
  Result<Registration> register_temporary(const Range& range, uint32_t access) {
    if (!pages_ || range.kind != MemoryKind::kHost)
      return Status::make(Code::kUnsupported, "fabric: {} takes no temporary registrations of such memory",
                          nic_.name);
    Registration made;
    made.rkey = random_key();
    pages_->allow(made, range, access);
    return made;
  }

  // One system call for all pages, and one for each key. The kernel looks up the peer's memory once per stretch of it, so pages go
  // in the order of their addresses over there and neighbours become one stretch.
  Posted post_pages_across(Route to, Piece* pieces, uint32_t count, Context* context) {
    std::sort(pieces, pieces + count, [](const Piece& a, const Piece& b) { return a.remote < b.remote; });
    iovec from[kStretchesMax], into[kStretchesMax];
    size_t stretches = 0;
    for (uint32_t i = 0; i < count; ++i) {
      from[i] = {pieces[i].local, pieces[i].bytes};
      if (i > 0 && pieces[i - 1].remote + pieces[i - 1].bytes == pieces[i].remote)
        into[stretches - 1].iov_len += pieces[i].bytes;
      else
        into[stretches++] = {reinterpret_cast<void*>(pieces[i].remote), pieces[i].bytes};
    }
    const Neighbour& neighbour = destinations_[to].neighbour;
    int error = 0;
    for (uint32_t i = 0; i < count && error == 0; ++i)
      if (i == 0 || pieces[i].rkey != pieces[i - 1].rkey) error = check_grant(neighbour, pieces[i].rkey);
    if (error == 0) error = copy_across(Across::kWrite, neighbour.pid, from, count, into, stretches);
    for (uint32_t i = 0; i < count && error == EFAULT; ++i) error = why_fault(neighbour, pieces[i].rkey);
    return across(error, context);
  }

  // Two system calls, the copy and a look at the key: what the shm provider does too, which does not look at the key
  // and goes through a queue.
  Posted post_across(Across way, const RmaOp& op) {
    iovec here{op.piece.local, op.piece.bytes};
    iovec there{reinterpret_cast<void*>(op.piece.remote), op.piece.bytes};
    const Neighbour& neighbour = destinations_[op.to].neighbour;
    int error = way == Across::kWrite ? check_grant(neighbour, op.piece.rkey) : 0;
    if (error == 0) error = copy_across(way, neighbour.pid, &here, 1, &there, 1);
    if (error == 0 && way == Across::kRead) error = check_grant(neighbour, op.piece.rkey);
    if (error == EFAULT) error = why_fault(neighbour, op.piece.rkey);
    if (error != 0 || !op.has_imm) return across(error, op.context);
    // The bytes are there. With them, libfabric would let the peer fetch them here later, when this process may have
    // given up and used the memory again: docs/decisions/0041.
    RmaOp notice = op;
    notice.piece.bytes = 0;
    return post_inject(notice, destinations_[op.to].address);
  }

  // Memory that its owner has taken back may be gone, too.
  static int why_fault(const Neighbour& neighbour, uint64_t key) {
    const int error = check_grant(neighbour, key);
    return error ? error : EFAULT;
  }

  Posted across(int error, Context* context) {
    if (error == 0) return Posted::kDone;
    Event event;
    event.kind = EventKind::kFailed;
    event.context = context;
    event.peer_gone = error == ESRCH;
    event.key_refused = error == EKEYREVOKED;
    event.text = event.key_refused ? "the peer has taken this memory back"
                                   : text("copying between processes: {}", std::strerror(error));
    (event.key_refused ? refused_ : ready_).push_back(std::move(event));
    return Posted::kOk;
  }

  // The source is reusable at once, and there is no completion to wait for.
  Posted post_inject(const RmaOp& op, uint64_t to) {
    const Piece& p = op.piece;
    const Posted posted =
        answer(op.has_imm ? ep_->rma->injectdata(ep_, p.local, p.bytes, op.imm, to, p.remote, p.rkey)
                          : ep_->rma->inject(ep_, p.local, p.bytes, to, p.remote, p.rkey));
    return posted == Posted::kOk ? Posted::kDone : posted;
  }

  // Whether others of this host copy to and from registered memory by themselves, so that keys must have a place in this
  // process's table.
  bool grants_keys() const {
    return may_copy_across_ && (mr_mode_ & FI_MR_VIRT_ADDR) && !(mr_mode_ & FI_MR_PROV_KEY);
  }

  Result<uint64_t> make_key() const {
    for (int tries = 0; tries < 64; ++tries) {
      const uint64_t key =
          key_bytes_ >= 8 ? random_key() : random_key() & ((uint64_t{1} << (8 * key_bytes_)) - 1);
      if (!grants_keys() || (key != 0 && grant(key))) return key;
    }
    return logged(
        Status::make(Code::kCapacity, "fabric: no place for another registration on {}", nic_.name));
  }

  Posted post_delivered(const RmaOp& op, uint64_t to) {
    iovec from{op.piece.local, op.piece.bytes};
    fi_rma_iov into{op.piece.remote, op.piece.bytes, op.piece.rkey};
    void* desc = op.piece.lkey;
    fi_msg_rma message{&from, &desc, 1, to, &into, 1, op.context, op.imm};
    return answer(
        ep_->rma->writemsg(ep_, &message, FI_DELIVERY_COMPLETE | (op.has_imm ? FI_REMOTE_CQ_DATA : 0)));
  }

  Posted answer(ssize_t code) {
    if (code == 0) return Posted::kOk;
    if (code == -EAGAIN) return Posted::kAgain;
    refused_with_ = static_cast<int>(code);
    return Posted::kFatal;
  }

  static bool translate(const fi_cq_data_entry& entry, Event& event) {
    event.peer_gone = event.key_refused = false;
    event.context = static_cast<Context*>(entry.op_context);
    event.bytes = entry.len;
    // A message may carry data, too, which says nothing here. It used a receive, which must come back.
    const bool is_message = (entry.flags & FI_RECV) != 0;
    if (!is_message && (entry.flags & FI_REMOTE_CQ_DATA) && !(entry.flags & FI_WRITE)) {
      event.kind = EventKind::kImm;
      event.imm = entry.data;
      return true;
    }
    event.kind = is_message ? EventKind::kReceived : EventKind::kDone;
    return event.context != nullptr;
  }

  size_t take_error(Event& event) {
    fi_cq_err_entry entry{};
    if (cq_->ops->readerr(cq_, &entry, 0) <= 0) return 0;
    char words[256] = {};
    const char* said = cq_->ops->strerror
                           ? cq_->ops->strerror(cq_, entry.prov_errno, entry.err_data, words, sizeof words)
                           : nullptr;
    event.kind = EventKind::kFailed;
    event.context = static_cast<Context*>(entry.op_context);
    const bool takes_nothing = nic_.provider == "fabric:verbs" &&
                               (entry.prov_errno == kRetryExceeded || entry.prov_errno == kRnrExceeded);
    event.peer_gone = takes_nothing || fi::means_peer_gone(entry.err);
    event.key_refused = false;
    event.text = entry.err == ECANCELED  // of libfabric's own connections; it does not say why one ended
                     ? "the connection has ended: its process has, or packets were not answered"
                     : text("{} (error {}; provider {}: {})", fi_.strerror(entry.err), entry.err,
                            entry.prov_errno, said ? said : "");
    if (event.context) return 1;
    log_info("fabric: {}: {}", nic_.name, event.text);
    return 0;
  }

  // efa would send to processes of this host through shared memory, of which write-before-immediate is not
  // promised, and call CUDA from the thread that posts. Releases that know no such option do not do it
  // either.
  void forbid_detours() {
    const bool is_permitted = false;
    for (int option : {FI_OPT_SHARED_MEMORY_PERMITTED, FI_OPT_CUDA_API_PERMITTED}) {
      const int code =
          ep_->ops->setopt(&ep_->fid, FI_OPT_ENDPOINT, option, &is_permitted, sizeof is_permitted);
      if (code != 0) log_info("fabric: option {} on {}: {}", option, nic_.name, fi_.strerror(-code));
    }
  }

  const fi::Library& fi_;
  Nic nic_;
  bool may_copy_across_;
  const std::string secret_;
  fid_fabric* fabric_ = nullptr;
  fid_domain* domain_ = nullptr;
  fid_cq* cq_ = nullptr;
  fid_av* av_ = nullptr;
  fid_ep* ep_ = nullptr;
  int mr_mode_ = 0;
  size_t key_bytes_ = 8;
  std::optional<size_t> inject_bytes_;  // none: nothing is injected
  std::string own_address_;
  std::unique_ptr<ListenerGuard> guard_;
  std::unique_ptr<PageStreams> pages_;
  Listener lifelines_;
  uint32_t polls_ = 0;
  std::vector<Destination> destinations_;
  std::deque<Event> ready_, refused_;
  int refused_with_ = 0;
};

class Fabric : public Provider {
 public:
  explicit Fabric(std::string kind) : kind_(std::move(kind)) {}

  std::string name() const override { return "fabric:" + kind_; }

  std::vector<Nic> probe() override {
    const auto library = fi::open_library();
    if (!library.ok()) return {unusable(library.status())};
    const auto found = fi::find_networks(**library, kind_);
    if (!found.ok()) return {unusable(found.status())};
    std::vector<Nic> nics;
    for (const fi_info* info = found->first(); info; info = info->next) {
      Nic nic = describe(*info, kind_);
      if (!nic.usable() && kind_ == "tcp") continue;
      const auto known =
          std::find_if(nics.begin(), nics.end(), [&](const Nic& n) { return n.name == nic.name; });
      if (known == nics.end())
        nics.push_back(std::move(nic));
      else if (!known->usable())
        *known = std::move(nic);
    }
    return nics;
  }

  Result<std::unique_ptr<Rail>> open(const Nic& nic, const RailOptions& options) override {
    WEFT_TRY_ASSIGN(const fi::Library* library, fi::open_library());
    if (kind_ == "shm") remove_regions_of_the_dead();
    WEFT_TRY_ASSIGN(const fi::InfoList found, fi::find_networks(*library, kind_));
    for (fi_info* info = found.first(); info; info = info->next) {
      if (nic_name(*info, kind_) != nic.name || !why_unfit(*info, kind_).empty()) continue;
      auto rail =
          std::make_unique<FabricRail>(*library, describe(*info, kind_), kind_ == "shm", options.secret);
      WEFT_TRY(rail->open(*info));
      return std::unique_ptr<Rail>(std::move(rail));
    }
    return Status::invalid("nic: got {}, which {} does not have", nic.name, name());
  }

 private:
  Nic unusable(const Status& why) const {
    Nic nic;
    nic.provider = name();
    nic.name = "-";
    nic.unusable_because = why.message();
    return nic;
  }

  std::string kind_;
};

}  // namespace

FabricObjects fabric_objects(Rail& rail) {
  auto* fabric = dynamic_cast<FabricRail*>(&rail);
  return fabric ? fabric->objects() : FabricObjects();
}

uint64_t fabric_address(Rail& rail, Route route) {
  auto* fabric = dynamic_cast<FabricRail*>(&rail);
  return fabric ? fabric->address_of(route) : FI_ADDR_UNSPEC;
}

std::shared_ptr<Provider> make_fabric(const std::string& kind) {
  return std::make_shared<Fabric>(kind);
}

}  // namespace weft::provider
