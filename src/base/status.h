// SPDX-License-Identifier: Apache-2.0
//
// Status says whether an operation worked and, if not, why; Result<T> is a Status or a value.
//   Result<Window> w = Window::create(comm, bytes);
//   if (!w.ok()) return w.status();
// Threads: values, no shared state. The first to know a cause logs it (logged()); callers pass it on in
// silence. Nothing in Weft aborts; exceptions start at the Python boundary, where Code picks the exception.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "base/text.h"

namespace weft {

enum class Code {
  kOk = 0,
  kInvalid,      // an argument is wrong: its name, what was given, what is allowed
  kCapacity,     // valid, but does not fit what was allocated
  kPeerLost,     // a peer died or stayed silent past the deadline
  kUnsupported,  // this machine, build or transport cannot do it
  kSystem,       // the operating system, driver or a library refused
  kClosed,       // used after destroy
};

const char* to_string(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  // Builds a Status whose message is `pattern` with each {} replaced in order.
  template <class... Args>
  static Status make(Code code, std::string_view pattern, const Args&... args) {
    return Status(code, text(pattern, args...));
  }
  template <class... Args>
  static Status invalid(std::string_view pattern, const Args&... args) {
    return make(Code::kInvalid, pattern, args...);
  }
  // kSystem with the text of `error_number` (an errno) after the message.
  template <class... Args>
  static Status from_errno(int error_number, std::string_view pattern, const Args&... args) {
    return Status(Code::kSystem, text(pattern, args...) + ": " + errno_text(error_number));
  }

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  static std::string errno_text(int error_number);

  Code code_ = Code::kOk;
  std::string message_;
};

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace weft

// Returns the Status of `expr` from the enclosing function unless it is ok.
#define WEFT_TRY(expr)                                 \
  do {                                                 \
    ::weft::Status weft_try_status = (expr);           \
    if (!weft_try_status.ok()) return weft_try_status; \
  } while (false)

#define WEFT_CONCAT_(a, b) a##b
#define WEFT_CONCAT(a, b) WEFT_CONCAT_(a, b)
// Declares or assigns `lhs` from a Result, or returns its Status.
#define WEFT_TRY_ASSIGN(lhs, expr) WEFT_TRY_ASSIGN_(WEFT_CONCAT(weft_result_, __LINE__), lhs, expr)
#define WEFT_TRY_ASSIGN_(result, lhs, expr) \
  auto result = (expr);                     \
  if (!result.ok()) return result.status(); \
  lhs = std::move(*result)
