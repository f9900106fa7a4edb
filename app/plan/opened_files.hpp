// The files that a deck names, opened before a run waits in a queue for them: data, weights, the
// table of patterns by head, recorded indexes and a profile table that samples are balanced by.
#pragma once
#include <string>
#include <vector>

#include "core/config/config.hpp"
#include "core/data/sampler.hpp"
#include "io/data/dataset.hpp"

namespace ballast {

struct OpenedFiles {
  std::string data;                   ///< what the data is, and the share that carries loss; ""
                                      ///< where the deck has none or it cannot be opened
  SampleLength longest;               ///< sample; of 0 tokens where not known
  double loss_share = 0;              ///< of the tokens of the first samples
  std::vector<std::string> problems;  ///< what `train` would stop at
};

/// Opens what block data, model.weights, attention.heads, attention.recorded and profile.table
/// (where placement, SAB or DST need it) name, as `train` does: every file and tensor must be there
/// and fit the model.  dpo.reference must be there, and is not compared.
OpenedFiles open_files_of(const Config& config);

/// A sample that no packing group holds would end the run at the step that meets it.
void refuse_samples_beyond_groups(const Config& config, const Dataset& data);

/// Evaluations would silently have nothing to measure, or to continue.
void refuse_missing_held_out(const Config& config, const Sampler& sampler);

}  // namespace ballast
