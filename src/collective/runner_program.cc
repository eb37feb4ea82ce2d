// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include "base/config.h"
#include "base/log.h"
#include "collective/compiled.h"
#include "collective/runner_parts.h"
#include "jit/mesh_launch.h"
#include "kernels/collective/element.cuh"

namespace weft {
namespace {

constexpr char kFile[] = "kernels/collective/program.cuh";

// The facts of a chunk that both ends know.
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

std::vector<std::pair<std::string, int64_t>> shape_words(const ProgramShape& shape) {
  return {{"element", shape.element}, {"reduction", shape.reduction}, {"protocol", shape.protocol}};
}

// A result of this size leaves the caches of a core before anybody reads it.
constexpr uint64_t kStreamBytes = 1 << 20;

// From messages of this size on, buffers are registered at the link to port peers.
constexpr uint64_t kLeastRegisteredBytes = 64 << 10;

}  // namespace

Status CollectiveRunner::run(const RunCall& call) {
  if (call.part_elems == 0 && call.input_table.empty()) {
    const Status why = fault();
    return why.ok() ? why : refused("a call without elements", why);
  }
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
                    message_bytes(program, call.protocol, has_sizes)},
                   call.element, call.protocol, rings_, call.num_sms, limits_);
  args.chunk_elems = plan.chunk_elems;
  args.slice_elems = plan.slice_elems;
  args.iterations = plan.iterations;
  args.group = has_sizes ? 1 : plan.group;
  args.skip_empty = has_sizes ? 1 : 0;
  args.uses_registrations = !has_sizes && !program.is_of_pairs &&
                            takes_temporary(std::min(plan.slice_elems, plan.chunk_elems) * elem_bytes);
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
  if (call.tag != 0) digest.add(static_cast<uint64_t>(call.tag));
  args.digest = digest.value();
  planned.record.digest = args.digest;
  planned.record.count = has_sizes ? ~uint64_t{0} : call.part_elems;
  planned.record.element = call.element;
  planned.record.tag = call.tag;
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

// As a user called it.
std::string CollectiveRunner::name_of(const PlannedRun& planned) {
  CallRecord record = planned.record;
  const Program& program = *planned.program;
  if (program.is_of_pairs) set_name(record, program.receivers.empty() ? "recv" : "send", program.name);
  return describe(record);
}

Status CollectiveRunner::start(const PlannedRun& planned, std::byte* input, std::byte* output, void* stream) {
  if (const Status why = fault(); !why.ok()) return refused(name_of(planned), why);
  const RunCall& call = planned.call;
  if (!links_.empty() && call.protocol != Protocol::kSimple)
    return Status::invalid("protocol: allowed: Simple, while links are delayed for a test");
  last_program_ = planned.program->name.c_str();
  ProgramArgs args = planned.args;
  args.wait = wait_rule();  // whose bound may differ from call to call
  args.delays = links_.empty() ? nullptr : &delays_;
  WEFT_TRY_ASSIGN(args.direct, direct_rule());
  args.buffers[0] = {input, call.part_elems, call.per_part, 0, nullptr, 0};
  args.buffers[1] = {output, call.part_elems, call.per_part, 0, nullptr, 0};
  if (planned.scratch_elems) {
    WEFT_TRY_ASSIGN(std::byte * memory, scratch(planned.scratch_elems * element_bytes(call.element)));
    // One part of all chunks: every scratch chunk has its full size.
    args.buffers[2] = {memory, planned.scratch_elems, planned.program->scratch_chunks, 0, nullptr, 0};
  }
  const bool is_stored_to = planned.program->stores && call.input_table.empty();
  for (BufferLayout& layout : args.buffers) place(layout, is_stored_to);
  if (comm_->device().is_host()) ask_huge_pages(planned, input, output);
  if (!call.input_table.empty()) {
    WEFT_TRY_ASSIGN(args.buffers[0].table, table(planned.input, input_table_, stream));
    WEFT_TRY_ASSIGN(args.buffers[1].table, table(planned.output, output_table_, stream));
  }
  WEFT_TRY(announce(planned));
  const std::vector<uint32_t> registrations =
      args.uses_registrations ? register_buffers(planned, args) : std::vector<uint32_t>();
  const Status status = launch(*planned.kernel, planned.how, &args, sizeof(args), &planned.shape, stream,
                               planned.program->is_of_pairs && call.input_table.empty());
  if (!registrations.empty()) comm_->port_link()->reclaim(registrations, status.ok() && !is_stopped());
  return status;
}

