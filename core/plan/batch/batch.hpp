// Batch plan: what each data-parallel rank computes in one step.  Built by pure functions from
// lengths.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace ballast {

/// Tokens [origin + begin, origin + end) of a sample.  begin == 0 everywhere is a packed
/// micro-batch; begin > 0 is a dependent chunk that attends to the stored keys and values of [0,
/// begin).
struct Segment {
  std::int64_t sample = 0;  ///< index in the dataset
  std::int64_t begin = 0, end = 0;
  std::int64_t loss_tokens =
      0;  ///< tokens of this segment that carry loss; of a chunk of a masked sample an estimate
  std::int64_t origin = 0;  ///< token of the sample that positions count from: where the rejected
                            ///< answer of a pair begins, 0 elsewhere
  std::int64_t tokens() const { return end - begin; }
  /// Whether a sample begins with this segment.
  bool begins_sample() const { return begin == 0 && origin == 0; }
  bool operator==(const Segment&) const = default;
};

class Hash;
/// Adds every field.
void add(Hash& hash, const Segment& segment);

/// Length of a packed axis on which segments start at multiples of `align`, and which ends at one.
std::int64_t axis_tokens(std::span<const Segment> segments, std::int64_t align);

/// Segments computed together, concatenated along one packed axis.
struct MicroBatch {
  std::vector<Segment> segments;
  int sp = 1;                 ///< data-parallel ranks that share it (adaptive SP, HBP); 1: none
  int recompute_layers = -1;  ///< layers recomputed in backward; -1: as the deck says
  /// Segments start at multiples of this on the packed axis, which ends at one (sparse patterns:
  /// 64); what lies between is padding.
  std::int64_t align = 1;
  std::int64_t tokens() const;
  /// Length of the packed axis: tokens and padding.
  std::int64_t axis_tokens() const;
  std::int64_t loss_tokens() const;
  /// Sum over segments of visible (query, key) pairs: n (begin + (n + 1) / 2) for n tokens.
  double attention_pairs() const;
  bool operator==(const MicroBatch&) const = default;
};

/// One step: micro_batches[d] is the list of data-parallel rank d, in execution order.  Ranks [d, d
/// + sp), d a multiple of sp, share a micro-batch of sp > 1: it stands with rank d, the others hold
/// one without segments, of the same sp, at the same place of their lists.
struct Batch {
  std::int64_t step = 0;
  std::vector<std::vector<MicroBatch>> micro_batches;
  std::int64_t loss_tokens() const;  ///< of the whole global batch: the `ave_token` normaliser
  std::int64_t tokens() const;
  std::int64_t samples() const;  ///< distinct samples (Segment::begins_sample)
};

/// Length of one sample of the step's global batch.
struct SampleLength {
  std::int64_t sample = 0;
  std::int64_t tokens = 0;
  std::int64_t loss_tokens = 0;
  /// Of a pair of answers (loss.kind = "dpo"): what of it is the chosen one, which comes first.  0:
  /// no pair.
  std::int64_t chosen_tokens = 0, chosen_loss_tokens = 0;
};

/// What of a packed axis a whole sample takes up: each answer of a pair is a segment of its own.
std::int64_t axis_tokens(const SampleLength& sample, std::int64_t align);

}  // namespace ballast
