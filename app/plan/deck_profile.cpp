#include "app/plan/deck_profile.hpp"

#include <algorithm>
#include <fstream>
#include <regex>

#include "ballast_version.hpp"
#include "core/config/run_options.hpp"
#include "core/plan/context/axis_range.hpp"
#include "io/profile/profile_file.hpp"

namespace ballast {
namespace {

std::string layer_text(const ModelShape& m) {
  return fmt::format("hidden {}, intermediate {}, {} query and {} key/value heads of {}{}",
                     m.hidden, m.intermediate, m.query_heads, m.kv_heads, m.head_dim,
                     m.qkv_bias  ? ", qkv bias"
                     : m.qk_norm ? ", qk norm"
                                 : "");
}

std::string adapters_text(const LoraOptions& lora) {
  if (!lora.enabled()) return "none";
  std::vector<std::string> on;
  for (const Projection p : lora.projections) on.push_back(name(p));
  return fmt::format("of rank {} on {}", lora.rank, fmt::join(on, ", "));
}

/// The kind of device, whichever of them this rank has: without a GPU's number, with the host's
/// processor.
std::string hardware_text(const Device& device) {
  std::string text = std::regex_replace(device.description(), std::regex(" #[0-9]+"), "");
  if (device.space() != Space::host) return text;
  std::ifstream processors("/proc/cpuinfo");
  for (std::string line; std::getline(processors, line);)
    if (line.starts_with("model name"))
      return text + ", " + line.substr(std::min(line.size(), line.find(':') + 2));
  return text;
}

/// What a layer computes in.
std::string product_type(const Config& config, DType type) {
  return config.run.fp8() ? fmt::format("fp8 over {}", name(type)) : name(type);
}

}  // namespace

std::map<std::string, std::string> planned_identity(const Config& config) {
  const ModelShape model = model_shape(config);
  return {{"layer", layer_text(model)},
          {"adapters", adapters_text(model.lora)},
          {"vocabulary", fmt::to_string(model.vocabulary)},
          {"dtype", product_type(config, config.run.type())}};
}

std::map<std::string, std::string> measured_identity(const Config& config, const Device& device,
                                                     DType type) {
  std::map<std::string, std::string> identity = planned_identity(config);
  identity["dtype"] = product_type(config, type);
  identity["hardware"] = hardware_text(device);
  identity["kernels"] = kernel_hash();
  return identity;
}

void compare_identity(const Config& config, const ProfileTable& table,
                      std::map<std::string, std::string> here, std::vector<std::string>& notes) {
  const std::string& path = config.profile.table;
  for (const char* key : {"adapters", "vocabulary"})
    if (!table.identity.contains(key)) {
      notes.push_back(
          fmt::format("{} of the table {}: not stated; here: {}", key, path, here.at(key)));
      here.erase(key);
    }
  const auto found = identity_differences(path, table, here, config.profile.allow_mismatch);
  notes.insert(notes.end(), found.begin(), found.end());
}

ProfileTable load_profile(const Config& config, std::vector<std::string>& notes,
                          const Device* device) {
  const std::string& path = config.profile.table;
  require(!path.empty(),
          "{}: profile.table names no profile table; measure one with `ballast profile`",
          config.from.file);
  const ProfileTable table = read_profile(path);
  const auto here = device == nullptr ? planned_identity(config)
                                      : measured_identity(config, *device, config.run.type());
  compare_identity(config, table, here, notes);
  if (const auto hardware = table.identity.find("hardware");
      device == nullptr && hardware != table.identity.end())
    notes.push_back(fmt::format("times of {}, measured on {}", path, hardware->second));
  try {
    return checked(table, config.profile.repair_limit, notes);
  } catch (const Error& e) {
    fail("{}: {}", path, e.what());
  }
}

}  // namespace ballast
