// ballast export: the weights of a checkpoint as a Hugging Face folder, adapters merged in, or the
// adapters alone as a PEFT folder.  The model's shape comes from the deck inside the checkpoint.
#include <filesystem>

#include "app/command/command_line.hpp"
#include "app/observe/json_output.hpp"
#include "app/train/adapter_files.hpp"
#include "app/train/checkpointing.hpp"
#include "app/train/session.hpp"
#include "core/config/run_options.hpp"
#include "io/checkpoint/checkpoint_file.hpp"
#include "io/data/token_table.hpp"
#include "io/deck/deck_reader.hpp"
#include "io/model/huggingface.hpp"

namespace ballast {
namespace {

constexpr std::int64_t kFileBytes =
    5'000'000'000;  // of one safetensors file, as Transformers cuts them

/// The weights beside which the checkpoint's adapters were trained.
WeightReader known_base(const CommandLine& line, const Config& config, const ModelShape& shape,
                        const CheckpointState& state) {
  WeightReader base = base_weights(config, shape);
  const auto known = state.extra.find("base_fingerprint");
  if (config.model.weights.empty() || known == state.extra.end()) return base;
  require(known->second == halves(base_fingerprint(shape, base)),
          "{}: its adapters were trained beside other weights than those that model.weights = "
          "\"{}\" holds now; put those back, or export the adapters alone with --adapter",
          line.checkpoint, config.model.weights);
  return base;
}

/// All weights, adapters merged in.  Returns what went with them of the folder that training began
/// with.
std::string write_weights(const CommandLine& line, const Config& config, const ModelShape& shape,
                          const std::string& dtype, const CheckpointState& state) {
  const std::string& folder = config.model.weights;
  const std::string foreign =
      folder.empty() ? "" : foreign_tokens(folder, whole(state.extra, "tokens_mark"), shape);
  ModelShape plain = shape;
  plain.lora = {};
  const auto table = parameter_table(plain);
  WeightReader read;
  if (shape.lora.enabled()) {
    read = merged_weights(line.checkpoint, shape, known_base(line, config, shape, state));
  } else {
    auto masters = std::make_shared<MasterWeights>(line.checkpoint, table);
    read = [masters](const Parameter& p, std::int64_t begin, std::span<float> out) {
      masters->read(p.name, begin, out);
    };
  }
  write_huggingface(
      line.folder, plain, table, dtype, kFileBytes,
      [&](std::size_t p, std::int64_t begin, std::span<float> out) { read(table[p], begin, out); },
      foreign.empty() ? folder : "");
  if (!foreign.empty())
    return foreign +
           ": copy the files of the model's tokenizer beside them, and set bos_token_id and "
           "eos_token_id of config.json, which are null";
  if (has_tokenizer(line.folder)) return "with the tokenizer of " + folder;
  return "a tokenizer is not part of a checkpoint: copy its files beside them";
}

}  // namespace

int export_command(const CommandLine& line) {
  const Communicator world = Communicator::world();
  const CheckpointState state = verify_checkpoint(line.checkpoint, world);
  together(world, [&] {
    if (world.rank() != 0) return;
    const Config config =
        parse_config(state.deck, "deck of " + line.checkpoint, {}, "",
                     {.model = true, .data = false, .weights = false, .executes = false});
    const ModelShape shape = model_shape(config);
    const std::string dtype = line.dtype == "f32" ? "F32" : "BF16";
    require(!line.adapter || shape.lora.enabled(),
            "{}: holds no adapters (its deck has lora.rank = 0); export without --adapter",
            line.checkpoint);
    std::string beside = "they go with the weights of model.weights";
    if (line.adapter)
      write_peft(line.folder, line.checkpoint, config, shape, dtype);
    else
      beside = write_weights(line, config, shape, dtype, state);
    std::uintmax_t bytes = 0;
    std::int64_t files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(line.folder))
      if (entry.path().extension() == ".safetensors") ++files, bytes += entry.file_size();
    std::int64_t parameters = shape.parameters();
    if (line.adapter) {
      parameters = 0;
      for (const Parameter& p : parameter_table(shape)) parameters += p.trainable ? p.numel() : 0;
    }
    fmt::print("{}: {} {} after step {} as {} in {} file{}, {} bytes; {}\n", line.folder,
               parameters,
               line.adapter           ? "parameters of adapters"
               : shape.lora.enabled() ? "parameters, adapters merged,"
                                      : "parameters",
               state.step, line.dtype, files, files == 1 ? "" : "s", bytes, beside);
    write_json(line.json, {{"checkpoint", line.checkpoint},
                           {"folder", line.folder},
                           {"step", state.step},
                           {"dtype", line.dtype},
                           {"parameters", parameters},
                           {"files", files},
                           {"bytes", bytes}});
  });
  return 0;
}

}  // namespace ballast
