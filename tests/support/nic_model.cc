// SPDX-License-Identifier: Apache-2.0
#include "support/nic_model.h"

#include <algorithm>

#include "base/deadline.h"
#include "memory/host_visible.h"
#include "support/nic_queue.h"

namespace weft::testing {
namespace {

// A queue pair, as the transport has it.
class ModelPair : public ibgda::QueuePair {
 public:
  ModelPair(std::shared_ptr<NicShared> shared, std::shared_ptr<ModelQueue> queue)
      : shared_(std::move(shared)), queue_(std::move(queue)) {}
  ~ModelPair() override {
    {
      std::lock_guard lock(shared_->mutex);
      shared_->queues.erase(queue_->memory().number);
      ++shared_->version;
    }
    queue_->reset();  // whoever serves it finds nothing more to do
  }
  const ibgda::QueueMemory& memory() const override { return queue_->memory(); }
  bool is_far() const override { return shared_->plan.rooms != nullptr; }
  uint32_t posted() const override { return is_far() ? queue_->posted() : QueuePair::posted(); }
  ibgda::Completion completion(uint32_t index) const override {
    return is_far() ? queue_->completion(index) : QueuePair::completion(index);
  }
  Status put_entry(uint32_t index, const ibgda::Entry& entry) override {
    return is_far() ? queue_->put_entry(index, entry) : QueuePair::put_entry(index, entry);
  }
  std::string address() const override { return queue_->address(); }
  Status connect(std::string_view address) override { return queue_->connect(address); }
  Status reset() override {
    queue_->reset();
    return {};
  }
  bool is_rung_by_host() const override { return shared_->plan.is_rung_by_host; }
  void ring(uint64_t doorbell) override { queue_->ring(doorbell); }

 private:
  const std::shared_ptr<NicShared> shared_;
  const std::shared_ptr<ModelQueue> queue_;
};

// Serves every threads-th queue, in an order that changes.
void serve(NicShared& shared, uint32_t thread) {
  std::mt19937_64 random(shared.plan.seed * 1000003 + thread);
  std::vector<std::shared_ptr<ModelQueue>> mine;
  uint64_t version = 0;
  for (unsigned idle = 0; !shared.stops.load(); back_off(idle)) {
    if (shared.version.load() != version) {
      std::lock_guard lock(shared.mutex);
      version = shared.version.load();
      mine.clear();
      uint32_t place = 0;
      for (const auto& [number, queue] : shared.queues)
        if (place++ % shared.plan.threads == thread && queue) mine.push_back(queue);
    }
    if (random() % 16 == 0) std::shuffle(mine.begin(), mine.end(), random);
    bool any = false;
    for (const auto& queue : mine) any = queue->step() || any;
    if (random() % 8 == 0) sched_yield();  // with few cores, who watches would see whole operations only
    idle = any ? 0 : idle + 1;
  }
}

}  // namespace

void NicShared::fail(const std::string& what) {
  std::lock_guard lock(mutex);
  if (failures.size() < 4000) failures += text("seed {}: {}\n", plan.seed, what);
}

uint64_t NicShared::draw() {
  uint64_t drawn_now = plan.seed + ++drawn * 0x9e3779b97f4a7c15u;
  drawn_now = (drawn_now ^ drawn_now >> 30) * 0xbf58476d1ce4e5b9u;
  drawn_now = (drawn_now ^ drawn_now >> 27) * 0x94d049bb133111ebu;
  return drawn_now ^ drawn_now >> 31;
}

std::shared_ptr<ModelQueue> NicShared::find(uint32_t queue) {
  std::lock_guard lock(mutex);
  const auto found = queues.find(queue);
  return found == queues.end() ? nullptr : found->second;
}

NicModel::NicModel(NicPlan plan) : shared_(std::make_shared<NicShared>()) {
  shared_->plan = plan;
  for (uint32_t thread = 0; thread < plan.threads; ++thread)
    shared_->threads.emplace_back([shared = shared_, thread] { serve(*shared, thread); });
}

NicModel::~NicModel() {
  shared_->stops.store(true);
  for (std::thread& thread : shared_->threads) thread.join();
}

ibgda::NicFinding NicModel::find(Device) {
  return {missing_, text("a model of a NIC, seed {}", shared_->plan.seed), "process:model", 100};
}
void NicModel::set_missing(const std::string& why) {
  missing_ = why;
}

Result<std::unique_ptr<ibgda::Nic>> NicModel::open(Device device) {
  return std::unique_ptr<ibgda::Nic>(open_model(device));
}
std::unique_ptr<ModelNic> NicModel::open_model(Device device) {
  return std::make_unique<ModelNic>(shared_, device);
}

std::string NicModel::failures() const {
  std::lock_guard lock(shared_->mutex);
  return shared_->failures;
}
void NicModel::refuse_next(uint32_t queue, ibgda::Syndrome why) {
  if (const auto found = shared_->find(queue)) found->refuse_next(why);
}
void NicModel::set_taken(uint32_t queue, uint64_t completions) {
  if (const auto found = shared_->find(queue)) found->set_taken(completions);
}
void NicModel::kill_nic_of(uint32_t queue) {
  if (const auto found = shared_->find(queue)) found->kill();
}
void NicModel::hold(bool holds) {
  shared_->holds.store(holds);
}
uint64_t NicModel::doorbells() const {
  return shared_->doorbells.load();
}
uint64_t NicModel::entries() const {
  return shared_->entries.load();
}

ModelNic::ModelNic(std::shared_ptr<NicShared> shared, Device device)
    : shared_(std::move(shared)), core_(std::make_shared<Core>()), device_(device) {}

Result<std::unique_ptr<ibgda::QueuePair>> ModelNic::create_queue(uint32_t blocks) {
  return create_queue(blocks, shared_->plan.shares_completion ? 1 : blocks);
}

std::unique_ptr<ibgda::QueuePair> ModelNic::create_queue(uint32_t blocks, uint32_t completions) {
  constexpr uint64_t kWords = 2 * ibgda::kBlockBytes;
  auto memory = HostVisible::create(
      device_, uint64_t{blocks + completions} * ibgda::kBlockBytes + kWords + ibgda::kBlockBytes);
  if (!memory.ok()) {
    shared_->fail(memory.status().message());
    return nullptr;
  }
  auto* data =
      reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>((*memory)->data()) + ibgda::kBlockBytes - 1) /
                                   ibgda::kBlockBytes * ibgda::kBlockBytes);
  ibgda::QueueMemory at{data, data + uint64_t{blocks} * ibgda::kBlockBytes};
  at.record = reinterpret_cast<uint32_t*>(at.completions + uint64_t{completions} * ibgda::kBlockBytes);
  at.doorbell =
      reinterpret_cast<uint64_t*>(at.completions + (uint64_t{completions} + 1) * ibgda::kBlockBytes);
  at.blocks = blocks;
  at.entries = completions;
  auto far = far_from(at);
  if (!far.ok()) {
    shared_->fail(far.status().message());
    return nullptr;
  }
  return add_queue(at, std::shared_ptr<const void>(std::move(*memory)), true, std::move(*far));
}

