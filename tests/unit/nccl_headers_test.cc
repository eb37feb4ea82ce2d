// SPDX-License-Identifier: Apache-2.0
//
// NCCL's device headers: which are taken, and what is changed in them.
#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/config.h"
#include "transports/nccl/device_headers.h"

namespace weft::nccl_link {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

// A wheel's folders with headers of one release, gone at the end.
class Wheel {
 public:
  explicit Wheel(int minor) : root_(fs::temp_directory_path() / text("weft-wheel-{}-{}", getpid(), minor)) {
    fs::create_directories(root_ / "include/nccl_device/impl");
    fs::create_directories(root_ / "lib");
    write("nccl.h", text("#define NCCL_MAJOR 2\n#define NCCL_MINOR {}\n#define NCCL_PATCH 7\n"
                         "#define NCCL_VERSION_CODE 1\n#include <cuda_runtime.h>\n"
                         "typedef struct ncclComm* ncclComm_t;\ntypedef enum {{ ncclSuccess = 0,\n"
                         "               ncclTimeout = 8 }} ncclResult_t;\nint ncclAllReduce();\n",
                         minor));
    write("nccl_device/impl/one.h", "#include \"../two.h\"\n");
  }
  ~Wheel() { fs::remove_all(root_); }

  void write(const std::string& name, const std::string& words) const {
    std::ofstream(root_ / "include" / name) << words;
  }
  std::string library() const { return (root_ / "lib/libnccl.so.2").string(); }
  std::string include() const { return (root_ / "include").string(); }

 private:
  const fs::path root_;
};

TEST(NcclHeaders, ThoseBesideTheLibraryAreTaken) {
  const Wheel wheel(30);
  const auto found = find_headers(wheel.library(), 23007);
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ(*found, wheel.include());
}

TEST(NcclHeaders, ThoseOfAnotherReleaseAreRefusedByBothVersions) {
  const Wheel wheel(31);
  const auto found = find_headers(wheel.library(), 23007);
  EXPECT_EQ(found.status().code(), Code::kUnsupported);
  EXPECT_THAT(found.status().message(), AllOf(HasSubstr("headers of NCCL 2.31.7"), HasSubstr("is 2.30.7"),
                                              HasSubstr("WEFT_NCCL_INCLUDE")));
}

TEST(NcclHeaders, WhereThereAreNoneTheFoldersAreNamed) {
  const auto found = find_headers("/nowhere/lib/libnccl.so.2", 23007);
  EXPECT_EQ(found.status().code(), Code::kUnsupported);
  EXPECT_THAT(found.status().message(), AllOf(HasSubstr("/nowhere/include"), HasSubstr("NCCL 2.30.7")));
}

TEST(NcclHeaders, AFolderThatIsNamedIsTakenAlone) {
  const Wheel wheel(30), other(29);
  setenv("WEFT_NCCL_INCLUDE", other.include().c_str(), 1);
  config_reload();
  EXPECT_THAT(find_headers(wheel.library(), 23007).status().message(), HasSubstr("headers of NCCL 2.29.7"));
  EXPECT_TRUE(find_headers(wheel.library(), 22907).ok());
  unsetenv("WEFT_NCCL_INCLUDE");
  config_reload();
}

TEST(NcclHeaders, OneBackEndIsSwitchedOnAndTheLibrarysSizeAsserted) {
  const Wheel wheel(30);
  const auto sources = device_sources(wheel.include(), GinType::kGdaki, 240);
  ASSERT_TRUE(sources.ok()) << sources.status().message();
  EXPECT_THAT((*sources)->options,
              AllOf(Contains("-DNCCL_GIN_GDAKI_ENABLE=1"), Contains("-DNCCL_GIN_PROXY_ENABLE=0"),
                    Contains("-DWEFT_NCCL_DEV_COMM_BYTES=240")));
  EXPECT_THAT((*sources)->headers,
              Contains(Pair("nccl_device/impl/one.h", "#include \"nccl_device/two.h\"\n")));
  EXPECT_EQ(*device_sources(wheel.include(), GinType::kGdaki, 240), *sources);  // kernels are found by it
  EXPECT_NE(*device_sources(wheel.include(), GinType::kProxy, 240), *sources);
}

TEST(NcclHeaders, OfNcclHOnlyWhatDeviceCodeUsesIsLeft) {
  const Wheel wheel(30);
  std::ifstream file(wheel.include() + "/nccl.h");
  const std::string all((std::istreambuf_iterator<char>(file)), {});
  EXPECT_THAT(for_nvrtc("nccl.h", all),
              AllOf(HasSubstr("#define NCCL_VERSION_CODE 1"), HasSubstr("ncclTimeout = 8"),
                    HasSubstr("typedef struct ncclComm* ncclComm_t;"), Not(HasSubstr("cuda_runtime")),
                    Not(HasSubstr("ncclAllReduce"))));
}

TEST(NcclHeaders, AttributesBehindAStructGoToItsFront) {
  EXPECT_EQ(
      for_nvrtc("a.h",
                "typedef struct {\n  struct { int x; } in;\n} __attribute__((packed, aligned(16))) T;\n"),
      "typedef struct  __attribute__((packed, aligned(16)))  {\n  struct { int x; } in;\n}  T;\n");
  const std::string function = "void f() {} __attribute__((used)) int g() { return 1; }\n";
  EXPECT_EQ(for_nvrtc("a.h", function), function);
}

TEST(NcclHeaders, PrototypesOfHostFunctionsGo) {
  EXPECT_EQ(for_nvrtc("a.h", "int a;\nNCCL_EXTERN_C __host__ int f(int x,\n int y);\nint b;\n"),
            "int a;\n\nint b;\n");
  const std::string kept = "__host__ __device__ int f(int x);\n__host__ int g() { return 1; }\n";
  EXPECT_EQ(for_nvrtc("a.h", kept), kept);
  EXPECT_EQ(for_nvrtc("nccl_device/utility.h", "__host__ int f();\n"), "__host__ int f();\n");
}

TEST(NcclHeaders, WordsThatNvrtcLacksAreReplaced) {
  EXPECT_EQ(for_nvrtc("a.h", "  typeof(x) y = __typeof__ (x)(1); __builtin_memcpy(a, b, 1);\n"),
            "  WEFT_TYPEOF(x) y = WEFT_TYPEOF(x)(1); memcpy(a, b, 1);\n");
  EXPECT_EQ(for_nvrtc("a.h", "  uint4 u[sizeof(T) / 16];\n"),
            "  uint4 u[sizeof(T) / 16 ? sizeof(T) / 16 : 1];\n");
  EXPECT_EQ(for_nvrtc("a.h", "#define DOCA_TYPEOF(x) decltype(x)\n"),
            "#define DOCA_TYPEOF(x) WEFT_TYPEOF(x)\n");
  EXPECT_EQ(for_nvrtc("nccl_device/gin/x.h",
                      "#include <stdint.h>\n#include <cuda/atomic>\n#include \"../net.h\"\n"),
            "\n#include <cuda/atomic>\n#include \"nccl_device/net.h\"\n");
}

}  // namespace
}  // namespace weft::nccl_link
