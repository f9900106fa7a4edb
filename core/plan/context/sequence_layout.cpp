#include "core/plan/context/sequence_layout.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "core/plan/context/axis_range.hpp"

namespace ballast {
namespace {
/// Rounds with an order of their own: many more than a slash or a band meets, and little memory at
/// any length.
constexpr std::int64_t kDeals = 256;
}  // namespace

SequenceLayout::SequenceLayout(LayoutKind kind, std::int64_t tokens, int ranks, std::int64_t stripe,
                               std::int64_t align)
    : kind_(kind), tokens_(tokens), stripe_(stripe), align_(align), ranks_(ranks) {
  require(tokens >= 0, "sequence layout: {} tokens; must not be negative", tokens);
  require(ranks >= 1, "sequence layout: {} context-parallel ranks; must be at least 1", ranks);
  require(kind != LayoutKind::automatic, "sequence layout: auto stands for one of the others");
  require(stripe >= 1, "sequence layout: stripe of {} tokens; must be at least 1", stripe);
  require(align >= 1, "sequence layout: pieces aligned to {} tokens; must be at least 1", align);
  // boundary() multiplies the two.
  require(
      tokens <= std::numeric_limits<std::int64_t>::max() / (2 * static_cast<std::int64_t>(ranks)),
      "sequence layout: {} tokens over {} ranks overflow", tokens, ranks);
  if (kind == LayoutKind::shuffled) {
    const std::int64_t rounds = std::min(kDeals, tokens / stripe / ranks + 1);
    auto places = std::make_shared<std::vector<std::int32_t>>();
    std::vector<int> dealt(static_cast<std::size_t>(ranks));  // the rank at each place
    for (std::int64_t round = 0; round < rounds; ++round) {
      const std::size_t first = places->size();
      places->resize(first + dealt.size());
      const auto order = dealt.begin();
      std::iota(order, dealt.end(), 0);
      for (int i = ranks - 1; i > 0; --i)
        std::swap(order[i], order[static_cast<std::ptrdiff_t>(
                                random_bits(0, stream_of("shuffled_stripes"),
                                            static_cast<std::uint64_t>(round * ranks + i)) %
                                (static_cast<std::uint64_t>(i) + 1))]);
      for (int i = 0; i < ranks; ++i) (*places)[first + static_cast<std::size_t>(order[i])] = i;
    }
    places_ = std::move(places);
  }
  if (kind == LayoutKind::document_zigzag) lay_documents({0, tokens});
}

SequenceLayout::SequenceLayout(LayoutKind kind, const MicroBatch& micro_batch, int ranks,
                               std::int64_t stripe, std::int64_t align)
    : SequenceLayout(kind, micro_batch.axis_tokens(), ranks, stripe, align) {
  if (kind == LayoutKind::document_zigzag) lay_documents(PackedAxis(micro_batch).offset);
}

void SequenceLayout::lay_documents(std::vector<std::int64_t> offset) {
  if (offset.size() < 2) offset = {0, 0};
  auto documents = std::make_shared<Documents>();
  documents->offset = std::move(offset);
  documents_ = documents;
  const auto ranks = static_cast<std::size_t>(ranks_);
  documents->before.assign(documents->offset.size() * ranks, 0);
  for (std::size_t d = 0; d + 1 < documents->offset.size(); ++d)
    for (int r = 0; r < ranks_; ++r) {
      std::int64_t own = 0;
      const std::int64_t first = first_piece(d, r);
      for (const std::int64_t piece : {first, 2 * std::int64_t{ranks_} - 1 - first})
        own += piece_begin(d, piece + 1) - piece_begin(d, piece);
      const std::size_t at = d * ranks + static_cast<std::size_t>(r);
      documents->before[at + ranks] = documents->before[at] + own;
    }
}

std::int64_t SequenceLayout::piece_begin(std::size_t document, std::int64_t i) const {
  const std::int64_t first = documents_->offset[document],
                     length = documents_->offset[document + 1] - first,
                     parts = 2 * std::int64_t{ranks_};
  return first + (i == parts ? length : length * i / parts / align_ * align_);
}

std::int64_t SequenceLayout::first_piece(std::size_t document, int rank) const {
  return (rank + static_cast<std::int64_t>(document)) % ranks_;
}

std::size_t SequenceLayout::document_of(std::int64_t global) const {
  const auto& offset = documents_->offset;  // empty segments share an offset: the last of them
  return static_cast<std::size_t>(std::upper_bound(offset.begin(), offset.end() - 1, global) -
                                  offset.begin()) -
         1;
}

std::int64_t SequenceLayout::place(std::int64_t round, int rank) const {
  return places_ ? (*places_)[static_cast<std::size_t>(round % kDeals * ranks_ + rank)] : rank;
}

std::int64_t SequenceLayout::boundary(std::int64_t i, std::int64_t parts) const {
  return i == parts ? tokens_ : tokens_ * i / parts / align_ * align_;
}

std::int64_t SequenceLayout::global(int rank, std::int64_t index) const {
  require(rank >= 0 && rank < ranks_, "sequence layout: rank {} lies outside [0, {})", rank,
          ranks_);
  require(index >= 0 && index < local_tokens(rank),
          "sequence layout: local index {} lies outside [0, {}) of rank {}", index,
          local_tokens(rank), rank);
  switch (kind_) {
    case LayoutKind::contiguous:
      return boundary(rank, ranks_) + index;
    case LayoutKind::zigzag: {
      const std::int64_t parts = 2 * static_cast<std::int64_t>(ranks_);
      const std::int64_t first = boundary(rank, parts), length = boundary(rank + 1, parts) - first;
      return index < length ? first + index : boundary(parts - 1 - rank, parts) + index - length;
    }
    case LayoutKind::striped:
    case LayoutKind::shuffled:
      return (index / stripe_ * ranks_ + place(index / stripe_, rank)) * stripe_ + index % stripe_;
    case LayoutKind::document_zigzag: {
      std::size_t low = 0, high = documents_->offset.size() - 1;  // before[low] <= index
      const auto before = [&](std::size_t d) {
        return documents_
            ->before[d * static_cast<std::size_t>(ranks_) + static_cast<std::size_t>(rank)];
      };
      while (high - low > 1) {
        const std::size_t middle = (low + high) / 2;
        (before(middle) <= index ? low : high) = middle;
      }
      const std::int64_t own = index - before(low), piece = first_piece(low, rank),
                         begin = piece_begin(low, piece),
                         length = piece_begin(low, piece + 1) - begin;
      return own < length ? begin + own : piece_begin(low, 2 * ranks_ - 1 - piece) + own - length;
    }
    case LayoutKind::automatic:  // stands for one of the others, no layout itself
      break;
  }
  return 0;
}

std::int64_t SequenceLayout::local_tokens(int rank) const { return lower_bound(rank, tokens_); }

std::int64_t SequenceLayout::lower_bound(int rank, std::int64_t global) const {
  require(rank >= 0 && rank < ranks_, "sequence layout: rank {} lies outside [0, {})", rank,
          ranks_);
  global = std::clamp<std::int64_t>(global, 0, tokens_);
  const auto below = [&](std::int64_t piece, std::int64_t parts) {
    return std::clamp(global, boundary(piece, parts), boundary(piece + 1, parts)) -
           boundary(piece, parts);
  };
  switch (kind_) {
    case LayoutKind::contiguous:
      return below(rank, ranks_);
    case LayoutKind::zigzag: {
      const std::int64_t parts = 2 * static_cast<std::int64_t>(ranks_);
      return below(rank, parts) + below(parts - 1 - rank, parts);
    }
    case LayoutKind::striped:
    case LayoutKind::shuffled: {
      // Whole turns of all ranks, then this rank's part of the last, incomplete turn.  Blocks, not
      // tokens, are counted, so that a huge stripe cannot overflow.
      const std::int64_t block = global / stripe_, turn = block / ranks_, last = block % ranks_,
                         own = place(turn, rank);
      return turn * stripe_ + (last > own ? stripe_ : last == own ? global % stripe_ : 0);
    }
    case LayoutKind::document_zigzag: {
      const std::size_t document = document_of(global);
      std::int64_t sum = documents_->before[document * static_cast<std::size_t>(ranks_) +
                                            static_cast<std::size_t>(rank)];
      const std::int64_t first = first_piece(document, rank);
      for (const std::int64_t piece : {first, 2 * std::int64_t{ranks_} - 1 - first}) {
        const std::int64_t begin = piece_begin(document, piece);
        sum += std::clamp(global, begin, piece_begin(document, piece + 1)) - begin;
      }
      return sum;
    }
    case LayoutKind::automatic:  // stands for one of the others, no layout itself
      break;
  }
  return 0;
}

std::vector<std::pair<std::int64_t, std::int64_t>> SequenceLayout::pieces(int rank) const {
  require(rank >= 0 && rank < ranks_, "sequence layout: rank {} lies outside [0, {})", rank,
          ranks_);
  std::vector<std::pair<std::int64_t, std::int64_t>> result;
  const auto add = [&](std::int64_t begin, std::int64_t end) {
    if (begin >= end) return;
    if (!result.empty() && result.back().second == begin)
      result.back().second = end;
    else
      result.emplace_back(begin, end);
  };
  switch (kind_) {
    case LayoutKind::contiguous:
      add(boundary(rank, ranks_), boundary(rank + 1, ranks_));
      break;
    case LayoutKind::zigzag: {
      const std::int64_t parts = 2 * static_cast<std::int64_t>(ranks_);
      for (std::int64_t piece : {static_cast<std::int64_t>(rank), parts - 1 - rank})
        add(boundary(piece, parts), boundary(piece + 1, parts));
      break;
    }
    case LayoutKind::striped:
    case LayoutKind::shuffled: {
      const std::int64_t blocks = tokens_ / stripe_ + (tokens_ % stripe_ != 0);
      result.reserve(static_cast<std::size_t>(blocks / ranks_ + 1));
      for (std::int64_t round = 0; round * ranks_ < blocks; ++round) {
        const std::int64_t block = round * ranks_ + place(round, rank);
        if (block < blocks)
          add(block * stripe_, std::min(tokens_ - block * stripe_, stripe_) + block * stripe_);
      }
      break;
    }
    case LayoutKind::document_zigzag:
      for (std::size_t d = 0; d + 1 < documents_->offset.size(); ++d) {
        const std::int64_t first = first_piece(d, rank);
        for (const std::int64_t piece : {first, 2 * std::int64_t{ranks_} - 1 - first})
          add(piece_begin(d, piece), piece_begin(d, piece + 1));
      }
      break;
    case LayoutKind::automatic:  // stands for one of the others, no layout itself
      break;
  }
  return result;
}

std::vector<std::pair<std::int64_t, std::int64_t>> SequenceLayout::pieces(int rank,
                                                                          std::int64_t begin,
                                                                          std::int64_t end) const {
  std::vector<std::pair<std::int64_t, std::int64_t>> result;
  std::int64_t index = 0;  // local index of the piece's first token
  for (const auto& [first, last] : pieces(rank)) {
    const std::int64_t from = std::max(begin, index), to = std::min(end, index + last - first);
    if (from < to) result.emplace_back(first + from - index, first + to - index);
    index += last - first;
  }
  return result;
}

PackedAxis::PackedAxis(const MicroBatch& batch) {
  offset.reserve(batch.segments.size() + 1);
  offset.push_back(0);
  for (const auto& segment : batch.segments) {
    require(segment.begin >= 0 && segment.end >= segment.begin,
            "segment [{}, {}) of sample {} is not a range of tokens", segment.begin, segment.end,
            segment.sample);
    offset.push_back(offset.back() +
                     (segment.tokens() + batch.align - 1) / batch.align * batch.align);
  }
}

int PackedAxis::segment_of(std::int64_t packed) const {
  require(packed >= 0 && packed < offset.back(), "packed position {} lies outside [0, {})", packed,
          offset.back());
  // The last segment that starts at or below: empty segments before it share its offset.
  return static_cast<int>(std::upper_bound(offset.begin(), offset.end(), packed) - offset.begin()) -
         1;
}

namespace {
AxisRanges ranges_of(const MicroBatch& batch, const PackedAxis& axis, const SequenceLayout& layout,
                     int rank) {
  const auto pieces = layout.pieces(rank);
  AxisRanges ranges;
  ranges.reserve(pieces.size());
  std::size_t segment = 0;  // pieces ascend, and so do segments
  for (const auto& [begin, end] : pieces)
    for (std::int64_t packed = begin; packed < end;) {
      while (axis.offset[segment + 1] <= packed) ++segment;
      const Segment& at = batch.segments[segment];
      const std::int64_t stop = std::min(end, axis.offset[segment + 1]),
                         position = at.begin + packed - axis.offset[segment],
                         tokens = std::clamp<std::int64_t>(at.end - position, 0, stop - packed);
      append(ranges, {static_cast<std::int32_t>(segment), position, tokens});
      append(ranges, {-1, 0, stop - packed - tokens});
      packed = stop;
    }
  return ranges;
}

void check_tokens(const PackedAxis& axis, const SequenceLayout& layout) {
  require(axis.offset.back() == layout.tokens(),
          "the layout spreads {} tokens, the micro-batch has {}", layout.tokens(),
          axis.offset.back());
}
}  // namespace

AxisRanges local_ranges(const MicroBatch& batch, const SequenceLayout& layout, int rank) {
  const PackedAxis axis(batch);
  check_tokens(axis, layout);
  return ranges_of(batch, axis, layout, rank);
}

std::vector<AxisRanges> shard_ranges(const MicroBatch& batch, const SequenceLayout& layout) {
  const PackedAxis axis(batch);
  check_tokens(axis, layout);
  std::vector<AxisRanges> shards;
  shards.reserve(static_cast<std::size_t>(layout.ranks()));
  for (int rank = 0; rank < layout.ranks(); ++rank)
    shards.push_back(ranges_of(batch, axis, layout, rank));
  return shards;
}

}  // namespace ballast
