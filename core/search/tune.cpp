#include "core/search/tune.hpp"

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>

#include "core/base/error.hpp"
#include "core/base/threads.hpp"
#include "core/config/deck_schema.hpp"
#include "core/config/run_options.hpp"
#include "core/config/segment_rule.hpp"
#include "core/config/step_options.hpp"
#include "core/plan/batch/pairs.hpp"
#include "core/search/tune_bounds.hpp"

namespace ballast {
namespace {

constexpr std::size_t kWave = 16;     // trials between two looks at what was found
constexpr std::size_t kUnproven = 4;  // of a base budget that may lack the coverage
constexpr double kPromising = 3;      // a choice gets a trial if it may take this much of the best
constexpr double kScheduledOps = 15e3;  // of all orders that a trial may build schedules of
// Of TuneOptions::seconds: when the search ends at the latest, and trials of choices that had none.
constexpr double kSearched = 0.65, kExplained = 0.75;
constexpr double kHeavy = 1.5;  // the best plans may be dearer to time than the mean of trials
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Entry {
  Candidate candidate;
  TuneBounds::Figures figures;
  std::size_t kind = 0;               ///< candidates that estimates err alike on
  std::vector<ChoiceFacts*> choices;  ///< of TuneResult::choices
  bool tried = false;
};

/// Whether two candidates differ in one choice alone; a mesh counts as one.
bool neighbours(const Candidate& a, const Candidate& b) {
  const bool method = a.method != b.method || a.groups != b.groups;
  const bool chunks = a.capacity != b.capacity || a.chunk_k != b.chunk_k || a.offload != b.offload;
  return (a.mesh != b.mesh) + (method || chunks) + (a.layout != b.layout) +
             (a.schedule != b.schedule) + (a.budget != b.budget) ==
         1;
}

class Search {
 public:
  Search(const TuneInput& input, const TuneOptions& options) : input_(input), options_(options) {
    for (int t = 0; t < std::max(1, options.threads); ++t)
      trials_.push_back(std::make_unique<TuneTrials>(input));
  }

  TuneResult run() {
    collect();
    const std::int64_t most = options_.trials > 0 ? options_.trials : affordable();
    while (result_.trials < most) {
      const std::vector<std::size_t> wave =
          in_time(next_wave(static_cast<std::size_t>(most - result_.trials)), kSearched);
      if (wave.empty()) break;
      try_all(wave);
    }
    explain();
    finish();
    return std::move(result_);
  }

 private:
  void collect() {
    const auto budgets =
        choosable(covering_budgets(input_.base, input_.steps.front(), input_.limits.coverage));
    TuneSpace space = tune_space(input_.base, input_.limits.ranks, input_.longest.tokens, budgets);
    result_.candidates = static_cast<std::int64_t>(space.candidates.size());
    result_.refused = space.refusals;
    for (const TuneSpace::Refused& r : space.refused) note_refusal(r.candidate, r.words);
    require(!space.candidates.empty(),
            "no candidate of {} ranks is allowed{}{}; free some of the keys that the command line "
            "states",
            input_.limits.ranks, space.refused.empty() ? "" : ": ",
            space.refused.empty() ? "" : space.refused.front().words);
    TuneBounds bounds(input_, *trials_.front());
    const Config& base = input_.base;
    for (const RecomputeOptions& r : recompute_choices(base))
      result_.choices[{"recompute", name(r.mode)}];
    for (const int zero : zero_choices(base)) result_.choices[{"zero", fmt::to_string(zero)}];
    const Candidate deck = deck_plan(base);
    const std::int64_t deck_budget = dst_options(base).base_budget;
    std::map<std::tuple<Batching, int, bool, ScheduleKind>, std::size_t> kinds;
    for (Candidate& c : space.candidates) {
      Entry entry;
      if (state_aware(c.schedule)) c.orders = orders(c);
      entry.figures = bounds.of(c);
      entry.kind = kinds.try_emplace({c.method, c.mesh.pp, c.ring() > 1, c.schedule}, kinds.size())
                       .first->second;
      for (const auto& facet : facets(c, false)) {
        entry.choices.push_back(&result_.choices[facet]);
        ++entry.choices.back()->candidates;
      }
      const double limit = input_.limits.memory_bytes;
      if (limit > 0 && static_cast<double>(entry.figures.bytes) > limit) {
        ++result_.too_large;
        note_bytes(c, entry.figures.bytes);
        continue;
      }
      // The deck's plan tries as many orders as the deck says.
      if (same_choices(c, deck) && (c.budget == 0 || c.budget == deck_budget))
        deck_ = entries_.size(), c.orders = deck.orders;
      entry.candidate = std::move(c);
      entries_.push_back(std::move(entry));
    }
    error_.assign(kinds.size(), {0, 0});
  }

