// SPDX-License-Identifier: Apache-2.0
//
// The counters of this process, and those of others from the bytes of their pages, as plain data.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <utility>

#include "base/log.h"
#include "base/tally.h"
#include "bind/bind.h"

namespace nb = nanobind;

namespace weft {
namespace {

// A name may have been cut inside a letter, and may be anything in memory of another process.
nb::object to_text(const std::string& name) {
  return nb::steal(
      PyUnicode_DecodeUTF8(name.data(), static_cast<Py_ssize_t>(name.size()), "backslashreplace"));
}

nb::dict to_dict(const TallySnapshot::Operation& operation) {
  nb::dict to;
  to["operation"] = to_text(operation.name);
  to["transport"] = to_text(operation.transport);
  to["calls"] = operation.calls;
  to["bytes"] = operation.bytes;
  to["errors"] = operation.errors;
  to["seconds"] = static_cast<double>(operation.busy_ns) / 1e9;
  to["waits"] = operation.waits;
  to["wait_seconds"] = static_cast<double>(operation.waited_ns) / 1e9;
  to["took"] = operation.took;
  return to;
}

nb::dict to_dict(const TallySnapshot::Peer& peer) {
  nb::dict to;
  to["peer"] = to_text(peer.name);
  to["transport"] = to_text(peer.transport);
  to["messages"] = peer.messages;
  to["bytes"] = peer.bytes;
  to["retries"] = peer.retries;
  to["faults"] = peer.faults;
  return to;
}

nb::dict to_dict(const TallySnapshot::Group& group) {
  nb::dict to;
  to["place"] = group.place;
  to["key"] = group.key;
  to["what"] = to_text(group.what);
  to["device"] = to_text(group.device);
  to["rank"] = group.rank;
  to["size"] = group.size;
  to["calls"] = group.calls;
  to["operation"] = to_text(group.operation);
  to["began_ns"] = group.began_ns;
  to["ended_ns"] = group.ended_ns;
  to["is_open"] = group.is_open;
  return to;
}

nb::dict to_dict(const TallySnapshot::Call& call) {
  nb::dict to;
  to["number"] = call.number;
  to["group_key"] = call.group_key;
  to["group_call"] = call.group_call;
  to["operation"] = to_text(call.operation);
  to["transport"] = to_text(call.transport);
  to["elements"] = call.elements;
  to["bytes"] = call.bytes;
  to["element"] = call.element;
  to["began_ns"] = call.began_ns;
  to["ended_ns"] = call.ended_ns;
  to["is_failed"] = call.is_failed;
  return to;
}

template <class Entry>
nb::list to_list(const std::vector<Entry>& entries) {
  nb::list to;
  for (const Entry& entry : entries) to.append(to_dict(entry));
  return to;
}

nb::dict to_dict(const TallySnapshot& snapshot) {
  nb::dict to;
  to["made_ns"] = snapshot.made_ns;
  to["has_secret"] = snapshot.has_secret;
  to["wall_minus_monotonic_ns"] = snapshot.wall_minus_monotonic_ns;
  to["operations"] = to_list(snapshot.operations);
  to["peers"] = to_list(snapshot.peers);
  to["groups"] = to_list(snapshot.groups);
  to["calls"] = to_list(snapshot.calls);
  return to;
}

// Lines wait here for a thread of Python: who logs may hold locks, or not be known to Python.
class LineQueue {
 public:
  void push(LogLevel level, const std::string& line) {
    std::lock_guard lock(mutex_);
    lines_.emplace_back(static_cast<int>(level), line);
    has_more_.notify_one();
  }
  // The next lines; none after stop().
  std::vector<std::pair<int, std::string>> take() {
    std::unique_lock lock(mutex_);
    has_more_.wait(lock, [this] { return !lines_.empty() || is_stopped_; });
    return std::exchange(lines_, {});
  }
  void stop() {
    std::lock_guard lock(mutex_);
    is_stopped_ = true;
    has_more_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable has_more_;
  std::vector<std::pair<int, std::string>> lines_;
  bool is_stopped_ = false;
};

LineQueue& lines() {
  static LineQueue* once = new LineQueue;  // threads may log until the very end
  return *once;
}

}  // namespace

void bind_tally(nb::module_& module) {
  module.def("has_tally", &has_tally, "Whether anything has been counted in this process.");
  module.def("tally", [] {
    const TallyPage& page = tally_page();
    return to_dict(value_or_throw(read_tally({reinterpret_cast<const char*>(&page), sizeof page})));
  });
  module.def(
      "tally_from",
      [](nb::bytes page) { return to_dict(value_or_throw(read_tally({page.c_str(), page.size()}))); },
      nb::arg("page"));
  module.attr("TALLY_NAME") = kTallyName;
  module.attr("TALLY_BYTES") = sizeof(TallyPage);
  module.def("log_to_queue", [] {
    set_log_sink([owner = getpid()](LogLevel level, const std::string& line) {
      if (getpid() == owner) return lines().push(level, line);
      const std::string whole = line + "\n";  // of a fork, which has no thread that takes lines
      std::fwrite(whole.data(), 1, whole.size(), stderr);
    });
  });
  module.def("take_log_lines", [] {
    const auto taken = without_gil([] { return lines().take(); });
    nb::list to;
    for (const auto& [level, line] : taken) to.append(nb::make_tuple(level, line));
    return to;
  });
  module.def("log_to_stderr", [] {
    set_log_sink({});
    lines().stop();
  });
}

}  // namespace weft
