// The deck's profile table: which one it is and whether it holds here.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "core/base/tensor.hpp"
#include "core/config/config.hpp"
#include "core/predict/profile_table.hpp"

namespace ballast {

/// What a table of this deck holds for, whatever machine it runs on: layer (shape), adapters,
/// vocabulary and dtype.
std::map<std::string, std::string> planned_identity(const Config& config);
/// The same on `device`, with hardware, kernels (hash of their sources) and software.
std::map<std::string, std::string> measured_identity(const Config& config, const Device& device,
                                                     DType type);

/// Notes what of `here` a table says otherwise; adapters and vocabulary, which tables of earlier
/// versions do not state, may be missing.  Error: they differ, unless profile.allow_mismatch.
void compare_identity(const Config& config, const ProfileTable& table,
                      std::map<std::string, std::string> here, std::vector<std::string>& notes);

/// The table of profile.table, checked and repaired; what was repaired or differs is one sentence
/// each in `notes`.  A plan compares planned_identity alone, since it may be made for another
/// machine; with `device` the hardware and the kernels must be the table's too. Errors: no
/// profile.table, a damaged table, another identity (both sides shown) unless
/// profile.allow_mismatch.
ProfileTable load_profile(const Config& config, std::vector<std::string>& notes,
                          const Device* device = nullptr);

}  // namespace ballast
