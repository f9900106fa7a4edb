#include "core/plan/batch/batch_metrics.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/observe/metrics.hpp"
#include "core/plan/batch/balance_packing.hpp"
#include "core/plan/batch/batch_plan.hpp"

namespace ballast {

void BatchMeter::Sums::add(double d, double p, double a) {
  dbr += d;
  pr += p;
  abr += a;
  ++batches;
}

BatchMeter::BatchMeter(const BatchingOptions& options, int shared_ranks)
    : options_(options), shared_ranks_(shared_ranks) {
  if (options.method != Batching::hbp) options_.groups = {{options.micro_batch_tokens, 1, -1}};
  for (const PackGroup& g : options_.groups) {
    GroupMetrics m;
    m.group = g;
    m.fill.resize(GroupMetrics::kBins);
    m.attention.resize(GroupMetrics::kBins);
    counts_.groups.push_back(std::move(m));
  }
  group_full_.resize(options_.groups.size());
}

bool BatchMeter::is_full(const Batch& batch) {
  std::size_t busy = 0, rounds = 0;
  for (const auto& list : batch.micro_batches) {
    rounds = std::max(rounds, list.size());
    for (const MicroBatch& m : list)
      if (!m.segments.empty()) busy += static_cast<std::size_t>(m.sp);
  }
  return busy == rounds * batch.micro_batches.size();
}

BatchMeter::Lengths BatchMeter::lengths_of(const Batch& batch) {
  Lengths lengths;
  for (const auto& list : batch.micro_batches)
    for (const MicroBatch& m : list)
      for (const Segment& s : m.segments)
        lengths[s.sample] = std::max(lengths[s.sample], s.origin + s.end);
  return lengths;
}

void BatchMeter::add_lengths(const Lengths& lengths) {
  double sum = 0, count = 0;
  for (const auto& [sample, tokens] : lengths) {
    if (tokens == 0) continue;
    const double log = std::log(static_cast<double>(tokens));
    sum += log, log_squares_ += log * log, ++count;
  }
  logs_ += sum, logged_ += count;
  if (count > 0) step_squares_ += sum * sum / count;
}

BatchMeter::Pack BatchMeter::pack_of(const MicroBatch& micro_batch) const {
  Pack pack;
  std::int64_t longest_sample = 0;
  for (const Segment& s : micro_batch.segments) {
    pack.tokens += static_cast<double>(s.tokens());
    // A chunk also attends to what lies before it: the chunks of a sample add to its square.
    const double begin = static_cast<double>(s.begin), end = static_cast<double>(s.end);
    pack.squares += end * end - begin * begin;
    pack.longest = std::max(pack.longest, s.tokens());
    longest_sample = std::max(longest_sample, s.origin + s.end);
  }
  pack.group = group(longest_sample);
  const bool padded = options_.method == Batching::none || options_.method == Batching::sorted;
  const double length = static_cast<double>(
      padded ? pack.longest * static_cast<std::int64_t>(micro_batch.segments.size())
             : options_.groups[pack.group].tokens);
  // A longer sample has a pack of its own, without padding.
  pack.padding = padding_ratio(std::vector<double>{std::min(pack.tokens, length)}, length);
  return pack;
}

std::size_t BatchMeter::group(std::int64_t tokens) const {
  return options_.method == Batching::hbp ? group_of(tokens, options_.groups) : 0;
}

void BatchMeter::count(const MicroBatch& micro_batch, const Pack& pack, const Lengths& lengths,
                       bool full) {
  GroupMetrics& of = counts_.groups[pack.group];
  const double capacity = static_cast<double>(of.group.tokens);
  const auto bin = [](double share) {
    return static_cast<std::size_t>(
        std::clamp(share * GroupMetrics::kBins, 0.0, GroupMetrics::kBins - 1.0));
  };
  ++of.packs;
  of.tail_packs += full ? 0 : 1;
  of.tokens += static_cast<std::int64_t>(pack.tokens);
  ++of.fill[bin(pack.tokens / capacity)];
  ++of.attention[bin(pack.squares / (capacity * capacity))];
  for (const Segment& s : micro_batch.segments) {
    if (!s.begins_sample()) continue;
    const std::int64_t tokens = lengths.at(s.sample);
    ++of.samples;
    counts_.longest = std::max(counts_.longest, tokens);
    const auto b = static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(tokens)));
    if (of.lengths.size() <= b) of.lengths.resize(b + 1);
    ++of.lengths[b];
    if (options_.groups[group(tokens)].ranks > 1) needing_ += static_cast<double>(tokens);
  }
}

void BatchMeter::add(const Batch& batch, bool full) {
  const Lengths lengths = lengths_of(batch);
  add_lengths(lengths);
  const std::size_t ranks = batch.micro_batches.size();
  std::vector<double> tokens(ranks), attention(ranks);
  double padding = 0;
  std::int64_t packs = 0;
  std::size_t only = options_.groups.size();  // the group of every pack
  bool mixed = false;
  for (std::size_t d = 0; d < ranks; ++d)
    for (const MicroBatch& m : batch.micro_batches[d]) {
      if (m.segments.empty()) continue;
      const Pack pack = pack_of(m);
      padding += pack.padding;
      for (std::size_t r = d; r < std::min(ranks, d + static_cast<std::size_t>(m.sp)); ++r) {
        tokens[r] += pack.tokens / m.sp;
        attention[r] += pack.squares / m.sp;
      }
      if (shared_ranks_ * m.sp > 1) communicating_ += pack.tokens;
      ++packs;
      mixed = mixed || (only != options_.groups.size() && only != pack.group);
      only = pack.group;
      count(m, pack, lengths, full);
    }
  const double dbr = balance_ratio(tokens),
               pr = packs > 0 ? padding / static_cast<double>(packs) : 0,
               abr = balance_ratio(attention);
  all_.add(dbr, pr, abr);
  if (full)
    full_.add(dbr, pr, abr);
  else
    counts_.tail_packs += packs;
  if (full && !mixed && packs > 0) group_full_[only].add(dbr, pr, abr);
  counts_.packs += packs, ++counts_.batches;
}

BatchMetrics BatchMeter::result() const {
  BatchMetrics m = counts_;
  const Sums& sums = full_.batches > 0 ? full_ : all_;
  const auto mean = [](double sum, std::int64_t count) {
    return count > 0 ? sum / static_cast<double>(count) : 0;
  };
  m.dbr = mean(sums.dbr, sums.batches);
  m.pr = mean(sums.pr, sums.batches);
  m.abr = mean(sums.abr, sums.batches);
  for (std::size_t g = 0; g < m.groups.size(); ++g) {
    const Sums& s = group_full_[g];
    m.groups[g].batches = s.batches;
    m.groups[g].dbr = mean(s.dbr, s.batches);
    m.groups[g].pr = mean(s.pr, s.batches);
    m.groups[g].abr = mean(s.abr, s.batches);
    m.samples += m.groups[g].samples;
    m.tokens += m.groups[g].tokens;
  }
  m.cr = mean(communicating_, m.tokens);
  m.cr_bound = mean(needing_, m.tokens);
  const double center = logged_ > 0 ? logs_ * logs_ / logged_ : 0, all = log_squares_ - center;
  m.length_share = all > 0 ? std::max(0.0, step_squares_ - center) / all : 0;
  m.ave_t = mean(static_cast<double>(m.tokens), m.batches * options_.dp);
  return m;
}

}  // namespace ballast
