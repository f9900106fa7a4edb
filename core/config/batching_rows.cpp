#include "core/config/batching_rows.hpp"

#include "core/config/config.hpp"
#include "core/data/sampler.hpp"

namespace ballast {
namespace {

/// Above any step that is trained (up to 2^30 tokens), and few enough to be planned.
constexpr std::int64_t kStepTokens = std::int64_t{1} << 34;

}  // namespace

using namespace deck_row;

void batching_rows(Schema& schema) {
  const auto method = on(&Config::batching, &BatchingConfig::method);
  auto batching = schema.block("batching", &Config::batching);
  batching.key(
      "method", &BatchingConfig::method,
      "none: one sample a micro-batch; packed: best-fit packs, heaviest first to the least "
      "loaded rank; hbp: packing groups; sab: ranks, then micro-batches, balanced by "
      "predicted latency (SparseBalance), lbb: by tokens; chunkflow: dependent chunks of long "
      "samples; balanced: long samples on as many ranks as they need, beside packs of short ones, "
      "by predicted time; others: packing baselines");
  batching
      .key("micro_batch_tokens", &BatchingConfig::micro_batch_tokens, "tokens", between(1, kTokens),
           "capacity of a pack; a longer sample gets a micro-batch of its own (balanced: as "
           "many data-parallel ranks as hold no more than this each, or chunks); stages of a "
           "pipeline get layers for it")
      .when_any({method.is_not(Batching::none, Batching::hbp, Batching::chunkflow),
                 on(&Config::mesh, &MeshShape::pp).is_not(1)})
      .when_any({method.is_not(Batching::chunkflow)});
  batching
      .key("global_tokens", &BatchingConfig::global_tokens, "tokens", between(1, kStepTokens),
           "tokens of a global batch: samples are taken in order until they reach it; each rank "
           "accumulates the gradients of its micro-batches (gradient accumulation)")
      .when(on(&Config::batching, &BatchingConfig::global_samples), 0);
  batching.key("global_samples", &BatchingConfig::global_samples, "samples",
               between(0, kMostStepSamples),
               "samples of a global batch, in place of global_tokens; 0: global_tokens decides");
  batching
      .key("micro_batch_samples", &BatchingConfig::micro_batch_samples, "samples",
           between(0, 1 << 20),
           "none, sab, lbb: samples of a micro-batch (none: that many in order; sab, lbb: on "
           "average); 0: one (none), as micro_batch_tokens allows (sab, lbb)")
      .when(method, Batching::none, Batching::sab, Batching::lbb);
  batching.key("window", &BatchingConfig::window, "steps", between(1, 4096),
               "steps whose samples are taken together and dealt out anew by batching.window_rule; "
               "by lengths and the model's shape alone; 1: steps as the sampler takes them");
  batching
      .key("window_rule", &BatchingConfig::window_rule,
           "balanced: equal work to each step of a window; sorted: samples of like length in a "
           "step, steps in random order (LongAlign)")
      .when(on(&Config::batching, &BatchingConfig::window));
  batching.key("shuffle", &BatchingConfig::shuffle,
               "a new sample order each epoch, the same on every mesh");
  batching.key("scope", &BatchingConfig::scope,
               "what is packed at once: each global batch, or the whole epoch, cut into batches of "
               "one micro-batch a rank (pack only)");
  batching
      .key("groups", &BatchingConfig::groups, "tokens", between(1, kTokens),
           "hbp: pack length of each group, ascending")
      .when(method, Batching::hbp);
  batching
      .key(
          "group_ranks", &BatchingConfig::group_ranks, "ranks", between(1, kDegree),
          "hbp: ranks that share a pack of each group, a divisor of mesh.dp: heads over as many as "
          "divide the query heads, a ring over the rest; empty list: 1")
      .when(method, Batching::hbp);
  batching
      .key("group_recompute", &BatchingConfig::group_recompute, "layers", between(-1, 1 << 16),
           "hbp: first layers of a stage recomputed in backward in each group, as recompute.mode = "
           "\"full\" does; -1 or an empty list: as block recompute says")
      .when(method, Batching::hbp);
  batching
      .key("groups_from", &BatchingConfig::groups_from,
           "hbp: where the packing groups stand; profile: those that `ballast profile` or `ballast "
           "plan` selected (select_lengths) and stored in profile.table, in place of groups, "
           "group_ranks and group_recompute")
      .when(method, Batching::hbp);
  batching
      .key("select_lengths", &BatchingConfig::select_lengths, "tokens", between(1, kTokens),
           "hbp: pack lengths that `ballast plan` and `ballast profile` try when they select "
           "packing groups, ascending; empty: no selection")
      .when(method, Batching::hbp);
  batching
      .key("select_ranks", &BatchingConfig::select_ranks, "ranks", between(1, kDegree),
           "hbp, balanced: ranks a pack to try; empty list: powers of two that divide mesh.dp "
           "(balanced: all divisors of mesh.dp, 1 where the deck tunes budgets or joins ranks "
           "itself)")
      .when(method, Batching::hbp, Batching::balanced);
  batching
      .key("select_memory_gib", &BatchingConfig::select_memory_gib, "GiB", at_least(0),
           "hbp: memory of a rank that selected groups keep within by recomputing layers, packs of "
           "all "
           "of them in a step; 0: no limit")
      .when(method, Batching::hbp);
  batching
      .key("select_refine", &BatchingConfig::select_refine,
           "hbp: selected groups are changed one at a time while the data's planned time falls; "
           "false: those of Algorithm 1 as the paper prints it")
      .when(method, Batching::hbp);
  batching
      .key("packing", &BatchingConfig::packing,
           "hbp: how a group's samples become packs; alike: sets of packs alike in tokens and "
           "attention; isf: one by one by initial sample fit, as Algorithm 2 of the paper prints")
      .when(method, Batching::hbp);
  batching
      .key("balance", &BatchingConfig::balance,
           "hbp: packs and batches of like attention; false: random packs of each group in random "
           "order")
      .when(method, Batching::hbp);
  batching
      .key("long", &BatchingConfig::long_samples,
           "hbp: what happens to a sample above the longest group; split: pieces of its length, "
           "each a sample")
      .when(method, Batching::hbp);
}

}  // namespace ballast
