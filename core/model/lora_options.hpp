// Low-rank adapters (LoRA: Hu et al., ICLR 2022): y = W x + alpha / rank B A dropout(x), with W
// frozen and A [rank, in], B [out, rank] trained.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/enum_names.hpp"
#include "core/base/problem.hpp"

namespace ballast {

/// Matrices of a layer that can have an adapter, in the order of the parameter table.
enum class Projection { q, k, v, o, gate, up, down };
template <>
struct EnumNames<Projection> {
  static constexpr EnumTable<Projection, 7> table{{{Projection::q, "q"},
                                                   {Projection::k, "k"},
                                                   {Projection::v, "v"},
                                                   {Projection::o, "o"},
                                                   {Projection::gate, "gate"},
                                                   {Projection::up, "up"},
                                                   {Projection::down, "down"}}};
};

struct LoraOptions {
  std::int64_t rank = 0;  ///< 0: no adapters, every weight is trained
  double alpha = 16;
  double dropout = 0;  ///< of the adapters' inputs, in training
  std::vector<Projection> projections = {Projection::q, Projection::k, Projection::v,
                                         Projection::o};
  std::uint64_t seed = 0;  ///< of dropout
  bool enabled() const { return rank > 0; }
  double scale() const { return alpha / static_cast<double>(rank); }
  bool operator==(const LoraOptions&) const = default;
};

/// All projections, in order.
const std::vector<Projection>& lora_projections();
/// Its module inside a layer, as in Hugging Face: q -> self_attn.q_proj, down -> mlp.down_proj.
std::string lora_module(Projection projection);
/// What is wrong.
std::vector<Problem> problems(const LoraOptions& options);

}  // namespace ballast
