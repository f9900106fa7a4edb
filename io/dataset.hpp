// Datasets: samples of tokens, memory-mapped, read by range.  Targets and loss mask are made per sample, before any
// chunking, packing or layout.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/deck.hpp"

namespace ballast {

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual std::int64_t samples() const = 0;
  virtual std::int64_t length(std::int64_t sample) const = 0;  ///< tokens
  /// Tokens that carry loss: those with a successor whose mask is set.  Known without reading tokens where there is no mask.
  virtual std::int64_t loss_tokens(std::int64_t sample) const = 0;
  /// Tokens [begin, end) of a sample.  Errors name the file and the sample.
  virtual void tokens(std::int64_t sample, std::int64_t begin, std::int64_t end, std::span<std::int32_t> out) const = 0;
  /// Target of each token in [begin, end): the next token of the sample, or -1 where it carries no loss (last token, masked).
  virtual void targets(std::int64_t sample, std::int64_t begin, std::int64_t end, std::span<std::int32_t> out) const = 0;
  virtual std::int64_t vocabulary() const = 0;  ///< smallest vocabulary that holds every token id
  virtual std::string description() const = 0;  ///< one line for the log
};

/// Opens the deck's data.source: files | megatron | hdf5 | lengths | distribution, with data.max_tokens and data.long
/// (truncate | split | drop) applied, so that samples are what batching sees.  Errors: missing or damaged files by name.
std::unique_ptr<Dataset> open_dataset(const Deck& deck);

}  // namespace ballast
