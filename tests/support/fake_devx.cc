// SPDX-License-Identifier: Apache-2.0
#include "support/fake_devx.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "conformance/fake_verbs.h"

namespace weft::testing {
namespace {

namespace ib = provider::ib;
namespace mlx5 = ibgda::mlx5;

constexpr size_t kCommand = 272, kAnswer = 16, kPage = 4096;
constexpr uint32_t kEventQueue = 0x5a;

// A command's bytes, of which each bit is looked at once; what nobody looked at must be 0.
class Reader {
 public:
  Reader(const void* bytes, size_t size)
      : left_(static_cast<const uint8_t*>(bytes), static_cast<const uint8_t*>(bytes) + size) {}
  // Bytes, big-endian.
  uint64_t take(size_t at, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) {
      value = value << 8 | left_[at + i];
      left_[at + i] = 0;
    }
    return value;
  }
  // Those bits of a byte that `mask` has.
  uint32_t bits(size_t at, uint32_t mask) {
    const uint32_t value = (left_[at] & mask) / (mask & (~mask + 1));
    left_[at] = static_cast<uint8_t>(left_[at] & ~mask);
    return value;
  }
  std::string rest() const {
    for (size_t at = 0; at < left_.size(); ++at)
      if (left_[at] != 0)
        return text("byte {} has bits {} that mean nothing here", at, static_cast<int>(left_[at]));
    return "";
  }

 private:
  std::vector<uint8_t> left_;
};

struct FakeUmem : mlx5dv_devx_umem {
  std::byte* at = nullptr;
  size_t bytes = 0;
  std::shared_ptr<const void> held;
};
struct FakeUar : mlx5dv_devx_uar {
  uint64_t word = 0;
};
struct FakeAh {
  mlx5_wqe_av vector{};
};
struct FakeObject {
  bool is_queue_pair = false;
  uint32_t number = 0;
  // Completion queues.
  std::byte* completions = nullptr;
  uint32_t entries = 0;
  // Queue pairs.
  FakeObject* cq = nullptr;
  std::unique_ptr<ibgda::QueuePair> pair;
  uint32_t state = 0, sends_from = 0, expects_from = 0, peer = 0;
};

uint8_t mac_byte(const ibv_gid& gid, int i) {
  uint8_t raw[16];
  std::memcpy(raw, &gid, sizeof raw);
  return static_cast<uint8_t>(raw[10 + i] ^ (0x51 + i));
}

}  // namespace

struct FakeDevx::State {
  NicOf nic_of;
  std::mutex mutex;
  DevxPlan plan;
  std::map<uint32_t, FakeUmem*> umems;
  std::map<uint32_t, FakeUar*> uars;  // by page
  std::map<uint32_t, FakeObject*> cqs, qps;
  size_t made = 0, ahs = 0;
  uint32_t drawn = 0x0a0b01;
  std::string failures;

  void fail(const std::string& what) { failures += what + "\n"; }
  bool check(bool is_right, const std::string& what) {
    if (!is_right) fail(what);
    return is_right;
  }
  std::byte* place(uint32_t umem, uint64_t offset, uint64_t bytes, const std::string& what) {
    const auto found = umems.find(umem);
    if (found != umems.end() && offset + bytes <= found->second->bytes) return found->second->at + offset;
    fail(text("{}: no registered memory {} with {} bytes at {}", what, umem, bytes, offset));
    return nullptr;
  }
  FakeObject* make_cq(Reader& in);
  FakeObject* make_qp(Reader& in);
  void to_init(FakeObject& qp, Reader& in);
  void to_receive(FakeObject& qp, Reader& in);
  void to_send(FakeObject& qp, Reader& in);
};

namespace {

FakeDevx::State* current = nullptr;

}  // namespace

