// Datasets: samples of tokens, memory-mapped, read by range.  Targets and loss mask are made per
// sample, before any chunking, packing or layout.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/data/data_options.hpp"
#include "core/data/needle_task.hpp"
#include "core/plan/batch/batch.hpp"

namespace ballast {

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual std::int64_t samples() const = 0;
  virtual std::int64_t length(std::int64_t sample) const = 0;  ///< tokens
  /// Tokens that carry loss: those with a successor whose mask is set.  Known without reading
  /// tokens where there is no mask.
  virtual std::int64_t loss_tokens(std::int64_t sample) const = 0;
  /// Tokens [begin, end) of a sample; `out` holds end - begin.  Errors name the file and the
  /// sample.
  virtual void tokens(std::int64_t sample, std::int64_t begin, std::int64_t end,
                      std::span<std::int32_t> out) const = 0;
  /// Target of each token in [begin, end): the next token of the sample, or -1 where it carries no
  /// loss (last token, masked).
  virtual void targets(std::int64_t sample, std::int64_t begin, std::int64_t end,
                       std::span<std::int32_t> out) const = 0;
  /// Smallest vocabulary known to hold every token id: 256 for `files`; otherwise the model's,
  /// which every id is checked against when read.
  virtual std::int64_t vocabulary() const = 0;
  virtual std::string description() const = 0;  ///< one line for the log
  /// Identity of the samples: file names and sizes (or lengths) and how they are cut.  Equal on
  /// every rank, or the ranks see different files; stored in checkpoints, since sampler positions
  /// mean nothing in another dataset.
  virtual std::uint64_t fingerprint() const = 0;
  /// Document that a sample was cut from (long = "split"): pieces of one document belong on the
  /// same side of a validation split.
  virtual std::int64_t document(std::int64_t sample) const { return sample; }
  /// How many of the last samples are held out whatever data.validation_share says.
  virtual std::int64_t held_out() const { return 0; }
  /// Where samples are pairs (DataOptions::pairs): tokens of the chosen answer, with which the
  /// sample begins, and those of them that carry loss; the rejected answer follows.  0: no pairs.
  virtual std::int64_t chosen_tokens(std::int64_t) const { return 0; }
  virtual std::int64_t chosen_loss_tokens(std::int64_t) const { return 0; }
  /// Questions of a sample whose answers evaluation judges (data.source = "needle"); others have
  /// none.
  virtual std::vector<NeedleQuestion> questions(std::int64_t) const { return {}; }
};

/// A sample as batching sees it.  Without `count_loss` loss tokens are 0: counting them may mean
/// reading a mask.
SampleLength sample_length(const Dataset& dataset, std::int64_t sample, bool count_loss = true);
/// The sample of most tokens, the first of equals.
std::int64_t longest_sample(const Dataset& dataset);
/// Tokens of the longest that attends to itself alone: document_lengths().
std::int64_t longest_document(const Dataset& dataset);
/// The sample that takes up most of a packed axis, of several the one of most tokens, the first of
/// equals: of pairs it need not be the longest.
SampleLength widest_sample(const Dataset& dataset, std::int64_t align);
/// Whether samples have several lengths; looks no further than the first that differs.
bool lengths_differ(const Dataset& dataset);

/// Share of the tokens that carry loss, of the first 1000 samples (of all where there are fewer),
/// and the same as a sentence.
double loss_share(const Dataset& dataset);
std::string loss_share_text(const Dataset& dataset);

/// Fingerprint of what a dataset's samples contain: tokens and targets of blocks spread over it, so
/// that files of equal sizes and other contents are told apart.  Reads at most 256 blocks of 64
/// tokens.
std::uint64_t sampled_contents(const Dataset& dataset);

/// Exact Segment::loss_tokens of those segments that are a part of their sample; a plan estimates
/// them where a mask leaves tokens out.
void count_loss_tokens(Batch& batch, const Dataset& dataset);

/// Opens a source with max_tokens, min_tokens and long applied, so that samples are what batching
/// sees.  Everything that can be checked without reading the tokens is checked here.  Errors:
/// missing, damaged or inconsistent files by name and place; no sample left.
std::unique_ptr<Dataset> open_dataset(const DataOptions& options);

}  // namespace ballast
