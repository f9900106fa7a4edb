// Layers over pipeline stages: pure functions of the model's shape.
#pragma once
#include <cstdint>
#include <vector>

#include "core/model/parameter_table.hpp"

namespace ballast {

/// Time of a model's parts for one token, in any one unit.
struct PartCosts {
  double layer = 1, embedding = 0, head = 0;
};

/// FLOPs of one token's forward: matrix products and attention over `context` visible keys in a
/// layer, the head's product.  The embedding is a copy of one row, counted with one operation an
/// element.
PartCosts part_costs(const ModelShape& shape, double context);

/// Share of a layer's backward matrix products that computes weight gradients: half, but with
/// adapters (frozen weights have none) less.
double weight_share(const ModelShape& shape);

/// First layer of every stage, so that the slowest stage is as fast as can be: stage 0 also has the
/// embedding, the last one the final norm and the head.  Every stage gets at least one layer. Among
/// equals later stages get more, since they hold fewer live activations. Errors: fewer layers than
/// stages, fewer than one stage.
std::vector<std::int64_t> balance_stages(std::int64_t layers, int stages, const PartCosts& costs);

/// The rows of the parameter table that one stage holds, in order, and how many elements of the
/// whole table lie before them: each stage is one range of it.  With adapters that holds of the
/// frozen weights; the stage's adapters follow them.
struct StageTable {
  std::vector<Parameter> table;
  std::int64_t begin = 0;
};
StageTable stage_table(const ModelShape& shape, const std::vector<std::int64_t>& layer_begin,
                       int stage);

}  // namespace ballast