FakeObject* FakeDevx::State::make_cq(Reader& in) {
  auto cq = std::make_unique<FakeObject>();
  check(in.bits(16, 0x02) == 1 && in.bits(92, 0x80) == 1,
        "a completion queue in memory that is not registered");
  check(in.bits(17, 0x02) == 1, "a completion queue that minds overrun");
  cq->entries = 1u << in.bits(28, 0x1f);
  check(uars.contains(static_cast<uint32_t>(in.take(29, 3))), "a completion queue without a doorbell page");
  check(in.take(39, 1) == kEventQueue, "a completion queue of another event queue");
  const auto record = static_cast<uint32_t>(in.take(20, 4));
  place(record, in.take(72, 8), 8, "record of a completion queue");
  const uint64_t offset = in.take(80, 8);
  cq->completions =
      place(static_cast<uint32_t>(in.take(88, 4)), offset, uint64_t{cq->entries} * 64, "completions");
  cq->number = drawn += 0x0101;
  return cq->completions ? cq.release() : nullptr;
}

FakeObject* FakeDevx::State::make_qp(Reader& in) {
  auto qp = std::make_unique<FakeObject>();
  qp->is_queue_pair = true;
  check(in.take(25, 1) == 0 && in.bits(26, 0x18) == 3, "a queue pair that is not reliable");
  ModelNic* nic = nic_of(static_cast<uint32_t>(in.take(29, 3)));
  const auto uar = uars.find(static_cast<uint32_t>(in.take(37, 3)));
  const auto cq = cqs.find(static_cast<uint32_t>(in.take(149, 3)));
  check(in.take(181, 3) == (cq == cqs.end() ? 0 : cq->first),
        "another completion queue for what is received");
  check(in.bits(196, 0x07) == 3, "a queue pair that receives");
  const uint32_t blocks = 1u << in.bits(34, 0x78);
  check(in.bits(232, 0x10) == 1 && in.bits(268, 0x80) == 1, "a queue pair in memory that is not registered");
  const uint64_t record_at = in.take(184, 8), ring_at = in.take(256, 8);
  std::byte* record = place(static_cast<uint32_t>(in.take(252, 4)), record_at, 8, "record of a queue pair");
  const auto ring_umem = static_cast<uint32_t>(in.take(264, 4));
  std::byte* ring = place(ring_umem, ring_at, uint64_t{blocks} * 64, "ring");
  const bool is_complete =
      check(nic && uar != uars.end() && cq != cqs.end(), "a queue pair of unknown parts");
  if (!is_complete || !record || !ring) return nullptr;
  qp->cq = cq->second;
  const ibgda::QueueMemory at{ring,
                              qp->cq->completions,
                              reinterpret_cast<uint32_t*>(record),
                              &uar->second->word,
                              blocks,
                              qp->cq->entries,
                              0};
  qp->pair = nic->create_queue_in(at, umems.at(ring_umem)->held);
  qp->number = qp->pair->memory().number;
  return qp.release();
}

void FakeDevx::State::to_init(FakeObject& qp, Reader& in) {
  check(qp.state == 0 && in.bits(26, 0x18) == 3, "a queue pair is started again");
  check(in.take(85, 1) == 2, "a queue pair of another port");
  (void)in.take(50, 2);  // P_Key, by its place in the port's table
  check(in.bits(170, 0xe0) == 7 && in.bits(169, 0x0f) == 1, "a queue pair without reads, writes or atomics");
  qp.state = 1;
}

void FakeDevx::State::to_receive(FakeObject& qp, Reader& in) {
  check(qp.state == 1, "a queue pair receives before it was started");
  check(in.bits(32, 0xe0) != 0 && in.bits(32, 0x1f) == 30,
        "a queue pair without sizes of packets and messages");
  check(in.bits(169, 0xe0) == 4 && in.bits(172, 0x1f) != 0, "a queue pair that answers no reads");
  qp.peer = static_cast<uint32_t>(in.take(45, 3));
  qp.expects_from = static_cast<uint32_t>(in.take(173, 3));
  ibv_gid gid{};
  std::array<uint8_t, 16> raw{};
  for (size_t i = 0; i < raw.size(); ++i) raw[i] = static_cast<uint8_t>(in.take(64 + i, 1));
  std::memcpy(&gid, raw.data(), sizeof raw);
  for (int i = 0; i < 6; ++i)
    check(in.take(86 + static_cast<size_t>(i), 1) == mac_byte(gid, i),
          "another MAC address than the GID has");
  check(in.take(85, 1) == 2 && in.take(57, 1) == 3, "a path from another port or GID");
  check(in.take(59, 1) != 0 && in.take(82, 2) >= 0xc000, "a path without hops or source port");
  (void)in.take(60, 2);     // traffic class: 4 bits of each
  (void)in.bits(81, 0x3f);  // and as DSCP
  (void)in.bits(84, 0x70);  // priority
  const auto peer = qps.find(qp.peer);
  if (!check(peer != qps.end(), text("queue {} is to be joined to {}", qp.number, qp.peer))) return;
  check(qp.pair->connect(peer->second->pair->address()).ok(), "the model does not join the queues");
  qp.state = 2;
}

