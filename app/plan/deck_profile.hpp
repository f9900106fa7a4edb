// The deck's profile table: which one it is, whether it holds here, and the latency model over it.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/config/config.hpp"
#include "core/predict/latency_model.hpp"
#include "core/predict/profile_table.hpp"

namespace ballast {

/// What a table of this deck holds for, whatever machine it runs on: layer (shape) and dtype.
std::map<std::string, std::string> planned_identity(const Config& config);
/// The same on `device`, with hardware, kernels (hash of their sources) and software.
std::map<std::string, std::string> measured_identity(const Config& config, const Device& device,
                                                     DType type);

/// The table of profile.table, checked and repaired; what was repaired or differs is one sentence
/// each in `notes`.  A plan compares layer and dtype alone, since it may be made for another
/// machine; with `device` the hardware and the kernels must be the table's too. Errors: no
/// profile.table, a damaged table, another identity (both sides shown) unless
/// profile.allow_mismatch.
ProfileTable load_profile(const Config& config, std::vector<std::string>& notes,
                          const Device* device = nullptr);

/// Series and ranks of the deck for LatencyModel: recompute.mode, mesh.sp, ranks of a ring;
/// `pattern` as in the table.
LatencyOptions latency_options(const Config& config, PatternKind pattern);

/// The model that plans of this deck use: of profile.table, or else of the stated costs
/// (costs.forward_token_s, forward_pair_s and backward_over_forward are a stage's: a layer takes
/// its part of them).  `notes` as load_profile.
LatencyModel latency_model(const Config& config, std::vector<std::string>& notes,
                           const Device* device = nullptr);

}  // namespace ballast
