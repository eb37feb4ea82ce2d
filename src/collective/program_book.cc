// SPDX-License-Identifier: Apache-2.0
//
// After the magic: version, words of a block, of a step, of a wait, number of programs, number of choices.
// A program: words that follow, ranks, protocol, chunks per part, channels, scratch chunks, whether no
// message needs to fit a slot, bytes of the name, the name padded to words; then for every rank the numbers
// of blocks, steps and waits, and their words. A choice: machine, ranks, collective, mode, program (counted
// over the whole file), slice bytes, SMs, and the limit in bytes, low word first.
#include "collective/program_book.h"

#include <algorithm>
#include <cstring>
#include <fstream>

#include "base/private_path.h"

namespace weft {
namespace {

constexpr char kMagic[8] = {'w', 'e', 'f', 't', 'b', 'o', 'o', 'k'};
constexpr uint32_t kVersion = 5;
constexpr size_t kBlockWords = sizeof(ProgramBlock) / 4, kStepWords = sizeof(ProgramStep) / 4,
                 kWaitWords = sizeof(ProgramWait) / 4;
constexpr uint64_t kMaxFileBytes = 256 << 20;

Result<std::string> read_any(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return Status::make(Code::kSystem, "{}: cannot be read", path);
  std::string bytes(std::min(static_cast<uint64_t>(file.tellg()), kMaxFileBytes + 1), '\0');
  file.seekg(0);
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file) return Status::make(Code::kSystem, "{}: ends before its {} bytes", path, bytes.size());
  return bytes;
}

Result<std::vector<uint32_t>> read_words(const std::string& path, bool is_private) {
  WEFT_TRY_ASSIGN(const std::string bytes, is_private ? read_private(path, kMaxFileBytes) : read_any(path));
  if (bytes.size() <= sizeof kMagic || bytes.size() > kMaxFileBytes || bytes.size() % 4 != 0 ||
      std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0)
    return Status::invalid("{}: its {} bytes are not a book of programs", path, bytes.size());
  std::vector<uint32_t> words((bytes.size() - sizeof kMagic) / 4);
  std::memcpy(words.data(), bytes.data() + sizeof kMagic, words.size() * 4);
  return words;
}

template <class T>
const uint32_t* copy_rows(std::vector<T>& rows, uint32_t count, const uint32_t* from) {
  rows.resize(count);
  if (count) std::memcpy(rows.data(), from, count * sizeof(T));
  return from + count * sizeof(T) / 4;
}

}  // namespace

// Takes words one after the other; after the end it gives zeros and is not ok().
class ProgramBook::Reader {
 public:
  explicit Reader(const std::vector<uint32_t>& words) : words_(words) {}
  uint32_t next() { return has(1) ? words_[at_++] : 0; }
  void skip(size_t count) {
    if (has(count)) at_ += count;
  }
  bool has(size_t count) {
    if (words_.size() - at_ < count) is_ok_ = false;
    return is_ok_;
  }
  size_t at() const { return at_; }
  bool ok() const { return is_ok_; }
  std::string name(uint32_t bytes) {
    const size_t count = (size_t{bytes} + 3) / 4;
    if (!has(count)) return "";
    std::string text(reinterpret_cast<const char*>(&words_[at_]), bytes);
    at_ += count;
    return text;
  }

 private:
  const std::vector<uint32_t>& words_;
  size_t at_ = 0;
  bool is_ok_ = true;
};

