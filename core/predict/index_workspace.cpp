#include "core/predict/index_workspace.hpp"

#include <algorithm>
#include <vector>

#include "core/base/division.hpp"
#include "core/base/reduction_space.hpp"
#include "core/plan/attention/slash_windows.hpp"

namespace ballast {
namespace {

/// Receive space of a host reduction over a ring, by Communicator::all_reduce.
std::int64_t received(std::int64_t bytes, int ring) {
  return bytes * ring <= kGatheredBytes ? bytes * ring : std::min(bytes, kReductionBytes);
}

/// The keys of a micro-batch, as executors see them.
KeyAxis keys_of(std::span<const Segment> segments) {
  KeyAxis axis{{0}, {}, {}};
  for (const Segment& s : segments) {
    axis.first_position.push_back(0);
    axis.count.push_back(s.end);
    axis.offset.push_back(axis.offset.back() + divided_up(s.end, kBlock) * kBlock);
  }
  return axis;
}

/// The most of a segment's first `keys` that a rank of a ring has.
std::int64_t most_keys(std::int64_t keys, int ring) {
  return std::min(keys, divided_up(divided_up(keys, kBlock), ring) * kBlock);
}

bool observes_rows(const IndexRule& rule) {
  const AttentionOptions& o = rule.options;
  if (!o.chosen()) return false;
  if (o.pattern == PatternKind::by_head || o.pattern == PatternKind::flexprefill) return true;
  return o.pattern == PatternKind::vertical_slash &&
         (rule.budgeted || (o.vertical_share < 1 && o.slash_share < 1));
}

ObservedBatch batch_of(const IndexRule& rule, std::span<const SlashWindow> windows,
                       const KeyAxis& axis, int ring) {
  ObservedBatch batch;
  std::int64_t parts = 0, sent = 0, uneven = 0, most_uneven = 0;
  for (std::size_t w = 0; w < windows.size(); ++w) {
    const SlashWindow& window = windows[w];
    if (w == 0 || window.segment != windows[w - 1].segment) parts = uneven = 0;
    if (!window.observed()) continue;
    const std::int64_t end = window.rows.back().end(), rows = token_count(window.rows),
                       keys = most_keys(axis.count[window.segment], ring);
    batch.keys.rows += rows;
    batch.keys.pairs += observed_pairs(window, axis);
    uneven += rows * (most_keys(end, ring) - divided_up(end, ring));
    most_uneven = std::max(most_uneven, uneven);
    batch.slots += divided_up(rule.budgeted ? std::max(end, window.end) : end, kBlock);
    // Sampled rows may lie in as many blocks as there are rows.
    const std::int64_t blocks = rule.options.coverage_rows == CoverageRows::sampled
                                    ? std::min(rows, divided_up(end, kBlock))
                                    : divided_up(end, kBlock) - (end - rows) / kBlock;
    if (parts == 0) sent += keys;
    parts += rule.budgeted ? blocks : 1;
    batch.parts = std::max(batch.parts, parts);
  }
  // One rank has most of the segment that lies most unevenly; others even out.
  batch.keys.pairs = divided_up(batch.keys.pairs, ring) + most_uneven;
  batch.sent = batch.parts * sent;
  return batch;
}

}  // namespace

IndexWork recall_work(const AttentionOptions& options, std::span<const Segment> segments,
                      int ring) {
  IndexWork work;
  if (options.recall_every == 0 || !options.chosen() || options.pattern == PatternKind::dense)
    return work;
  std::int64_t pairs = 0, uneven = 0;
  for (const Segment& s : segments) {
    if (s.end <= options.whole_tokens()) continue;
    const std::int64_t rows = std::min(options.recall_rows, s.tokens());
    work.recall.rows += rows;
    pairs += rows * (s.begin + s.end + 1) / 2;  // rows lie evenly
    uneven = std::max(uneven, rows * (most_keys(s.end, ring) - divided_up(s.end, ring)) / 2);
    work.recall_blocks += rows * divided_up(s.end, kBlock);
  }
  work.recall.pairs = divided_up(pairs, ring) + uneven;
  return work;
}

IndexWork index_work(const IndexRule& rule, std::span<const Segment> segments, int ring,
                     bool carries) {
  IndexWork work = recall_work(rule.options, segments, ring);
  if (!observes_rows(rule)) return work;
  const KeyAxis axis = keys_of(segments);
  std::vector<std::int64_t> first;
  for (const Segment& s : segments) first.push_back(s.begin);
  const std::vector<SlashWindow> windows = slash_windows(rule.options, axis, first, carries);
  const std::vector<std::size_t> edges = observed_batches(windows, axis, rule.options.last_q);
  for (std::size_t b = 0; b + 1 < edges.size(); ++b)
    if (const ObservedBatch batch = batch_of(
            rule, std::span(windows).subspan(edges[b], edges[b + 1] - edges[b]), axis, ring);
        batch.keys.rows > 0)
      work.batches.push_back(batch);
  return work;
}

ChoiceBytes choice_bytes(const IndexWork& work, const ChoiceShape& shape) {
  const std::int64_t heads = shape.query_heads, dim = shape.head_dim,
                     operand = shape.type == DType::f32 ? 0 : shape.keys * shape.kv_heads * dim * 4;
  ChoiceBytes bytes;
  for (const ObservedBatch& batch : work.batches) {
    const auto [rows, pairs] = batch.keys;
    // Of rows their queries, maxima and sums; scores of pairs.
    bytes.observed =
        std::max(bytes.observed, operand + heads * (rows * (dim * 4 + 4 + 8) + pairs * 4 +
                                                    (batch.parts * shape.keys + batch.slots) * 8));
    bytes.message =
        std::max(bytes.message, shape.ring * heads * (batch.slots + 2 * batch.sent) * 8);
    for (const std::int64_t sum : {dim * 4, std::int64_t{8}})
      bytes.reduced = std::max(bytes.reduced, received(heads * rows * sum, shape.ring));
  }
  // Of rows their queries, maxima, and sums of all keys and of four parts.
  const std::int64_t rows = work.recall.rows, score = shape.type == DType::f64 ? 8 : 4,
                     bits = work.recall_blocks * 8;
  bytes.recall = heads * (rows * (dim * 8 + 8 + 5 * 8) + work.recall.pairs * score + bits);
  for (const std::int64_t sum : {rows * dim * 8, rows * 5 * 8, bits})
    bytes.reduced = std::max(bytes.reduced, received(heads * sum, shape.ring));
  if (shape.ring == 1) bytes.message = bytes.reduced = 0;
  return bytes;
}

}  // namespace ballast
