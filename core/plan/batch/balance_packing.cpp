#include "core/plan/batch/balance_packing.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "core/base/error.hpp"
#include "core/plan/batch/batch_plan.hpp"

namespace ballast {
namespace {

constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

/// Lengths in decreasing order, some of them taken.
class Remaining {
 public:
  explicit Remaining(std::vector<std::int64_t> tokens)
      : tokens_(std::move(tokens)), next_(tokens_.size() + 1) {
    std::iota(next_.begin(), next_.end(), 0u);
  }
  std::uint32_t size() const { return static_cast<std::uint32_t>(tokens_.size()); }
  std::int64_t tokens(std::uint32_t position) const { return tokens_[position]; }
  /// First position of at most `tokens`, taken or not; size() when there is none.
  std::uint32_t within(std::int64_t tokens) const {
    return static_cast<std::uint32_t>(
        std::partition_point(tokens_.begin(), tokens_.end(),
                             [&](std::int64_t n) { return n > tokens; }) -
        tokens_.begin());
  }
  /// First position from `at` on that is not taken; size() when there is none.  Amortised constant
  /// time.
  std::uint32_t from(std::uint32_t at) {
    std::uint32_t root = at;
    while (next_[root] != root) root = next_[root];
    while (next_[at] != root) at = std::exchange(next_[at], root);
    return root;
  }
  /// The longest from position `at` on that fits into `room` tokens.
  std::uint32_t longest(std::uint32_t at, std::int64_t room) {
    return from(std::max(at, within(room)));
  }
  void take(std::uint32_t position) { next_[position] = position + 1; }

 private:
  std::vector<std::int64_t> tokens_;
  std::vector<std::uint32_t>
      next_;  ///< itself while not taken, else a position closer to the next that is not
};

/// Positions, not taken, of lengths that fill `capacity` well, the longest one left among them. The
/// room beside it is shared by c alike, the last of them chosen to fit: short lengths, which fit
/// anywhere, are not used up early.  The least c that leaves little room is taken; where none does,
/// the best of kTries or of taking the longest that fits again and again.
std::vector<std::uint32_t> fill_pack(Remaining& lengths, std::int64_t capacity) {
  constexpr int kTries = 6;
  constexpr std::int64_t kLittle = 1024;  // part of the capacity
  const std::uint32_t first = lengths.from(0);
  const std::int64_t room = capacity - lengths.tokens(first);
  std::vector<std::uint32_t> best{first}, chosen;
  std::int64_t least = room;
  const auto consider = [&](std::int64_t left) {
    if (left < least || (left == least && chosen.size() > best.size())) {
      least = left;
      best.swap(chosen);
    }
  };
  const std::uint32_t second = lengths.longest(first + 1, room);
  if (second == lengths.size()) return best;
  const std::int64_t fewest = lengths.tokens(second) > 0
                                  ? (room + lengths.tokens(second) - 1) / lengths.tokens(second)
                                  : kTries;
  for (std::int64_t c = std::max<std::int64_t>(1, fewest);
       c < fewest + kTries && least > capacity / kLittle; ++c) {
    chosen.assign(1, first);
    std::int64_t left = room;
    std::uint32_t begin = lengths.longest(first + 1, room / c), p = begin;
    for (std::int64_t i = 1; i < c && p < lengths.size(); ++i, p = lengths.from(p + 1)) {
      chosen.push_back(p);
      left -= lengths.tokens(p);
    }
    if (begin == lengths.size()) break;
    // Those between `begin` and `p` are chosen.
    std::uint32_t last = lengths.longest(first + 1, left);
    if (c > 1 && last >= begin && last < p) last = p;
    if (last < lengths.size()) {
      chosen.push_back(last);
      left -= lengths.tokens(last);
    }
    consider(left);
  }
  if (least > capacity / kLittle) {
    chosen.assign(1, first);
    std::int64_t left = room;
    for (std::uint32_t p; (p = lengths.longest(chosen.back() + 1, left)) < lengths.size();
         left -= lengths.tokens(p))
      chosen.push_back(p);
    consider(left);
  }
  return best;
}

class Packer {
 public:
  Packer(std::span<const std::int64_t> lengths, std::span<const PackGroup> groups, int ranks,
         bool alike, std::uint64_t seed)
      : groups_(groups),
        ranks_(ranks),
        alike_(alike),
        seed_(seed),
        order_(longest_first(lengths)),
        samples_(gathered(lengths, order_)) {
    result_.packs.items.reserve(order_.size());
  }

