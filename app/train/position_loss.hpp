// Held-out loss by position in the sample: whether a model uses its context, and from which
// distance on a sparse pattern loses what a dense one keeps.
#pragma once
#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "kernels/model/stage_model.hpp"
#include "parallel/comm/comm.hpp"

namespace ballast {

/// Sums over the tokens of one evaluation, in classes [0, 1), [1, 2), [2, 4), [4, 8) ... of the
/// position, tokens.
class PositionLoss {
 public:
  /// Tokens without loss do not count; nothing on a stage that predicts nothing.
  void add(const LocalBatch& batch, const StageOutput& output);
  /// Sums over all ranks, each token being on one of them.  Collective.
  void reduce(const Communicator& world);
  /// Classes with tokens that carry loss: begin and end of the positions, mean loss, tokens.
  nlohmann::ordered_json json() const;
  std::string table() const;  ///< for the terminal: a row a class

 private:
  static constexpr std::size_t kClasses = 48;
  std::array<double, 2 * kClasses> sums_{};  // losses, then tokens
};

}  // namespace ballast
