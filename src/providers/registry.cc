// SPDX-License-Identifier: Apache-2.0
//
// The list of providers. A new one adds a line to makers().
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "providers/cuda/cuda.h"
#include "providers/fabric/fabric.h"
#include "providers/fabric/library.h"
#include "providers/loopback/loopback.h"
#include "providers/provider.h"
#include "providers/verbs/library.h"
#include "providers/verbs/verbs.h"

namespace weft::provider {
namespace {

struct Maker {
  const char* name;
  std::function<std::shared_ptr<Provider>()> make;
};

// Hardware before software: "auto" takes the first that has a usable NIC.
const std::vector<Maker>& makers() {
  static const std::vector<Maker> all = {
      {"fabric:efa", [] { return make_fabric("efa"); }},
      {"fabric:cxi", [] { return make_fabric("cxi"); }},
      {"verbs", [] { return make_verbs(); }},
      {"fabric:verbs", [] { return make_fabric("verbs"); }},
      {"fabric:tcp", [] { return make_fabric("tcp"); }},
      {"fabric:shm", [] { return make_fabric("shm"); }},
      {"cuda", [] { return make_cuda(); }},
      {"loopback", [] { return std::make_shared<Loopback>(); }},
  };
  return all;
}

// libfabric is opened by whoever asks first, also without a provider.
const bool kHasAsked = [] {
  fi::ask_for_queue_limit([]() { return ib::completion_entries_max(); });
  return true;
}();

// "loopback:seed=7,reorder=0.3" is the loopback with these faults: for tests of what finds its provider by a name.
constexpr std::string_view kFaulty = "loopback:";

struct MadeProviders {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Provider>> by_name;
};

bool has_usable_nic(Provider& provider) {
  for (const Nic& nic : provider.probe())
    if (nic.usable()) return true;
  return false;
}

}  // namespace

std::vector<std::string> provider_names() {
  std::vector<std::string> names;
  for (const Maker& maker : makers()) names.push_back(maker.name);
  return names;
}

Result<std::shared_ptr<Provider>> find_provider(const std::string& name) {
  static OnePerProcess<MadeProviders> of_processes;
  auto& [mutex, made] = of_processes.get();
  std::lock_guard lock(mutex);
  std::string allowed = "auto";
  if (name.starts_with(kFaulty)) {
    WEFT_TRY_ASSIGN(const FaultPlan plan, parse_fault_plan(std::string_view(name).substr(kFaulty.size())));
    std::shared_ptr<Provider>& provider = made[name];
    Loopback::Options options;
    options.plan = plan;
    if (!provider) provider = std::make_shared<Loopback>(options);
    return provider;
  }
  for (const Maker& maker : makers()) {
    allowed += std::string(", ") + maker.name;
    if (name != maker.name && name != "auto") continue;
    std::shared_ptr<Provider>& provider = made[maker.name];
    if (!provider) provider = maker.make();
    if (name != "auto" || has_usable_nic(*provider)) return provider;
  }
  return Status::invalid("provider: got {}, allowed: {}", name, allowed);
}

}  // namespace weft::provider
