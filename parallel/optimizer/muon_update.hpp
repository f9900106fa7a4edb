// Muon over the ranks that hold the same parameters: momentum and update element by element on each
// rank's shard, orthogonalisation by whole matrices, each on one rank.
#pragma once
#include <cstdint>

#include "core/model/muon_table.hpp"
#include "core/observe/events.hpp"
#include "kernels/model/parameters.hpp"
#include "kernels/ops/muon.hpp"
#include "parallel/comm/comm.hpp"

namespace ballast {

class MuonUpdate {
 public:
  /// The trainable parameters are in order_for_muon's order; this rank's shard are their elements
  /// [begin, end), all of them where `sharded` is false.  Errors: a matrix that does not lie before
  /// the other trainable parameters.
  MuonUpdate(const Parameters& parameters, const Communicator& replica, bool sharded,
             std::int64_t begin, std::int64_t end, MuonOptions options);

  /// Elements [0, elements()) of the trainable ones are Muon's, the others AdamW's.
  std::int64_t elements() const { return work_.elements; }

  /// One step on the Muon part of the shard: `moment`, `gradient`, `master`, `values` [own], of
  /// which the gradient is used up.  Collective.
  void apply(Tensor moment, Tensor gradient, Tensor master, Tensor values, double gradient_scale,
             double learning_rate, Recorder* recorder);

 private:
  /// Elements [begin, end) of a matrix, among the trainable ones, that `rank` holds.
  struct Piece {
    std::int64_t begin = 0, end = 0;
  };
  Piece held(const MuonMatrix& matrix, int rank) const;
  /// Between holders and owners, there or back; `lent` holds what this rank's matrices need of
  /// others, matrix after matrix in whole.  Returns the bytes sent.
  std::int64_t exchange(const Tensor& own, const Tensor& lent, bool back) const;

  Communicator replica_;
  bool sharded_;
  std::int64_t begin_, end_, block_;  ///< of the Muon part of the shard; elements of every shard
  MuonOptions options_;
  MuonWork work_;
  std::vector<int> owner_;                ///< [matrix]
  std::vector<std::int64_t> lent_place_;  ///< [matrix] first element in `lent`; -1: not there
  std::int64_t lent_elements_ = 0;
};

}  // namespace ballast