void FakeDevx::State::to_send(FakeObject& qp, Reader& in) {
  check(qp.state == 2, "a queue pair sends before it receives");
  check(in.bits(56, 0xf8) != 0 && in.bits(137, 0x07) != 0 && in.bits(138, 0xe0) == 7,
        "a queue pair that never asks again");
  check(in.bits(137, 0xe0) == 4, "a queue pair that sends no reads");
  qp.sends_from = static_cast<uint32_t>(in.take(145, 3));
  const auto peer = qps.find(qp.peer);
  const bool is_known = peer != qps.end() && peer->second->state >= 2;
  check(!is_known || peer->second->expects_from == qp.sends_from,
        "the ends do not agree about where they begin");
  qp.state = 3;
}

namespace {

ibv_context* open_device(ibv_device* device, mlx5dv_context_attr* attr) {
  if (attr->flags != MLX5DV_CONTEXT_FLAGS_DEVX) current->fail("a context without commands");
  if (current->plan.context == 0) return transfer::testing::fake_verbs_library().open_device(device);
  errno = current->plan.context;
  return nullptr;
}

mlx5dv_devx_umem* refuse_umem(int why) {
  errno = why;
  return nullptr;
}

mlx5dv_devx_umem* umem_reg(ibv_context*, mlx5dv_devx_umem_in* in) {
  std::lock_guard lock(current->mutex);
  current->check((in->pgsz_bitmap & (kPage - 1)) == 0 && in->pgsz_bitmap != 0 && (in->access & 1) != 0,
                 "memory registered with other pages or read-only");
  auto umem = std::make_unique<FakeUmem>();
  umem->bytes = in->size;
  if (in->comp_mask == MLX5DV_UMEM_MASK_DMABUF) {
    if (current->plan.dmabuf != 0) return refuse_umem(current->plan.dmabuf);
    const auto offset = reinterpret_cast<uint64_t>(in->addr);
    struct stat file{};
    if (fstat(in->dmabuf_fd, &file) != 0) return refuse_umem(EBADF);
    if (offset % kPage != 0 || offset + in->size > static_cast<uint64_t>(file.st_size))
      return refuse_umem(EINVAL);
    void* mapped = mmap(nullptr, in->size, PROT_READ | PROT_WRITE, MAP_SHARED, in->dmabuf_fd,
                        static_cast<off_t>(offset));
    if (mapped == MAP_FAILED) return refuse_umem(errno);
    umem->at = static_cast<std::byte*>(mapped);
    umem->held = {mapped, [bytes = in->size](const void* at) { munmap(const_cast<void*>(at), bytes); }};
  } else {
    if (current->plan.peer_memory != 0) return refuse_umem(current->plan.peer_memory);
    umem->at = static_cast<std::byte*>(in->addr);
  }
  umem->umem_id = current->drawn += 0x010001;
  current->umems[umem->umem_id] = umem.get();
  return umem.release();
}

int umem_dereg(mlx5dv_devx_umem* umem) {
  std::lock_guard lock(current->mutex);
  const auto* fake = static_cast<FakeUmem*>(umem);
  for (const auto& [number, cq] : current->cqs)
    current->check(cq->completions < fake->at || cq->completions >= fake->at + fake->bytes,
                   "memory went before the queue in it");
  current->umems.erase(umem->umem_id);
  delete fake;
  return 0;
}

mlx5dv_devx_uar* alloc_uar(ibv_context*, uint32_t flags) {
  std::lock_guard lock(current->mutex);
  current->check(flags == MLX5DV_UAR_ALLOC_TYPE_NC, "a doorbell page of another kind");
  auto* uar = new FakeUar{};
  uar->reg_addr = &uar->word;
  uar->page_id = current->drawn += 0x0101;
  current->uars[uar->page_id] = uar;
  return uar;
}
void free_uar(mlx5dv_devx_uar* uar) {
  std::lock_guard lock(current->mutex);
  current->uars.erase(uar->page_id);
  delete static_cast<FakeUar*>(uar);
}

int query_eqn(ibv_context*, uint32_t vector, uint32_t* eqn) {
  *eqn = kEventQueue;
  return vector == 0 ? 0 : EINVAL;
}

mlx5dv_devx_obj* obj_create(ibv_context*, const void* in, size_t bytes, void* out, size_t out_bytes) {
  std::lock_guard lock(current->mutex);
  Reader reader(in, bytes);
  const uint64_t code = reader.take(0, 2);
  current->check(bytes == kCommand && out_bytes == kAnswer && (code == 0x400 || code == 0x500),
                 "an unknown command");
  FakeObject* made = nullptr;
  if (code == 0x500 && current->plan.queue_pair != 0) {
    static_cast<uint8_t*>(out)[0] = 3;
    errno = current->plan.queue_pair;
    return nullptr;
  }
  made = code == 0x400 ? current->make_cq(reader) : current->make_qp(reader);
  current->check(reader.rest().empty(), text("command {}: {}", code, reader.rest()));
  if (!made) {
    errno = EREMOTEIO;
    return nullptr;
  }
  (code == 0x400 ? current->cqs : current->qps)[made->number] = made;
  current->made += code == 0x500;
  auto* answer = static_cast<uint8_t*>(out);
  for (int i = 0; i < 3; ++i) answer[9 + i] = static_cast<uint8_t>(made->number >> (16 - 8 * i));
  return reinterpret_cast<mlx5dv_devx_obj*>(made);
}

int obj_modify(mlx5dv_devx_obj* object, const void* in, size_t bytes, void*, size_t) {
  std::lock_guard lock(current->mutex);
  auto& qp = *reinterpret_cast<FakeObject*>(object);
  Reader reader(in, bytes);
  const uint64_t code = reader.take(0, 2);
  const bool is_its = bytes == kCommand && qp.is_queue_pair && reader.take(9, 3) == qp.number;
  if (!current->check(is_its && code >= 0x502 && code <= 0x504, "a change of something else")) return EINVAL;
  if (code == 0x502) current->to_init(qp, reader);
  if (code == 0x503) current->to_receive(qp, reader);
  if (code == 0x504) current->to_send(qp, reader);
  current->check(reader.rest().empty(), text("command {}: {}", code, reader.rest()));
  return 0;
}

int obj_destroy(mlx5dv_devx_obj* object) {
  std::lock_guard lock(current->mutex);
  auto* fake = reinterpret_cast<FakeObject*>(object);
  for (const auto& [number, qp] : current->qps)
    current->check(qp->cq != fake, "a completion queue went before its queue pair");
  (fake->is_queue_pair ? current->qps : current->cqs).erase(fake->number);
  delete fake;
  return 0;
}

}  // namespace

