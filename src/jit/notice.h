// SPDX-License-Identifier: Apache-2.0
//
// CompileNotice tells people that kernels are being compiled, which takes seconds, and how long it took.
//   CompileNotice notice("dispatch_rows", "sm_90a");   // until the end of its scope
// Kernels that are compiled at once share one line: "compiled combine_rows, dispatch_rows for sm_90a in 2.1 s".
// It goes to the log (info); where standard error is a terminal and the log does not show it, it stands there
// while the work lasts. Threads: any.
#pragma once

#include <string>

namespace weft {

class CompileNotice {
 public:
  CompileNotice(const std::string& kernel, const std::string& target);
  ~CompileNotice();
  CompileNotice(const CompileNotice&) = delete;

  // From now on nothing of this process goes to the terminal: of many ranks on one, the first speaks.
  static void keep_off_terminal();
};

}  // namespace weft
