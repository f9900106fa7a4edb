#include "core/model/lora_options.hpp"

#include <set>

namespace ballast {

const std::vector<Projection>& lora_projections() {
  static const std::vector<Projection> all = values_of<Projection>();
  return all;
}

std::string lora_module(Projection projection) {
  return fmt::format("{}.{}_proj", projection <= Projection::o ? "self_attn" : "mlp",
                     name(projection));
}

std::vector<Problem> problems(const LoraOptions& o) {
  std::vector<Problem> list;
  if (o.rank < 0)
    list.push_back(
        {{"lora.rank"}, fmt::format("lora.rank = {} must be at least 0 (0: no adapters)", o.rank)});
  if (!(o.alpha > 0))
    list.push_back({{"lora.alpha"}, fmt::format("lora.alpha = {} must be above 0", o.alpha)});
  if (!(o.dropout >= 0 && o.dropout < 1))
    list.push_back(
        {{"lora.dropout"}, fmt::format("lora.dropout = {} must be in [0, 1)", o.dropout)});
  if (o.enabled() && o.projections.empty())
    list.push_back({{"lora.projections"},
                    "lora.projections is empty",
                    fmt::format("list some of: {}", fmt::join(names_of<Projection>(), ", "))});
  std::set<Projection> seen;
  for (const Projection p : o.projections)
    if (!seen.insert(p).second)
      list.push_back(
          {{"lora.projections"}, fmt::format("lora.projections lists \"{}\" twice", name(p))});
  return list;
}

}  // namespace ballast