  /// Budgets by which GPUs can choose the pattern of the longest document.  Error: none.
  std::vector<std::int64_t> choosable(const std::vector<std::int64_t>& budgets) {
    std::vector<std::int64_t> list;
    std::string words;
    for (const std::int64_t budget : budgets) {
      Candidate c = deck_plan(input_.base);
      c.budget = budget;
      const auto problem =
          segment_problem(with(input_.base, c), input_.longest_document, input_.heads.get());
      if (!problem) {
        list.push_back(budget);
        continue;
      }
      words = problem->message();
      if (budget > 0) result_.choices[{"budget", fmt::to_string(budget)}].refused = words;
    }
    require(!list.empty(), "{}", words);
    return list;
  }

  /// Orders of samples that a state-aware schedule may try: as many as the deck says where that is
  /// quickly done.
  int orders(const Candidate& c) const {
    double micro_batches = 0;
    for (const SampleLength& s : input_.steps.front())
      micro_batches +=
          std::max(1.0, static_cast<double>(s.tokens) / static_cast<double>(c.capacity));
    const double most = kScheduledOps / (3 * micro_batches * c.mesh.pp);
    return std::clamp(static_cast<int>(most), 1, std::max(1, input_.base.pipeline.search));
  }

  double elapsed_s() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }
  /// How many of `count` pieces of `each_s` seconds end within a share of the time.
  std::size_t in_time(std::size_t count, double each_s, double share) {
    if (options_.trials > 0 || each_s == 0) return count;
    const double left = std::max(0.0, share * options_.seconds - elapsed_s()) / each_s;
    if (left >= static_cast<double>(count)) return count;
    result_.cut_short = true;
    return static_cast<std::size_t>(left);
  }
  /// The first trials of a wave that end in time.
  std::vector<std::size_t> in_time(std::vector<std::size_t> wave, double share) {
    const double each_s =
        result_.trials > 0 ? trials_s_ / static_cast<double>(result_.trials) : 0.0;
    wave.resize(in_time(wave.size(), each_s, share));
    return wave;
  }

  /// Trials that take about 20 s of two cores: planning and timing grow with micro-batches, ranks
  /// and stages.
  std::int64_t affordable() const {
    const double samples = static_cast<double>(input_.steps.front().size()),
                 ranks = input_.limits.ranks;
    return std::clamp<std::int64_t>(static_cast<std::int64_t>(4e5 / (samples + 4 * ranks + 200)),
                                    32, 1500);
  }

  /// What a candidate may take, by the errors of earlier estimates of its kind, or of all.
  double promise(const Entry& e) const {
    const auto& [sum, count] = error_[e.kind].second > 0 ? error_[e.kind] : all_errors_;
    return std::max(e.figures.bound_s, e.figures.estimate_s * (count > 0 ? sum / count : 1.0));
  }

  double cutoff() const {
    return static_cast<std::int64_t>(found_.size()) < options_.list
               ? kInfinity
               : found_[static_cast<std::size_t>(options_.list) - 1].step_s;
  }

  /// Trials whose tuned budgets had the coverage at this base budget or a smaller one, and those
  /// that lacked it at this or a larger one: it grows with the base.
  std::pair<std::size_t, std::size_t> coverage(std::int64_t budget) const {
    std::pair<std::size_t, std::size_t> trials{0, 0};
    for (const auto& [base, seen] : coverage_) {
      if (base <= budget) trials.first += seen.first;
      if (base >= budget) trials.second += seen.second;
    }
    return trials;
  }
  /// Whether more trials of this base budget would be lost.
  bool uncovered(std::int64_t budget) const {
    const auto [had, lacked] = coverage(budget);
    return had == 0 && lacked >= kUnproven;
  }

