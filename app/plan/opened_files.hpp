// The files that a deck names, opened before a run waits in a queue for them: data, weights, the
// table of patterns by head, recorded indexes and a profile table that samples are balanced by.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/config/config.hpp"
#include "core/data/sampler.hpp"
#include "core/plan/attention/head_rules.hpp"
#include "io/data/dataset.hpp"

namespace ballast {

struct OpenedFiles {
  std::string data;       ///< what the data is, and the share that carries loss; ""
                          ///< where the deck has none or it cannot be opened
  SampleLength longest;   ///< sample; of 0 tokens where not known
  double loss_share = 0;  ///< of the tokens of the first samples
  std::shared_ptr<const HeadTable> heads;  ///< of attention.pattern = "by_head"; null: not read
  std::vector<std::string> notes;          ///< ReferenceValues::note, huggingface_note(), ...
  std::vector<std::string> problems;       ///< what `train` would stop at
};

/// Opens what block data, model.weights, attention.heads, attention.recorded and profile.table
/// (where placement, SAB or DST need it) name, as `train` does: every file and tensor must be there
/// and fit the model.  Ids are read of the first samples, kReadTokens of them; values of weights
/// are not.  dpo.reference must be there; where all else is sound, it is compared, with all values
/// of the weights.  run.dump_gradients must be a file that can be written.
inline constexpr std::int64_t kReadTokens = std::int64_t{1} << 26;
OpenedFiles open_files_of(const Config& config);

/// Whether run.dump_gradients ("": nothing to write) can be written without replacing anything but
/// gradients.  Errors name what it would replace, or why not.
void refuse_gradient_file(const Config& config);

/// Whether layers choose by the table that attention.heads names.
bool goes_by_head(const Config& config);
/// That table, which fits the model; every head dense where no file is named.
std::shared_ptr<const HeadTable> head_table(const Config& config);
/// The same; null where layers do not choose by one, or its file is of another machine.
std::shared_ptr<const HeadTable> head_table_here(const Config& config);

/// A sample that no packing group holds would end the run at the step that meets it.
void refuse_samples_beyond_groups(const Config& config, const Dataset& data);

/// A sample, or an answer of a pair, of which no GPU can choose the deck's pattern
/// (segment_problem()) would end the run likewise.  `heads`: of attention.pattern = "by_head", or
/// null.
void refuse_samples_beyond_gpus(const Config& config, const Dataset& data, const HeadTable* heads);

/// What that says of the files that the deck names; "" where it says nothing, or they are not here.
std::string samples_beyond_gpus(const Config& config);

/// Training would change nothing where no token carries loss.
void refuse_without_loss(const Dataset& data);

/// Evaluations would silently have nothing to measure, or to continue.
void refuse_missing_held_out(const Config& config, const Dataset& data, const Sampler& sampler);
/// A mean over no tokens is none, and would pass for the best.
void refuse_held_out_without_loss(const Config& config, const Dataset& data,
                                  const Sampler& sampler);

}  // namespace ballast
