// SPDX-License-Identifier: Apache-2.0
#include "moe/low_latency_known.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "jit/source.h"

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

KernelKey dispatch_key() {
  KernelKey key{"kernels/moe/low_latency_dispatch.cuh", "low_latency_dispatch", "LowLatencyDispatchArgs",
                "MappedMesh"};
  key.shape = {{"ranks", 4}, {"top_k", 8}};
  key.threads_per_block = 512;
  return key;
}

LowLatencyDispatchArgs dispatch_args() {
  LowLatencyDispatchArgs args{};
  args.call.max_tokens = 128;
  args.call.tokens = 100;
  args.call.half_bytes = uint64_t{5} << 30;
  args.call.batches = batches_of(128);
  args.call.batch_tokens = Divisor::of(3);
  args.source_jobs = Divisor::of(512);
  return args;
}

TEST(LowLatencyKnown, NeverLeavesTheKernelAsItIs) {
  const KernelKey key = with_known(dispatch_key(), dispatch_args(), "never");
  EXPECT_EQ(key, dispatch_key());
  EXPECT_EQ(kernel_source(key, 384, 0),
            "#include \"kernels/moe/low_latency_dispatch.cuh\"\n"
            "#include \"transports/mapped/channel.cuh\"\n"
            "struct Shape {\n"
            "  static constexpr int64_t ranks = 4;\n"
            "  static constexpr int64_t top_k = 8;\n"
            "};\n"
            "static_assert(sizeof(weft::LowLatencyDispatchArgs) == 384);\n"
            "extern \"C\" __global__ void __launch_bounds__(512, 1)\n"
            "weft_low_latency_dispatch(const __grid_constant__ weft::LowLatencyDispatchArgs args,\n"
            "            const __grid_constant__ weft::MappedMesh mesh) {\n"
            "  weft::low_latency_dispatch<weft::MappedMesh, Shape>(args, mesh, Shape{});\n"
            "}\n");
}

TEST(LowLatencyKnown, AFunctionBeforeTheKernelSetsWhatIsKnown) {
  const KernelKey key = with_known(dispatch_key(), dispatch_args(), "sizes");
  EXPECT_EQ(key.name, "low_latency_dispatch_of_facts");
  EXPECT_EQ(key.shape, dispatch_key().shape);
  EXPECT_THAT(key.prelude, HasSubstr("  LowLatencyDispatchArgs args = given;\n"));
  EXPECT_THAT(key.prelude, HasSubstr("  args.call.max_tokens = 128u;\n"));
  EXPECT_THAT(key.prelude, HasSubstr("  args.call.half_bytes = 5368709120u;\n"));
  EXPECT_THAT(key.prelude, HasSubstr("  low_latency_dispatch(args, mesh, shape);\n"));
  EXPECT_THAT(kernel_source(key, 0, 0),
              HasSubstr("weft::low_latency_dispatch_of_facts<weft::MappedMesh, Shape>(args"));
}

TEST(LowLatencyKnown, TokensAndGridAreOfCallsAlone) {
  const std::string sizes = with_known(dispatch_key(), dispatch_args(), "sizes").prelude;
  const std::string calls = with_known(dispatch_key(), dispatch_args(), "calls").prelude;
  const Divisor three = Divisor::of(3);
  for (const std::string& line :
       {std::string("args.call.tokens = 100u;"), std::string("args.source_jobs.value = 512u;"),
        "args.call.batch_tokens.magic = " + std::to_string(three.magic) + "u;"}) {
    EXPECT_THAT(sizes, Not(HasSubstr(line)));
    EXPECT_THAT(calls, HasSubstr(line));
  }
}

// Launches differ in tensors, phases and call slots, and these in what they wait for.
TEST(LowLatencyKnown, WhatLaunchesDifferInStaysAnArgument) {
  const std::string calls = with_known(dispatch_key(), dispatch_args(), "calls").prelude;
  for (const char* field : {"phases", "call_slot", "wait", "topk_idx", "args.x ", "routes", "dispatch_epoch"})
    EXPECT_THAT(calls, Not(HasSubstr(field)));
  EXPECT_THAT(calls, Not(HasSubstr("receive_splits")));  // of value 0
}

TEST(LowLatencyKnown, MemoryIsKnownWhereThereIsNone) {
  const KernelKey combine{"kernels/moe/low_latency_combine.cuh", "low_latency_combine",
                          "LowLatencyCombineArgs"};
  LowLatencyCombineArgs args{};
  const std::string without = with_known(combine, args, "sizes").prelude;
  EXPECT_THAT(without, HasSubstr("args.call.masked = nullptr;"));
  EXPECT_THAT(without, HasSubstr("args.signals = nullptr;"));
  uint32_t masks[4] = {};
  args.call.masked = masks;
  args.signals_per_expert = 1;
  const std::string with = with_known(combine, args, "sizes").prelude;
  EXPECT_THAT(with, Not(HasSubstr("masked")));
  EXPECT_THAT(with, Not(HasSubstr("args.signals =")));
}

}  // namespace
}  // namespace weft
