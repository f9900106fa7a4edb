#include "core/plan/batch/placement.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <queue>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/base/error.hpp"
#include "core/plan/batch/chunking.hpp"
#include "core/plan/batch/packing.hpp"

namespace ballast {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
/// A plan this near its target is not improved any further.
constexpr double kNear = 1.002;
/// Targets to try, over the least mean that degrees can reach, and the longest time of one
/// micro-batch over the target: lower ones stack better, fill pipelines and cost more transfers.
constexpr double kTargets[] = {1.0, 1.01, 1.03, 1.06, 1.1, 1.2};
constexpr double kShares[] = {1.0, 0.5, 0.25, 0.12, 0.06};
constexpr int kSharesAlone = 3;  ///< without a pipeline
/// Of the largest pack, that a pipeline's packs are tried with: what fills and drains it is as long
/// as a micro-batch on each of its stages but one.
constexpr int kPackParts[] = {1, 2, 4, 8, 16};
constexpr std::size_t kManySamples = 1500;  ///< of a pipeline: planning stays below 0.2 s
/// Long samples x ranks above which no smaller share is tried: planning stays below 0.2 s.
constexpr std::int64_t kMostStarts = 1200000;
/// What each later stage of 1F1B waits where neighbouring micro-batches differ in length, of the
/// difference.  By the clock's steps of 2 and 4 stages; from 0.3 to 1 the choices are alike.
constexpr double kUneven = 0.5;
/// Ranks that the last one tries to exchange samples with, and what of the time between their ends
/// an exchange must move at least.
constexpr int kPartners = 8;
constexpr double kWorth = 0.02;

/// One way to run a sample.
struct Choice {
  PlacementSplit split;
  std::int64_t chunk_tokens = 0;  ///< 0: whole
  double seconds = 0;
  double area() const { return seconds * split.ranks; }
};

/// Time left on a rank before a shared micro-batch begins.
struct Gap {
  int rank = 0;
  double room = 0;
  std::vector<std::uint32_t> samples;
};

/// A sample that has a group of its own, and the gaps that it leaves on the group's ranks.
struct Shared {
  std::uint32_t sample = 0;
  Choice choice;
  int first = 0;
  std::vector<std::size_t> gaps;
};

struct Attempt {
  std::vector<Shared> shared;
  std::vector<Gap> gaps;
  std::vector<std::vector<std::uint32_t>> tail;  ///< [rank]: short samples after the shared ones
  std::vector<double> end;                       ///< [rank]
};

class Placer {
 public:
  Placer(const std::vector<SampleLength>& samples, const PlacementOptions& options,
         const PlacementCosts& costs)
      : samples_(samples), options_(options), costs_(costs) {
    std::vector<std::int64_t> lengths(samples.size());
    for (std::size_t i = 0; i < samples.size(); ++i) {
      require(samples[i].tokens >= 0, "sample {} has {} tokens", samples[i].sample,
              samples[i].tokens);
      lengths[i] = axis_tokens(samples[i], options.align);
    }
    order_ = longest_first(lengths);
    capacity_ = std::max<std::int64_t>(1, options.micro_batch_tokens);
    if (options.memory_bytes > 0)
      capacity_ = std::min(capacity_, largest(options.splits.front(), capacity_, options.align,
                                              [](auto) { return std::int64_t{0}; }));
    packed_s_.resize(samples.size());
    for (const std::uint32_t i : order_) {
      packed_s_[i] = packed_seconds(lengths[i]);
      total_s_ += packed_s_[i] * options.splits.front().ranks;
    }
  }

  Placement run() {
    const double mean = total_s_ / options_.ranks;
    Placement best;
    best.step_s = kNever;
    const std::int64_t largest_pack = capacity_;
    const std::size_t parts = options_.stages > 1 ? std::size(kPackParts) : 1;
    for (std::size_t i = 0; i < parts; i += coarse() ? 2 : 1) {
      capacity_ = std::max<std::int64_t>(1, largest_pack / kPackParts[i]);
      search(mean, best);
    }
    best.bound_s = mean;
    return best;
  }