  /// The first entry with each base budget in an order, the largest budget first.
  std::vector<std::size_t> of_each_budget(
      const std::vector<std::pair<double, std::size_t>>& order) const {
    std::map<std::int64_t, std::size_t, std::greater<>> first;
    for (const auto& [s, i] : order) first.try_emplace(entries_[i].candidate.budget, i);
    std::vector<std::size_t> list;
    for (const auto& [budget, i] : first) list.push_back(i);
    return list;
  }

  /// First the deck's plan and a candidate of every choice that none was tried of, then neighbours
  /// of the best, then those that promise most.
  std::vector<std::size_t> next_wave(std::size_t most) const {
    const double limit = cutoff();
    std::vector<std::pair<double, std::size_t>> order, near;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const Entry& e = entries_[i];
      if (e.tried || e.figures.bound_s >= limit || uncovered(e.candidate.budget)) continue;
      order.emplace_back(promise(e), i);
      for (std::size_t b = 0; b < std::min<std::size_t>(3, found_.size()); ++b)
        if (neighbours(e.candidate, found_[b].candidate)) {
          near.push_back(order.back());
          break;
        }
    }
    std::sort(order.begin(), order.end());
    std::sort(near.begin(), near.end());
    std::vector<std::size_t> wave;
    std::set<const ChoiceFacts*> covered;
    const std::size_t size = std::min(kWave, most);
    const bool tunes = input_.limits.coverage > 0 && input_.base.dst.enabled;
    std::map<std::int64_t, std::size_t> unproven;  // in the wave, by base budget
    const auto take = [&](std::size_t i) {
      if (wave.size() == size || std::find(wave.begin(), wave.end(), i) != wave.end()) return;
      const std::int64_t budget = entries_[i].candidate.budget;
      if (!tunes || coverage(budget).first > 0 || ++unproven[budget] <= kUnproven)
        wave.push_back(i), covered.insert(entries_[i].choices.begin(), entries_[i].choices.end());
    };
    if (deck_ && !entries_[*deck_].tried) take(*deck_);
    // What tuning leaves of the base budgets, the largest first, is not known before a trial.
    if (tunes && coverage_.empty())
      for (const std::size_t i : of_each_budget(order)) take(i);
    const auto untried = [&](const ChoiceFacts* c) { return c->trials == 0 && !covered.count(c); };
    for (const auto& [s, i] : order) {
      if (wave.size() == size || s > kPromising * order.front().first) break;
      const auto& choices = entries_[i].choices;
      if (std::any_of(choices.begin(), choices.end(), untried)) take(i);
    }
    for (std::size_t n = 0; n < near.size() && n < kWave / 2; ++n) take(near[n].second);
    for (const auto& [s, i] : order) {
      if (wave.size() == size) break;
      take(i);
    }
    return wave;
  }

  void each(std::size_t count, const std::function<void(TuneTrials&, std::size_t)>& work) {
    in_threads(trials_.size(), [&](std::size_t t) {
      for (std::size_t i = t; i < count; i += trials_.size()) work(*trials_[t], i);
    });
  }

  void try_all(const std::vector<std::size_t>& wave) {
    const double began = elapsed_s();
    std::vector<Trial> done(wave.size());
    each(wave.size(), [&](TuneTrials& trials, std::size_t i) {
      const Candidate& candidate = entries_[wave[i]].candidate;
      done[i] = trials.lightest(candidate);
      if (wave[i] == deck_) done[i] = trials.better_as_it_is(std::move(done[i]), saving(candidate));
    });
    trials_s_ += elapsed_s() - began;
    for (std::size_t i = 0; i < wave.size(); ++i) {
      Entry& e = entries_[wave[i]];
      planned_ += done[i].planned;
      e.tried = true;
      ++result_.trials;
      note(done[i]);
      if (done[i].state != TrialState::fits) continue;
      for (auto* error : {&error_[e.kind], &all_errors_})
        error->first += done[i].step_s / e.figures.estimate_s, error->second += 1;
      found_.push_back(std::move(done[i]));
    }
    sort(found_);
  }

  static void sort(std::vector<Trial>& list) {
    std::stable_sort(list.begin(), list.end(),
                     [](const Trial& a, const Trial& b) { return a.step_s < b.step_s; });
  }

  /// The deck's plan with what the deck says that saves memory.
  Candidate saving(Candidate c) const {
    const Candidate deck = deck_plan(input_.base);
    c.recompute = deck.recompute, c.offload = deck.offload, c.zero = deck.zero;
    return c;
  }