FakeDevx::FakeDevx(NicOf nic_of) : state_(std::make_unique<State>()) {
  state_->nic_of = std::move(nic_of);
  current = state_.get();
}
FakeDevx::~FakeDevx() {
  current = nullptr;
}

mlx5::Devx FakeDevx::calls() {
  return {open_device, umem_reg,   umem_dereg, alloc_uar,  free_uar,
          query_eqn,   obj_create, obj_modify, obj_destroy};
}

ibv_ah* FakeDevx::create_ah(ibv_pd*, ibv_ah_attr* attr) {
  std::lock_guard lock(current->mutex);
  auto* ah = new FakeAh{};
  for (int i = 0; i < 6; ++i) ah->vector.rmac[i] = mac_byte(attr->grh.dgid, i);
  ++current->ahs;
  return reinterpret_cast<ibv_ah*>(ah);
}
int FakeDevx::destroy_ah(ibv_ah* ah) {
  std::lock_guard lock(current->mutex);
  delete reinterpret_cast<FakeAh*>(ah);
  --current->ahs;
  return 0;
}
int FakeDevx::init_ah(mlx5dv_obj* object) {
  static_cast<mlx5dv_ah*>(object->ah.out)->av = &reinterpret_cast<FakeAh*>(object->ah.in)->vector;
  return 0;
}