  GroupedPacking run() {
    // GroupData: in decreasing order a group is one range of positions.
    std::uint32_t begin = 0;
    for (std::size_t g = groups_.size(); g-- > 0;) {
      const std::uint32_t end = g == 0 ? samples_.size() : samples_.within(groups_[g - 1].tokens);
      pack_group(g, begin, end);
      begin = end;
    }
    return std::move(result_);
  }

 private:
  struct Pack {
    std::vector<std::uint32_t> positions;
    std::int64_t tokens = 0;
    double squares = 0;  ///< sum of squared lengths
  };

  static std::vector<std::int64_t> gathered(std::span<const std::int64_t> lengths,
                                            std::span<const std::uint32_t> order) {
    std::vector<std::int64_t> tokens(order.size());
    std::transform(order.begin(), order.end(), tokens.begin(),
                   [&](std::uint32_t i) { return lengths[i]; });
    return tokens;
  }

  void pack_group(std::size_t g, std::uint32_t begin, std::uint32_t end) {
    std::vector<std::uint32_t> own;
    for (std::uint32_t p = samples_.from(begin); p < end; p = samples_.from(p + 1)) {
      own.push_back(p);
      samples_.take(p);
    }
    if (alike_)
      pack_alike(g, own, end);
    else
      pack_alone(g, own, end);
  }

  /// Sets of `width` packs.  A set takes whole layers: `width` neighbours by length, counted with
  /// their longest.
  void pack_alike(std::size_t g, const std::vector<std::uint32_t>& own, std::uint32_t end) {
    const std::size_t width = static_cast<std::size_t>(ranks_ / groups_[g].ranks);
    std::vector<std::int64_t> longest;
    for (std::size_t i = 0; i < own.size(); i += width) longest.push_back(samples_.tokens(own[i]));
    Remaining layers(std::move(longest));
    while (layers.from(0) < layers.size()) {
      const std::vector<std::uint32_t> chosen = fill_pack(layers, groups_[g].tokens);
      begin_set(std::min(width, own.size() - chosen.front() * width));
      for (const std::uint32_t i : chosen) {
        layers.take(i);
        spread(std::span(own).subspan(i * width, std::min(width, own.size() - i * width)));
      }
      end_set(g, end);
    }
  }

  /// Pack by pack, each from a random draw (isf).
  void pack_alone(std::size_t g, const std::vector<std::uint32_t>& own, std::uint32_t end) {
    std::vector<std::int64_t> tokens(own.size());
    std::transform(own.begin(), own.end(), tokens.begin(),
                   [&](std::uint32_t p) { return samples_.tokens(p); });
    const Packing packs = pack_lengths(PackMethod::isf, tokens, groups_[g].tokens, seed_ + g);
    for (std::size_t p = 0; p < packs.size(); ++p) {
      begin_set(1);
      for (const std::uint32_t i : packs[p]) add(packs_.front(), own[i]);
      end_set(g, end);
    }
  }

  void begin_set(std::size_t packs) {
    packs_.assign(packs, {});
    ranking_.resize(packs);
    std::iota(ranking_.begin(), ranking_.end(), 0u);
  }
  /// Fills the set's room with samples from position `shorter` on and stores its packs.
  void end_set(std::size_t g, std::uint32_t shorter) {
    if (g > 0) greedy_fill(groups_[g].tokens, shorter);
    for (const Pack& pack : packs_) {
      for (const std::uint32_t p : pack.positions) result_.packs.items.push_back(order_[p]);
      result_.packs.close();
      result_.group.push_back(static_cast<std::uint32_t>(g));
    }
  }

  void add(Pack& pack, std::uint32_t position) {
    const std::int64_t tokens = samples_.tokens(position);
    pack.positions.push_back(position);
    pack.tokens += tokens;
    pack.squares += static_cast<double>(tokens) * static_cast<double>(tokens);
  }