Result<ProgramBook> ProgramBook::read(const std::string& path, uint32_t ranks, BookMachine machine,
                                      bool is_private) {
  ProgramBook book;
  book.ranks_ = ranks;
  WEFT_TRY_ASSIGN(book.words_, read_words(path, is_private));
  Reader in(book.words_);
  const uint32_t version = in.next(), block_words = in.next(), step_words = in.next(), wait_words = in.next();
  if (version != kVersion || block_words != kBlockWords || step_words != kStepWords ||
      wait_words != kWaitWords)
    return Status::invalid("{}: version {} with rows of {}, {} and {} words, allowed: {} with {}, {} and {}",
                           path, version, block_words, step_words, wait_words, kVersion, kBlockWords,
                           kStepWords, kWaitWords);
  const uint32_t num_programs = in.next(), num_choices = in.next();
  std::vector<uint32_t> numbers;  // of the file's programs among ours; ~0: for other ranks
  for (uint32_t i = 0; i < num_programs && in.ok(); ++i) {
    const uint32_t length = in.next();
    const size_t end = in.at() + length;
    if (!in.has(length)) break;
    const bool is_ours = in.next() == ranks;
    numbers.push_back(is_ours ? static_cast<uint32_t>(book.programs_.size()) : ~0u);
    if (is_ours) {
      BookProgram program{};
      program.protocol = static_cast<Protocol>(in.next());
      program.per_part = in.next();
      program.channels = in.next();
      program.scratch_chunks = in.next();
      program.refers_only = in.next() != 0;
      program.name = in.name(in.next());
      program.first_word = in.at();
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        const uint64_t blocks = in.next(), steps = in.next(), waits = in.next();
        in.skip(blocks * kBlockWords + steps * kStepWords + waits * kWaitWords);
      }
      if (!in.ok() || in.at() != end || program.per_part == 0 ||
          static_cast<uint32_t>(program.protocol) >= kProtocols)
        return Status::invalid("{}: program {} is damaged", path, i);
      book.programs_.push_back(std::move(program));
    }
    in.skip(end - in.at());
  }
  for (uint32_t i = 0; i < num_choices && in.ok(); ++i) {
    const auto on = static_cast<BookMachine>(in.next());
    const uint32_t of_ranks = in.next();
    const auto collective = static_cast<BookCollective>(in.next());
    const auto mode = static_cast<BookMode>(in.next());
    const uint32_t number = in.next();
    BookChoice choice{collective, mode, 0, 0, in.next(), in.next()};
    choice.max_bytes = in.next();
    choice.max_bytes |= uint64_t{in.next()} << 32;
    if (on != machine || of_ranks != ranks) continue;
    const bool is_program = mode == BookMode::kProgram;
    const bool is_known = is_program ? number < numbers.size() && numbers[number] != ~0u
                                     : mode <= BookMode::kPlaces && collective != BookCollective::kExchange;
    if (!is_known || collective > BookCollective::kScatter)
      return Status::invalid("{}: choice {} is damaged", path, i);
    if (is_program) choice.program = numbers[number];
    book.choices_.push_back(choice);
  }
  if (!in.ok()) return Status::invalid("{}: ends too soon", path);
  if (book.choices_.empty()) return Status::invalid("{}: has nothing for {} ranks", path, ranks);
  book.digest_ = 0xcbf29ce484222325;
  for (const uint32_t word : book.words_) book.digest_ = (book.digest_ ^ word) * 0x100000001b3;
  return book;
}

const BookChoice* ProgramBook::choose(BookCollective collective, uint64_t num_bytes) const {
  const BookChoice* best = nullptr;
  for (const BookChoice& choice : choices_) {
    const bool serves = choice.collective == collective && num_bytes <= choice.max_bytes;
    if (serves && (!best || choice.max_bytes < best->max_bytes)) best = &choice;
  }
  return best;
}

ProgramText ProgramBook::text(uint32_t number, uint32_t rank, uint32_t root) const {
  const BookProgram& program = programs_[number];
  ProgramText text;
  text.name = program.name;
  text.scratch_chunks = program.scratch_chunks;
  text.refers_only = program.refers_only;
  const uint32_t wanted = (rank + ranks_ - root) % ranks_;
  const uint32_t* at = &words_[program.first_word];
  for (uint32_t r = 0; r <= wanted; ++r) {
    const uint32_t blocks = at[0], steps = at[1], waits = at[2];
    at = copy_rows(text.blocks, blocks, at + 3);
    at = copy_rows(text.steps, steps, at);
    at = copy_rows(text.waits, waits, at);
  }
  const auto rank_of = [&](int32_t peer) {
    return peer < 0 ? peer : static_cast<int32_t>((static_cast<uint32_t>(peer) + root) % ranks_);
  };
  for (ProgramBlock& block : text.blocks) {
    block.send_peer = rank_of(block.send_peer);
    block.recv_peer = rank_of(block.recv_peer);
  }
  return text;
}

uint32_t ProgramBook::channels(bool of_exchange) const {
  uint32_t most = 1;
  for (const BookChoice& choice : choices_)
    if (choice.mode == BookMode::kProgram && (choice.collective == BookCollective::kExchange) == of_exchange)
      most = std::max(most, programs_[choice.program].channels);
  return most;
}

}  // namespace weft
