#include "core/plan/batch/batch.hpp"

#include <algorithm>

#include "core/base/hash.hpp"

namespace ballast {

std::int64_t MicroBatch::tokens() const {
  std::int64_t sum = 0;
  for (const auto& s : segments) sum += s.tokens();
  return sum;
}

namespace {
std::int64_t rounded(std::int64_t tokens, std::int64_t align) {
  return (tokens + align - 1) / align * align;
}
}  // namespace

std::int64_t axis_tokens(std::span<const Segment> segments, std::int64_t align) {
  std::int64_t sum = 0;
  for (const auto& s : segments) sum += rounded(s.tokens(), align);
  return sum;
}
std::int64_t axis_tokens(const SampleLength& s, std::int64_t align) {
  return rounded(s.chosen_tokens, align) + rounded(s.tokens - s.chosen_tokens, align);
}
std::int64_t MicroBatch::axis_tokens() const { return ballast::axis_tokens(segments, align); }

std::int64_t MicroBatch::loss_tokens() const {
  std::int64_t sum = 0;
  for (const auto& s : segments) sum += s.loss_tokens;
  return sum;
}

double MicroBatch::attention_pairs() const {
  double sum = 0;
  for (const auto& s : segments) {
    const double n = static_cast<double>(s.tokens());
    sum += n * static_cast<double>(s.begin) + n * (n + 1) / 2;
  }
  return sum;
}

void add(Hash& hash, const Segment& s) {
  hash.add(s.sample).add(s.begin).add(s.end).add(s.loss_tokens);
  if (s.origin != 0) hash.add(s.origin);
}

namespace {
template <class F>
std::int64_t total(const Batch& batch, F&& of) {
  std::int64_t sum = 0;
  for (const auto& list : batch.micro_batches)
    for (const auto& mb : list) sum += of(mb);
  return sum;
}
}  // namespace

std::int64_t Batch::loss_tokens() const {
  return total(*this, [](const MicroBatch& mb) { return mb.loss_tokens(); });
}

std::int64_t Batch::tokens() const {
  return total(*this, [](const MicroBatch& mb) { return mb.tokens(); });
}

std::int64_t Batch::samples() const {
  return total(*this, [](const MicroBatch& mb) {
    return std::count_if(mb.segments.begin(), mb.segments.end(),
                         [](const Segment& s) { return s.begins_sample(); });
  });
}

}  // namespace ballast