void FakeDevx::set_plan(const DevxPlan& plan) {
  std::lock_guard lock(state_->mutex);
  state_->plan = plan;
}
std::string FakeDevx::failures() const {
  std::lock_guard lock(state_->mutex);
  return state_->failures;
}
size_t FakeDevx::left_over() const {
  std::lock_guard lock(state_->mutex);
  return state_->umems.size() + state_->uars.size() + state_->cqs.size() + state_->qps.size() + state_->ahs;
}
size_t FakeDevx::queues_made() const {
  std::lock_guard lock(state_->mutex);
  return state_->made;
}

// ---- rooms in files

namespace {

constexpr uint64_t kBefore = 3 * kPage, kBehind = 2 * kPage;

class FileRoom : public ibgda::QueueRoom {
 public:
  FileRoom(FileDescriptor file, std::byte* mapped, uint64_t bytes, int64_t error)
      : file_(std::move(file)), mapped_(mapped), bytes_(bytes), error_(error) {}
  ~FileRoom() override { munmap(mapped_, kBefore + bytes_ + kBehind); }
  std::byte* data() const override { return mapped_ + kBefore; }
  Result<ibgda::RoomFile> file() const override {
    return ibgda::RoomFile{FileDescriptor(dup(file_.get())), kBefore + static_cast<uint64_t>(error_)};
  }
  // Word by word: the NIC writes meanwhile.
  Status read(void* to, const void* at, uint64_t bytes) const override {
    if (!is_inside(at, bytes)) return Status::invalid("read of {} bytes outside the room", bytes);
    const auto* from = static_cast<const uint32_t*>(at);
    for (uint64_t i = 0; i < bytes / 4; ++i) {
      const uint32_t word = load_acquire(from + i);
      std::memcpy(static_cast<std::byte*>(to) + 4 * i, &word, sizeof word);
    }
    return {};
  }
  Status write(void* at, const void* from, uint64_t bytes) override {
    if (!is_inside(at, bytes)) return Status::invalid("write of {} bytes outside the room", bytes);
    std::memcpy(at, from, bytes);
    return {};
  }

 private:
  bool is_inside(const void* at, uint64_t bytes) const {
    const auto* first = static_cast<const std::byte*>(at);
    return bytes % 4 == 0 && first >= data() && first + bytes <= data() + bytes_;
  }
  const FileDescriptor file_;
  std::byte* const mapped_;
  const uint64_t bytes_;
  const int64_t error_;
};

}  // namespace

Result<std::unique_ptr<ibgda::QueueRoom>> FileRooms::make(uint64_t bytes) {
  const uint64_t whole = kBefore + bytes + kBehind;
  FileDescriptor file(memfd_create("room", MFD_CLOEXEC));
  if (!file.is_open() || ftruncate(file.get(), static_cast<off_t>(whole)) != 0)
    return Status::from_errno(errno, "memfd_create");
  void* mapped = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (mapped == MAP_FAILED) return Status::from_errno(errno, "mmap of {} bytes", whole);
  return std::unique_ptr<ibgda::QueueRoom>(
      std::make_unique<FileRoom>(std::move(file), static_cast<std::byte*>(mapped), bytes, error_));
}

Result<ibgda::RoomFile> FileRooms::export_file(std::byte* at, uint64_t) {
  FileDescriptor file = own_memory_file();
  if (!file.is_open()) return Status::from_errno(errno, "open /proc/self/mem");
  return ibgda::RoomFile{std::move(file), reinterpret_cast<uint64_t>(at) + static_cast<uint64_t>(error_)};
}

int FakeDevx::refuses_window() const {
  std::lock_guard lock(state_->mutex);
  return state_->plan.window;
}

}  // namespace weft::testing