 private:
  /// Whether a pipeline's step has so many samples that fewer ways are tried.
  bool coarse() const { return options_.stages > 1 && samples_.size() > kManySamples; }

  /// Over shares and targets, with packs of the capacity; `best` becomes a better one.
  void search(double mean, Placement& best) {
    const std::size_t shares = options_.stages > 1 ? std::size(kShares) : kSharesAlone;
    for (std::size_t i = 0; i < shares; i += coarse() ? 2 : 1) {
      const double share = kShares[i];
      const double least = least_target(mean, share);
      if (best.step_s < kNever && long_samples(least * share) * options_.ranks > kMostStarts) break;
      double before_s = kNever;
      for (const double factor : kTargets) {
        if (best.step_s <= least * kNear) break;
        Placement found = built(attempt(least * factor, share));
        const bool same = found.step_s == before_s;  // and so it is with the targets that follow
        before_s = found.step_s;
        if (found.step_s < best.step_s) best = std::move(found);
        if (same || coarse()) break;
      }
    }
  }

  static std::int64_t rounded(std::int64_t tokens, std::int64_t align) {
    return (tokens + align - 1) / align * align;
  }
  std::int64_t tokens(std::uint32_t i) const { return axis_tokens(samples_[i], options_.align); }

  bool fits(std::int64_t tokens, std::int64_t prefix, const PlacementSplit& split) const {
    return options_.memory_bytes <= 0 ||
           costs_.bytes(tokens, prefix, split) <= options_.memory_bytes;
  }
  /// Most tokens, a multiple of `align`, at most `limit`, that fit behind prefix(tokens); 0: none.
  template <class Prefix>
  std::int64_t largest(const PlacementSplit& split, std::int64_t limit, std::int64_t align,
                       const Prefix& prefix) const {
    std::int64_t low = 0, high = limit / align + 1;  // in units of align; low fits
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2, n = middle * align;
      (fits(n, prefix(n), split) ? low : high) = middle;
    }
    return low * align;
  }

  /// Seconds that a sample adds to a pack of short ones at the smallest split.
  double packed_seconds(std::int64_t n) const {
    if (n == 0) return 0;
    const PlacementSplit& split = options_.splits.front();
    const std::int64_t pack = std::max(n, capacity_);
    const double part = static_cast<double>(n) / static_cast<double>(pack),
                 attention = costs_.attention_s(n, 0, split);
    return attention +
           part * (costs_.rest_s(pack, split) + costs_.transfer_s(pack, attention / part, split));
  }
  double seconds_of(std::int64_t n, std::int64_t prefix, const PlacementSplit& split) const {
    const double attention = costs_.attention_s(n, prefix, split);
    return costs_.rest_s(n, split) + attention + costs_.transfer_s(n, attention, split);
  }
  double seconds_of_chunks(std::int64_t n, std::int64_t chunk, const PlacementSplit& split) const {
    double sum = 0;
    const std::int64_t chunks = (n + chunk - 1) / chunk;
    for (std::int64_t c = 0; c < chunks; ++c) {
      const double once = seconds_of(std::min(chunk, n - c * chunk), c * chunk, split);
      sum += once * (c < chunks - options_.chunk_k ? 1 + options_.forward_share : 1);
    }
    return sum;
  }

  /// Ways to run a sample of n tokens, least rank-seconds first; whole ones, or chunks where no
  /// group's memory holds it.
  const std::vector<Choice>& choices(std::int64_t n) {
    const auto [at, added] = choices_.try_emplace(n);
    std::vector<Choice>& list = at->second;
    if (!added) return list;
    for (const PlacementSplit& split : options_.splits)
      if (fits(n, 0, split)) list.push_back({split, 0, seconds_of(n, 0, split)});
    const std::int64_t chunk_align = std::lcm(options_.align, options_.chunk_align);
    if (list.empty())
      for (const PlacementSplit& split : options_.splits) {
        const std::int64_t most =
            largest(split, n, chunk_align, [&](std::int64_t c) { return n - c; });
        if (most == 0) continue;
        const std::int64_t count = (n + most - 1) / most,
                           even = rounded((n + count - 1) / count, chunk_align);
        list.push_back({split, even, seconds_of_chunks(n, even, split)});
      }
    require(!list.empty(),
            "a sample of {} tokens fits the memory of no group of up to {} ranks, not even in "
            "chunks of {} tokens{}",
            n, options_.splits.back().ranks, chunk_align,
            chunk_align > options_.align ? " (attention.stretch)" : "");
    std::stable_sort(list.begin(), list.end(),
                     [](const Choice& a, const Choice& b) { return a.area() < b.area(); });
    return list;
  }

