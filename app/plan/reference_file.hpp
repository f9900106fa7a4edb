// The file of dpo.reference: log probabilities of every pair under the model that training begins
// with, and the marks of the data and of the model that they were computed from.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/config/config.hpp"
#include "core/model/model_shape.hpp"
#include "io/data/dataset.hpp"

namespace ballast {

struct ReferenceValues {
  std::vector<double> chosen, rejected;  ///< [sample]
  // Of read_reference:
  std::uint64_t model = 0;  ///< mark of the model
  std::string note;         ///< what is no error but moves the first loss away from ln 2; ""
};

/// Throws Error where dpo.reference is no file.
void need_reference(const Config& config);

/// Throws Error where dpo.reference names something that write_reference would destroy.
void check_reference_target(const Config& config);

/// Errors: no such file, damaged, of other data (tokens and masks, so another template too), of
/// another model or other weights.
ReferenceValues read_reference(const Config& config, const ModelShape& shape,
                               const Dataset& dataset);

/// Writes the file, under another name first.  Errors: cannot be written.
void write_reference(const Config& config, const ModelShape& shape, const Dataset& dataset,
                     const ReferenceValues& values);

}  // namespace ballast
