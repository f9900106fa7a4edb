#include "app/latency.hpp"

#include "ballast_version.hpp"
#include "core/run_options.hpp"
#include "io/profile_file.hpp"

namespace ballast {
namespace {

DType planned_type(const Deck& deck) {
  if (deck.text("run.backend") == "cuda") return DType::bf16;
  return deck.text("run.precision") == "fp64" ? DType::f64 : DType::f32;
}

std::string layer_text(const ModelShape& m) {
  return fmt::format("hidden {}, intermediate {}, {} query and {} key/value heads of {}{}", m.hidden, m.intermediate, m.query_heads,
                     m.kv_heads, m.head_dim, m.qkv_bias ? ", qkv bias" : "");
}

}  // namespace

std::map<std::string, std::string> planned_identity(const Deck& deck) {
  return {{"layer", layer_text(model_shape(deck))}, {"dtype", name(planned_type(deck))}};
}

std::map<std::string, std::string> measured_identity(const Deck& deck, const Device& device, DType type) {
  return {{"layer", layer_text(model_shape(deck))}, {"dtype", name(type)}, {"hardware", device.description()}, {"kernels", kernel_hash()}};
}

ProfileTable load_profile(const Deck& deck, std::vector<std::string>& notes, const Device* device) {
  const std::string& path = deck.text("profile.table");
  require(!path.empty(), "{}: profile.table names no profile table; measure one with `ballast profile`", deck.file);
  const ProfileTable table = read_profile(path);
  const auto here = device == nullptr ? planned_identity(deck) : measured_identity(deck, *device, planned_type(deck));
  notes = identity_differences(path, table, here, deck.boolean("profile.allow_mismatch"));
  return checked(table, deck.real("profile.repair_limit"), notes);
}

LatencyOptions latency_options(const Deck& deck, const std::string& pattern) {
  const ModelShape m = model_shape(deck);
  const MeshShape mesh = mesh_shape(deck);
  LatencyOptions options;
  options.pattern = pattern;
  options.recompute = deck.text("recompute.mode");
  options.sp = mesh.sp;
  options.cp = mesh.cp();
  options.exchange_bytes_per_token =
      static_cast<double>(2 * (m.query_heads + m.kv_heads) * m.head_dim) * static_cast<double>(size_of(planned_type(deck)));
  return options;
}

}  // namespace ballast
