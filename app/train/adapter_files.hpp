// What `ballast export` makes of a checkpoint with adapters: whole weights with the adapters merged
// in, or a PEFT folder of the adapters alone.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/config/config.hpp"
#include "core/model/parameter_table.hpp"
#include "io/checkpoint/checkpoint_file.hpp"

namespace ballast {

/// Tensors of a checkpoint's parameters as fp32, by name.
class MasterWeights {
 public:
  /// Errors: a parameter of `table` that the file lacks or has in another shape, by name.
  MasterWeights(const std::string& path, const std::vector<Parameter>& table);
  void read(const std::string& parameter, std::int64_t begin, std::span<float> out);
  std::vector<float> read(const Parameter& parameter);

 private:
  CheckpointFile file_;
  std::map<std::string, CheckpointDataset> datasets_;
  std::vector<double> wide_;
};

/// Elements [begin, begin + out.size()) of a parameter.
using WeightReader =
    std::function<void(const Parameter&, std::int64_t begin, std::span<float> out)>;

/// The frozen weights of a deck: from model.weights, or the initial values.  Errors: the folder is
/// missing or does not fit.
WeightReader base_weights(const Config& config, const ModelShape& shape);

inline constexpr std::int64_t kPieceElements = std::int64_t{1} << 24;  ///< on the host at once
/// The fingerprint of a parameter of the base, carried on over pieces of kPieceElements from
/// stream_of(its name) on.  That of a base is the sum over its parameters.
std::uint64_t base_print(std::span<const float> piece, std::uint64_t print);
/// Of the frozen weights that a reader gives.
std::uint64_t base_fingerprint(const ModelShape& shape, const WeightReader& base);

/// W + alpha / rank B A for every matrix with an adapter in the checkpoint, the base elsewhere.
WeightReader merged_weights(const std::string& checkpoint, const ModelShape& shape,
                            WeightReader base);

/// Writes DIR/adapter_config.json and adapter_model.safetensors under PEFT's names
/// (base_model.model.MODULE.lora_A.weight).  dtype: F32 or BF16. Refuses a folder that holds
/// adapters already.
void write_peft(const std::string& dir, const std::string& checkpoint, const Config& config,
                const ModelShape& shape, const std::string& dtype);

}  // namespace ballast
