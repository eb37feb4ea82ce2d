// SPDX-License-Identifier: Apache-2.0
//
// The program behind tools/weak-order.
//   litmus [part]               litmus tests: one line each
//   allowed seeds               what each litmus test may show, as JSON
//   run seconds seed [part]     scenarios of that name, or all, by turns; the first failure is printed with what led there
//   list                        the sites of order that scenarios come by, numbered, each way in which one is weakened
//   mutants seconds [number]    each of them, or one, until it is caught or that time is over
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "weak/litmus.h"
#include "weak/scenarios.h"

namespace weft::weak {
namespace {

constexpr uint64_t kLitmusSeeds = 2000, kListSeeds = 48;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The report of a run that failed; empty: it did not.
std::string played(const Scenario& scenario, Settings settings) {
  Machine machine(settings);
  return scenario.play(machine, settings.seed) ? "" : machine.report();
}

int run(double seconds, uint64_t seed, const std::string& part) {
  const double end = now_s() + seconds;
  uint64_t runs = 0, first = seed;
  for (; seed == first || now_s() < end; ++seed)
    for (const Scenario& scenario : scenarios()) {
      if (std::string(scenario.name).find(part) == std::string::npos) continue;
      ++runs;
      const std::string report = played(scenario, {.seed = seed});
      if (report.empty()) continue;
      std::printf("%s, seed %llu: %s\n", scenario.name, static_cast<unsigned long long>(seed),
                  played(scenario, {.seed = seed, .keeps_events = true}).c_str());
      return 1;
    }
  std::printf("%llu runs, seeds %llu to %llu: no failure\n", static_cast<unsigned long long>(runs),
              static_cast<unsigned long long>(first), static_cast<unsigned long long>(seed - 1));
  return 0;
}

struct Site {
  Mutant mutant;
  std::vector<const Scenario*> scenarios;  // that come by it
};

std::vector<Site> all_sites() {
  std::map<Mutant, std::vector<const Scenario*>> found;
  for (const Scenario& scenario : scenarios()) {
    std::set<Mutant> mutants;
    for (uint64_t seed = 0; seed < kListSeeds; ++seed) played(scenario, {.seed = seed, .mutants = &mutants});
    for (const Mutant& mutant : mutants) found[mutant].push_back(&scenario);
  }
  std::vector<Site> sites;
  for (const auto& [mutant, by] : found) sites.push_back({mutant, by});
  return sites;
}

// Runs scenarios with a site weakened. Returns what caught it; empty: nothing in that time.
std::string caught(const Site& site, double seconds, bool keeps_events) {
  const double end = now_s() + seconds;
  for (uint64_t seed = 1; now_s() < end; ++seed)
    for (const Scenario* scenario : site.scenarios) {
      const std::string report =
          played(*scenario, {.seed = seed, .keeps_events = keeps_events, .mutant = &site.mutant});
      if (!report.empty())
        return std::string(scenario->name) + ", seed " + std::to_string(seed) + ": " + report;
    }
  return "";
}

int run_mutants(double seconds, int64_t only) {
  const std::vector<Site> sites = all_sites();
  uint32_t survivors = 0, tried = 0;
  for (size_t i = 0; i < sites.size(); ++i) {
    if (only >= 0 && i != static_cast<size_t>(only)) continue;
    ++tried;
    const double since = now_s();
    const std::string by = caught(sites[i], seconds, only >= 0);
    survivors += by.empty() ? 1 : 0;
    std::printf("%3zu %-70s %s %.2f s %s\n", i, text_of(sites[i].mutant).c_str(),
                by.empty() ? "NOT CAUGHT" : "caught", now_s() - since,
                only >= 0 ? by.c_str() : by.substr(0, by.find('\n')).c_str());
    std::fflush(stdout);
  }
  std::printf("%u mutants, %u not caught\n", tried, survivors);
  return tried == 0 || (only >= 0 && survivors) ? 1 : 0;
}

int list() {
  const std::vector<Site> sites = all_sites();
  for (size_t i = 0; i < sites.size(); ++i) std::printf("%3zu %s\n", i, text_of(sites[i].mutant).c_str());
  return 0;
}

}  // namespace
}  // namespace weft::weak

int main(int argc, char** argv) {
  using namespace weft::weak;
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "litmus") return run_litmus(argc > 2 ? argv[2] : "", kLitmusSeeds) ? 1 : 0;
  if (what == "allowed" && argc == 3) return print_allowed(std::strtoull(argv[2], nullptr, 10)), 0;
  if (what == "run" && argc >= 4)
    return run(std::atof(argv[2]), std::strtoull(argv[3], nullptr, 10), argc > 4 ? argv[4] : "");
  if (what == "list") return list();
  if (what == "mutants" && argc >= 3)
    return run_mutants(std::atof(argv[2]), argc > 3 ? std::atoll(argv[3]) : -1);
  std::fprintf(
      stderr,
      "weak: litmus [PART] | allowed SEEDS | run SECONDS SEED [PART] | list | mutants SECONDS [NUMBER]\n");
  return 2;
}
