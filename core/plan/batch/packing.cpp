#include "core/plan/batch/packing.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <numeric>
#include <queue>

#include "core/base/error.hpp"
#include "core/base/random.hpp"

namespace ballast {
namespace {

using Items = std::vector<std::uint32_t>;
using Lengths = std::span<const std::int64_t>;

/// Consecutive items of `order` until the next one does not fit.
Packing next_fit(std::span<const std::uint32_t> order, Lengths lengths, std::int64_t capacity) {
  Packing packs;
  packs.items.assign(order.begin(), order.end());
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (i > packs.first.back() && tokens + lengths[order[i]] > capacity) {
      packs.first.push_back(i);
      tokens = 0;
    }
    tokens += lengths[order[i]];
  }
  if (!order.empty()) packs.close();
  return packs;
}

Packing sorted_batches(Lengths lengths, std::int64_t capacity) {
  Packing packs;
  packs.items = longest_first(lengths);
  for (std::size_t i = 0; i < packs.items.size(); ++i) {
    const std::size_t begin = packs.first.back();
    const std::int64_t padded =
        lengths[packs.items[begin]] * static_cast<std::int64_t>(i - begin + 1);
    if (i > begin && padded > capacity) packs.first.push_back(i);
  }
  if (!packs.items.empty()) packs.close();
  return packs;
}

Packing iterative_sampling(Lengths lengths, std::int64_t capacity, std::uint64_t seed) {
  constexpr int kRounds = 12;       // after which 3 % of the packs are taken as they come
  constexpr std::size_t kKept = 4;  // each round keeps a quarter: its fullest
  Packing packs;
  Items rest(lengths.size());
  std::iota(rest.begin(), rest.end(), 0u);
  for (int round = 0; round < kRounds && !rest.empty(); ++round) {
    const std::uint64_t stream = stream_of("packing.isf") + static_cast<std::uint64_t>(round);
    for (std::size_t i = rest.size(); i > 1; --i)
      std::swap(rest[i - 1], rest[random_bits(seed, stream, i) % i]);
    const Packing drawn = next_fit(rest, lengths, capacity);
    std::vector<std::int64_t> tokens(drawn.size());
    for (std::size_t p = 0; p < drawn.size(); ++p)
      for (const std::uint32_t i : drawn[p]) tokens[p] += lengths[i];
    std::vector<std::int64_t> ranked = tokens;
    const std::size_t place = ranked.size() / kKept;
    std::nth_element(ranked.begin(), ranked.begin() + static_cast<std::ptrdiff_t>(place),
                     ranked.end(), std::greater<>());
    const std::int64_t enough = round + 1 == kRounds ? 0 : ranked[place];
    rest.clear();
    for (std::size_t p = 0; p < drawn.size(); ++p) {
      Items& to = tokens[p] >= enough ? packs.items : rest;
      to.insert(to.end(), drawn[p].begin(), drawn[p].end());
      if (tokens[p] >= enough) packs.close();
    }
  }
  return packs;
}

/// Leftmost pack with enough room, from a tree of the most room in each half.
Packing first_fit(const Items& order, Lengths lengths, std::int64_t capacity) {
  // Of two packs at most one is half empty, so this many are enough; items above the capacity come
  // on top.
  const double total = std::accumulate(
      lengths.begin(), lengths.end(), 0.0,
      [&](double sum, std::int64_t n) { return sum + static_cast<double>(std::min(n, capacity)); });
  const std::size_t most = std::min(
      lengths.size(), static_cast<std::size_t>(2 * total / static_cast<double>(capacity)) + 2);
  const std::size_t leaves = std::bit_ceil(std::max<std::size_t>(1, most));
  std::vector<std::int64_t> room(
      2 * leaves, capacity + 1);  // one more than any item within the capacity: not yet begun
  Items pack_of(order.size());
  std::uint32_t packs = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::int64_t tokens =
        std::min(lengths[order[i]], capacity + 1);  // an item above the capacity begins a pack
    std::size_t at = 1;
    while (at < leaves) at = 2 * at + (room[2 * at] >= tokens ? 0 : 1);
    pack_of[i] = static_cast<std::uint32_t>(at - leaves);
    packs = std::max(packs, pack_of[i] + 1);
    room[at] = std::min(room[at], capacity) -
               tokens;  // -1: not even an item without tokens joins the one above the capacity
    for (at /= 2; at >= 1; at /= 2) room[at] = std::max(room[2 * at], room[2 * at + 1]);
  }
  return gather(order, pack_of, packs);
}

