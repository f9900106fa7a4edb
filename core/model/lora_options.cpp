#include "core/model/lora_options.hpp"

#include <algorithm>
#include <set>

#include "core/base/error.hpp"

namespace ballast {

const std::vector<std::string>& lora_projections() {
  static const std::vector<std::string> names = {"q", "k", "v", "o", "gate", "up", "down"};
  return names;
}

std::string lora_module(const std::string& projection) {
  const auto& all = lora_projections();
  const auto at = std::find(all.begin(), all.end(), projection);
  require(at != all.end(), "lora: no projection \"{}\"; there are: {}", projection,
          fmt::join(all, ", "));
  return fmt::format("{}.{}_proj", at - all.begin() < 4 ? "self_attn" : "mlp", projection);
}

std::vector<std::string> problems(const LoraOptions& o) {
  std::vector<std::string> list;
  const auto& known = lora_projections();
  if (o.rank < 0)
    list.push_back(fmt::format("lora.rank = {} must be at least 0 (0: no adapters)", o.rank));
  if (!(o.alpha > 0)) list.push_back(fmt::format("lora.alpha = {} must be above 0", o.alpha));
  if (!(o.dropout >= 0 && o.dropout < 1))
    list.push_back(fmt::format("lora.dropout = {} must be in [0, 1)", o.dropout));
  if (o.enabled() && o.projections.empty())
    list.push_back(
        fmt::format("lora.projections is empty; list some of: {}", fmt::join(known, ", ")));
  std::set<std::string> seen;
  for (const std::string& p : o.projections) {
    if (std::find(known.begin(), known.end(), p) == known.end())
      list.push_back(fmt::format("lora.projections: \"{}\" is unknown; choose from: {}", p,
                                 fmt::join(known, ", ")));
    else if (!seen.insert(p).second)
      list.push_back(fmt::format("lora.projections lists \"{}\" twice", p));
  }
  return list;
}

}  // namespace ballast
