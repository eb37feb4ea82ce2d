// SPDX-License-Identifier: Apache-2.0
#include "collective/runner.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/config.h"
#include "base/cuda_driver.h"
#include "base/log.h"
#include "collective/compiled.h"
#include "jit/notice.h"
#include "kernels/collective/element.cuh"
#include "kernels/core/carver.h"

namespace weft {
namespace {

constexpr char kFile[] = "kernels/collective/program.cuh";
constexpr char kExchangeFile[] = "kernels/collective/exchange.cuh";
// Host ranks share cores, so a slot is worth a turn of the scheduler, and all rings fit the last cache; a GPU
// slot is worth several microseconds of a link.
constexpr uint64_t kHostSlotBytes[kProtocols] = {256 << 10, 16 << 10, 16 << 10};
constexpr uint64_t kCudaSlotBytes[kProtocols] = {256 << 10, 64 << 10, 64 << 10};

// A message of this size is worth a system call, or a look into the peer's window, instead of two copies.
constexpr uint64_t kHostDirectBytes = 16 << 10, kCudaDirectBytes = 16 << 10;
// Messages that all go by reference need not fit a slot: the larger, the fewer turns that ranks which share
// cores wait for each other. What is reduced had better stay in the caches between two messages.
constexpr uint64_t kHostMessageBytes = 4 << 20;
constexpr uint64_t kBounceBytes = 64 << 10;  // with source and result it fits a core's second cache
constexpr uint64_t kMaxWindows = 1024;       // of a communicator, whose memory peers may use directly

// Blocks of an exchange, and what one of them sends to a peer in one round: on GPUs 512 KiB in all. The host
// has few of both, so that small buffers take several rounds as large ones do on GPUs.
constexpr uint32_t kHostExchangeBlocks = 2, kCudaExchangeBlocks = 128;
constexpr uint32_t kHostRegionUnits = 64, kCudaRegionUnits = 256;
constexpr uint32_t kHostStageUnits = 256, kCudaStageUnits = 1024;
constexpr const char* kExchangeNames[kExchanges] = {"all_reduce", "all_gather", "reduce_scatter",
                                                    "all_to_all"};
constexpr const char* kWayNames[] = {"an exchange by lines", "an exchange in place", "an exchange by stages"};

// What both ends of a chunk know of it.
uint32_t digest_of(const ChunkSpan& span) {
  return CallDigest().add(span.length).add(span.mark).value();
}

// Parts whose sizes differ are cut for `instances` blocks a peer, in pieces that are worth a block's while. Both
// ends of a part cut it alike, and mark every piece with the size of the whole.
constexpr uint64_t kLeastPieceBytes = 16 << 10, kPieceGrainBytes = 512;
std::vector<ChunkSpan> cut(const std::vector<ChunkSpan>& parts, uint32_t instances, uint64_t elem_bytes) {
  std::vector<ChunkSpan> pieces;
  pieces.reserve(parts.size() * instances);
  for (const ChunkSpan& part : parts) {
    const uint64_t grain = kPieceGrainBytes / elem_bytes;
    const uint64_t fair = (part.length + instances - 1) / instances;
    const uint64_t most = std::max((fair + grain - 1) / grain * grain, kLeastPieceBytes / elem_bytes);
    const uint32_t mark = digest_of(part);
    for (uint32_t i = 0; i < instances; ++i) {
      const uint64_t start = std::min(i * most, part.length);
      pieces.push_back({part.first + start, std::min(most, part.length - start), mark, 0});
    }
  }
  return pieces;
}

uint64_t longest(const std::vector<ChunkSpan>& pieces) {
  uint64_t most = 0;
  for (const ChunkSpan& piece : pieces) most = std::max(most, piece.length);
  return most;
}

// What direct_ holds.
struct DirectTables {
  uint64_t windows_at, processes_at, readers_at, bounce_at, end;
};
DirectTables direct_tables(uint64_t ranks, bool is_host) {
  Carver carver;
  DirectTables tables{};
  tables.windows_at = carver.take(kMaxWindows * sizeof(std::byte* const*));
  tables.processes_at = carver.take(ranks * sizeof(uint32_t));
  tables.readers_at = carver.take(ranks * sizeof(uint32_t));
  tables.bounce_at = carver.take(is_host ? kBounceBytes : 16, 4096);
  tables.end = carver.end();
  return tables;
}

// Each rank shows a number in its own memory; who can read it may read everything there.
struct ProcessCard {
  uint32_t process;
  uint32_t reserved;
  uint64_t address;
  uint64_t number;
};

// Why the system lets this process read nothing of another one, as errno's number: EPERM or, once it is gone,
// ESRCH. 0 where it would. Rights are looked at before addresses, so that of nothing does.
int refusal_to_read(uint32_t process) {
  std::byte byte{};
  const iovec here{&byte, 1}, there{nullptr, 1};
  if (process_vm_readv(static_cast<pid_t>(process), &here, 1, &there, 1, 0) >= 0 || errno == EFAULT) return 0;
  return errno;
}

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

Launch launch_of(const GridPlan& grid) {
  return {grid.blocks, grid.threads_per_block, grid.shared_bytes, nullptr, false};
}

std::vector<std::pair<std::string, int64_t>> shape_words(const ProgramShape& shape) {
  return {{"element", shape.element}, {"reduction", shape.reduction}, {"protocol", shape.protocol}};
}

// A result of this size leaves the caches of a core before anybody reads it.
constexpr uint64_t kStreamBytes = 1 << 20;

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
    wanted.slot_bytes[protocol] = given     ? given
                                  : is_host ? kHostSlotBytes[protocol]
                                            : kCudaSlotBytes[protocol];
  }
  wanted.exchange_blocks = !options.has_exchanges || wanted.has_ports ? 0
                           : is_host                                  ? kHostExchangeBlocks
                                                                      : kCudaExchangeBlocks;
  wanted.region_units = is_host ? kHostRegionUnits : kCudaRegionUnits;
  wanted.stage_units = is_host ? kHostStageUnits : kCudaStageUnits;
  const RingPlan plan = plan_rings(wanted);
  const Device device = comm->device();
  WEFT_TRY_ASSIGN(auto visible, HostVisible::create(device, sizeof(FaultBox)));
  WEFT_TRY_ASSIGN(ComputeLimits limits, compute_limits(*comm));
  if (comm->rank() != 0) CompileNotice::keep_off_terminal();
  const uint64_t counters = uint64_t{kProtocols} * ranks * options.channels * sizeof(uint64_t);
  WEFT_TRY_ASSIGN(auto memory, LocalMemory::create(device, 2 * counters + 2 * sizeof(uint64_t)));
  WEFT_TRY_ASSIGN(auto window, Window::create(comm, plan.end));
  WEFT_TRY_ASSIGN(auto board, CallBoard::create(*comm));
  std::unique_ptr<CollectiveRunner> runner(new CollectiveRunner(comm, std::move(window)));
  runner->visible_ = std::move(visible);
  runner->on_death_ = comm->peers().alarm(
      [box = runner->visible_->at<FaultBox>(0), self = static_cast<uint32_t>(comm->rank())](int peer) {
        raise(box, Site::kPeerDied, self, static_cast<uint32_t>(peer), 0, 0, 0);
      });
  runner->counters_ = std::move(memory);
  runner->board_ = std::move(board);
  runner->limits_ = limits;
  runner->rings_ = plan.layout;
  runner->exchange_ = plan.exchange;
  WEFT_TRY_ASSIGN(runner->exchange_states_,
                  LocalMemory::create(device, (wanted.exchange_blocks + 1) * sizeof(ExchangeState)));
  runner->timeout_s_ = options.timeout_s > 0 ? options.timeout_s : comm->timeout_s();
  runner->direct_bytes_ = options.direct_bytes ? options.direct_bytes
                          : is_host            ? kHostDirectBytes
                                               : kCudaDirectBytes;
  const DirectTables tables = direct_tables(ranks, is_host);
  WEFT_TRY_ASSIGN(runner->direct_, LocalMemory::create(device, tables.end));
  if (is_host) WEFT_TRY(runner->probe_process_reads());
  return runner;
}