// Whether port peers of a call with such messages put from and to the buffers of its users: it costs each call a handful
// of microseconds, and each message less.
bool CollectiveRunner::takes_temporary(uint64_t message_bytes) const {
  const Link* ports = comm_->port_link();
  return ports && comm_->device().is_host() && message_bytes >= kLeastRegisteredBytes &&
         ports->takes_temporary();
}

// Registers what the run reads and writes. Other buffers go through outbox and slots.
std::vector<uint32_t> CollectiveRunner::register_buffers(const PlannedRun& planned, ProgramArgs& args) const {
  const Program& program = *planned.program;
  const uint64_t elem_bytes = element_bytes(planned.call.element);
  const uint64_t part_bytes = planned.call.part_elems * elem_bytes, per_part = planned.call.per_part;
  const auto parts = [&](uint64_t chunks) { return (chunks + per_part - 1) / per_part * part_bytes; };
  const uint64_t bytes[3] = {parts(program.used_chunks[0]), parts(program.used_chunks[1]),
                             planned.scratch_elems * elem_bytes};
  std::vector<uint32_t> registrations;
  for (uint32_t i = 0; i < 3; ++i) {
    if (bytes[i] == 0 || !args.buffers[i].base) continue;
    if (i == 1 && args.registrations[0] && args.buffers[1].base == args.buffers[0].base &&
        bytes[1] <= bytes[0]) {
      args.registrations[1] = args.registrations[0];  // in place
      continue;
    }
    const Result<uint32_t> registration =
        comm_->port_link()->register_temporary(args.buffers[i].base, bytes[i]);
    if (!registration.ok()) continue;
    args.registrations[i] = *registration;
    registrations.push_back(*registration);
  }
  return registrations;
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
    call_log_->post(planned.record);
    WEFT_TRY(compare_calls());
  }
  return is_of_pairs || !planned.call.input_table.empty() ? announce_messages(planned) : Status();
}

// The same for messages between this rank and single others.
Status CollectiveRunner::announce_messages(const PlannedRun& planned) {
  const Program& program = *planned.program;
  const RunCall& call = planned.call;
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
       [&](int peer, const CallRecord& record) { call_log_->post_send(peer, record); });
  each(program.senders, call.output_table, program.is_of_pairs ? "recv" : "all_to_all",
       [&](int peer, const CallRecord& record) { call_log_->post_receive(peer, record); });
  if (!config().check) return {};
  Status status;
  each(program.senders, call.output_table, "", [&](int peer, const CallRecord&) {
    if (status.ok())
      status =
          call_log_->compare_receive(peer, Deadline::after_s(timeout_s_), [this] { return is_stopped(); });
  });
  return status.ok() ? status : logged(status);
}

void CollectiveRunner::ask_huge_pages(const PlannedRun& planned, std::byte* input, std::byte* output) {
  const RunCall& call = planned.call;
  const uint64_t* used_chunks = planned.program->used_chunks;
  if (!call.input_table.empty()) return;
  const uint64_t part_bytes = call.part_elems * element_bytes(call.element);
  auto bytes_of = [&](uint64_t chunks) { return (chunks + call.per_part - 1) / call.per_part * part_bytes; };
  huge_pages_.used(input, bytes_of(used_chunks[0]));
  if (output != input) huge_pages_.used(output, bytes_of(used_chunks[1]));
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

}  // namespace weft
