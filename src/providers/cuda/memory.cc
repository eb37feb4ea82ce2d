// SPDX-License-Identifier: Apache-2.0
#include "providers/cuda/memory.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/cuda_copies.h"
#include "base/log.h"
#include "base/process_watch.h"
#include "base/random.h"

namespace weft::provider::cuda {
namespace {

constexpr int kTries = 64;  // for a key whose place is free

CUdeviceptr address_of(const void* pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}

// The addresses of one physical allocation that holds an address.
struct Block {
  CUdeviceptr base = 0;
  size_t bytes = 0;
};
Result<Block> block_at(const CudaDriver& driver, CUdeviceptr at) {
  Block found;
  WEFT_TRY(cuda_status(driver.cuMemGetAddressRange(&found.base, &found.bytes, at), "looking at GPU memory {}",
                       at));
  return found;
}

bool is_of_cuda_malloc(const CudaDriver& driver, CUdeviceptr at) {
  int is_legacy = 0;
  return driver.cuPointerGetAttribute(&is_legacy, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, at) ==
             CUDA_SUCCESS &&
         is_legacy != 0;
}

Status share_ipc(const CudaDriver& driver, Export& place) {
  CUipcMemHandle handle;
  static_assert(sizeof handle == kHandleBytes);
  WEFT_TRY_ASSIGN(const Block block, block_at(driver, place.base));
  WEFT_TRY(
      cuda_status(driver.cuIpcGetMemHandle(&handle, block.base), "sharing {} bytes of a GPU", block.bytes));
  std::memcpy(place.handle, handle.reserved, sizeof handle.reserved);
  place.place = Place::kIpc;
  place.block = block.base;
  place.block_bytes = block.bytes;
  return {};
}

// Every physical allocation under the range, or an error: a peer that maps a part alone would write past it.
Status share_vmm(const CudaDriver& driver, Export& place, Enrolled& enrolled) {
  WEFT_TRY_ASSIGN(Block block, block_at(driver, place.base));
  place.block = block.base;
  for (CUdeviceptr at = block.base; at < place.base + place.bytes; at += block.bytes) {
    WEFT_TRY_ASSIGN(block, block_at(driver, at));
    CUmemGenericAllocationHandle handle = 0;
    WEFT_TRY(cuda_status(driver.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(at)),
                         "finding the allocation of {} bytes of a GPU", block.bytes));
    int fd = -1;
    const CUresult exported =
        driver.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    driver.cuMemRelease(handle);
    if (exported != CUDA_SUCCESS)
      return Status::make(
          Code::kUnsupported,
          "cuda: this GPU memory was not made to be shared (cuMemCreate without a handle type). PyTorch: "
          "leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF");
    enrolled.descriptors.emplace_back(fd);
    enrolled.segments.push_back({block.bytes, fd});
    place.block_bytes += block.bytes;
  }
  place.place = Place::kVmm;
  place.segments = static_cast<uint32_t>(enrolled.segments.size());
  place.segments_at = reinterpret_cast<uint64_t>(enrolled.segments.data());
  return {};
}

FileDescriptor fetch_descriptor(pid_t pid, int fd) {
#ifndef SYS_pidfd_getfd
  constexpr long SYS_pidfd_getfd = 438;
#endif
  const FileDescriptor process = FileDescriptor(open_process(pid));
  return FileDescriptor(static_cast<int>(syscall(SYS_pidfd_getfd, process.get(), fd, 0)));
}

}  // namespace

std::string refusal(uint32_t access, uint64_t base, uint64_t size, uint64_t address, uint64_t bytes,
                    Access wanted) {
  if (wanted != kLocal && !(access & wanted))
    return "cuda: remote access error: not registered for this access";
  return is_within(base, size, address, bytes) ? "" : kBeyond;
}

Result<const Enrolled*> OwnMemory::enroll(const Range& range, uint32_t access) {
  if (range.kind == MemoryKind::kCuda && !copies_)
    return Status::make(Code::kUnsupported, "cuda: a rail without a GPU does not reach memory of cuda:{}",
                        range.device);
  auto made = std::make_unique<Enrolled>();
  made->range = range;
  made->access = access;
  Export* place = nullptr;
  for (int i = 0; i < kTries && !place; ++i) {
    made->key = random_key();
    Export& candidate = page_.exports[made->key % kExports];
    if (candidate.key.load(std::memory_order_relaxed) == 0) place = &candidate;
  }
  if (!place)
    return Status::make(Code::kCapacity, "cuda: got one more registration, allowed: about {}", kExports / 2);
  WEFT_TRY(write_export(*made, *place));
  place->key.store(made->key, std::memory_order_release);
  const Enrolled* enrolled = made.get();
  enrolled_[made->key] = std::move(made);
  return enrolled;
}