  void note(const Trial& trial) {
    if (trial.uncovered || trial.covered_of > 0) {
      auto& [had, lacked] = coverage_[trial.candidate.budget];
      ++(trial.uncovered ? lacked : had);
    }
    if (trial.state == TrialState::refused) {
      ++result_.refused;
      note_refusal(trial.candidate, trial.words);
      return;
    }
    if (trial.state == TrialState::over_memory) note_bytes(trial.candidate, trial.bytes);
    for (const auto& facet : facets(trial.candidate)) {
      ChoiceFacts& facts = result_.choices[facet];
      ++facts.trials;
      if (trial.state != TrialState::fits) continue;
      if (facts.best.empty() || trial.step_s < facts.best.front().step_s) facts.best = {trial};
    }
  }
  /// Whatever saves memory was refused alike, or not looked at.
  void note_refusal(const Candidate& c, const std::string& words) {
    for (const auto& facet : facets(c, false))
      if (std::string& known = result_.choices[facet].refused; known.empty()) known = words;
  }
  void note_bytes(const Candidate& c, std::int64_t bytes) {
    for (const auto& facet : facets(c)) {
      std::int64_t& least = result_.choices[facet].least_bytes;
      least = least == 0 ? bytes : std::min(least, bytes);
    }
  }

  bool is_deck(const Trial& trial) const {
    return deck_ && same_choices(trial.candidate, entries_[*deck_].candidate) &&
           trial.candidate.budget == entries_[*deck_].candidate.budget;
  }

  bool fits(const Trial& trial) {
    if (trial.state == TrialState::over_memory) note_bytes(trial.candidate, trial.bytes);
    return trial.state == TrialState::fits;
  }

  /// A trial of each choice that had none, the most promising candidate with it: so that what it
  /// loses by can be said.
  void explain() {
    std::map<ChoiceFacts*, std::pair<double, std::size_t>> least;
    for (std::size_t i = 0; i < entries_.size(); ++i)
      for (ChoiceFacts* choice : entries_[i].choices)
        if (choice->trials == 0 && !entries_[i].tried) {
          const std::pair at(promise(entries_[i]), i);
          const auto [known, fresh] = least.try_emplace(choice, at);
          if (!fresh) known->second = std::min(known->second, at);
        }
    std::set<std::pair<double, std::size_t>> order;
    for (const auto& [choice, at] : least) order.insert(at);
    const std::size_t most =
        options_.trials > 0
            ? std::min(kWave, static_cast<std::size_t>(options_.trials - result_.trials))
            : kWave;
    std::vector<std::size_t> wave;
    for (const auto& [seconds, i] : order)
      if (wave.size() < most) wave.push_back(i);
    try_all(in_time(std::move(wave), kExplained));
  }

  /// Leaves the first `count` of what was found, and the deck's plan however slow its first steps
  /// are; the others stand in reserve.
  void carry(std::size_t count) {
    const auto cut = found_.begin() + static_cast<std::ptrdiff_t>(count);
    const auto others = std::stable_partition(
        cut, found_.end(), [this](const Trial& trial) { return is_deck(trial); });
    reserve_.insert(reserve_.begin(), others, found_.end());
    found_.erase(others, found_.end());
  }

  /// Fewer and fewer of the best over more and more steps, while there is time for all that are
  /// listed.
  void finish() {
    const auto list = static_cast<std::size_t>(options_.list);
    for (std::int64_t steps = 2, last = 1; !found_.empty(); last = steps, steps *= 2) {
      const std::int64_t now =
          std::min({steps, options_.steps, static_cast<std::int64_t>(input_.steps.size())});
      if (now <= last) break;
      const double step_s = planned_ > 0 ? kHeavy * trials_s_ / static_cast<double>(planned_) : 0.0;
      const std::size_t carried =
          in_time(std::min(found_.size(), now >= options_.steps ? list : 2 * list),
                  static_cast<double>(now - last) * step_s, 1);
      if (carried < std::min(list, found_.size())) break;
      carry(carried);
      std::vector<Trial> longer(found_.size());
      each(found_.size(), [&](TuneTrials& trials, std::size_t i) {
        longer[i] = trials.longer(found_[i], now, false);
      });
      std::erase_if(longer, [this](const Trial& t) { return !fits(t); });
      found_ = std::move(longer);
      sort(found_);
    }
    const double limit = cutoff();
    for (const Entry& e : entries_) {
      if (e.tried) continue;
      const bool above = e.figures.bound_s >= limit;
      ++(above ? result_.bounded : result_.left);
      if (!above && (result_.left_bound_s == 0 || e.figures.bound_s < result_.left_bound_s))
        result_.left_bound_s = e.figures.bound_s;
      const auto least = [](double& all, double value) {
        all = all == 0 ? value : std::min(all, value);
      };
      for (ChoiceFacts* facts : e.choices) {
        least(facts->least_bound_s, e.figures.bound_s);
        least(facts->least_estimate_s, promise(e));
      }
    }
    // Of fewer steps, for where those above turn out too large.
    found_.insert(found_.end(), reserve_.begin(), reserve_.end());
    keep_what_fits(list);
  }