// Whether ranks can read each other's memory, found by trying. Collective. The cards stand where the grants
// will, which are zero again before anybody runs.
Status CollectiveRunner::probe_process_reads() {
  const int ranks = comm_->size(), self = comm_->rank();
  const DirectTables tables = direct_tables(static_cast<uint64_t>(ranks), true);
  auto* processes = direct_->at<uint32_t>(tables.processes_at);
  auto* readers = direct_->at<uint32_t>(tables.readers_at);
  auto card_of = [&](int rank) {
    return reinterpret_cast<ProcessCard*>(window_->base(rank) + rings_.grants_at);
  };
  const uint64_t number = uint64_t{0x9e3779b97f4a7c15} * static_cast<uint64_t>(getpid() + 1);
  *card_of(self) = {static_cast<uint32_t>(getpid()), 0, reinterpret_cast<uint64_t>(&number), number};
  WEFT_TRY(comm_->barrier());
  for (int rank : config().process_reads ? comm_->mapped_ranks() : std::vector<int>()) {
    const ProcessCard card = *card_of(rank);
    uint64_t seen = 0;
    const bool can = read_process(card.process, &seen, card.address, sizeof(seen)) && seen == card.number;
    processes[rank] = can ? card.process : 0;
  }
  WEFT_TRY(comm_->barrier());
  auto* told = reinterpret_cast<uint32_t*>(window_->local() + rings_.grants_at);
  *card_of(self) = {};
  WEFT_TRY(comm_->barrier());
  for (int rank : comm_->mapped_ranks())
    reinterpret_cast<uint32_t*>(window_->base(rank) + rings_.grants_at)[self] = processes[rank] != 0;
  WEFT_TRY(comm_->barrier());
  std::copy_n(told, ranks, readers);
  std::fill_n(told, ranks, 0u);
  const bool i_read_all = std::all_of(processes, processes + ranks, [](uint32_t p) { return p != 0; });
  WEFT_TRY_ASSIGN(const std::vector<std::string> answers,
                  comm_->bootstrap().all_gather(i_read_all ? "1" : "0", comm_->deadline()));
  all_read_all_ =
      std::all_of(answers.begin(), answers.end(), [](const std::string& answer) { return answer == "1"; });
  return {};
}