  /// One sample to each pack, the longest to the pack with the least attention so far.
  void spread(std::span<const std::uint32_t> positions) {
    std::stable_sort(ranking_.begin(), ranking_.end(), [&](std::uint32_t a, std::uint32_t b) {
      return packs_[a].squares < packs_[b].squares;
    });
    for (std::size_t i = 0; i < positions.size(); ++i) add(packs_[ranking_[i]], positions[i]);
  }

  /// Samples of shorter groups, from position `from` on: as many as packs while they fit, then pack
  /// by pack.
  void greedy_fill(std::int64_t capacity, std::uint32_t from) {
    std::vector<std::uint32_t> found;
    while (true) {
      std::int64_t most = 0;
      for (const Pack& pack : packs_) most = std::max(most, pack.tokens);
      found.clear();
      std::uint32_t p = samples_.longest(from, capacity - most);
      for (; p < samples_.size() && found.size() < packs_.size(); p = samples_.from(p + 1))
        found.push_back(p);
      if (found.size() < packs_.size() || samples_.tokens(found.front()) == 0) break;
      for (const std::uint32_t q : found) samples_.take(q);
      spread(found);
    }
    for (Pack& pack : packs_)
      for (std::uint32_t p;
           (p = samples_.longest(from, capacity - pack.tokens)) < samples_.size() &&
           samples_.tokens(p) > 0;) {
        samples_.take(p);
        add(pack, p);
      }
  }

  std::span<const PackGroup> groups_;
  int ranks_;
  bool alike_;
  std::uint64_t seed_;
  std::vector<std::uint32_t> order_;  ///< samples, longest first; a position is an index in it
  Remaining samples_;                 ///< by position
  std::vector<Pack> packs_;           ///< of the set being filled
  std::vector<std::uint32_t> ranking_;
  GroupedPacking result_;
};

}  // namespace

std::vector<Problem> problems(std::span<const PackGroup> groups, int ranks) {
  std::vector<Problem> list;
  if (groups.empty())
    list.push_back(
        {{"batching.groups"},
         "batching.groups is empty: method \"hbp\" needs the pack length of each group",
         "`ballast plan` selects groups where batching.select_lengths names lengths to try"});
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const PackGroup& group = groups[g];
    if (group.tokens < 1)
      list.push_back({{"batching.groups"},
                      fmt::format("batching.groups: {} tokens must be at least 1", group.tokens)});
    if (g > 0 && group.tokens <= groups[g - 1].tokens)
      list.push_back({{"batching.groups"},
                      fmt::format("batching.groups must ascend: {} follows {}", group.tokens,
                                  groups[g - 1].tokens)});
    if (group.ranks < 1 || ranks % std::max(1, group.ranks) != 0)
      list.push_back({{"batching.group_ranks"},
                      fmt::format("batching.group_ranks: {} ranks a pack do not divide the {} "
                                  "data-parallel ranks (mesh.dp)",
                                  group.ranks, ranks)});
    if (g > 0 && group.ranks < groups[g - 1].ranks)
      list.push_back({{"batching.group_ranks"},
                      fmt::format("batching.group_ranks must not descend: {} follows {}",
                                  group.ranks, groups[g - 1].ranks)});
  }
  return list;
}

std::size_t group_of(std::int64_t tokens, std::span<const PackGroup> groups) {
  return static_cast<std::size_t>(
      std::partition_point(groups.begin(), groups.end(),
                           [&](const PackGroup& g) { return g.tokens < tokens; }) -
      groups.begin());
}

GroupedPacking hbp_packing(std::span<const std::int64_t> lengths, std::span<const PackGroup> groups,
                           int ranks, bool alike, std::uint64_t seed) {
  const auto wrong = problems(groups, ranks);
  require(wrong.empty(), "{}", wrong.empty() ? "" : wrong.front().message());
  require(lengths.size() < kNone, "{} samples: one plan holds fewer than 2^32", lengths.size());
  for (std::size_t i = 0; i < lengths.size(); ++i)
    require(lengths[i] <= groups.back().tokens,
            "sample {} of the plan has {} tokens, more than the longest group's {} "
            "(batching.groups); add a group, or let batching.long = "
            "\"split\" cut it",
            i, lengths[i], groups.back().tokens);
  return Packer(lengths, groups, ranks, alike, seed).run();
}

}  // namespace ballast