// The doorbell alone is that of the host: the register of a NIC is no memory of the device either.
Result<FarQueue> ModelNic::far_from(const ibgda::QueueMemory& at) {
  if (!shared_->plan.rooms) return FarQueue{};
  WEFT_TRY_ASSIGN(auto rooms, shared_->plan.rooms(device_));
  WEFT_TRY_ASSIGN(auto room, rooms->make((uint64_t{at.blocks} + at.entries + 1) * ibgda::kBlockBytes));
  FarQueue far{std::move(room), at};
  far.at.ring = far.room->data();
  far.at.completions = far.at.ring + (at.completions - at.ring);
  far.at.record =
      reinterpret_cast<uint32_t*>(far.at.ring + (reinterpret_cast<std::byte*>(at.record) - at.ring));
  return far;
}

std::unique_ptr<ibgda::QueuePair> ModelNic::create_queue_in(ibgda::QueueMemory at,
                                                            std::shared_ptr<const void> held) {
  return add_queue(at, std::move(held), false);
}

std::unique_ptr<ibgda::QueuePair> ModelNic::add_queue(ibgda::QueueMemory at, std::shared_ptr<const void> held,
                                                      bool fills, FarQueue far) {
  uint32_t number = 0;  // no two bytes alike
  uint64_t seed = 0;
  {
    std::lock_guard lock(shared_->mutex);
    while (number < 0x10000 || (number & 255) == (number >> 16) || shared_->queues.count(number))
      number = static_cast<uint32_t>(shared_->draw() & 0xffffff);
    seed = shared_->draw();
    shared_->queues[number] = nullptr;  // taken
  }
  at.number = far.at.number = number;
  auto queue = std::make_shared<ModelQueue>(shared_, core_, std::move(held), at, fills, seed, std::move(far));
  std::lock_guard lock(shared_->mutex);
  shared_->queues[number] = queue;
  ++shared_->version;
  return std::make_unique<ModelPair>(shared_, queue);
}

Result<ibgda::Enrolled> ModelNic::enroll(std::byte* data, uint64_t bytes, Device place) {
  constexpr uint32_t kAll = kAccessRead | kAccessWrite | kAccessAtomic;
  const auto& windows = shared_->plan.windows;
  if (place != device_ || (!windows && place.is_host())) return enroll_for(data, bytes, kAll);
  if (!windows) return Status::make(Code::kUnsupported, "this model of a NIC does not reach {}", place);
  WEFT_TRY_ASSIGN(auto far, windows(place));
  return enroll_at(data, bytes, kAll, draw_base(), 0, std::move(far));
}

// Addresses have nothing to do with where the memory is; some begin at 0.
uint64_t ModelNic::draw_base() {
  std::lock_guard lock(shared_->mutex);
  return shared_->draw() % 4 == 0 ? 0 : shared_->draw() >> 8 & ~uint64_t{4095};
}

ibgda::Enrolled ModelNic::enroll_for(std::byte* data, uint64_t bytes, uint32_t access, uint32_t domain) {
  return enroll_at(data, bytes, access, draw_base(), domain);
}

ibgda::Enrolled ModelNic::enroll_at(std::byte* data, uint64_t bytes, uint32_t access, uint64_t base,
                                    uint32_t domain, std::shared_ptr<FarMemory> far) {
  ibgda::Enrolled made;
  {
    std::lock_guard lock(shared_->mutex);
    made.local_key = static_cast<uint32_t>(shared_->draw());
    made.remote_key = static_cast<uint32_t>(shared_->draw());
  }
  made.base = base;
  made.handle = this;
  std::unique_lock lock(core_->keys);
  core_->local[made.local_key] = {data, bytes, base, access, domain, far};
  core_->remote[made.remote_key] = {data, bytes, base, access, domain, far};
  return made;
}

void ModelNic::release(ibgda::Enrolled& enrolled) {
  std::unique_lock lock(core_->keys);
  core_->local.erase(enrolled.local_key);
  core_->remote.erase(enrolled.remote_key);
  enrolled = {};
}

uint32_t ModelNic::put_shift() const {
  return shared_->plan.put_shift;
}

}  // namespace weft::testing
