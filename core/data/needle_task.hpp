// Needle task: synthetic retrieval from a long context (data.source = "needle").  Key-value pairs
// lie hidden in filler, and at the end some of them are asked for: a question is the key, the
// answer the value that followed it.
//
//   filler filler KEY VALUE KEY filler filler KEY VALUE KEY filler ... | KEY VALUE KEY VALUE ...
//   context: every pair once, anywhere                                   questions, each pair at
//   most once
//
// Loss lies on the values of the questions and, with `closing`, on the key that ends a pair, as a
// closing tag does.  The latter is no part of the accuracy: it teaches a value to look back at its
// key, half of what an answer needs, which small models otherwise discover late. Every sample is a
// function of (seed, held out or not, index) alone, so it does not depend on the mesh.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/base/problem.hpp"

namespace ballast {

struct NeedleOptions {
  std::vector<std::int64_t>
      lengths;  ///< tokens of a sample, questions included; each sample has one of them
  std::vector<double> length_share;    ///< share of the samples of each length, in proportion to
                                       ///< their sum; empty: alike
  std::vector<double> held_out_share;  ///< of the held-out samples; empty: as in training
  std::vector<std::int64_t> pairs{
      16};  ///< hidden in a sample, of distinct keys: one number for all lengths, or one for each
  std::vector<std::int64_t> questions{
      16};                 ///< asked at the end of a sample, at most its pairs; likewise
  std::int64_t keys = 64;  ///< token ids [0, keys) are keys, one token each
  std::int64_t values =
      64;  ///< ids [keys, keys + values) form values; the rest of the vocabulary is filler
  std::int64_t value_tokens = 1;  ///< tokens of a value
  std::int64_t vocabulary = 0;
  std::uint64_t seed = 0;
  bool closing = true;  ///< a pair in the context ends with its key again, which carries loss
  std::int64_t pair_tokens() const {
    return 1 + value_tokens + (closing ? 1 : 0);
  }                                                                  ///< in the context
  std::int64_t question_tokens() const { return 1 + value_tokens; }  ///< with the answer
  /// Tokens of a sample of lengths[kind] that carry loss.
  std::int64_t loss_tokens(std::size_t kind) const {
    return questions_of(kind) * value_tokens + (closing ? pairs_of(kind) : 0);
  }
  /// Of samples of lengths[kind].
  std::int64_t pairs_of(std::size_t kind) const { return pairs[pairs.size() == 1 ? 0 : kind]; }
  std::int64_t questions_of(std::size_t kind) const {
    return questions[questions.size() == 1 ? 0 : kind];
  }
  /// Which of the lengths a sample has.
  std::size_t kind(bool held_out, std::int64_t index) const;
};
/// What is wrong with the options.
std::vector<Problem> problems(const NeedleOptions& options);

/// A question: the tokens at positions [first, last) of the sample are those whose targets form the
/// answer.
struct NeedleQuestion {
  std::int64_t first = 0, last = 0;
  double depth = 0;  ///< where the pair lies in the context: 0 at its beginning, 1 at its end
  bool operator==(const NeedleQuestion&) const = default;
};

/// One sample: where its pairs lie.  Tokens are made when they are asked for, so a long sample
/// costs no memory.
class NeedleSample {
 public:
  /// Errors: options with problems().
  NeedleSample(const NeedleOptions& options, bool held_out, std::int64_t index);
  std::int64_t length() const { return length_; }
  const std::vector<NeedleQuestion>& questions() const { return questions_; }
  /// Tokens of positions [begin, begin + out.size()).
  void tokens(std::int64_t begin, std::span<std::int32_t> out) const;
  /// Targets there: the next token where it belongs to an answer or closes a pair, else -1.
  void targets(std::int64_t begin, std::span<std::int32_t> out) const;

 private:
  struct Placed {  // a pair in the context, or a question with its answer
    std::int64_t position = 0, key = 0, value = 0;  // value: its first token in values_
  };
  std::int64_t tokens_of(std::size_t placed) const;
  std::size_t first_from(
      std::int64_t position) const;  // the first of placed_ that does not end before it

  NeedleOptions options_;
  std::uint64_t stream_ = 0;
  std::int64_t length_ = 0, pairs_ = 0;
  std::vector<std::int32_t> values_;  // [pairs_, value_tokens]
  std::vector<Placed> placed_;        // pairs_ pairs, then the questions: ascending positions
  std::vector<NeedleQuestion> questions_;
};

}  // namespace ballast
