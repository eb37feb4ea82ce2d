// SPDX-License-Identifier: Apache-2.0
#include "moe/low_latency_known.h"

#include <string>

#include "base/text.h"

namespace weft {
namespace {

// Lines that set fields of `args` to constants.
class Fields {
 public:
  void set(const std::string& field, uint64_t value) { lines_ += text("  args.{} = {}u;\n", field, value); }
  // Where memory is stays an argument; that there is none is known.
  void set(const std::string& field, const void* memory) {
    if (!memory) lines_ += text("  args.{} = nullptr;\n", field);
  }
  void set(const std::string& field, const Divisor& by) {
    if (by.value == 0) return;
    set(field + ".value", by.value);
    set(field + ".magic", by.magic);
    set(field + ".first_shift", by.first_shift);
    set(field + ".last_shift", by.last_shift);
  }
  const std::string& lines() const { return lines_; }

 private:
  std::string lines_;
};

// A field's name and its value, spelled once.
#define WEFT_KNOWN(field) known.set(#field, args.field)

template <class Args>
void add_sizes_of_any(Fields& known, const Args& args) {
  WEFT_KNOWN(call.region);
  WEFT_KNOWN(call.half_bytes);
  WEFT_KNOWN(call.lines_at);
  WEFT_KNOWN(call.masked);
  WEFT_KNOWN(call.silent);
  WEFT_KNOWN(call.may_mask);
  WEFT_KNOWN(call.max_tokens);
  WEFT_KNOWN(call.experts);
  WEFT_KNOWN(call.id_bytes);
  WEFT_KNOWN(call.lines);
  WEFT_KNOWN(call.batches.count);
  WEFT_KNOWN(call.batches.capacity);
  WEFT_KNOWN(call.page.control);
  WEFT_KNOWN(call.page.own);
  WEFT_KNOWN(call.page.own_bytes);
  for (uint32_t word = 0; word < LowLatencyHandshake::kWords; ++word)
    known.set(text("call.handshake.words[{}]", word), args.call.handshake.words[word]);
  WEFT_KNOWN(x_row_bytes);
  WEFT_KNOWN(rail_tables);
}

template <class Args>
void add_calls_of_any(Fields& known, const Args& args) {
  WEFT_KNOWN(call.tokens);
  WEFT_KNOWN(call.batch_tokens);
  WEFT_KNOWN(receive_splits);
}

void add_sizes(Fields& known, const LowLatencyDispatchArgs& args) {
  add_sizes_of_any(known, args);
  WEFT_KNOWN(scale_expert_stride);
  WEFT_KNOWN(scale_row_stride);
  WEFT_KNOWN(scale_word_stride);
  WEFT_KNOWN(tiled_scales);
  WEFT_KNOWN(line_tokens);
  WEFT_KNOWN(expert_rows);
  WEFT_KNOWN(max_rows);
}
void add_calls(Fields& known, const LowLatencyDispatchArgs& args) {
  add_calls_of_any(known, args);
  WEFT_KNOWN(source_jobs);
}

void add_sizes(Fields& known, const LowLatencyCombineArgs& args) {
  add_sizes_of_any(known, args);
  WEFT_KNOWN(pieces);
  WEFT_KNOWN(owner_jobs);
  WEFT_KNOWN(sent_id_bytes);
  WEFT_KNOWN(has_saved_weights);
  WEFT_KNOWN(signal_value);
  WEFT_KNOWN(signals_per_expert);
  WEFT_KNOWN(signal_rows);
  if (args.signals_per_expert == 0) WEFT_KNOWN(signals);
  WEFT_KNOWN(answer_room);
  WEFT_KNOWN(answer_parts);
  WEFT_KNOWN(domain_ranks);
  WEFT_KNOWN(domain_sources);
}
void add_calls(Fields& known, const LowLatencyCombineArgs& args) {
  add_calls_of_any(known, args);
  WEFT_KNOWN(piece_splits);
}
#undef WEFT_KNOWN

// The key of a function that calls the kernel of `key` so.
KernelKey in_front(KernelKey key, const std::string& lines) {
  const std::string kernel = key.name;
  key.name += "_of_facts";
  const std::string head = text("WEFT_KERNEL void {}(const {}& given, const MeshT& mesh, const Shape& shape)",
                                key.name, key.args_type);
  key.prelude = "namespace weft {\ntemplate <class MeshT, class Shape>\n" + head + " {\n" +
                text("  {} args = given;\n{}  {}(args, mesh, shape);\n", key.args_type, lines, kernel) +
                "}\n}\n";
  return key;
}

template <class Args>
KernelKey with_known_of(KernelKey key, const Args& args, std::string_view which) {
  if (which == "never") return key;
  Fields known;
  add_sizes(known, args);
  if (which == "calls") add_calls(known, args);
  return in_front(std::move(key), known.lines());
}

}  // namespace

KernelKey with_known(KernelKey key, const LowLatencyDispatchArgs& args, std::string_view which) {
  return with_known_of(std::move(key), args, which);
}
KernelKey with_known(KernelKey key, const LowLatencyCombineArgs& args, std::string_view which) {
  return with_known_of(std::move(key), args, which);
}

}  // namespace weft
