// SPDX-License-Identifier: Apache-2.0
//
// The baseline of `weft bench transfer`: the loads of transfer_loop.h straight on libfabric.
#include <cstring>

#include "measure/loops/transfer_loop.h"
#include "providers/fabric/abi.h"
#include "providers/fabric/fabric.h"

namespace weft::transfer {
namespace {

using Clock = Deadline::Clock;

constexpr uint32_t kScatterWays = 8;
constexpr size_t kEntries = 32;
constexpr size_t kContexts = 8192;
constexpr uint64_t kEchoData = 1, kStopData = 2;

double now_s() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

struct BufferDescriptor {  // what the two sides exchange
  uint64_t base = 0;
  uint64_t rkey = 0;
  uint64_t bytes = 0;
};

}  // namespace

struct RawLoop::Impl {
  std::unique_ptr<provider::Rail> rail;
  provider::Registration mine;
  provider::FabricObjects objects;
  uint64_t peer = 0;
  BufferDescriptor there;
  char* data = nullptr;
  uint64_t bytes = 0;
  std::vector<provider::Context> contexts{kContexts};
  size_t next_context = 0;
  uint64_t done = 0, echoes = 0, stops = 0;
  Answered answered;
  Status error;
  std::shared_ptr<Peer> beside;  // null: nobody is watched

  // Whether anything came.
  bool poll() {
    fi_cq_data_entry entries[kEntries];
    const ssize_t count = objects.cq->ops->read(objects.cq, entries, kEntries);
    if (count == -FI_EAVAIL) {
      fi_cq_err_entry entry{};
      objects.cq->ops->readerr(objects.cq, &entry, 0);
      error = Status::make(Code::kPeerLost, "raw loop: the other side is lost: {} (error {}, provider {})",
                           std::strerror(entry.err), entry.err, entry.prov_errno);
    }
    for (ssize_t i = 0; i < count; ++i) {
      if ((entries[i].flags & FI_REMOTE_CQ_DATA) && !(entries[i].flags & FI_WRITE))
        ++(entries[i].data == kStopData ? stops : echoes);
      else
        ++done;
    }
    return count > 0;
  }

  // No event tells of a peer that dies while nothing is under way; heartbeats of the engine beside do.
  bool is_well() {
    if (error.ok() && beside && !beside->is_alive())
      error = Status::make(Code::kPeerLost, "raw loop: the other side is lost: {}", beside->why().message());
    return error.ok();
  }

  template <class Ready>
  Status poll_until(Deadline until, Ready ready) {
    const bool came = wait_until(until, [&] { return ready() || !is_well(); }, [this] { return poll(); });
    WEFT_TRY(Status(error));
    return came ? Status() : Status::make(Code::kPeerLost, "raw loop: no answer in time");
  }

  Status post(bool is_read, uint64_t here, uint64_t remote, uint64_t length, uint64_t flags, uint64_t imm,
              Deadline until) {
    iovec from{data + here, length};
    fi_rma_iov into{there.base + remote, length, there.rkey};
    void* desc = mine.lkey;
    fi_msg_rma message{&from, &desc, 1, peer, &into, 1, &contexts[next_context++ % kContexts], imm};
    ssize_t code = 0;
    const bool came = wait_until(until, [&] {
      code = is_read ? objects.endpoint->rma->readmsg(objects.endpoint, &message, flags)
                     : objects.endpoint->rma->writemsg(objects.endpoint, &message, flags);
      if (code == -EAGAIN) poll();
      return code != -EAGAIN || !is_well();
    });
    WEFT_TRY(Status(error));
    if (!came) return Status::make(Code::kPeerLost, "raw loop: the endpoint stays full");
    return code == 0 ? Status() : Status::make(Code::kSystem, "raw loop: posting: error {}", -code);
  }

  Status echo(uint64_t length, Deadline until) {
    const uint64_t expected = echoes + 1;
    WEFT_TRY(post(false, 0, 0, length, FI_REMOTE_CQ_DATA, kEchoData, until));
    return poll_until(until, [&] { return echoes >= expected; });
  }

  Status post_load(const Load& load, uint32_t i, const std::vector<uint32_t>& here,
                   const std::vector<uint32_t>& away, Deadline until) {
    const uint64_t at = place_of(i, load.bytes, std::min(bytes, there.bytes));
    if (load.kind == LoadKind::kPaged)
      return post(false, here[i] * load.bytes, away[i] * load.bytes, load.bytes, 0, 0, until);
    if (load.kind != LoadKind::kScatter)
      return post(load.kind == LoadKind::kRead, at, at, load.bytes, 0, 0, until);
    const uint64_t each = load.bytes / kScatterWays;
    for (uint32_t k = 0; k < kScatterWays; ++k)
      WEFT_TRY(post(false, at + (kScatterWays - 1 - k) * each, at + k * each, each, 0, 0, until));
    return {};
  }

