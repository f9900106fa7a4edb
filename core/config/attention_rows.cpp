#include "core/config/attention_rows.hpp"

#include "core/config/config.hpp"

namespace ballast {

using namespace deck_row;

void attention_rows(Schema& schema) {
  const auto pattern = on(&Config::attention, &AttentionConfig::pattern);
  const auto index = on(&Config::attention, &AttentionConfig::index);
  auto attention = schema.block("attention", &Config::attention);
  attention.key("pattern", &AttentionConfig::pattern,
                "which (query, key) pairs are computed; vertical_slash: columns and block "
                "diagonals that the last queries attend to (MTraining); moba: the best blocks of "
                "keys for each query; xattention: blocks with the heaviest antidiagonals; by_head: "
                "each head as a table says (MInference); flexprefill: each head by blocks or by "
                "columns and slashes, as its last queries tell");
  attention
      .key("vertical_share", &AttentionConfig::vertical_share, "", share(),
           "vertical_slash, p_v: share of the observed attention that the columns hold; 1: dense")
      .when(index, IndexOrigin::pattern)
      .when(pattern, PatternKind::vertical_slash);
  attention
      .key("slash_share", &AttentionConfig::slash_share, "", share(),
           "vertical_slash, p_s: share of the observed attention that the slashes hold; 1: dense")
      .when(index, IndexOrigin::pattern)
      .when(pattern, PatternKind::vertical_slash);
  attention
      .key("last_q", &AttentionConfig::last_q, "queries", between(1, 1 << 20),
           "vertical_slash, by_head, flexprefill: queries at a segment's end (causal: before each "
           "stretch) that are observed; segments no longer (causal: than a stretch) are dense. Of "
           "every pattern recall and drift are measured on longer segments alone")
      .when(index, IndexOrigin::pattern)
      .when(pattern, PatternKind::vertical_slash, PatternKind::by_head, PatternKind::flexprefill,
            PatternKind::moba, PatternKind::xattention);
  attention
      .key("selection", &AttentionConfig::selection,
           "queries that a vertical_slash index is chosen by; last: the last ones of a "
           "segment, for all its queries (MTraining; the choice for the beginning looks at the "
           "end); causal: for each stretch of queries those before it. dense and moba look at "
           "no later token either way")
      .when(index, IndexOrigin::pattern)
      .when(pattern, PatternKind::vertical_slash, PatternKind::xattention, PatternKind::by_head,
            PatternKind::flexprefill);
  attention
      .key("stretch", &AttentionConfig::stretch, "tokens", between(64, 1 << 30),
           "causal: queries that share a choice, a multiple of 64; dense among themselves, the "
           "first stretch altogether")
      .when(on(&Config::attention, &AttentionConfig::selection), IndexSelection::causal);
  attention
      .key("max_columns", &AttentionConfig::max_columns, "keys", between(0, kTokens),
           "vertical_slash: columns of a head at most, the heaviest (dst: of those that a budget "
           "buys); 0: no cap")
      .when(index, IndexOrigin::pattern)
      .when(pattern, PatternKind::vertical_slash);
  attention
      .key("max_slashes", &AttentionConfig::max_slashes, "blocks", between(0, kTokens),
           "vertical_slash: slashes of a head at most, the heaviest; 0: no cap")
      .when(index, IndexOrigin::pattern)
      .when(pattern, PatternKind::vertical_slash)
      .when(on(&Config::dst, &DstConfig::enabled), false);  // a budget bounds them
  attention
      .key("moba_block", &AttentionConfig::moba_block, "tokens", between(64, 1 << 30),
           "moba: tokens of a block, a multiple of 64")
      .when(index, IndexOrigin::pattern)
      .when(pattern, PatternKind::moba);
  attention
      .key("moba_top_k", &AttentionConfig::moba_top_k, "blocks", between(1, kTokens),
           "moba: blocks a query, its own included; more than there are: dense")
      .when(index, IndexOrigin::pattern)
      .when(pattern, PatternKind::moba);
  attention
      .key("xattention_block", &AttentionConfig::xattention_block, "tokens", between(64, 1 << 20),
           "xattention: tokens of a block, a multiple of 64")
      .when(index, IndexOrigin::pattern)
      .when(pattern, PatternKind::xattention);
  attention
      .key("xattention_stride", &AttentionConfig::xattention_stride, "tokens", between(1, 1 << 20),
           "xattention: tokens between the antidiagonals that are summed; divides 64")
      .when(index, IndexOrigin::pattern)
      .when(pattern, PatternKind::xattention);
  attention
      .key("xattention_threshold", &AttentionConfig::xattention_threshold, "", share(),
           "xattention: share of the estimated attention that each row of blocks keeps; 1: dense")
      .when(index, IndexOrigin::pattern)
      .when(pattern, PatternKind::xattention);
  attention
      .key("heads", &AttentionConfig::heads,
           "by_head: file with the pattern of every layer and head, as `ballast bench heads` "
           "writes it")
      .when(index, IndexOrigin::pattern)
      .when(pattern, PatternKind::by_head);
  attention
      .key("flex_threshold", &AttentionConfig::flex_threshold, "", between(0, 1),
           "flexprefill, tau: a head whose pooled estimate diverges less than this (square root of "
           "Jensen-Shannon) from what its last queries attend to takes blocks for each block of "
           "queries, others columns and slashes; 0: never blocks")
      .when(index, IndexOrigin::pattern)
      .when(pattern, PatternKind::flexprefill);
  attention
      .key("flex_share", &AttentionConfig::flex_share, "", share(),
           "flexprefill, gamma: share of the attention, estimated or observed, that blocks, "
           "columns and slashes each hold; 1: dense")
      .when(index, IndexOrigin::pattern)
      .when(pattern, PatternKind::flexprefill);
  attention.key("index", &AttentionConfig::index,
                "pattern: from the pattern's own rule; generated: made-up vertical-slash patterns, "
                "for plans and timings (random weights are not sparse); recorded: those that an "
                "earlier run chose");
  attention
      .key("recorded", &AttentionConfig::recorded,
           "recorded: folder of indexes (RUN/indexes of a run with trace.indexes_every); each "
           "segment "
           "takes the sample of the nearest length")
      .when(index, IndexOrigin::recorded);
  attention
      .key("expected_sparsity", &AttentionConfig::expected_sparsity, "", between(0, 0.999),
           "share of the visible pairs that a pattern which chooses its pairs while it runs leaves "
           "out, for plans: sparsity_ratio of a run's report; 0: plans time all visible pairs")
      .when(index, IndexOrigin::pattern)
      .when(pattern, PatternKind::vertical_slash, PatternKind::xattention, PatternKind::by_head,
            PatternKind::flexprefill)
      .when(on(&Config::dst, &DstConfig::enabled), false);  // a budget counts them
  attention
      .key("generated_density", &AttentionConfig::generated_density, "", between(1e-6, 1),
           "generated: share of the causal pairs that is computed at least: band and columns stay "
           "where they are more; 1: dense")
      .when(index, IndexOrigin::generated);
  attention
      .key("generated_band_tokens", &AttentionConfig::generated_band_tokens, "tokens",
           between(1, kTokens), "generated: local band")
      .when(index, IndexOrigin::generated);
  attention
      .key("generated_columns", &AttentionConfig::generated_columns, "keys", between(0, kTokens),
           "generated: single key columns of a head, at most one in 16 keys")
      .when(index, IndexOrigin::generated);
}

void ring_rows(Schema& schema) {
  const auto layout = on(&Config::ring, &RingConfig::layout);
  auto ring = schema.block("ring", &Config::ring);
  ring.key("layout", &RingConfig::layout,
           "how the tokens of a micro-batch lie on the context-parallel ranks; auto: the quickest "
           "of contiguous, document_zigzag and striped for each micro-batch (striped where the "
           "index has slashes or columns: vertical_slash, by_head, flexprefill, generated, "
           "recorded); shuffled: stripes, each round of them dealt in an order of its own")
      .when_any(
          {on(&Config::mesh, &MeshShape::cp_inner).is(),
           on(&Config::mesh, &MeshShape::cp_outer).is(),
           on(&Config::batching, &BatchingConfig::method).is(Batching::hbp, Batching::balanced)});
  ring.key("stripe", &RingConfig::stripe, "tokens", between(1, 1 << 30),
           "tokens of a stripe (striped and shuffled layouts; auto: rounded up to blocks of a "
           "sparse pattern, or to 128)")
      .when(layout, LayoutKind::striped, LayoutKind::shuffled, LayoutKind::automatic);
}

void dst_rows(Schema& schema) {
  const auto enabled = on(&Config::dst, &DstConfig::enabled);
  auto dst = schema.block("dst", &Config::dst);
  dst.key("enabled", &DstConfig::enabled,
          "dynamic sparsity tuning: micro-batches predicted above the anchor lose attention "
          "budget, those below gain");
  dst.key("anchor", &DstConfig::anchor,
          "predicted latency that micro-batches are aligned to; path: the mean for those above it, "
          "those below gain budget as far as the simulated step takes no longer")
      .when(enabled, true);
  dst.key("dead_band", &DstConfig::dead_band, "", between(0, 1),
          "micro-batches whose predicted latency is within this share of the anchor keep the base "
          "budget")
      .when(enabled, true);
  dst.key("bound", &DstConfig::bound,
          "what dst.threshold bounds; layer: the drop of every layer; stage: the mean drop over a "
          "stage's layers, so that layers whose coverage is flat give more and others less")
      .when(enabled, true);
  dst.key("threshold", &DstConfig::threshold, "", between(0, 1),
          "p: largest drop of coverage, the share of routing mass that a budget keeps")
      .when(enabled, true);
  dst.key(
         "coverage_rows", &DstConfig::coverage_rows,
         "queries that coverage is told of; last: with vertical_slash the last attention.last_q of "
         "a segment, by which slashes and columns are bought too, with moba all; sampled: with "
         "vertical_slash as many, spread over the segment, with moba the first 16 of every 64")
      .when(enabled, true);
  dst.key("base_budget", &DstConfig::base_budget, "blocks", between(0, 1 << 20),
          "budget without tuning, in key blocks a query; 0: attention.moba_top_k (moba)")
      .when(enabled, true);
  dst.key("budgets", &DstConfig::budgets, "blocks", between(1, 1 << 20),
          "budgets to choose from, ascending, with the base; empty: four to the octave, from an "
          "eighth of the base to four times it")
      .when(enabled, true);
  dst.key("simulated_coverage", &DstConfig::simulated_coverage, "blocks", between(1, 1 << 20),
          "plan: blocks that cover 90 %, one of these drawn for each sample and layer "
          "(SparseBalance Figure 4); empty: 10, 36, 50");
}

void sab_rows(Schema& schema) {
  const auto method = on(&Config::batching, &BatchingConfig::method);
  auto sab = schema.block("sab", &Config::sab);
  sab.key("decay", &SabConfig::decay, "", up_to(0, 1),
          "weight of the past in the moving average of final budgets of a length bin")
      .when(method, Batching::sab)
      .when(on(&Config::dst, &DstConfig::enabled), true);
}

}  // namespace ballast