Packing best_fit(const Items& order, Lengths lengths, std::int64_t capacity) {
  BestFit fit(capacity);
  Items pack_of(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) pack_of[i] = fit.place(lengths[order[i]]);
  return gather(order, pack_of, fit.packs());
}

Packing shortest_pack_first(const Items& order, Lengths lengths, std::int64_t capacity) {
  using Open = std::pair<std::int64_t, std::uint32_t>;  // tokens, pack
  std::priority_queue<Open, std::vector<Open>, std::greater<>> open;
  Items pack_of(order.size());
  std::uint32_t packs = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    Open pack{0, packs};
    if (!open.empty() && open.top().first + lengths[order[i]] <= capacity) {
      pack = open.top();
      open.pop();
    } else {
      ++packs;
    }
    pack_of[i] = pack.second;
    open.emplace(pack.first + lengths[order[i]], pack.second);
  }
  return gather(order, pack_of, packs);
}

}  // namespace

Packing pack_lengths(PackMethod method, std::span<const std::int64_t> lengths,
                     std::int64_t capacity, std::uint64_t seed) {
  require(capacity >= 1, "batching.micro_batch_tokens = {} must be at least 1", capacity);
  const auto random_order = [&] {
    return shuffled(lengths.size(), seed, stream_of("packing.order"));
  };
  switch (method) {
    case PackMethod::random:
      return next_fit(random_order(), lengths, capacity);
    case PackMethod::sorted:
      return sorted_batches(lengths, capacity);
    case PackMethod::isf:
      return iterative_sampling(lengths, capacity, seed);
    case PackMethod::ffs:
      return first_fit(random_order(), lengths, capacity);
    case PackMethod::ffd:
      return first_fit(longest_first(lengths), lengths, capacity);
    case PackMethod::bfs:
      return best_fit(random_order(), lengths, capacity);
    case PackMethod::bfd:
      return best_fit(longest_first(lengths), lengths, capacity);
    case PackMethod::spfhp:
      return shortest_pack_first(longest_first(lengths), lengths, capacity);
  }
  return {};
}

std::vector<std::uint32_t> longest_first(std::span<const std::int64_t> lengths) {
  // Least significant digit first, on the distance from the longest: stable, so equal lengths keep
  // their order.
  constexpr int kBits = 11;
  struct Entry {
    std::uint64_t key;
    std::uint32_t item;
  };
  const std::int64_t longest =
      lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  std::vector<Entry> entries(lengths.size()), other(lengths.size());
  std::uint64_t widest = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    entries[i] = {static_cast<std::uint64_t>(longest - lengths[i]), static_cast<std::uint32_t>(i)};
    widest = std::max(widest, entries[i].key);
  }
  for (int shift = 0; shift < 64 && widest >> shift != 0; shift += kBits) {
    const auto digit = [&](const Entry& e) { return (e.key >> shift) & ((1u << kBits) - 1); };
    std::array<std::size_t, (1 << kBits) + 1> at{};
    for (const Entry& e : entries) ++at[digit(e) + 1];
    std::partial_sum(at.begin(), at.end(), at.begin());
    for (const Entry& e : entries) other[at[digit(e)]++] = e;
    entries.swap(other);
  }
  Items order(lengths.size());
  std::transform(entries.begin(), entries.end(), order.begin(),
                 [](const Entry& e) { return e.item; });
  return order;
}

std::vector<std::uint32_t> shuffled(std::size_t n, std::uint64_t seed, std::uint64_t stream) {
  Items order(n);
  std::iota(order.begin(), order.end(), 0u);
  for (std::size_t i = n; i > 1; --i)
    std::swap(order[i - 1], order[random_bits(seed, stream, i) % i]);  // Fisher-Yates
  return order;
}

std::uint32_t BestFit::place(std::int64_t tokens) {
  std::uint32_t pack = packs_;
  std::int64_t room = capacity_;
  if (auto fit = open_.lower_bound(tokens); fit != open_.end()) {
    room = fit->first;
    pack = fit->second;
    open_.erase(fit);
  } else {
    ++packs_;
  }
  if (room > tokens) open_.emplace(room - tokens, pack);
  return pack;
}

Packing gather(std::span<const std::uint32_t> order, std::span<const std::uint32_t> pack_of,
               std::uint32_t packs) {
  Packing result;
  result.first.assign(packs + std::size_t{1}, 0);
  for (const std::uint32_t p : pack_of) ++result.first[p + 1];
  std::partial_sum(result.first.begin(), result.first.end(), result.first.begin());
  std::vector<std::size_t> at(result.first.begin(), result.first.end() - 1);
  result.items.resize(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) result.items[at[pack_of[i]]++] = order[i];
  return result;
}

}  // namespace ballast