  bool is_short(std::uint32_t i, double limit) const {
    if (packed_s_[i] > limit) return false;
    return fits(tokens(i), 0, options_.splits.front());
  }

  std::int64_t long_samples(double limit) const {
    return std::partition_point(order_.begin(), order_.end(),
                                [&](std::uint32_t i) { return !is_short(i, limit); }) -
           order_.begin();
  }

  /// The least mean time of a rank when no sample takes longer than `share` of it.
  double least_target(double mean, double share) {
    const auto mean_with = [&](double target) {
      double sum = total_s_;
      for (const std::uint32_t i : order_) {
        if (is_short(i, target * share)) break;  // and so are all that are not longer
        sum += least_area(tokens(i), target * share) - packed_s_[i] * options_.splits.front().ranks;
      }
      return sum / options_.ranks;
    };
    double low = mean, high = std::max(mean, mean_with(mean));
    for (int i = 0; i < 12 && high > low * (kNear - 1e-3); ++i) {
      const double middle = (low + high) / 2;
      (mean_with(middle) <= middle ? high : low) = middle;
    }
    return high;
  }
  double least_area(std::int64_t n, double limit) {
    const Choice* fastest = nullptr;
    for (const Choice& c : choices(n)) {
      if (c.seconds <= limit) return c.area();
      if (!fastest || c.seconds < fastest->seconds) fastest = &c;
    }
    return fastest->area();
  }

  /// Where `ranks` adjacent ranks are free first, the least idle of those.
  std::pair<int, double> window(const std::vector<double>& end, int ranks) const {
    const int step =
        std::lcm(options_.aligned ? ranks : ranks & -ranks, options_.splits.front().ranks);
    int at = 0;
    double best = kNever, best_sum = -1;
    for (int first = 0; first + ranks <= options_.ranks; first += step) {
      double latest = 0, sum = 0;
      for (int r = first; r < first + ranks && latest <= best; ++r) {
        latest = std::max(latest, end[static_cast<std::size_t>(r)]);
        sum += end[static_cast<std::size_t>(r)];
      }
      if (latest < best || (latest == best && sum > best_sum))
        at = first, best = latest, best_sum = sum;
    }
    return {at, best};
  }

  void place_long(Attempt& a, std::uint32_t i, double target, double share) {
    Shared shared{i, {}, 0, {}};
    double start = 0, finish = kNever;
    for (const Choice& c : choices(tokens(i))) {
      const auto [first, free] = window(a.end, c.split.ranks);
      const double ends = free + c.seconds;
      const bool good = ends <= target && c.seconds <= target * share;
      if (ends >= finish && !good) continue;
      shared.choice = c, shared.first = first;
      start = free, finish = ends;
      if (good) break;
    }
    for (int r = shared.first; r < shared.first + shared.choice.split.ranks; ++r) {
      double& end = a.end[static_cast<std::size_t>(r)];
      if (end < start && r % options_.splits.front().ranks == 0) {
        shared.gaps.push_back(a.gaps.size());
        a.gaps.push_back({r, start - end, {}});
      }
      end = finish;
    }
    a.shared.push_back(std::move(shared));
  }

