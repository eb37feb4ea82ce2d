// SPDX-License-Identifier: Apache-2.0
#include "collective/compiled.h"

#include "base/text.h"

namespace weft {
namespace {

std::string waits_source(const ProgramText& text, const ProgramStep& step) {
  if (step.waits == 0) return "const ProgramWait* waits = nullptr;";
  std::string rows;
  for (uint32_t i = 0; i < step.waits; ++i) {
    const ProgramWait& wait = text.waits[step.first_wait + i];
    rows += weft::text("{}{{}, {}, {}}", i ? ", " : "", wait.block, wait.step, wait.steps);
  }
  return weft::text("const ProgramWait waits[] = {{}};", rows);
}

std::string row_source(const ProgramStep& s) {
  return weft::text("{{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}}", s.op, s.src_buffer,
                    s.src_index, s.dst_buffer, s.dst_index, s.count, s.first_wait, s.waits, s.needed,
                    s.direct, s.remote_buffer, s.remote_index, s.fused, s.ends_sum);
}

std::string step_source(const ProgramText& text, uint32_t number, uint32_t at) {
  const ProgramBlock& b = text.blocks[number];
  const ProgramStep* s = &text.steps[b.first_step + at];
  std::string out = weft::text("      case {}: {\n", number << 16 | at);
  out += weft::text("        const ProgramBlock block{{}, {}, {}, {}, {}, {}};\n", b.send_peer, b.recv_peer,
                    b.channel, b.first_step, b.steps, b.grants);
  out += "        const ProgramStep steps[] = {";
  for (uint32_t i = 0; i <= s->fused; ++i) out += (i ? ", " : "") + row_source(s[i]);
  out += "};\n        " + waits_source(text, *s) + "\n        return f(block, steps[0], waits);\n      }\n";
  return out;
}

}  // namespace

bool can_compile(const ProgramText& text) {
  return text.steps.size() <= kMaxCompiledSteps && text.blocks.size() < (1u << 15);
}

std::string program_source(const ProgramText& text) {
  std::string cases;
  for (uint32_t number = 0; number < text.blocks.size(); ++number)
    for (uint32_t at = 0; at < text.blocks[number].steps; ++at) {
      cases += step_source(text, number, at);
      at += text.steps[text.blocks[number].first_step + at].fused;
    }
  return "namespace weft {\n"
         "// A collective program, as constants.\n"
         "struct ConstantSteps {\n"
         "  template <class F>\n"
         "  WEFT_DEVICE program::Verdict with_step(uint32_t number, uint32_t at, F f) const {\n"
         "    switch (number << 16 | at) {\n" +
         cases +
         "    }\n"
         "    return program::kFault;\n"
         "  }\n"
         "};\n"
         "template <class MeshT, class Shape>\n"
         "WEFT_KERNEL void run_compiled(const ProgramArgs& a, const MeshT& mesh, const Shape& shape) {\n"
         "  run_steps(ConstantSteps{}, a, mesh, shape);\n"
         "}\n"
         "}  // namespace weft\n";
}

}  // namespace weft
