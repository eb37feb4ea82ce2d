// SPDX-License-Identifier: Apache-2.0
//
// A ProgramBook holds verified programs, and which of them serves what, for callers without Python. Python
// compiles it (weft.collectives.book); docs/decisions/0007-python-compiles-a-program-book.md says why.
//   WEFT_TRY_ASSIGN(ProgramBook book, ProgramBook::read(path, comm->size(), BookMachine::kNvlink));
//   const BookChoice* choice = book.choose(BookCollective::kAllReduce, bytes);
//   WEFT_TRY_ASSIGN(uint32_t id, runner->load(book.text(choice->program, rank, root)));
// The choice depends on what all ranks of a call agree on, so all choose alike if all read the same book:
// digest() is for comparing. Programs with a root are those of root 0, renumbered.
// The file: 8 bytes of magic, then 32-bit words in the host's order; program_book.cc says which.
// Threads: immutable after read().
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "collective/runner.h"

namespace weft {

// The numbers of weft.collectives.book.
enum class BookCollective : uint32_t {
  kAllReduce = 0,  // in place
  kAllGather,      // out of place, or the input is the rank's part of the output
  kReduceScatter,  // out of place, or the output is the rank's part of the input
  kAllToAll,       // out of place
  kBroadcast,      // in place
  kReduce,         // in place; only the root's buffer changes
  kExchange,       // all to all with sizes of their own, given by tables
  kGather,         // of these, exchanges alone; sizes are those of one part
  kScatter,
};
enum class BookMachine : uint32_t { kCpu = 0, kNvlink };

struct BookProgram {
  std::string name;
  Protocol protocol;
  uint32_t per_part;
  uint32_t channels;
  uint32_t scratch_chunks;
  bool refers_only;   // as in ProgramText
  size_t first_word;  // of the ranks' texts
};

// What serves a call: a program, or the exchange kernel, all_reduce by lines in one step or in two.
enum class BookMode : uint32_t { kProgram = 0, kLinesAtOnce, kLines, kPlaces };

// Serves calls of up to max_bytes of the full buffer.
struct BookChoice {
  BookCollective collective;
  BookMode mode;
  uint64_t max_bytes;
  uint32_t program;  // where mode is kProgram
  uint32_t slice_bytes;
  uint32_t num_sms;
};

class ProgramBook {
 public:
  // Reads what is for `ranks` and `machine`. Errors: kSystem when the file cannot be read; kInvalid, saying
  // where, when it is damaged, of another version, or has nothing for so many ranks.
  static Result<ProgramBook> read(const std::string& path, uint32_t ranks, BookMachine machine);

  // Null: nothing serves this.
  const BookChoice* choose(BookCollective collective, uint64_t num_bytes) const;
  const BookProgram& program(uint32_t number) const { return programs_[number]; }
  const std::vector<BookChoice>& choices() const { return choices_; }
  // The program of `rank` for calls whose root is `root`.
  ProgramText text(uint32_t program, uint32_t rank, uint32_t root) const;

  // The most channels that a program uses: exchange programs, and the others.
  uint32_t channels(bool of_exchange) const;
  uint64_t digest() const { return digest_; }

 private:
  class Reader;
  uint32_t ranks_ = 0;
  std::vector<uint32_t> words_;
  std::vector<BookProgram> programs_;
  std::vector<BookChoice> choices_;
  uint64_t digest_ = 0;
};

}  // namespace weft