  Status repeat(const Load& load, const std::vector<uint32_t>& here, const std::vector<uint32_t>& away,
                Deadline until) {
    if (load.kind == LoadKind::kLatency) {
      for (uint32_t i = 0; i < load.count; ++i) WEFT_TRY(echo(load.bytes, until));
      return {};
    }
    const uint64_t ways = load.kind == LoadKind::kScatter ? kScatterWays : 1;
    const uint64_t base = done;
    for (uint32_t i = 0; i < load.count; ++i) {
      if (i >= load.window)
        WEFT_TRY(poll_until(until, [&] { return done - base + load.window * ways > i * ways; }));
      WEFT_TRY(post_load(load, i, here, away, until));
      if (i % 16 == 15) poll();
    }
    WEFT_TRY(poll_until(until, [&] { return done - base >= load.count * ways; }));
    return echo(8, until);
  }
};

RawLoop::RawLoop(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

RawLoop::~RawLoop() {
  impl_->rail->release(impl_->mine);
}

Result<std::unique_ptr<RawLoop>> RawLoop::open(provider::Provider& provider, const provider::Nic& nic,
                                               void* data, uint64_t bytes) {
  auto impl = std::make_unique<Impl>();
  WEFT_TRY_ASSIGN(impl->rail, provider.open(nic, {}));
  impl->objects = provider::fabric_objects(*impl->rail);
  if (!impl->objects.endpoint)
    return Status::make(Code::kUnsupported, "raw loop: {} is not libfabric", provider.name());
  WEFT_TRY_ASSIGN(impl->mine, impl->rail->enroll({data, bytes}, kRemoteRead | kRemoteWrite));
  impl->data = static_cast<char*>(data);
  impl->bytes = bytes;
  return std::unique_ptr<RawLoop>(new RawLoop(std::move(impl)));
}

std::string RawLoop::address() const {
  const BufferDescriptor descriptor{impl_->mine.base, impl_->mine.rkey, impl_->bytes};
  return std::string(reinterpret_cast<const char*>(&descriptor), sizeof descriptor) + impl_->rail->address();
}

Status RawLoop::connect(std::string_view address) {
  if (address.size() <= sizeof(BufferDescriptor))
    return Status::invalid("address: got {} bytes, allowed: a raw loop's", address.size());
  std::memcpy(&impl_->there, address.data(), sizeof(BufferDescriptor));
  WEFT_TRY_ASSIGN(const provider::Route route,
                  impl_->rail->resolve(address.substr(sizeof(BufferDescriptor))));
  impl_->peer = provider::fabric_address(*impl_->rail, route);
  return {};
}

Result<std::vector<double>> RawLoop::measure(const Load& load, std::shared_ptr<Peer> beside, Deadline until) {
  impl_->beside = std::move(beside);
  std::vector<uint32_t> here, away;
  if (load.kind == LoadKind::kPaged) {
    here = random_pages(load.count, load.pool, 1);
    away = random_pages(load.count, load.pool, 2);
  }
  WEFT_TRY(impl_->echo(8, until));
  std::vector<double> seconds;
  for (uint32_t i = 0; i < load.repeats; ++i) {
    const double start = now_s();
    WEFT_TRY(impl_->repeat(load, here, away, until));
    seconds.push_back(now_s() - start);
  }
  return seconds;
}

Status RawLoop::serve(Deadline until) {
  while (true) {
    WEFT_TRY(impl_->poll_until(until, [&] {
      return impl_->echoes > impl_->answered.echoes || impl_->stops > impl_->answered.stops;
    }));
    if (impl_->echoes == impl_->answered.echoes) {
      ++impl_->answered.stops;
      return {};
    }
    ++impl_->answered.echoes;
    WEFT_TRY(impl_->post(false, 0, 0, 8, FI_REMOTE_CQ_DATA, kEchoData, until));
  }
}

Status RawLoop::stop_serving(Deadline until) {
  const uint64_t expected = impl_->done + 1;
  WEFT_TRY(impl_->post(false, 0, 0, 8, FI_REMOTE_CQ_DATA, kStopData, until));
  return impl_->poll_until(until, [&] { return impl_->done >= expected; });
}

}  // namespace weft::transfer
