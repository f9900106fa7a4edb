// The space of `ballast tune`: what a deck may become on a number of ranks.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/config/config.hpp"

namespace ballast {

/// One point of the space: values of the keys that the search may set.
struct Candidate {
  MeshShape mesh;
  Batching method = Batching::packed;
  std::int64_t capacity = 0;  ///< tokens of a micro-batch (chunkflow: of a chunk)
  std::int64_t chunk_k = 1;   ///< chunkflow
  Offload offload = Offload::none;
  std::vector<PackGroup> groups;  ///< hbp
  LayoutKind layout = LayoutKind::zigzag;
  ScheduleKind schedule = ScheduleKind::one_f_one_b;
  int orders = 1;           ///< state-aware schedules: orders of samples to try (pipeline.search)
  std::int64_t budget = 0;  ///< of the sparse pattern; 0: the deck's
  RecomputeOptions recompute;
  int zero = 1;

  int ring() const { return mesh.cp(); }
};

/// The deck as it stands.
Candidate deck_plan(const Config& base);

/// Whether two candidates are alike in all but budget, orders and what saves memory.
bool same_choices(const Candidate& a, const Candidate& b);

/// The deck with a candidate's values.  Where a stage's time is stated, it is that of the
/// candidate's stages: the deck's, times mesh.pp of the deck over that of the candidate.
/// Provenance names `origin` for every key whose value changes.
Config with(const Config& base, const Candidate& candidate);

/// "block.key=value" of every key that differs.
std::vector<std::string> overrides(const Config& base, const Config& changed);

/// The keys that a deck, the command line, a profile table or a search set, as TOML: a deck of the
/// same run.
std::string stated_deck(const Config& config);

/// A short name: "packed 16384, dp 8 x pp 2 x sp 2, 1f1b, recompute full, ZeRO 1".
std::string describe(const Candidate& candidate);

/// What of a candidate a user would choose by: ("method", "packed"), ("mesh.pp", "2") ...; those
/// that have no effect on it are left out.  Without `saving`: all but what saves memory.
std::vector<std::pair<std::string, std::string>> facets(const Candidate& candidate,
                                                        bool saving = true);

/// Whether the command line states the key of a member: the search leaves it as it is.
bool held(const Config& config, const void* member_of_default);

/// All candidates of `ranks` ranks, the deck's plan among them where it has as many, but what saves
/// memory (the deck's), and what the table of combinations refuses.  `longest`: tokens of the
/// longest sample; `budgets` of the sparse pattern to try, {0}: the deck's.
struct TuneSpace {
  std::vector<Candidate> candidates;
  struct Refused {
    Candidate candidate;
    std::string words;
  };
  std::vector<Refused> refused;  ///< the first for each reason
  std::int64_t refusals = 0;     ///< all of them
};
TuneSpace tune_space(const Config& base, int ranks, std::int64_t longest,
                     const std::vector<std::int64_t>& budgets);

/// What saves memory: modes of recompute, places of stored chunks, stages of ZeRO to try.
std::vector<RecomputeOptions> recompute_choices(const Config& base);
std::vector<Offload> offload_choices(const Config& base, Batching method);
std::vector<int> zero_choices(const Config& base);

}  // namespace ballast
