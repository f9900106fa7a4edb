// Accuracy of the needle task, by length of the sample and depth of the pair.  An answer is right
// when every token of it is the most likely one, the right ones before it given (teacher forcing).
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/plan/batch/batch.hpp"
#include "io/data/dataset.hpp"
#include "io/trace/trace_writer.hpp"
#include "kernels/model/stage_model.hpp"
#include "parallel/comm/comm.hpp"

namespace ballast {

struct NeedleCount {
  std::int64_t questions = 0, right = 0;
  double accuracy() const {
    return questions > 0 ? static_cast<double>(right) / static_cast<double>(questions) : 0;
  }
  NeedleCount& operator+=(const NeedleCount& other) {
    questions += other.questions;
    right += other.right;
    return *this;
  }
};

struct NeedleAccuracy {
  std::vector<std::int64_t>
      lengths;  ///< of the samples asked, tokens, ascending; empty: the data has no questions
  std::int64_t depths = 1;                      ///< equal parts of the context
  std::vector<std::vector<NeedleCount>> cells;  ///< [length][depth]
  NeedleCount total() const;
  NeedleCount of_length(std::size_t i) const;
  NeedleCount of_depth(std::size_t d) const;
  /// Trace scalars: needle_accuracy, needle_accuracy.length.N, needle_accuracy.depth.D,
  /// needle_accuracy.length.N.depth.D; parts without a question are left out.
  StepRow scalars() const;
  nlohmann::ordered_json json()
      const;  ///< total, by length, by depth, and every cell with its number of questions
  std::string table() const;  ///< for the terminal: a row a length, a column a depth
};

/// Collects a rank's predictions over the micro-batches of one evaluation.
class NeedleJudge {
 public:
  NeedleJudge(const Dataset& dataset, const std::vector<std::int64_t>& samples);
  bool has_questions() const { return !questions_.empty(); }
  /// `output` of a judged `batch`, whose segments are `micro_batch`'s; nothing on a stage that
  /// predicts nothing.
  void add(const MicroBatch& micro_batch, const LocalBatch& batch, const StageOutput& output);
  /// Sums over all ranks, each token being on one of them.  Collective; the same on every rank.
  NeedleAccuracy result(const Communicator& world, std::int64_t depths) const;

 private:
  struct Asked {
    NeedleQuestion question;
    std::int64_t length = 0;
  };
  std::unordered_map<std::int64_t, std::pair<std::size_t, std::size_t>>
      of_sample_;  // its questions, [first, last)
  std::vector<Asked> questions_;
  std::vector<double> right_tokens_;  // per question, on this rank
};

}  // namespace ballast
