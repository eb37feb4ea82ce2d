// SPDX-License-Identifier: Apache-2.0
#include "tests/conformance/nccl_rma_harness.h"
#include "support/places.h"

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>

// Where the library is part of the program: builds with a sanitizer.
extern "C" {
__attribute__((weak)) extern weft::nccl_rma::RmaV14 ncclRmaPlugin_v14;
__attribute__((weak)) extern weft::nccl_rma::RmaV13 ncclRmaPlugin_v13;
}

namespace weft::nccl_rma::testing {
namespace {

std::mutex& lines_mutex() {
  static std::mutex mutex;
  return mutex;
}
std::vector<std::string>& logged_lines() {
  static std::vector<std::string> all;
  return all;
}

void logger(NcclLogLevel level, unsigned long, const char*, int, const char* format, ...) {
  if (level > kNcclLogWarn) return;
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  std::lock_guard lock(lines_mutex());
  logged_lines().emplace_back(line);
}

const void* find_table(const std::string& symbol) {
  if (*weft::testing::kNcclRmaFile == 0) {
    const std::map<std::string, const void*> linked = {{"ncclRmaPlugin_v13", &ncclRmaPlugin_v13},
                                                       {"ncclRmaPlugin_v14", &ncclRmaPlugin_v14},
                                                       {"ncclGinPlugin_v13", &ncclRmaPlugin_v13}};
    const auto found = linked.find(symbol);
    return found == linked.end() ? nullptr : found->second;
  }
  void* library = dlopen(weft::testing::kNcclRmaFile, RTLD_NOW | RTLD_LOCAL);
  EXPECT_NE(library, nullptr) << dlerror();
  return library ? dlsym(library, symbol.c_str()) : nullptr;
}

template <class To, class From>
void take_common(To& to, const From& from) {
  to.name = from.name;
  to.init = from.init;
  to.devices = from.devices;
  to.get_properties = from.get_properties;
  to.listen = from.listen;
  to.connect = from.connect;
  to.deregister = from.deregister;
  to.destroy_context = from.destroy_context;
  to.close_team = from.close_team;
  to.close_listener = from.close_listener;
  to.put = from.put;
  to.get = from.get;
  to.flush = from.flush;
  to.test = from.test;
  to.progress = from.progress;
  to.query_last_error = from.query_last_error;
  to.finalize = from.finalize;
}

}  // namespace

std::vector<std::string> Library::lines() {
  std::lock_guard lock(lines_mutex());
  return logged_lines();
}

Library::Library(const std::string& symbol) {
  const void* table = find_table(symbol);
  if (!table) return;
  if (symbol.ends_with("_v14")) {
    v14_ = static_cast<const RmaV14*>(table);
    table_ = *v14_;
  } else if (symbol.ends_with("_v13")) {
    v13_ = static_cast<const RmaV13*>(table);
    take_common(table_, *v13_);
  }
}

NcclResult Library::create_context(void* team, ConfigV14 config, void** context) const {
  if (v14_) return v14_->create_context(team, &config, context);
  ConfigV13 old{0, 0, config.contexts, 0, config.traffic_class};
  DeviceHandle* device = nullptr;
  return v13_->create_context(team, &old, context, &device);
}

NcclResult Library::enroll(void* team, void* data, size_t bytes, int kind, uint64_t flags,
                           void** memory) const {
  if (v14_) return v14_->enroll(team, data, bytes, kind, flags, memory);
  void* unused = nullptr;
  return v13_->enroll(team, data, bytes, kind, flags, memory, &unused);
}

NcclResult Library::put_signal(void* context, int channel, uint64_t src_offset, void* src, size_t bytes,
                               uint64_t dst_offset, void* dst, uint32_t rank, uint64_t signal_offset,
                               void* signal, uint64_t value, uint32_t op, bool is_strong,
                               void** request) const {
  if (v14_)
    return v14_->put_signal(context, channel, src_offset, src, bytes, dst_offset, dst, rank, signal_offset,
                            signal, value, op, is_strong, request);
  return v13_->put_signal(context, channel, src_offset, src, bytes, dst_offset, dst, rank, signal_offset,
                          signal, value, op, request);
}

Communicator::Communicator(const Library& library, std::shared_ptr<Bootstrap> bootstrap)
    : library_(library), bootstrap_(std::move(bootstrap)) {
  const RmaV14& rma = library_.table();
  EXPECT_EQ(rma.init(&instance_, 0x1234, logger), kNcclSuccess);
  int devices = 0;
  EXPECT_EQ(rma.devices(&devices), kNcclSuccess);
  EXPECT_GE(devices, 1);
  PropertiesV12 properties{};
  EXPECT_EQ(rma.get_properties(0, &properties), kNcclSuccess);
  EXPECT_EQ(properties.device_type, kDeviceGinProxy);
  EXPECT_TRUE(properties.pointer_support & kPointerHost);
  EXPECT_EQ(size_t(properties.receives_max) * kMaxRequests, kRing);
  std::string handle(kHandleBytes, '\0');
  void* listener = nullptr;
  EXPECT_EQ(rma.listen(instance_, 0, handle.data(), &listener), kNcclSuccess);
  auto all = bootstrap_->all_gather(handle, Deadline::after_s(60));
  EXPECT_TRUE(all.ok()) << all.status().message();
  if (!all.ok()) return;
  std::vector<void*> handles;
  for (std::string& bytes : *all) handles.push_back(bytes.data());
  // As NCCL 2.30.7 does for its RMA proxy: a context of something else.
  int other = 0;
  EXPECT_EQ(rma.connect(&other, handles.data(), ranks(), rank(), listener, &team_), kNcclSuccess);
  EXPECT_EQ(rma.close_listener(listener), kNcclSuccess);
}

void* Communicator::enroll(void* data, size_t bytes, uint64_t flags) {
  void* memory = nullptr;
  EXPECT_EQ(library_.enroll(team_, data, bytes, kPointerHost, flags, &memory), kNcclSuccess);
  EXPECT_NE(memory, nullptr);
  memory_.push_back(memory);
  return memory;
}

void Communicator::open(int channels, int stride) {
  EXPECT_EQ(library_.create_context(team_, {channels, -1, stride}, &context_), kNcclSuccess);
  rings_.clear();
  for (int i = 0; i < channels * ranks(); ++i) rings_.push_back(std::make_unique<Ring>());
  stops_ = false;
  progress_ = std::thread([this] {
    while (!stops_ && failure_ == kNcclSuccess) {
      if (const NcclResult result = round(); result != kNcclSuccess) failure_ = result;
      std::this_thread::yield();
    }
  });
}

NcclResult Communicator::post(const Operation& o, void** request) {
  const int channel = static_cast<int>(o.channel);
  if (o.is_get)
    return library_.table().get(context_, channel, o.src_offset, o.src, o.bytes, o.dst_offset, o.dst, o.rank,
                                request);
  if (!o.signal)
    return library_.table().put(context_, channel, o.src_offset, o.src, o.bytes, o.dst_offset, o.dst, o.rank,
                                request);
  return library_.put_signal(context_, channel, o.src_offset, o.src, o.bytes, o.dst_offset, o.dst, o.rank,
                             o.signal_offset, o.signal, o.value, o.op, o.is_strong, request);
}

// For each context: ask about all requests, then take one command of each peer; then progress.
NcclResult Communicator::round() {
  const RmaV14& rma = library_.table();
  for (const std::unique_ptr<Ring>& each : rings_) {
    for (void*& request : each->requests) {
      if (!request) continue;
      int done = 0;
      if (const NcclResult result = rma.test(team_, request, &done); result != kNcclSuccess) return result;
      if (done) request = nullptr;
    }
    for (; !each->requests.empty() && !each->requests.front(); each->requests.pop_front())
      each->held.fetch_sub(1, std::memory_order_release);
    Operation next;
    {
      std::lock_guard lock(each->mutex);
      if (each->operations.empty()) continue;
      next = each->operations.front();
      each->operations.pop_front();
    }
    void* request = nullptr;
    if (const NcclResult result = post(next, &request); result != kNcclSuccess) return result;
    each->requests.push_back(request);
  }
  return rma.progress(context_);
}

void Communicator::push(const Operation& operation) {
  Ring& to = ring(operation.channel, operation.rank);
  wait_until(Deadline::after_s(60),
             [&] { return to.held.load(std::memory_order_acquire) < kRing || failure_ != kNcclSuccess; });
  to.held.fetch_add(1, std::memory_order_relaxed);
  pushed_.fetch_add(1, std::memory_order_relaxed);
  std::lock_guard lock(to.mutex);
  to.operations.push_back(operation);
}

bool Communicator::quiet(double seconds) {
  for (const std::unique_ptr<Ring>& each : rings_)
    if (!wait_until(Deadline::after_s(seconds),
                    [&] { return each->held.load() == 0 || failure_ != kNcclSuccess; }))
      return false;
  return failure_ == kNcclSuccess;
}

void Communicator::barrier() {
  EXPECT_TRUE(bootstrap_->all_gather("", Deadline::after_s(120)).ok());
}

void Communicator::shut() {
  stops_ = true;
  if (progress_.joinable()) progress_.join();
  if (context_) {
    EXPECT_EQ(library_.table().destroy_context(context_), kNcclSuccess);
  }
  context_ = nullptr;
}

void Communicator::close() {
  shut();
  const RmaV14& rma = library_.table();
  for (void* memory : memory_) EXPECT_EQ(rma.deregister(team_, memory), kNcclSuccess);
  memory_.clear();
  if (team_) {
    EXPECT_EQ(rma.close_team(team_), kNcclSuccess);
  }
  team_ = nullptr;
  if (instance_) {
    EXPECT_EQ(rma.finalize(instance_), kNcclSuccess);
  }
  instance_ = nullptr;
}

}  // namespace weft::nccl_rma::testing