  /// Long samples first, then short ones into the gaps that they leave and onto the rank that ends
  /// first.
  Attempt attempt(double target, double share) {
    Attempt a;
    a.end.assign(static_cast<std::size_t>(options_.ranks), 0.0);
    a.tail.resize(a.end.size());
    std::vector<std::uint32_t> rest;
    for (const std::uint32_t i : order_)
      if (is_short(i, target * share))
        rest.push_back(i);
      else
        place_long(a, i, target, share);
    using Load = std::pair<double, std::size_t>;
    std::priority_queue<Load> rooms;  // the widest gap first
    for (std::size_t g = 0; g < a.gaps.size(); ++g) rooms.emplace(a.gaps[g].room, g);
    std::priority_queue<Load, std::vector<Load>, std::greater<>> ends;
    const auto width = static_cast<std::size_t>(options_.splits.front().ranks);
    for (std::size_t r = 0; r < a.end.size(); r += width) ends.emplace(a.end[r], r);
    for (const std::uint32_t i : rest) {
      if (!rooms.empty() && rooms.top().first >= packed_s_[i] && packed_s_[i] > 0) {
        const auto [room, g] = rooms.top();
        rooms.pop();
        a.gaps[g].samples.push_back(i);
        rooms.emplace(room - packed_s_[i], g);
        continue;
      }
      const auto [end, r] = ends.top();
      ends.pop();
      a.tail[r].push_back(i);
      ends.emplace(end + packed_s_[i], r);
    }
    std::set<Load> last;
    for (; !ends.empty(); ends.pop()) last.insert(ends.top());
    even_out(a.tail, last);
    return a;
  }

  /// Exchanges short samples between the rank that ends last and those that end first until none
  /// makes both end earlier than the last one did.  `ends`: of every rank, with its samples.
  void even_out(std::vector<std::vector<std::uint32_t>>& samples,
                std::set<std::pair<double, std::size_t>>& ends) const {
    while (ends.size() > 1) {
      // Plain variables: Clang before 16 captures no structured bindings.
      const double latest = ends.rbegin()->first;
      const std::size_t from = ends.rbegin()->second;
      auto other = ends.begin();
      bool exchanged = false;
      for (int tried = 0; tried < kPartners && other->second != from && !exchanged;
           ++tried, ++other) {
        const double earliest = other->first;
        const std::size_t to = other->second;
        exchanged = exchange(samples[from], samples[to], latest - earliest, [&](double moved) {
          ends.erase({latest, from}), ends.erase({earliest, to});
          ends.emplace(latest - moved, from), ends.emplace(earliest + moved, to);
        });
        if (exchanged) break;
      }
      if (!exchanged) break;
    }
    for (auto& list : samples)
      std::sort(list.begin(), list.end(), [&](std::uint32_t a, std::uint32_t b) {
        return tokens(a) != tokens(b) ? tokens(a) > tokens(b) : a < b;
      });
  }
  /// Gives one sample for one or none so that about half of `gap` seconds move; false: no pair
  /// moves anything worth it.
  template <class Moved>
  bool exchange(std::vector<std::uint32_t>& from, std::vector<std::uint32_t>& to, double gap,
                const Moved& moved) const {
    double best = gap * (0.5 - kWorth), seconds = 0;
    std::size_t give = from.size(), take = to.size();
    std::vector<Back> backs{{0, to.size()}};
    for (std::size_t j = 0; j < to.size(); ++j) backs.emplace_back(packed_s_[to[j]], j);
    std::sort(backs.begin(), backs.end());
    for (std::size_t i = 0; i < from.size(); ++i) {
      const auto [off, back] = nearest(backs, packed_s_[from[i]], gap / 2);
      if (off >= best) continue;
      best = off, seconds = packed_s_[from[i]] - back.first, give = i, take = back.second;
    }
    if (give == from.size()) return false;
    if (take < to.size()) {
      std::swap(from[give], to[take]);
    } else {
      to.push_back(from[give]);
      from.erase(from.begin() + static_cast<std::ptrdiff_t>(give));
    }
    moved(seconds);
    return true;
  }

  /// Seconds of a sample that may come back for another one, and its place; 0 where none does.
  using Back = std::pair<double, std::size_t>;
  /// Of ascending `backs` the one for which `seconds` less its own are nearest to `wanted`, the
  /// lowest place of several, and how near.
  static std::pair<double, Back> nearest(const std::vector<Back>& backs, double seconds,
                                         double wanted) {
    std::pair<double, Back> found{kNever, {}};
    const auto walk = [&](auto at, auto end) {  // away from the nearest it is never nearer again
      for (double before = kNever; at != end; ++at) {
        const double off = std::abs(seconds - at->first - wanted);
        if (off > before) break;
        before = off;
        if (off < found.first || (off == found.first && at->second < found.second.second))
          found = {off, *at};
      }
    };
    const auto middle = std::lower_bound(backs.begin(), backs.end(), Back{seconds - wanted, 0});
    walk(middle, backs.end());
    walk(std::make_reverse_iterator(middle), backs.rend());
    return found;
  }