Status OwnMemory::write_export(Enrolled& enrolled, Export& place) const {
  place.base = reinterpret_cast<uint64_t>(enrolled.range.data);
  place.bytes = enrolled.range.bytes;
  place.access = enrolled.access;
  place.place = Place::kHost;
  place.block = place.block_bytes = place.segments_at = 0;
  place.segments = 0;
  if (!enrolled.is_device()) {
    // Pages that are pinned already, or cannot be, are copied through the driver's own.
    if (copies_ && enrolled.range.bytes > 0)
      if (auto pinned = Pinned::make(*copies_, enrolled.range.data, enrolled.range.bytes); pinned.ok())
        enrolled.pinned = std::move(*pinned);
    return {};
  }
  WEFT_TRY_ASSIGN(CudaContext current, copies_->enter());
  const CudaDriver& driver = current.driver();
  const RelaxedCapture relaxed(driver);
  return is_of_cuda_malloc(driver, place.base) ? share_ipc(driver, place)
                                               : share_vmm(driver, place, enrolled);
}

void OwnMemory::release(uint64_t key) {
  Export& place = page_.exports[key % kExports];
  uint64_t held = key;
  place.key.compare_exchange_strong(held, 0);
  enrolled_.erase(key);
}

const Enrolled* OwnMemory::find(uint64_t key) const {
  const auto found = enrolled_.find(key);
  return found == enrolled_.end() ? nullptr : found->second.get();
}

Result<const Enrolled*> OwnMemory::check(uint64_t key, uint64_t address, uint64_t bytes,
                                         Access wanted) const {
  const Enrolled* found = find(key);
  if (!found) return Status::invalid("cuda: remote access error: no memory has this key");
  const std::string why = refusal(found->access, reinterpret_cast<uint64_t>(found->range.data),
                                  found->range.bytes, address, bytes, wanted);
  if (!why.empty()) return Status(Code::kInvalid, why);
  return found;
}

Result<std::shared_ptr<PeerMemory>> PeerMemory::open(const Contact& contact) {
  auto made = std::make_shared<PeerMemory>();
  made->contact_ = contact;
  made->is_this_process_ = contact.memory.pid == getpid() && contact.memory.witness == this_process().witness;
  if (!can_copy_across(contact.memory))
    return Status::make(
        Code::kUnsupported,
        "cuda: this process may not reach into {} of pid {}: another host, user or container, or "
        "/proc/sys/kernel/yama/ptrace_scope is not 0",
        contact.process.machine, contact.memory.pid);
  WEFT_TRY_ASSIGN(made->shared_, SharedMemory::open(contact.page, sizeof(ControlPage)));
  made->process_ = NamedProcess(contact.process);
  return made;
}

PeerMemory::~PeerMemory() {
  for (const auto& [at, mapped] : blocks_) unmap(mapped);
}

Result<Found> PeerMemory::find(uint64_t key, uint64_t address, uint64_t bytes, Access wanted) const {
  const Export& place = page().exports[key % kExports];
  Found found;
  const bool is_there = key != 0 && place.key.load(std::memory_order_acquire) == key;
  found.key = key;
  found.address = address;
  found.base = place.base;
  found.bytes = place.bytes;
  found.block = place.block;
  found.block_bytes = place.block_bytes;
  found.segments_at = place.segments_at;
  found.segments = place.segments;
  found.place = place.place;
  const uint32_t access = place.access;
  std::memcpy(found.handle, place.handle, sizeof found.handle);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (!is_there || place.key.load(std::memory_order_relaxed) != key)
    return Status::invalid("cuda: remote access error: no memory has this key");
  const std::string why = refusal(access, found.base, found.bytes, address, bytes, wanted);
  if (!why.empty()) return Status(Code::kInvalid, why);
  return found;
}

Result<char*> PeerMemory::map(const Found& found, const Copies& copies) {
  if (is_this_process_) return reinterpret_cast<char*>(found.address);
  auto name = block_of_.find(found.key);
  if (name == block_of_.end()) {
    // Of cudaMalloc's memory CUDA opens a block once. Descriptors are of one registration.
    const bool is_ipc = found.place == Place::kIpc;
    const std::string block =
        is_ipc ? std::string(found.handle, sizeof found.handle) : std::to_string(found.key);
    if (blocks_.count(block) == 0) {
      WEFT_TRY_ASSIGN(blocks_[block], is_ipc ? map_ipc(found, copies) : map_vmm(found, copies));
    }
    ++blocks_[block].keys;
    name = block_of_.emplace(found.key, block).first;
  }
  return reinterpret_cast<char*>(blocks_.at(name->second).base + (found.address - found.block));
}