// The most that a message may have, or 0 for what its slot holds. From what all ranks know alike.
uint64_t CollectiveRunner::message_bytes(const Program& program, Protocol protocol) const {
  const bool is_free = program.refers_only && all_read_all_ && protocol == Protocol::kSimple &&
                       direct_bytes_ <= rings_.slot_bytes[0];
  return is_free ? kHostMessageBytes : 0;
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

void CollectiveRunner::place(BufferLayout& layout) const {
  const Communicator::WindowPlace found = comm_->find_window(layout.base);
  if (found.number < 0 || found.number >= static_cast<int>(kMaxWindows)) return;
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
  Program program{std::move(text.name),
                  std::move(memory),
                  args,
                  text.scratch_chunks,
                  text.refers_only,
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

Status CollectiveRunner::run(const RunCall& call) {
  WEFT_TRY(fault());
  if (call.part_elems == 0 && call.input_table.empty()) return {};
  WEFT_TRY_ASSIGN(const PlannedRun planned, plan(call));
  return run(planned, call.input, call.output, call.stream);
}

Result<CollectiveRunner::PlannedRun> CollectiveRunner::plan(const RunCall& given) {
  RunCall call = given;
  // Lines are for memory that a peer can see while it is written: over ports every message is Simple.
  if (rings_.has_outbox) call.protocol = Protocol::kSimple;
  const Program* found = find(call.program);
  if (!found) return Status::invalid("program: got {}, allowed: one that was loaded", call.program);
  const Program& program = *found;
  if (call.per_part == 0) return Status::invalid("chunks of a part: got 0, allowed: 1 or more");
  if (call.has_exact_chunks && call.part_elems % call.per_part)
    return Status::invalid("elements: got {}, allowed: a multiple of the {} chunks of {}", call.part_elems,
                           call.per_part, program.name);
  if (call.is_compiled && program.source.empty())
    return Status::make(Code::kUnsupported, "{} has more than the {} steps that are compiled", program.name,
                        kMaxCompiledSteps);
  const bool has_sizes = !call.input_table.empty();
  const uint64_t elem_bytes = element_bytes(call.element);
  PlannedRun planned{call, found, program.args, {}, {}, 0, program.record, {}, {}, nullptr, {}, {}};
  planned.input = cut(call.input_table, call.per_part, elem_bytes);
  planned.output = cut(call.output_table, call.per_part, elem_bytes);
  const uint64_t part_elems =
      has_sizes ? std::max(longest(planned.input), longest(planned.output)) * call.per_part : call.part_elems;
  ProgramArgs& args = planned.args;
  const ProgramPlan plan =
      plan_program({part_elems, call.per_part, args.num_blocks, call.slice_bytes, call.has_exact_chunks,
                    has_sizes ? 0 : message_bytes(program, call.protocol)},
                   call.element, call.protocol, rings_, call.num_sms, limits_);
  args.chunk_elems = plan.chunk_elems;
  args.slice_elems = plan.slice_elems;
  args.iterations = plan.iterations;
  args.group = has_sizes ? 1 : plan.group;
  args.skip_empty = has_sizes ? 1 : 0;
  args.streams_output = !limits_.is_cuda && call.part_elems * element_bytes(call.element) >= kStreamBytes;
  const uint64_t counters = uint64_t{kProtocols} * comm_->size() * rings_.channels * sizeof(uint64_t);
  args.sent = counters_->at<uint64_t>(0);
  args.received = counters_->at<uint64_t>(counters);
  args.calls = program.is_of_pairs ? nullptr : counters_->at<uint64_t>(2 * counters);
  args.rings = rings_;
  planned.scratch_elems = program.scratch_chunks * plan.chunk_elems;

  CallDigest digest;
  digest.add(program.record.digest)
      .add(static_cast<uint64_t>(call.element) << 32 | static_cast<uint64_t>(call.protocol) << 16 |
           static_cast<uint64_t>(call.reduction))
      .add(plan.slice_elems);
  // Sizes that differ from rank to rank are compared chunk by chunk.
  if (!has_sizes) digest.add(call.part_elems).add(uint64_t{call.per_part} << 32 | plan.group);
  args.digest = digest.value();
  planned.record.digest = args.digest;
  planned.record.count = has_sizes ? ~uint64_t{0} : call.part_elems;
  planned.record.element = call.element;
  if (program.is_reduction) planned.record.reduction = static_cast<int32_t>(call.reduction);
  const uint64_t part_bytes = part_elems * elem_bytes;
  for (const Share& sent : program.chunks_sent)
    planned.bytes_sent.push_back({sent.peer, sent.amount * part_bytes / call.per_part});
  planned.facts = {part_bytes, planned.record.count, static_cast<int32_t>(call.element),
                   !program.is_of_pairs};

  planned.shape = shape_of(program, call);
  planned.how = launch_of(plan.grid);
  KernelKey key{kFile, call.is_compiled ? "run_compiled" : "run_program", "ProgramArgs"};
  key.shape = shape_words(planned.shape);
  if (call.is_compiled) key.prelude = program.source;
  WEFT_TRY_ASSIGN(planned.kernel, kernel_on_mesh(*window_, std::move(key), planned.how));
  return planned;
}

Status CollectiveRunner::run(const PlannedRun& planned, std::byte* input, std::byte* output, void* stream) {
  count_sent(planned.bytes_sent);
  return tally_.count(*planned.program->counted, planned.facts,
                      [&] { return start(planned, input, output, stream); });
}

Status CollectiveRunner::run(const PlannedExchange& planned, std::byte* input, std::byte* output,
                             void* stream) {
  count_sent(planned.bytes_sent);
  return tally_.count(*exchanges_[planned.shape.exchange], planned.facts,
                      [&] { return start(planned, input, output, stream); });
}

void CollectiveRunner::count_sent(const std::vector<Share>& bytes) {
  for (const Share& sent : bytes) tally_.sent_to(static_cast<size_t>(sent.peer), sent.amount);
}

Status CollectiveRunner::start(const PlannedRun& planned, std::byte* input, std::byte* output, void* stream) {
  WEFT_TRY(fault());
  const RunCall& form = planned.form;
  if (!links_.empty() && form.protocol != Protocol::kSimple)
    return Status::invalid("protocol: allowed: Simple, while links are delayed for a test");
  last_program_ = planned.program->name.c_str();
  ProgramArgs args = planned.args;
  args.wait = wait_rule();  // whose bound may differ from call to call
  args.delays = links_.empty() ? nullptr : &delays_;
  WEFT_TRY_ASSIGN(args.direct, direct_rule());
  args.buffers[0] = {input, form.part_elems, form.per_part, 0, nullptr, 0};
  args.buffers[1] = {output, form.part_elems, form.per_part, 0, nullptr, 0};
  if (planned.scratch_elems) {
    WEFT_TRY_ASSIGN(std::byte * memory, scratch(planned.scratch_elems * element_bytes(form.element)));
    // One part of all chunks: every scratch chunk has its full size.
    args.buffers[2] = {memory, planned.scratch_elems, planned.program->scratch_chunks, 0, nullptr, 0};
  }
  for (BufferLayout& layout : args.buffers) place(layout);
  if (comm_->device().is_host()) ask_huge_pages(planned, input, output);
  if (!form.input_table.empty()) {
    WEFT_TRY_ASSIGN(args.buffers[0].table, table(planned.input, input_table_, stream));
    WEFT_TRY_ASSIGN(args.buffers[1].table, table(planned.output, output_table_, stream));
  }
  WEFT_TRY(announce(planned));
  return launch(*planned.kernel, planned.how, &args, sizeof(args), &planned.shape, stream,
                planned.program->is_of_pairs && form.input_table.empty());
}

// What only moves data is compiled for the width of its elements, not for their type.
ProgramShape CollectiveRunner::shape_of(const Program& program, const RunCall& call) {
  const auto protocol = static_cast<int64_t>(call.protocol);
  if (program.reduces)
    return {static_cast<int64_t>(call.element), static_cast<int64_t>(call.reduction), protocol};
  Element element = call.element;
  for (const Element same : {Element::kFp32, Element::kFp16, Element::kFp64, Element::kUint8})
    if (element_bytes(same) == element_bytes(call.element)) element = same;
  return {static_cast<int64_t>(element), 0, protocol};
}

// Writes down what this rank calls; the kernel has its digest.
Status CollectiveRunner::announce(const PlannedRun& planned) {
  const bool is_of_pairs = planned.program->is_of_pairs;
  if (!is_of_pairs) {
    board_->post(planned.record);
    WEFT_TRY(compare_calls());
  }
  return is_of_pairs || !planned.form.input_table.empty() ? announce_messages(planned) : Status();
}

// The same for messages between this rank and single others.
Status CollectiveRunner::announce_messages(const PlannedRun& planned) {
  const Program& program = *planned.program;
  const RunCall& call = planned.form;
  const auto ranks = static_cast<size_t>(comm_->size());
  const int self = comm_->rank();
  auto each = [&](const std::vector<int>& peers, const std::vector<ChunkSpan>& table, const char* name,
                  auto post) {
    CallRecord record = planned.record;
    set_name(record, name, program.name);
    if (table.empty())
      for (int peer : peers) post(peer, record);
    for (size_t i = 0; i < table.size(); ++i) {
      const int peer = static_cast<int>(i * ranks / table.size());
      if (peer == self || table[i].length == 0) continue;
      record.element = static_cast<Element>(table[i].mark);
      record.count = table[i].length * element_bytes(call.element) / element_bytes(record.element);
      record.digest = digest_of(table[i]);
      post(peer, record);
    }
  };
  each(program.receivers, call.input_table, program.is_of_pairs ? "send" : "all_to_all",
       [&](int peer, const CallRecord& record) { board_->post_send(peer, record); });
  each(program.senders, call.output_table, program.is_of_pairs ? "recv" : "all_to_all",
       [&](int peer, const CallRecord& record) { board_->post_receive(peer, record); });
  if (!config().check) return {};
  Status status;
  each(program.senders, call.output_table, "", [&](int peer, const CallRecord&) {
    if (status.ok())
      status = board_->compare_receive(peer, Deadline::after_s(timeout_s_), [this] { return is_stopped(); });
  });
  return status.ok() ? status : logged(status);
}

Result<int> CollectiveRunner::wait_for_sender(int first) {
  WEFT_TRY(fault());
  if (first < 0 || first >= comm_->size())
    return Status::invalid("first: got {}, allowed: 0 to {}", first, comm_->size() - 1);
  int sender = -1;
  wait_until(Deadline::after_s(timeout_s_), [&] {
    sender = board_->unreceived_sender(first);
    return sender >= 0 || is_stopped();
  });
  if (sender >= 0) return sender;
  WEFT_TRY(fault());
  return logged(Status::make(Code::kPeerLost, "rank {}, recv from any rank, waited {} s: no rank sent",
                             comm_->rank(), timeout_s_));
}

Status CollectiveRunner::compare_calls() {
  if (!config().check) return {};
  const Status status = board_->compare(Deadline::after_s(timeout_s_), [this] { return is_stopped(); });
  if (status.code() == Code::kClosed) return fault();
  return status.ok() ? status : logged(status);
}

bool CollectiveRunner::is_stopped() const {
  return load_acquire(&visible_->at<FaultBox>(0)->raised) != 0;
}

// Where peers find a buffer, as in a card; sets the table of its window, which direct_ holds already.
uint64_t CollectiveRunner::card(std::byte* memory, std::byte* const** bases) const {
  const Communicator::WindowPlace found = comm_->find_window(memory);
  const bool fits = found.number >= 0 && found.number + 1 < (1 << kCardWindowBits) &&
                    static_cast<size_t>(found.number) < known_windows_.size() && found.offset % 16 == 0 &&
                    found.offset / 16 < uint64_t{1} << kCardOffsetBits;
  if (!fits) return 0;
  *bases = known_windows_[static_cast<size_t>(found.number)];
  return (static_cast<uint64_t>(found.number) + 1) << kCardOffsetBits | found.offset / 16;
}

Status CollectiveRunner::exchange(const ExchangeCall& call) {
  WEFT_TRY(fault());
  if (call.part_elems == 0) return {};
  WEFT_TRY_ASSIGN(const PlannedExchange planned, plan(call));
  return run(planned, call.input, call.output, call.stream);
}

Result<CollectiveRunner::PlannedExchange> CollectiveRunner::plan(const ExchangeCall& call) const {
  if (exchange_.blocks == 0)
    return Status::make(Code::kUnsupported, "an exchange, allowed: of a runner that was made for exchanges{}",
                        rings_.has_outbox ? "; " + comm_->why_not_all_mapped() : "");
  const auto ranks = static_cast<uint32_t>(comm_->size());
  const bool adds = call.kind == Exchange::kAllReduce || call.kind == Exchange::kReduceScatter;
  PlannedExchange planned{};
  ExchangeArgs& args = planned.args;
  args.bytes = call.part_elems * element_bytes(call.element);
  args.is_one_shot = call.is_one_shot;
  args.way = call.way == ExchangeWay::kPlaces && args.bytes % 16 != 0 ? ExchangeWay::kStages : call.way;
  args.windows = direct_->at<std::byte* const*>(
      direct_tables(static_cast<uint64_t>(ranks), comm_->device().is_host()).windows_at);
  args.states = exchange_states_->at<ExchangeState>(0);
  args.layout = exchange_;
  const ExchangePlan plan = plan_exchange({call.kind, args.bytes, ranks, call.is_one_shot, args.way},
                                          exchange_, call.num_sms, limits_);
  args.slice_units = plan.slice_units;
  args.stage_slice_units = plan.stage_slice_units;
  args.piece_bytes = plan.piece_bytes;
  args.pipe_warps = plan.pipe_warps;
  args.digest = CallDigest()
                    .add(static_cast<uint64_t>(call.kind) << 32 | static_cast<uint64_t>(call.element) << 16 |
                         (adds ? static_cast<uint64_t>(call.reduction) : 0))
                    .add(call.part_elems)
                    .add(static_cast<uint64_t>(args.way) << 1 | (call.is_one_shot ? 1 : 0))
                    .add(uint64_t{plan.grid.blocks} << 32 | plan.slice_units)
                    .add(uint64_t{plan.stage_slice_units} << 32 | plan.piece_bytes)
                    .value();
  CallRecord& record = planned.record;
  record.digest = args.digest;
  record.count = call.part_elems;
  record.element = call.element;
  if (adds) record.reduction = static_cast<int32_t>(call.reduction);
  set_name(record, kExchangeNames[static_cast<uint32_t>(call.kind)],
           kWayNames[static_cast<uint32_t>(args.way)]);
  planned.facts = {args.bytes, call.part_elems, static_cast<int32_t>(call.element)};
  // An all-reduce in two phases sends each rank its part of the sum, then everyone the own one.
  const bool has_two_phases = call.kind == Exchange::kAllReduce && !call.is_one_shot;
  const uint64_t each = has_two_phases ? 2 * args.bytes / ranks : args.bytes;
  for (int peer = 0; peer < comm_->size(); ++peer)
    if (peer != comm_->rank()) planned.bytes_sent.push_back({peer, each});

  planned.shape = {static_cast<int64_t>(call.kind), adds ? static_cast<int64_t>(call.element) : 0,
                   adds ? static_cast<int64_t>(call.reduction) : 0, ranks};
  planned.how = launch_of(plan.grid);
  KernelKey key{kExchangeFile, "run_exchange", "ExchangeArgs"};
  key.shape = {{"exchange", planned.shape.exchange},
               {"element", planned.shape.element},
               {"reduction", planned.shape.reduction},
               {"ranks", planned.shape.ranks}};
  WEFT_TRY_ASSIGN(planned.kernel, kernel_on_mesh(*window_, std::move(key), planned.how));
  return planned;
}

Status CollectiveRunner::start(const PlannedExchange& planned, std::byte* input, std::byte* output,
                               void* stream) {
  WEFT_TRY(fault());
  if (!links_.empty()) return Status::invalid("an exchange, allowed: programs, while links are delayed");
  last_program_ = kExchangeNames[planned.shape.exchange];
  WEFT_TRY(bring_up_windows());
  ExchangeArgs args = planned.args;
  args.wait = wait_rule();
  args.input = input;
  args.output = output;
  const bool is_aligned = (reinterpret_cast<uint64_t>(input) | reinterpret_cast<uint64_t>(output)) % 16 == 0;
  if (args.way == ExchangeWay::kPlaces && is_aligned) {
    args.places[0] = card(input, &args.own_windows[0]);
    args.places[1] = card(output, &args.own_windows[1]);
  }
  board_->post(planned.record);
  WEFT_TRY(compare_calls());
  return launch(*planned.kernel, planned.how, &args, sizeof(args), &planned.shape, stream);
}

void CollectiveRunner::ask_huge_pages(const PlannedRun& planned, std::byte* input, std::byte* output) {
  const RunCall& call = planned.form;
  const uint64_t* used_chunks = planned.program->used_chunks;
  if (!call.input_table.empty()) return;
  const uint64_t part_bytes = call.part_elems * element_bytes(call.element);
  auto bytes_of = [&](uint64_t chunks) { return (chunks + call.per_part - 1) / call.per_part * part_bytes; };
  huge_pages_.used(input, bytes_of(used_chunks[0]));
  if (output != input) huge_pages_.used(output, bytes_of(used_chunks[1]));
}

const CollectiveRunner::Program* CollectiveRunner::find(uint32_t number) {
  std::lock_guard lock(programs_mutex_);
  if (number >= programs_.size()) return nullptr;
  return &programs_[number];
}

Status CollectiveRunner::scale(Element element, const ScaleArgs& args, void* stream) {
  const auto blocks = static_cast<uint32_t>(std::clamp<uint64_t>(args.elems / 4096, 1, limits_.max_blocks));
  GridPlan grid{};
  grid.blocks = limits_.is_cuda ? blocks : 1;
  grid.threads_per_block = limits_.is_cuda ? 512 : 1;
  KernelKey key{kFile, "scale_buffer", "ScaleArgs"};
  const ProgramShape shape{static_cast<int64_t>(element), 0, 0};
  key.shape = shape_words(shape);
  const Launch how = launch_of(grid);
  WEFT_TRY_ASSIGN(const Kernel* kernel, kernel_on_mesh(*window_, std::move(key), how));
  return launch(*kernel, how, &args, sizeof(args), &shape, stream);
}

Status CollectiveRunner::launch(const Kernel& kernel, Launch how, const void* args, size_t args_bytes,
                                const void* shape, void* stream, bool is_of_pairs) {
  how.stream = stream;
  WEFT_TRY_ASSIGN(const bool is_captured, is_capturing(comm_->device(), stream));
  if (!is_captured) WEFT_TRY(last_run_.wait(stream));
  WEFT_TRY(launch_on_mesh(*window_, kernel, how, args, args_bytes, shape));
  if (!is_captured && !is_of_pairs) WEFT_TRY(last_run_.note(stream));
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

// Sizes of chunks in device memory. Runs that are under way on `stream` still read the earlier ones there, so
// they are replaced in stream order, and only by others; what a graph captures copies them again at every replay,
// from here, so that nobody knows any more what is there.
Result<const ChunkSpan*> CollectiveRunner::table(const std::vector<ChunkSpan>& entries, ChunkTable& table,
                                                 void* stream) {
  const uint64_t bytes = entries.size() * sizeof(ChunkSpan);
  WEFT_TRY_ASSIGN(const bool is_captured, is_capturing(comm_->device(), stream));
  if (!table.memory || table.memory->bytes() < bytes) {
    if (is_captured)
      return Status::make(Code::kUnsupported,
                          "sizes of {} chunks while a graph is captured, allowed: after a call without one",
                          entries.size());
    if (table.memory) old_tables_.push_back(std::move(table.memory));
    table.held.clear();
    WEFT_TRY_ASSIGN(table.memory, LocalMemory::create(comm_->device(), bytes));
  }
  const bool is_held = captured_tables_.empty() && !is_captured && table.held.size() == entries.size() &&
                       std::memcmp(table.held.data(), entries.data(), bytes) == 0;
  if (is_held) return table.memory->at<ChunkSpan>(0);
  table.held.clear();
  if (!is_captured) WEFT_TRY(last_run_.wait(stream));
  const std::vector<ChunkSpan>* source = &entries;
  if (is_captured) source = &captured_tables_.emplace_back(entries);
  WEFT_TRY(table.memory->write_in_order(0, source->data(), bytes, stream));
  table.held = entries;
  return table.memory->at<ChunkSpan>(0);
}

Status CollectiveRunner::fault() {
  const FaultBox& box = *visible_->at<FaultBox>(0);
  if (broken_.ok() && load_acquire(&box.raised) != 0) {
    broken_ = logged(fault_status());
    if (broken_.code() == Code::kPeerLost && box.peer != box.self) tally_.lost(box.peer);
  }
  return broken_;
}

Status CollectiveRunner::fault_status() const {
  const FaultBox& box = *visible_->at<FaultBox>(0);
  if (box.site == Site::kPeerWindow) return Status(Code::kClosed, sentence());
  // Nobody is lost: this process has lost the right to read others.
  if (box.site == Site::kPeerMemory && refusal_to_read(process_of(box.peer)) == EPERM)
    return Status(Code::kSystem, sentence());
  // A rank that left may have done so because of the difference.
  const bool may_differ =
      box.site == Site::kCollective || box.site == Site::kCollectiveCall || box.site == Site::kPeerDied;
  if (!may_differ) return Status(Code::kPeerLost, sentence());
  if (const std::string words = board_->mismatch(); !words.empty())
    return Status::invalid("rank {}, {}", comm_->rank(), words);
  if (box.site == Site::kCollectiveCall) return Status(Code::kInvalid, sentence());
  if (box.peer == box.self || box.site == Site::kPeerDied) return Status(Code::kPeerLost, sentence());
  return Status(Code::kPeerLost, sentence() + "; " + board_->progress(static_cast<int>(box.peer)));
}

uint32_t CollectiveRunner::process_of(uint32_t peer) const {
  const DirectTables tables = direct_tables(static_cast<uint64_t>(comm_->size()), true);
  return direct_->at<uint32_t>(tables.processes_at)[peer];
}

void CollectiveRunner::stop() {
  const auto self = static_cast<uint32_t>(comm_->rank());
  raise(visible_->at<FaultBox>(0), Site::kNone, self, self, 0, 0, 0);
}

std::string CollectiveRunner::sentence() const {
  const FaultBox& box = *visible_->at<FaultBox>(0);
  PeerWatch& peers = comm_->peers();
  const char* last_program = last_program_;
  if (box.site == Site::kPeerDied)
    return text("rank {}, collective {}: {}", box.self, last_program, peers.lost());
  if (box.site == Site::kPeerMemory) {
    const int refusal = refusal_to_read(process_of(box.peer));
    return text(
        "rank {}, collective {}, block {}, step {}: {} bytes of rank {}'s memory cannot be read any "
        "more{}{}; {}",
        box.self, last_program, box.detail >> 16, box.detail & 0xffff, box.expected, box.peer,
        refusal ? ": " : "", refusal ? strerror(refusal) : "",
        peers.fates({static_cast<int>(box.peer)}, "is running"));
  }
  if (box.site == Site::kPeerWindow)
    return text(
        "rank {}, collective {}, block {}, step {}: rank {} passed memory of window {}, which this rank has "
        "destroyed, allowed: windows that all ranks still have",
        box.self, last_program, box.detail >> 16, box.detail & 0xffff, box.peer, box.expected);
  if (box.site == Site::kCollectiveCall)
    return text(
        "rank {}, collective {}, block {}, step {}: a message of rank {} is of another call, allowed: the "
        "same call on all ranks",
        box.self, last_program, box.detail >> 16, box.detail & 0xffff, box.peer);
  if (box.site == Site::kNone) return text("rank {}, collective {}: stopped", box.self, last_program);
  if (box.site == Site::kGaveUp)
    return text("rank {}, collective {}: an earlier call gave up waiting, allowed: a new communicator",
                box.self, last_program);
  const std::string lost = peers.lost();
  if (box.site == Site::kTakenBack)  // perhaps because of another rank's death, which it saw sooner
    return text("rank {}, collective {}, block {}, step {}: rank {} had given up waiting for this rank{}{}",
                box.self, last_program, box.detail >> 16, box.detail & 0xffff, box.peer,
                lost.empty() ? "" : "; ", lost);
  const std::string whom = box.peer == box.self ? "another block of its own" : text("rank {}", box.peer);
  const std::string fate =
      lost.empty() && box.peer != box.self ? peers.fate(static_cast<int>(box.peer)) : lost;
  return text(
      "rank {}, collective {}, block {}, step {}, waited {} s for {}: expected message {}, saw {}{}{}",
      box.self, last_program, box.detail >> 16, box.detail & 0xffff,
      static_cast<double>(box.waited_ns / 100'000'000) / 10, whom, box.expected, box.seen,
      fate.empty() ? "" : "; ", fate);
}

}  // namespace weft
