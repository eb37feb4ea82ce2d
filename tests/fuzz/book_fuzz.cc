// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer target: files of compiled collectives (program books). tools/fuzz builds and runs it, from a book of
// two small programs on. What is read must give every rank's program, for every root, from inside of the file.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

#include "base/text.h"
#include "collective/program_book.h"

using namespace weft;

namespace {

int file() {
  static const int fd = memfd_create("book", MFD_CLOEXEC);
  return fd;
}

void walk(const ProgramBook& book, uint32_t ranks) {
  for (uint32_t program = 0; program < 1000; ++program) {
    bool is_used = false;
    for (const BookChoice& choice : book.choices())
      is_used = is_used || (choice.mode == BookMode::kProgram && choice.program == program);
    if (!is_used) continue;
    for (uint32_t rank = 0; rank < ranks; ++rank)
      for (uint32_t root = 0; root < ranks; ++root) (void)book.text(program, rank, root);
    (void)book.program(program).name.size();
  }
  for (uint32_t collective = 0; collective < 7; ++collective)
    for (uint64_t bytes : {uint64_t{1}, uint64_t{1} << 20, uint64_t{1} << 40})
      (void)book.choose(static_cast<BookCollective>(collective), bytes);
  (void)book.channels(false);
  (void)book.channels(true);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (ftruncate(file(), 0) != 0 || pwrite(file(), data, size, 0) != static_cast<ssize_t>(size)) std::abort();
  const std::string path = text("/proc/self/fd/{}", file());
  for (const BookMachine machine : {BookMachine::kCpu, BookMachine::kNvlink})
    for (uint32_t ranks : {2u, 3u})
      if (auto book = ProgramBook::read(path, ranks, machine); book.ok()) walk(*book, ranks);
  return 0;
}