  /// Packs of short samples (longest first) on one rank.
  void pack(const std::vector<std::uint32_t>& samples, int rank,
            std::vector<PlacedMicroBatch>& to) {
    BestFit fit(capacity_);
    const std::size_t begin = to.size();
    for (const std::uint32_t i : samples) {
      const std::size_t p = begin + fit.place(tokens(i));
      if (p == to.size()) to.push_back({{}, rank, options_.splits.front(), 0});
      to[p].segments.push_back(
          {samples_[i].sample, 0, samples_[i].tokens, samples_[i].loss_tokens});
    }
    for (std::size_t p = begin; p < to.size(); ++p)
      to[p].seconds = seconds(to[p].segments, to[p].split, costs_, options_.align);
  }
  void cut(const Shared& shared, std::vector<PlacedMicroBatch>& to) const {
    const SampleLength& sample = samples_[shared.sample];
    // A pair that its padding alone makes too long is cut too, and refused where batches are made.
    const std::int64_t size = shared.choice.chunk_tokens > 0
                                  ? std::min(shared.choice.chunk_tokens, sample.tokens - 1)
                                  : sample.tokens;
    const std::vector<Segment> pieces = cut_sample(sample, size);
    for (std::size_t c = 0; c < pieces.size(); ++c) {
      PlacedMicroBatch m{{pieces[c]}, shared.first, shared.choice.split, 0};
      m.seconds = seconds(m.segments, m.split, costs_, options_.align);
      if (c + static_cast<std::size_t>(options_.chunk_k) < pieces.size())
        m.seconds *= 1 + options_.forward_share;
      to.push_back(std::move(m));
    }
  }

  /// Micro-batches of an attempt with their exact times, in the order of their start.
  Placement built(const Attempt& a) {
    Placement result;
    std::vector<PlacedMicroBatch> list;
    for (const Shared& s : a.shared) {
      for (const std::size_t g : s.gaps) pack(a.gaps[g].samples, a.gaps[g].rank, list);
      cut(s, list);
    }
    for (std::size_t r = 0; r < a.tail.size(); ++r) pack(a.tail[r], static_cast<int>(r), list);
    std::vector<double> clock(a.tail.size()), start(list.size(), 0.0), began,
        done(list.size(), 0.0);
    // Every stage in turn does what the one before it has done; ranks that share meet there.
    for (int stage = 0; stage < options_.stages; ++stage) {
      std::fill(clock.begin(), clock.end(), 0.0);
      for (std::size_t m = 0; m < list.size(); ++m) {
        const auto first = clock.begin() + list[m].first, last = first + list[m].split.ranks;
        start[m] = std::max(done[m], *std::max_element(first, last));
        done[m] = start[m] + list[m].seconds;
        std::fill(first, last, done[m]);
      }
      if (stage == 0) began = start;
    }
    std::vector<std::size_t> order(list.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t x, std::size_t y) { return began[x] < began[y]; });
    result.ranks.resize(clock.size());
    for (const std::size_t m : order) {
      const int id = static_cast<int>(result.micro_batches.size());
      for (int r = list[m].first; r < list[m].first + list[m].split.ranks; ++r)
        result.ranks[static_cast<std::size_t>(r)].push_back(id);
      result.micro_batches.push_back(std::move(list[m]));
    }
    for (std::size_t r = 0; r < clock.size(); ++r)
      result.step_s = std::max(result.step_s,
                               clock[r] + (options_.stages - 1) * kUneven * differences(result, r));
    return result;
  }
  /// Seconds by which neighbours in a rank's list differ, summed up.
  static double differences(const Placement& placed, std::size_t rank) {
    double sum = 0;
    const std::vector<int>& list = placed.ranks[rank];
    const auto seconds_at = [&](std::size_t i) {
      return placed.micro_batches[static_cast<std::size_t>(list[i])].seconds;
    };
    for (std::size_t i = 1; i < list.size(); ++i)
      sum += std::abs(seconds_at(i) - seconds_at(i - 1));
    return sum;
  }

  const std::vector<SampleLength>& samples_;
  const PlacementOptions& options_;
  const PlacementCosts& costs_;
  std::vector<std::uint32_t> order_;  ///< longest first
  std::vector<double> packed_s_;      ///< [sample]
  std::int64_t capacity_ = 1;
  double total_s_ = 0;  ///< rank-seconds of all samples at the smallest split
  std::unordered_map<std::int64_t, std::vector<Choice>> choices_;  ///< by tokens
};

}  // namespace