Result<PeerMemory::Mapped> PeerMemory::map_ipc(const Found& found, const Copies& copies) const {
  WEFT_TRY_ASSIGN(CudaContext current, copies.enter());
  const CudaDriver& driver = current.driver();
  const RelaxedCapture relaxed(driver);
  CUipcMemHandle handle;
  std::memcpy(handle.reserved, found.handle, sizeof handle.reserved);
  Mapped mapped;
  mapped.bytes = found.block_bytes;
  mapped.device = copies.device();
  WEFT_TRY(cuda_status(driver.cuIpcOpenMemHandle(&mapped.base, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
                       "opening {} bytes of {} on cuda:{}", found.block_bytes, who(), copies.device()));
  return mapped;
}

Result<PeerMemory::Mapped> PeerMemory::map_vmm(const Found& found, const Copies& copies) const {
  std::vector<Segment> segments(found.segments);
  iovec here{segments.data(), segments.size() * sizeof(Segment)};
  iovec there{reinterpret_cast<void*>(found.segments_at), here.iov_len};
  if (const int error = copy_across(Across::kRead, contact_.memory.pid, &here, 1, &there, 1); error != 0)
    return Status::from_errno(error, "read the segments of memory of {}", who());
  WEFT_TRY_ASSIGN(CudaContext current, copies.enter());
  const CudaDriver& driver = current.driver();
  const RelaxedCapture relaxed(driver);
  Mapped mapped;
  mapped.bytes = found.block_bytes;
  mapped.device = copies.device();
  WEFT_TRY(cuda_status(driver.cuMemAddressReserve(&mapped.base, found.block_bytes, 0, 0, 0),
                       "reserving {} bytes of addresses", found.block_bytes));
  const Status done = map_segments(found, segments, copies, mapped);
  if (!done.ok()) {
    unmap(mapped);
    return done;
  }
  return mapped;
}

Status PeerMemory::map_segments(const Found& found, const std::vector<Segment>& segments,
                                const Copies& copies, Mapped& mapped) const {
  WEFT_TRY_ASSIGN(const CudaDriver* driver, cuda_driver());
  uint64_t offset = 0;
  for (const Segment& segment : segments) {
    const FileDescriptor fd = fetch_descriptor(contact_.memory.pid, segment.fd);
    if (!fd.is_open()) return Status::from_errno(errno, "fetch a descriptor of GPU memory of {}", who());
    if (segment.bytes > found.block_bytes - offset)
      return Status::make(Code::kSystem, "GPU memory of {}: its segments have more than its {} bytes", who(),
                          found.block_bytes);
    CUmemGenericAllocationHandle handle = 0;
    WEFT_TRY(cuda_status(driver->cuMemImportFromShareableHandle(
                             &handle, reinterpret_cast<void*>(static_cast<uintptr_t>(fd.get())),
                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                         "importing {} bytes of {}", segment.bytes, who()));
    const Status done = cuda_status(driver->cuMemMap(mapped.base + offset, segment.bytes, 0, handle, 0),
                                    "mapping {} bytes of {}", segment.bytes, who());
    driver->cuMemRelease(handle);
    WEFT_TRY(Status(done));
    mapped.segments.push_back(segment.bytes);
    offset += segment.bytes;
  }
  const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, copies.device()},
                               CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  return cuda_status(driver->cuMemSetAccess(mapped.base, offset, &access, 1),
                     "letting cuda:{} into memory of {}", copies.device(), who());
}

void PeerMemory::unmap(const Mapped& mapped) const {
  Result<CudaContext> current = enter_copy_context(mapped.device);
  if (!current.ok() || mapped.base == 0) return;
  const CudaDriver& driver = current->driver();
  const RelaxedCapture relaxed(driver);
  const bool is_vmm = !mapped.segments.empty();
  uint64_t offset = 0;
  for (const uint64_t bytes : mapped.segments) {
    driver.cuMemUnmap(mapped.base + offset, bytes);
    offset += bytes;
  }
  if (is_vmm)
    driver.cuMemAddressFree(mapped.base, mapped.bytes);
  else
    driver.cuIpcCloseMemHandle(mapped.base);
}

int PeerMemory::move(Across way, void* here, uint64_t there, uint64_t bytes) const {
  if (is_this_process_) {
    void* other = reinterpret_cast<void*>(there);
    std::memmove(way == Across::kWrite ? other : here, way == Across::kWrite ? here : other, bytes);
    return 0;
  }
  iovec near{here, bytes}, far{reinterpret_cast<void*>(there), bytes};
  return copy_across(way, contact_.memory.pid, &near, 1, &far, 1);
}

void PeerMemory::sweep() {
  for (auto at = block_of_.begin(); at != block_of_.end();) {
    const uint64_t key = at->first;
    if (page().exports[key % kExports].key.load(std::memory_order_acquire) == key) {
      ++at;
      continue;
    }
    const auto mapped = blocks_.find(at->second);
    at = block_of_.erase(at);
    if (mapped == blocks_.end() || --mapped->second.keys > 0) continue;
    unmap(mapped->second);
    blocks_.erase(mapped);
  }
}

}  // namespace weft::provider::cuda
