// A tied embedding on a pipeline lies on the first stage (embedding) and on the last one (head):
// both copies take the sum of both gradients.
#pragma once
#include <vector>

#include "parallel/comm/mesh.hpp"
#include "parallel/optimizer/zero.hpp"

namespace ballast {

class TiedEmbedding {
 public:
  /// Collective over the mesh.  Does nothing where no parameter is tied over stages.  Both
  /// arguments must outlive it.
  TiedEmbedding(const Mesh& mesh, Parameters& parameters, const ShardedOptimizer& optimizer,
                int zero_stage);
  /// Sums the reduced gradients, element by element, on whichever ranks the two stages' shards hold
  /// them; after reduce_gradients(), before squared_norm().  Both copies get the same bits, hence
  /// stay equal.  Collective over the two stages.
  void sum_gradients() const;

 private:
  /// Elements that this rank and one of the other stage both hold.
  struct Overlap {
    int peer = 0;                     ///< in `ends_`
    std::int64_t begin = 0, end = 0;  ///< in this rank's slice of the bucket
  };
  const ShardedOptimizer& optimizer_;
  Communicator ends_;  ///< ranks of the first stage, then of the last one, each in replica order
  std::size_t bucket_ = 0;  ///< with the embedding
  std::vector<Overlap> overlaps_;
};

}  // namespace ballast