  /// The first `most` of what was found that fit with their steps one after another.
  void keep_what_fits(std::size_t most) {
    const std::int64_t steps = found_.empty() ? 0 : found_.front().steps;
    for (std::size_t at = 0; at < found_.size() && result_.best.size() < most;) {
      std::vector<Trial> next(std::min(most - result_.best.size(), found_.size() - at));
      each(next.size(), [&](TuneTrials& trials, std::size_t i) {
        next[i] = trials.longer(found_[at + i], steps, true);
      });
      at += next.size();
      for (Trial& trial : next)
        if (fits(trial)) result_.best.push_back(std::move(trial));
    }
    sort(result_.best);
  }

  const TuneInput& input_;
  TuneOptions options_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  double trials_s_ = 0;                              ///< of all trials so far
  std::int64_t planned_ = 0;                         ///< steps in them
  std::vector<std::unique_ptr<TuneTrials>> trials_;  ///< one a thread
  std::vector<Entry> entries_;
  std::optional<std::size_t> deck_;  ///< of them: the deck's plan
  /// Trials whose tuned budgets had the coverage, and that lacked it, by the base budget.
  std::map<std::int64_t, std::pair<std::size_t, std::size_t>> coverage_;
  std::vector<std::pair<double, double>> error_;  ///< [kind] sum of simulated over estimate, count
  std::pair<double, double> all_errors_{0, 0};
  std::vector<Trial> found_;    ///< that fit, the fastest first
  std::vector<Trial> reserve_;  ///< slower ones, which fit by fewer steps
  TuneResult result_;
};

}  // namespace

TuneResult tune(const TuneInput& input, const TuneOptions& options) {
  require(!input.steps.empty() && !input.steps.front().empty(), "no samples to tune for");
  return Search(input, options).run();
}

std::vector<std::int64_t> covering_budgets(const Config& base,
                                           const std::vector<SampleLength>& samples,
                                           double coverage) {
  if (coverage == 0) return {0};
  const PatternKind pattern = budget_pattern(base);
  require(
      pattern == PatternKind::moba || (has_budgets(pattern) && base.dst.enabled),
      "a coverage is asked for, and attention.pattern = \"{}\" has no budget that could hold it: "
      "leave it out, take \"moba\", or \"vertical_slash\" with dst.enabled = true and "
      "dst.base_budget",
      name(base.attention.pattern));
  const SimulationOptions simulation = simulation_options(base, RunOptions::from(base));
  std::vector<std::int64_t> list;
  double most = 0;
  std::vector<std::int64_t> candidates = simulation.dst.candidates;
  if (pattern == PatternKind::moba && held(base, &default_config().attention.moba_top_k))
    candidates = {base.attention.moba_top_k};
  else if (held(base, &default_config().dst.base_budget))
    candidates = {simulation.base_budget};
  for (const std::int64_t budget : candidates) {
    double sum = 0, tokens = 0;
    for (const SampleLength& s : samples)
      for (const std::int64_t length : document_lengths(s))
        for (const std::int64_t blocks : simulation.coverage_blocks) {
          const auto n = static_cast<double>(length);
          sum += n * simulated_coverage(length, budget, blocks, simulation.block_tokens);
          tokens += n;
        }
    most = std::max(most, tokens > 0 ? sum / tokens : 1);
    if (sum >= coverage * tokens) list.push_back(budget);
  }
  require(!list.empty(),
          "no budget of {} covers {} of attention on average: the largest covers {:.4f}; widen "
          "dst.budgets, lower the coverage, or leave a stated budget to the search",
          fmt::join(candidates, ", "), coverage, most);
  return list;
}

}  // namespace ballast