int Placement::idle_ranks() const {
  return static_cast<int>(
      std::count_if(ranks.begin(), ranks.end(), [](const auto& list) { return list.empty(); }));
}

std::vector<std::string> problems(const PlacementOptions& options) {
  std::vector<std::string> list;
  if (options.ranks < 1) list.push_back(fmt::format("{} ranks to place on", options.ranks));
  if (options.splits.empty()) list.emplace_back("no split of a micro-batch is allowed");
  for (std::size_t i = 0; i < options.splits.size(); ++i) {
    const PlacementSplit& s = options.splits[i];
    if (s.ranks < 1 || s.ranks > options.ranks)
      list.push_back(
          fmt::format("a group of {} ranks does not lie in a row of {}", s.ranks, options.ranks));
    if (i > 0 && s.ranks < options.splits[i - 1].ranks)
      list.push_back(fmt::format("splits must ascend: {} ranks follow {}", s.ranks,
                                 options.splits[i - 1].ranks));
  }
  if (!options.splits.empty() && options.splits.front().ranks > 0 &&
      options.ranks % options.splits.front().ranks != 0)
    list.push_back(fmt::format("the smallest group of {} ranks does not divide the row of {}",
                               options.splits.front().ranks, options.ranks));
  if (options.micro_batch_tokens < 1)
    list.push_back(fmt::format("packs of {} tokens", options.micro_batch_tokens));
  if (options.stages < 1 || options.align < 1 || options.chunk_align < 1 || options.chunk_k < 1)
    list.emplace_back("stages, alignment and kept chunks must be at least 1");
  return list;
}

Placement place(const std::vector<SampleLength>& samples, const PlacementOptions& options,
                const PlacementCosts& costs) {
  const auto wrong = problems(options);
  require(wrong.empty(), "{}", wrong.empty() ? "" : wrong.front());
  Placement best = Placer(samples, options, costs).run();
  if (options.stages == 1) return best;
  // Micro-batches of like length keep a pipeline full, so short samples may share ranks as well.
  const double bound_s = best.bound_s;
  for (auto smallest = options.splits.begin() + 1; smallest < options.splits.end(); ++smallest) {
    PlacementOptions wider = options;
    wider.splits.clear();
    std::copy_if(smallest, options.splits.end(), std::back_inserter(wider.splits),
                 [&](const PlacementSplit& split) { return split.ranks % smallest->ranks == 0; });
    // A set without the largest group would cut, or could not hold, what that group holds.
    if (!problems(wider).empty() || wider.splits.back() != options.splits.back()) continue;
    Placement found = Placer(samples, wider, costs).run();
    if (found.step_s < best.step_s) best = std::move(found);
  }
  best.bound_s = bound_s;
  return best;
}

double seconds(const std::vector<Segment>& segments, const PlacementSplit& split,
               const PlacementCosts& costs, std::int64_t align) {
  std::int64_t tokens = 0;
  double attention = 0;
  for (const Segment& s : segments) {
    const std::int64_t n = axis_tokens({&s, 1}, align);
    tokens += n;
    attention += costs.attention_s(n, s.begin, split);
  }
  return costs.rest_s(tokens, split) + attention + costs.transfer_s(tokens, attention, split);
}

}  // namespace ballast
