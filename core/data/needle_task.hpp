// Needle task: synthetic retrieval from a long context (data.source = "needle"), after the kinds of
// question of the RULER benchmark (arXiv:2404.06654).  Items lie hidden in filler, and at the end
// some of them are asked for:
//
//   retrieval   KEY VALUE [KEY]  every key once; a question is the key, the answer its value
//   values      KEY VALUE [KEY]  every key `repeats` times; the answer is all its values, ascending
//   variables   KEY VALUE [KEY]  and KEY OTHER_KEY [KEY]: chains of `repeats` assignments, in the
//               order of the context; asked for the last variable, the answer is the chain back
//               to the value
//   common      KEY  words that occur once and one that occurs `repeats` times: the answer
//
// An item may be written several times back to back, so that a stretch of the context is about its
// key, as a paragraph is: patterns that choose by a mean over a block of keys (MoBA) can find it.
//
//   filler filler KEY VALUE KEY filler filler KEY VALUE KEY filler ... | KEY VALUE KEY VALUE ...
//   context                                                            questions, each at most once
//
// Loss lies on the answers and, with `closing`, on the key that ends an item, as a closing tag
// does.  The latter is no part of the accuracy: it teaches a value to look back at its key, half of
// what an answer needs, which small models otherwise discover late. Every sample is a function of
// (seed, held out or not, index) alone, so it does not depend on the mesh.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/base/enum_names.hpp"
#include "core/base/problem.hpp"

namespace ballast {

enum class NeedleTask { retrieval, values, variables, common };
template <>
struct EnumNames<NeedleTask> {
  static constexpr EnumTable<NeedleTask, 4> table{{{NeedleTask::retrieval, "retrieval"},
                                                   {NeedleTask::values, "values"},
                                                   {NeedleTask::variables, "variables"},
                                                   {NeedleTask::common, "common"}}};
};

struct NeedleOptions {
  NeedleTask task = NeedleTask::retrieval;
  std::vector<std::int64_t> repeats{2};  ///< values of a key, assignments of a chain, times of the
                                         ///< common word: one number for all lengths, or one for
                                         ///< each; 1 of the first two: as retrieval
  std::vector<std::int64_t>
      lengths;  ///< tokens of a sample, questions included; each sample has one of them
  std::vector<double> length_share;    ///< share of the samples of each length, in proportion to
                                       ///< their sum; empty: alike
  std::vector<double> held_out_share;  ///< of the held-out samples; empty: as in training
  std::vector<std::int64_t> pairs{
      16};  ///< keys, chains or words of a sample: one number for all lengths, or one for each
  std::vector<std::int64_t> questions{
      16};                 ///< asked at the end of a sample, at most its pairs; likewise
  std::int64_t keys = 64;  ///< token ids [0, keys) are keys, one token each
  std::int64_t values =
      64;  ///< ids [keys, keys + values) form values; the rest of the vocabulary is filler
  std::int64_t value_tokens = 1;  ///< tokens of a value
  std::int64_t vocabulary = 0;
  std::uint64_t seed = 0;
  bool closing = true;  ///< a pair in the context ends with its key again, which carries loss
  std::vector<std::int64_t> copies{1};  ///< times that an item of the context is written, back to
                                        ///< back; one number for all lengths, or one for each
  bool repeated() const { return task != NeedleTask::retrieval; }
  bool closes() const { return closing && task != NeedleTask::common; }
  std::int64_t item_tokens(std::size_t kind) const {  ///< in the context
    const std::int64_t once = task == NeedleTask::common ? 1 : 1 + value_tokens;
    return copies_of(kind) * once + (closes() ? 1 : 0);
  }
  std::int64_t answer_tokens(std::size_t kind) const {
    return task == NeedleTask::common ? 1 : repeated() ? repeats_of(kind) : value_tokens;
  }
  std::int64_t question_tokens(std::size_t kind) const {  ///< with the answer
    return 1 + answer_tokens(kind);
  }
  /// Items in the context of samples of lengths[kind].
  std::int64_t items_of(std::size_t kind) const {
    if (task == NeedleTask::common) return pairs_of(kind) - 1 + repeats_of(kind);
    return pairs_of(kind) * (repeated() ? repeats_of(kind) : 1);
  }
  /// Tokens of a sample of lengths[kind] that carry loss.
  std::int64_t loss_tokens(std::size_t kind) const {
    return questions_of(kind) * answer_tokens(kind) + (closes() ? items_of(kind) : 0);
  }
  std::int64_t repeats_of(std::size_t kind) const {
    return repeats[repeats.size() == 1 ? 0 : kind];
  }
  std::int64_t copies_of(std::size_t kind) const { return copies[copies.size() == 1 ? 0 : kind]; }
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
  double depth = 0;  ///< where the first item of the answer lies in the context: 0 at its
                     ///< beginning, 1 at its end
  bool operator==(const NeedleQuestion&) const = default;
};

/// One sample: where its items lie.  Tokens are made when they are asked for, so a long sample
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
  struct Placed {  // an item of the context, or a question with its answer
    std::int64_t position = 0, begin = 0, count = 0;  // tokens_[begin, begin + count)
    std::int64_t loss_begin = 0, loss_end = 0;        // of them, those that are targets
  };
  class Maker;
  std::size_t first_from(
      std::int64_t position) const;  // the first of placed_ that does not end before it

  NeedleOptions options_;
  std::uint64_t stream_ = 0;
  std::int64_t length_ = 0;
  std::vector<std::int32_t> tokens_;
  std::vector<Placed> placed_;  // items, then the questions: ascending positions
  std::vector<NeedleQuestion> questions_;
};

}  // namespace ballast
