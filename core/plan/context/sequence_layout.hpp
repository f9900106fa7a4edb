// SequenceLayout: (rank, local index) <-> position on the packed axis of a micro-batch, over
// context-parallel ranks.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/enum_names.hpp"
#include "core/plan/batch/batch.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {

/// `automatic` is a deck's word for a choice by micro-batch (LayoutChoice); plans and layouts have
/// the others alone.
enum class LayoutKind { contiguous, zigzag, striped, shuffled, document_zigzag, automatic };
template <>
struct EnumNames<LayoutKind> {
  static constexpr EnumTable<LayoutKind, 6> table{{{LayoutKind::contiguous, "contiguous"},
                                                   {LayoutKind::zigzag, "zigzag"},
                                                   {LayoutKind::striped, "striped"},
                                                   {LayoutKind::shuffled, "shuffled"},
                                                   {LayoutKind::document_zigzag, "document_zigzag"},
                                                   {LayoutKind::automatic, "auto"}}};
};
/// Whether the layout deals blocks of `stripe` tokens.
inline bool deals_stripes(LayoutKind kind) {
  return kind == LayoutKind::striped || kind == LayoutKind::shuffled;
}

/// What makes a SequenceLayout once the length is known.
struct LayoutRule {
  LayoutKind kind = LayoutKind::contiguous;
  std::int64_t stripe = 64;  ///< tokens of a stripe (striped and shuffled)
  std::int64_t align = 1;    ///< pieces begin at multiples of it
  bool operator==(const LayoutRule&) const = default;
};

/// How N tokens are spread over C ranks.  Local indices ascend with the global position on every
/// rank and every layout, so that causal visibility is one interval per query.
///   contiguous  rank r holds [b(r), b(r+1)), b(i) = N i / C rounded down to `align`
///   zigzag      2C pieces cut alike; rank r holds pieces r and 2C-1-r
///   striped     block b of `stripe` tokens lies on rank b mod C
///   shuffled    like striped, but every round of C blocks is dealt to the ranks in a random order
///   of its own, always the same one.  A slash,
///               which striping computes whole at one ring step or two, is spread over all of them,
///               and causal balance stays.
///   document_zigzag  every segment is cut like zigzag by itself (WLB-LLM's per-document shards);
///               the ranks take turns in who has the first piece, so that rests even out.  Exact
///               causal balance of packed samples.
class SequenceLayout {
 public:
  SequenceLayout() = default;
  SequenceLayout(LayoutKind kind, std::int64_t tokens, int ranks, std::int64_t stripe = 64,
                 std::int64_t align = 1);
  /// The layout of a micro-batch's packed axis, whose segments document_zigzag needs.
  SequenceLayout(LayoutKind kind, const MicroBatch& micro_batch, int ranks,
                 std::int64_t stripe = 64, std::int64_t align = 1);

  std::int64_t global(int rank, std::int64_t index) const;
  std::int64_t local_tokens(int rank) const;
  std::int64_t tokens() const { return tokens_; }
  int ranks() const { return ranks_; }
  LayoutKind kind() const { return kind_; }
  std::int64_t stripe() const { return stripe_; }
  std::int64_t align() const { return align_; }
  /// Number of local tokens of `rank` whose global position is below `global`: the lower bound that
  /// turns global intervals into local ones.
  std::int64_t lower_bound(int rank, std::int64_t global) const;
  /// Maximal ranges [begin, end) of global positions on `rank`, ascending.
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces(int rank) const;
  /// The same for local indices [begin, end) of the rank alone, such as one member's part of a
  /// Ulysses group (core/plan/context/ulysses_heads.hpp).
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces(int rank, std::int64_t begin,
                                                            std::int64_t end) const;

 private:
  std::int64_t boundary(std::int64_t i, std::int64_t parts) const;
  /// Place of `rank` in round `round` of stripes.
  std::int64_t place(std::int64_t round, int rank) const;

  /// Of a shuffled layout, [rounds][ranks]: the place of each rank; later rounds repeat them.
  std::shared_ptr<const std::vector<std::int32_t>> places_;

  /// Segments of a document_zigzag layout.
  struct Documents {
    std::vector<std::int64_t> offset;  ///< [segments + 1], on the packed axis
    std::vector<std::int64_t> before;  ///< [segments + 1][ranks]: local tokens of earlier segments
  };
  void lay_documents(std::vector<std::int64_t> offset);
  /// Beginning of piece i of a segment's 2C pieces on the packed axis.
  std::int64_t piece_begin(std::size_t document, std::int64_t i) const;
  /// The lower of the two pieces that a rank has of a segment.
  std::int64_t first_piece(std::size_t document, int rank) const;
  std::size_t document_of(std::int64_t global) const;
  std::shared_ptr<const Documents> documents_;
  LayoutKind kind_ = LayoutKind::contiguous;
  std::int64_t tokens_ = 0, stripe_ = 64, align_ = 1;
  int ranks_ = 1;
};

/// Where the segments of a micro-batch lie on its packed axis.  Padding (MicroBatch::align) follows
/// the segment it belongs to.
struct PackedAxis {
  std::vector<std::int64_t> offset;  ///< [segments + 1], start of each segment on the packed axis
  explicit PackedAxis(const MicroBatch& batch);
  int segment_of(std::int64_t packed) const;
};

/// Tokens that `rank` holds of a micro-batch under a layout, in local order.
AxisRanges local_ranges(const MicroBatch& batch, const SequenceLayout& layout, int rank);
/// The same of every rank.
std::vector<AxisRanges> shard_ranges(const MicroBatch& batch, const SequenceLayout& layout);

}  // namespace ballast
