// SPDX-License-Identifier: Apache-2.0
#include "collective/runner.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/config.h"
#include "base/cuda_driver.h"
#include "base/log.h"
#include "collective/compiled.h"
#include "collective/runner_parts.h"
#include "jit/mesh_launch.h"
#include "jit/notice.h"

namespace weft {
namespace {

// Host ranks share cores, so a slot is worth a turn of the scheduler, and all rings fit the last cache; a GPU
// slot is worth several microseconds of a link.
constexpr uint64_t kHostSlotBytes[kProtocols] = {256 << 10, 16 << 10, 16 << 10};
// Where ports take temporary registrations, messages go from user to user, and long ones are faster. Other messages use
// slots, so slots have as much room; those of all rings together have at most the second, and outboxes the same again.
constexpr uint64_t kLendingSlotBytes = 1 << 20, kLendingRingBytes = 128 << 20;
constexpr uint64_t kCudaSlotBytes[kProtocols] = {256 << 10, 64 << 10, 64 << 10};

// A message of this size is worth a system call, or a look into the peer's window, instead of two copies.
constexpr uint64_t kHostDirectBytes = 16 << 10, kCudaDirectBytes = 16 << 10;
// Messages that all go by reference need not fit a slot: the larger, the fewer turns that ranks which share
// cores wait for each other. Data that is reduced should stay in the caches between two messages.
constexpr uint64_t kHostMessageBytes = 4 << 20;

// Blocks of an exchange, and what one of them sends to a peer in one round: on GPUs 512 KiB in all. The host
// has few of both, so that small buffers take several rounds as large ones do on GPUs.
constexpr uint32_t kHostExchangeBlocks = 2, kCudaExchangeBlocks = 128;
constexpr uint32_t kHostRegionUnits = 64, kCudaRegionUnits = 256;
// Each rank shows a number in its own memory; a process that can read it may read everything there.
struct MemoryProbe {
  uint32_t process;
  uint32_t reserved;
  uint64_t address;
  uint64_t number;
};

bool sends(const ProgramStep& step) {
  const auto op = static_cast<StepOp>(step.op);
  return op == StepOp::kSend || op == StepOp::kRecvCopySend || op == StepOp::kRecvReduceSend ||
         op == StepOp::kRecvReduceCopySend;
}

// Ranks make windows alike, so that this tells objects of one communicator apart.
TallyCaller caller_of(const Window& window) {
  TallyCaller caller = window.communicator()->tally_caller();
  caller.key += static_cast<uint64_t>(window.number());
  return caller;
}

bool adds(const ProgramStep& step) {
  const auto op = static_cast<StepOp>(step.op);
  const bool only_moves =
      op == StepOp::kSend || op == StepOp::kRecv || op == StepOp::kRecvCopySend || op == StepOp::kCopy;
  return !only_moves || step.ends_sum != 0;
}

// What is chosen for the device.
uint64_t usual_slot_bytes(const Communicator& comm, uint32_t channels, uint32_t protocol) {
  if (!comm.device().is_host()) return kCudaSlotBytes[protocol];
  const Link* ports = comm.port_link();
  const bool is_simple = protocol == static_cast<uint32_t>(Protocol::kSimple);
  if (!is_simple || !ports || !ports->takes_temporary()) return kHostSlotBytes[protocol];
  const uint64_t slots = uint64_t{static_cast<uint32_t>(comm.size())} * channels * kRingSlots;
  return std::clamp(std::bit_floor(kLendingRingBytes / slots), kHostSlotBytes[0], kLendingSlotBytes);
}

}  // namespace

CollectiveRunner::CollectiveRunner(std::shared_ptr<Communicator> comm, std::unique_ptr<Window> window)
    : comm_(std::move(comm)),
      window_(std::move(window)),
      tally_("collectives", caller_of(*window_)),
      last_run_(comm_->device()) {
  for (uint32_t kind = 0; kind < kExchanges; ++kind)
    exchanges_[kind] = &tally_.operation(kExchangeNames[kind]);
}

Result<std::unique_ptr<CollectiveRunner>> CollectiveRunner::create(std::shared_ptr<Communicator> comm,
                                                                   const RunnerOptions& options) {
  const auto ranks = static_cast<uint32_t>(comm->size());
  RingOptions wanted{ranks, options.channels, {}};
  wanted.has_ports = comm->port_link() != nullptr;
  const bool is_host = comm->device().is_host();
  for (uint32_t protocol = 0; protocol < kProtocols; ++protocol) {
    const uint64_t given = protocol == 0 ? options.simple_slot_bytes : options.ll_slot_bytes;
    wanted.slot_bytes[protocol] = given ? given : usual_slot_bytes(*comm, options.channels, protocol);
  }
  wanted.exchange_blocks = !options.has_exchanges || wanted.has_ports ? 0
                           : is_host                                  ? kHostExchangeBlocks
                                                                      : kCudaExchangeBlocks;
  wanted.region_units = is_host ? kHostRegionUnits : kCudaRegionUnits;
  wanted.stage_units = exchange_stage_units(wanted.ranks, !is_host);
  const RingPlan plan = plan_rings(wanted);
  const Device device = comm->device();
  WEFT_TRY_ASSIGN(auto visible, HostVisible::create(device, sizeof(FaultBox)));
  WEFT_TRY_ASSIGN(ComputeLimits limits, compute_limits(*comm));
  if (comm->rank() != 0) CompileNotice::keep_off_terminal();
  const uint64_t counters = uint64_t{kProtocols} * ranks * options.channels * sizeof(uint64_t);
  WEFT_TRY_ASSIGN(auto memory, LocalMemory::create(device, 2 * counters + 2 * sizeof(uint64_t)));
  WEFT_TRY_ASSIGN(auto window, Window::create(comm, plan.end, plan.end));
  WEFT_TRY_ASSIGN(auto log, CallLog::create(*comm));
  std::unique_ptr<CollectiveRunner> runner(new CollectiveRunner(comm, std::move(window)));
  runner->visible_ = std::move(visible);
  runner->on_death_ = comm->peers().alarm(
      [box = runner->visible_->at<FaultBox>(0), self = static_cast<uint32_t>(comm->rank())](int peer) {
        raise(box, Site::kPeerDied, self, static_cast<uint32_t>(peer), 0, 0, 0);
      });
  runner->counters_ = std::move(memory);
  runner->call_log_ = std::move(log);
  runner->limits_ = limits;
  runner->rings_ = plan.layout;
  runner->exchange_ = plan.exchange;
  WEFT_TRY_ASSIGN(runner->exchange_states_,
                  LocalMemory::create(device, (wanted.exchange_blocks + 1) * sizeof(ExchangeState)));
  runner->orders_streams_ = options.orders_streams;
  runner->timeout_s_ = options.timeout_s > 0 ? options.timeout_s : comm->timeout_s();
  runner->direct_bytes_ = options.direct_bytes ? options.direct_bytes
                          : is_host            ? kHostDirectBytes
                                               : kCudaDirectBytes;
  const DirectTables tables = direct_tables(ranks, is_host);
  WEFT_TRY_ASSIGN(runner->direct_, LocalMemory::create(device, tables.end));
  if (is_host) WEFT_TRY(runner->probe_process_reads());
  WEFT_TRY_ASSIGN(runner->addresses_, SharedAddresses::probe(*comm));
  WEFT_TRY(runner->addresses_.write_tables(*runner->direct_, tables.windows_at));
  return runner;
}

// Whether ranks can read each other's memory, found by trying. Collective. The probes stand where the grants
// will, which are zero again before anybody runs.
Status CollectiveRunner::probe_process_reads() {
  const int ranks = comm_->size(), self = comm_->rank();
  const DirectTables tables = direct_tables(static_cast<uint64_t>(ranks), true);
  auto* processes = direct_->at<uint32_t>(tables.processes_at);
  auto* readers = direct_->at<uint32_t>(tables.readers_at);
  auto probe_of = [&](int rank) {
    return reinterpret_cast<MemoryProbe*>(window_->base(rank) + rings_.grants_at);
  };
  const uint64_t number = uint64_t{0x9e3779b97f4a7c15} * static_cast<uint64_t>(getpid() + 1);
  *probe_of(self) = {static_cast<uint32_t>(getpid()), 0, reinterpret_cast<uint64_t>(&number), number};
  WEFT_TRY(comm_->barrier());
  for (int rank : config().process_reads ? comm_->mapped_ranks() : std::vector<int>()) {
    const MemoryProbe probe = *probe_of(rank);
    uint64_t seen = 0;
    const bool can = read_process(probe.process, &seen, probe.address, sizeof(seen)) && seen == probe.number;
    processes[rank] = can ? probe.process : 0;
  }
  WEFT_TRY(comm_->barrier());
  auto* grants = reinterpret_cast<uint32_t*>(window_->local() + rings_.grants_at);
  *probe_of(self) = {};
  WEFT_TRY(comm_->barrier());
  for (int rank : comm_->mapped_ranks())
    reinterpret_cast<uint32_t*>(window_->base(rank) + rings_.grants_at)[self] = processes[rank] != 0;
  WEFT_TRY(comm_->barrier());
  std::copy_n(grants, ranks, readers);
  std::fill_n(grants, ranks, 0u);
  const bool i_read_all = std::all_of(processes, processes + ranks, [](uint32_t p) { return p != 0; });
  WEFT_TRY_ASSIGN(const std::vector<std::string> answers,
                  comm_->bootstrap().all_gather(i_read_all ? "1" : "0", comm_->deadline()));
  all_read_all_ =
      std::all_of(answers.begin(), answers.end(), [](const std::string& answer) { return answer == "1"; });
  return {};
}

// The most that a message may have, or 0 for what its slot holds. What is reduced, or has sizes, goes through slots, and had
// better stay in the caches. Computed from values that are the same on all ranks.
uint64_t CollectiveRunner::message_bytes(const Program& program, Protocol protocol, bool has_sizes) const {
  if (protocol != Protocol::kSimple || !comm_->device().is_host()) return 0;
  const bool only_refers = program.refers_only && !has_sizes && direct_bytes_ <= rings_.slot_bytes[0];
  if (only_refers) return all_read_all_ ? kHostMessageBytes : 0;
  return std::min(rings_.slot_bytes[0], kHostSlotBytes[0]);
}

// Brings the table of windows up to date, which a captured graph must not need.
Status CollectiveRunner::bring_up_windows() {
  const uint64_t version = comm_->windows_version();
  if (version == windows_version_) return {};
  const DirectTables tables = direct_tables(static_cast<uint64_t>(comm_->size()), comm_->device().is_host());
  std::vector<std::byte* const*> windows = comm_->window_tables();
  windows.resize(std::min<size_t>(windows.size(), kMaxWindows));
  WEFT_TRY(direct_->write(tables.windows_at, windows.data(), windows.size() * sizeof(windows[0])));
  known_windows_ = std::move(windows);
  windows_version_ = version;
  return {};
}

// The rule for a run.
Result<DirectRule> CollectiveRunner::direct_rule() {
  WEFT_TRY(bring_up_windows());
  const bool is_host = comm_->device().is_host();
  const DirectTables tables = direct_tables(static_cast<uint64_t>(comm_->size()), is_host);
  DirectRule rule{};
  rule.windows = direct_->at<std::byte* const*>(tables.windows_at);
  rule.processes = direct_->at<uint32_t>(tables.processes_at);
  rule.readers = direct_->at<uint32_t>(tables.readers_at);
  rule.bounce = direct_->at<std::byte>(tables.bounce_at);
  rule.bounce_bytes = kBounceBytes;
  rule.least_bytes = direct_bytes_;
  rule.prefers_stores = !is_host;
  return rule;
}

// Where peers find memory: in a window, or at an address that all ranks share.
Communicator::WindowPlace CollectiveRunner::find_place(const std::byte* memory) const {
  const Communicator::WindowPlace found = comm_->find_window(memory);
  if (found.number < 0) return addresses_.find(memory);
  return found.number < kMaxWindows ? found : Communicator::WindowPlace{};
}

// On GPUs peers read a buffer more slowly than its owner stores into their slots. So programs in which nobody stores
// into a buffer get no address, which would cost questions to the driver.
void CollectiveRunner::place(BufferLayout& layout, bool is_stored_to) const {
  const bool may_be_shared = !limits_.is_cuda || is_stored_to;
  const Communicator::WindowPlace found =
      may_be_shared ? find_place(layout.base) : comm_->find_window(layout.base);
  if (found.number < 0 || (found.number >= kMaxWindows && !may_be_shared)) return;
  layout.window = static_cast<uint32_t>(found.number) + 1;
  layout.window_at = found.offset;
}

Status CollectiveRunner::check(const ProgramText& text) const {
  const int ranks = comm_->size();
  for (const ProgramBlock& block : text.blocks) {
    if (block.send_peer >= ranks || block.recv_peer >= ranks || block.send_peer == comm_->rank())
      return Status::invalid("{}: peers {} and {}, allowed: other ranks of {}", text.name, block.send_peer,
                             block.recv_peer, ranks);
    if (block.channel >= rings_.channels)
      return Status::make(Code::kCapacity, "{}: channel {}, this runner has {}", text.name, block.channel,
                          rings_.channels);
    if (uint64_t{block.first_step} + block.steps > text.steps.size())
      return Status::invalid("{}: a block's steps end at {}, there are {}", text.name,
                             block.first_step + block.steps, text.steps.size());
  }
  for (const ProgramStep& step : text.steps)
    if (step.op > static_cast<uint32_t>(StepOp::kReduce) ||
        uint64_t{step.first_wait} + step.waits > text.waits.size())
      return Status::invalid("{}: operation {} with waits up to {} of {}", text.name, step.op,
                             step.first_wait + step.waits, text.waits.size());
  for (const ProgramBlock& block : text.blocks)
    for (uint32_t at = 0; at < block.steps; ++at)
      if (const uint32_t fused = text.steps[block.first_step + at].fused;
          fused && (fused >= kMaxSources || at + fused >= block.steps))
        return Status::invalid("{}: a step is fused with {} more, allowed: up to {}, in its block", text.name,
                               fused, kMaxSources - 1);
  for (const ProgramStep& step : text.steps)
    if (step.remote_buffer > 2)
      return Status::invalid("{}: a step stores into buffer {}, allowed: 0 to 2", text.name,
                             step.remote_buffer);
  for (const ProgramWait& wait : text.waits)
    if (wait.block >= text.blocks.size())
      return Status::invalid("{}: waits for block {} of {}", text.name, wait.block, text.blocks.size());
  return {};
}

Result<uint32_t> CollectiveRunner::load(ProgramText text) {
  WEFT_TRY(check(text));
  for (ProgramWait& wait : text.waits) wait.steps = text.blocks[wait.block].steps;
  Carver carver;
  const uint64_t blocks_at = carver.take(text.blocks.size() * sizeof(ProgramBlock));
  const uint64_t steps_at = carver.take(text.steps.size() * sizeof(ProgramStep));
  const uint64_t waits_at = carver.take(text.waits.size() * sizeof(ProgramWait));
  const uint64_t progress_at = carver.take(text.blocks.size() * sizeof(uint64_t));
  const uint64_t state_at = carver.take(sizeof(GridState));
  WEFT_TRY_ASSIGN(auto memory, LocalMemory::create(comm_->device(), carver.end()));
  WEFT_TRY(memory->write(blocks_at, text.blocks.data(), text.blocks.size() * sizeof(ProgramBlock)));
  WEFT_TRY(memory->write(steps_at, text.steps.data(), text.steps.size() * sizeof(ProgramStep)));
  WEFT_TRY(memory->write(waits_at, text.waits.data(), text.waits.size() * sizeof(ProgramWait)));
  ProgramArgs args{};
  args.blocks = memory->at<ProgramBlock>(blocks_at);
  args.steps = memory->at<ProgramStep>(steps_at);
  args.waits = memory->at<ProgramWait>(waits_at);
  args.progress = memory->at<uint64_t>(progress_at);
  args.state = memory->at<GridState>(state_at);
  args.num_blocks = static_cast<uint32_t>(text.blocks.size());
  std::string source = can_compile(text) ? program_source(text) : std::string();
  Program program{
      std::move(text.name),
      std::move(memory),
      args,
      text.scratch_chunks,
      text.refers_only,
      std::ranges::any_of(text.steps, [](const auto& step) { return (step.direct & kMayStore) != 0; }),
      std::move(source),
      {},
      {},
      text.is_of_pairs,
      text.is_reduction,
      false,
      {},
      {},
      {},
      nullptr};
  set_name(program.record, text.call.empty() ? program.name : text.call, program.name);
  program.record.root = text.root;
  program.record.digest = CallDigest()
                              .add(std::string_view(program.record.call))
                              .add(program.name)
                              .add(text.fingerprint)
                              .add(static_cast<uint64_t>(text.root))
                              .value();
  program.counted = &tally_.operation(program.record.call);
  for (const ProgramBlock& block : text.blocks) {
    if (block.send_peer >= 0) program.receivers.push_back(block.send_peer);
    if (block.recv_peer >= 0) program.senders.push_back(block.recv_peer);
    uint64_t chunks = 0;
    for (uint32_t i = 0; i < block.steps; ++i)
      if (sends(text.steps[block.first_step + i])) chunks += text.steps[block.first_step + i].count;
    if (block.send_peer >= 0) program.chunks_sent.push_back({block.send_peer, chunks});
  }
  for (const ProgramStep& step : text.steps) {
    auto touch = [&](uint32_t buffer, uint32_t index) {
      if (buffer < 2)
        program.used_chunks[buffer] = std::max<uint64_t>(program.used_chunks[buffer], index + step.count);
    };
    program.reduces |= adds(step);
    touch(step.src_buffer, step.src_index);
    touch(step.dst_buffer, step.dst_index);
  }
  std::lock_guard lock(programs_mutex_);
  programs_.push_back(std::move(program));
  return static_cast<uint32_t>(programs_.size() - 1);
}

WaitRule CollectiveRunner::wait_rule() const {
  const uint64_t counters =
      uint64_t{kProtocols} * static_cast<uint64_t>(comm_->size()) * rings_.channels * sizeof(uint64_t);
  return {static_cast<uint64_t>(timeout_s_ * 1e9),
          visible_->at<FaultBox>(0),
          static_cast<uint32_t>(comm_->rank()),
          0,
          nullptr,
          counters_->at<uint32_t>(2 * counters + sizeof(uint64_t))};
}

Status CollectiveRunner::delay_links(std::vector<LinkDelay> links) {
  if (!comm_->device().is_host())
    return Status::make(Code::kUnsupported, "links are delayed on the CPU only");
  if (!links.empty() && links.size() != static_cast<size_t>(comm_->size()))
    return Status::invalid("links: got {} delays, allowed: none, or one for each of {} ranks", links.size(),
                           comm_->size());
  links_ = std::move(links);
  held_.resize(size_t{rings_.channels} * static_cast<size_t>(comm_->size()) * kRingSlots);
  delays_ = {links_.data(), held_.data(), 0};
  return {};
}

void CollectiveRunner::count_sent(const std::vector<Share>& bytes) {
  for (const Share& sent : bytes) tally_.sent_to(static_cast<size_t>(sent.peer), sent.amount);
}

const CollectiveRunner::Program* CollectiveRunner::find(uint32_t number) {
  std::lock_guard lock(programs_mutex_);
  if (number >= programs_.size()) return nullptr;
  return &programs_[number];
}

Status CollectiveRunner::launch(const Kernel& kernel, Launch how, const void* args, size_t args_bytes,
                                const void* shape, void* stream, bool is_of_pairs) {
  how.stream = stream;
  bool has_order = !orders_streams_;
  if (!has_order) {
    WEFT_TRY_ASSIGN(has_order, is_capturing(comm_->device(), stream));
  }
  if (!has_order) WEFT_TRY(last_run_.wait(stream));
  WEFT_TRY(launch_on_mesh(*window_, kernel, how, args, args_bytes, shape));
  if (!has_order && !is_of_pairs) WEFT_TRY(last_run_.note(stream));
  return comm_->device().is_host() ? fault() : Status();
}

Result<std::byte*> CollectiveRunner::scratch(uint64_t bytes) {
  if (scratch_.empty() || scratch_.back()->bytes() < bytes) {
    WEFT_TRY_ASSIGN(auto memory, LocalMemory::create(comm_->device(), bytes));
    scratch_.push_back(std::move(memory));
    if (comm_->device().is_host()) scratch_.erase(scratch_.begin(), scratch_.end() - 1);
  }
  return scratch_.back()->data();
}

}  // namespace weft
