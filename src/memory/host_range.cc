// SPDX-License-Identifier: Apache-2.0
//
// Windows in host memory: anonymous files (memfd), one per segment, mapped into reserved addresses. For GPUs
// every mapping is pinned, too: kernels then use the same addresses. A forked child gets a private copy of each in its place:
// what it writes there, no rank sees.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <set>

#include "base/cuda_driver.h"
#include "base/log.h"
#include "base/owner_process.h"
#include "base/random.h"
#include "memory/huge_pages.h"
#include "memory/range.h"

namespace weft {
namespace {

class HostRange;

struct Names {
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<MappedRange>> ranges;
  std::set<const HostRange*> all;
};

Names& names() {
  static OnePerProcess<Names> once;
  return once.get();
}

// Sets addresses aside: the wanted bytes, or the half, a quarter, ... where limits (RLIMIT_AS, sanitizers)
// forbid it; and as many more as stand before them, and as base_in() may skip.
Result<std::pair<std::byte*, uint64_t>> reserve(uint64_t wanted, uint64_t least, uint64_t before) {
  for (uint64_t bytes = std::max(wanted, least);; bytes = std::max(bytes / 2, least)) {
    void* at = mmap(nullptr, before + bytes + kHugePageBytes, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at != MAP_FAILED) return std::pair{static_cast<std::byte*>(at), bytes};
    if (bytes == least)
      return logged(Status::from_errno(errno, "reserve {} bytes of addresses for a window", bytes));
  }
}

// Where a window begins: at a multiple of a huge page. The system maps huge pages only where addresses and the file are
// aligned alike; gap() aligns the files of later segments.
std::byte* base_in(std::byte* reserved) {
  const uint64_t past = reinterpret_cast<uint64_t>(reserved) % kHugePageBytes;
  return reserved + (past ? kHugePageBytes - past : 0);
}

// Lets a GPU's kernels use memory of the host at the address that it has here.
Status pin(int ordinal, std::byte* at, uint64_t bytes) {
  WEFT_TRY_ASSIGN(CudaContext current, CudaContext::enter(ordinal));
  const CudaDriver& driver = current.driver();
  WEFT_TRY(cuda_status(
      driver.cuMemHostRegister(at, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
      "pin {} bytes of a window for cuda:{}", bytes, ordinal));
  CUdeviceptr seen = 0;
  Status found = cuda_status(driver.cuMemHostGetDevicePointer(&seen, at, 0), "find a pinned window");
  if (found.ok() && reinterpret_cast<std::byte*>(seen) != at)
    found = Status::make(Code::kUnsupported, "cuda:{} sees pinned memory of the host at other addresses",
                         ordinal);
  if (!found.ok()) driver.cuMemHostUnregister(at);
  return found;
}

void unpin(int ordinal, std::byte* at) {
  Result<CudaContext> current = CudaContext::enter(ordinal);
  if (current.ok()) current->driver().cuMemHostUnregister(at);
}

class HostRange : public MappedRange {
 public:
  HostRange(std::byte* addresses, uint64_t reserved, uint64_t host_bytes, Device device)
      : addresses_(addresses),
        host_bytes_(host_bytes),
        before_(before_base(host_bytes)),
        base_(base_in(addresses) + before_),
        reserved_(reserved),
        device_(device),
        name_(random_key()) {
    std::lock_guard lock(names().mutex);
    names().all.insert(this);
  }
  ~HostRange() override {
    {
      std::lock_guard lock(names().mutex);
      names().ranges.erase(name_);
      names().all.erase(this);
    }
    unpin_to(0);
    munmap(addresses_, before_ + reserved_ + kHugePageBytes);
  }

  std::byte* base() const override { return base_; }
  uint64_t bytes() const override { return bytes_; }
  uint64_t granularity() const override { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }
  uint64_t local_name() const override { return name_; }

  Result<FdMessage> extend(uint64_t bytes) override {
    WEFT_TRY(check_room(*this, bytes, reserved_));
    FileDescriptor segment(memfd_create("weft-window", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!segment.is_open()) return logged(Status::from_errno(errno, "memfd_create for a window"));
    if (ftruncate(segment.get(), static_cast<off_t>(gap() + bytes)) != 0)
      return logged(Status::from_errno(errno, "size a window segment of {} bytes", bytes));
    // A sealed size: no peer can shrink the memory under another rank's loads.
    fcntl(segment.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    WEFT_TRY(map(segment.get(), bytes, true));
    return FdMessage{"", std::move(segment)};
  }

  Status import(const FdMessage& offer, uint64_t bytes) override {
    WEFT_TRY(check_room(*this, bytes, reserved_));
    struct stat info{};
    // Only sealed memory is mapped: anything else could be cut short under this rank's loads.
    const int seals = offer.fd.is_open() ? fcntl(offer.fd.get(), F_GET_SEALS) : -1;
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(offer.fd.get(), &info) != 0 ||
        static_cast<uint64_t>(info.st_size) != gap() + bytes)
      return logged(
          Status::make(Code::kSystem, "a peer's window segment came without its {} bytes of memory", bytes));
    return map(offer.fd.get(), bytes, false);
  }

  void used() override {
    if (device_.is_host()) huge_pages_.used(base_, bytes_);
  }

  void cut(uint64_t bytes) override {
    if (bytes >= bytes_) return;
    unpin_to(bytes);
    mmap(base_ + bytes, bytes_ - bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
         -1, 0);
    bytes_ = bytes;
    while (!segments_.empty() && segments_.back().begin >= base_ + bytes) segments_.pop_back();
  }

  // In a forked child, where nothing can be reported: it has what the ranks see now, and keeps what it writes to itself.
  void become_private() const {
    if (host_part_.bytes > 0) become_private(host_part_);
    for (const Segment& segment : segments_) become_private(segment);
  }

 private:
  struct Segment {
    std::byte* begin = nullptr;
    uint64_t bytes = 0;
    off_t offset = 0;  // in its file
    FileDescriptor file;
  };

  static void become_private(const Segment& segment) {
    (void)mmap(segment.begin, segment.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
               segment.file.get(), segment.offset);
  }

  // Mapped peers write to no host part but their own.
  Status map(int fd, uint64_t bytes, bool is_owner) {
    const bool is_host_part = host_bytes_ > 0 && host_part_.bytes == 0;
    if (is_host_part && bytes != host_bytes_)
      return Status::invalid("window: got a host part of {} bytes, allowed: {}", bytes, host_bytes_);
    Segment segment{is_host_part ? base_ - before_ : base_ + bytes_, bytes, static_cast<off_t>(gap()),
                    FileDescriptor(fcntl(fd, F_DUPFD_CLOEXEC, 0))};
    const int access = is_host_part && !is_owner ? PROT_READ : PROT_READ | PROT_WRITE;
    if (!segment.file.is_open() ||
        mmap(segment.begin, bytes, access, MAP_SHARED | MAP_FIXED, fd, segment.offset) == MAP_FAILED)
      return logged(Status::from_errno(errno, "map a window segment of {} bytes", bytes));
    if (is_host_part) {
      host_part_ = std::move(segment);
      return Status();
    }
    segments_.push_back(std::move(segment));
    if (!device_.is_host()) {
      WEFT_TRY(logged(pin(device_.ordinal, base_ + bytes_, bytes)));
      pinned_.push_back(bytes_);
    }
    bytes_ += bytes;
    return Status();
  }

  // Segments that begin at `bytes` or later.
  void unpin_to(uint64_t bytes) {
    for (; !pinned_.empty() && pinned_.back() >= bytes; pinned_.pop_back())
      unpin(device_.ordinal, base_ + pinned_.back());
  }

  // Bytes at the front of the next segment's file that nobody maps, nor ever touches.
  uint64_t gap() const { return bytes_ % kHugePageBytes; }

  std::byte* const addresses_;
  const uint64_t host_bytes_, before_;  // on the CPU: on GPUs all of it is memory of the host
  std::byte* const base_;
  const uint64_t reserved_;  // from base_
  const Device device_;      // whose kernels use it, too
  const uint64_t name_;
  uint64_t bytes_ = 0;
  Segment host_part_;
  std::vector<Segment> segments_;
  std::vector<uint64_t> pinned_;  // where each pinned segment begins
  WindowHugePages huge_pages_;
};

// Has windows become private in every child that is forked from now on.
void watch_forks() {
  static Names* forking = nullptr;  // the ranges of the process that forks
  static const int watched = pthread_atfork(
      [] {
        forking = &names();
        forking->mutex.lock();
      },
      [] { forking->mutex.unlock(); },
      [] {
        for (const HostRange* range : forking->all) range->become_private();
        forking->mutex.unlock();
      });
  (void)watched;
}

}  // namespace

Result<std::shared_ptr<MappedRange>> make_host_range(const RangeOptions& options) {
  watch_forks();
  WEFT_TRY_ASSIGN(const auto addresses,
                  reserve(options.reserve_bytes, options.least_bytes, before_base(options.host_bytes)));
  auto range =
      std::make_shared<HostRange>(addresses.first, addresses.second, options.host_bytes, options.device);
  std::lock_guard lock(names().mutex);
  names().ranges[range->local_name()] = range;
  return std::shared_ptr<MappedRange>(range);
}

std::shared_ptr<MappedRange> find_range(uint64_t local_name) {
  std::lock_guard lock(names().mutex);
  const auto found = names().ranges.find(local_name);
  return found == names().ranges.end() ? nullptr : found->second.lock();
}

}  // namespace weft
