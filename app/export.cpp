// ballast export: the weights of a checkpoint as a Hugging Face folder.  The model's shape comes from the deck inside the checkpoint.
#include <filesystem>
#include <fstream>

#include "app/command_line.hpp"
#include "app/json_twin.hpp"
#include "app/session.hpp"
#include "core/run_options.hpp"
#include "io/checkpoint_file.hpp"
#include "io/deck_reader.hpp"
#include "io/huggingface.hpp"

namespace ballast {
namespace {

constexpr std::int64_t kFileBytes = 5'000'000'000;  // of one safetensors file, as Transformers cuts them

/// Master weights of a checkpoint by position in a parameter table.
class MasterWeights {
 public:
  MasterWeights(const std::string& path, const std::vector<Parameter>& table) : file_(path, false) {
    std::map<std::string, CheckpointDataset> found;
    for (const CheckpointDataset& d : file_.datasets())
      if (d.field == "master") found.emplace(d.parameter, d);
    for (const Parameter& p : table) {
      const auto at = found.find(p.name);
      require(at != found.end() && at->second.shape == p.shape, "{}: has no parameter {} of shape {}, which the model of its deck needs",
              path, p.name, to_string(p.shape));
      datasets_.push_back(at->second);
    }
  }
  void read(std::size_t parameter, std::int64_t begin, std::span<float> out) {
    const CheckpointDataset& dataset = datasets_.at(parameter);
    const auto count = static_cast<std::int64_t>(out.size());
    if (dataset.type == DType::f32) return file_.read(dataset, begin, count, out.data());
    wide_.resize(out.size());  // of a run in fp64
    file_.read(dataset, begin, count, wide_.data());
    std::copy(wide_.begin(), wide_.end(), out.begin());
  }

 private:
  CheckpointFile file_;
  std::vector<CheckpointDataset> datasets_;
  std::vector<double> wide_;
};

}  // namespace

int export_command(const CommandLine& line) {
  const Communicator world = Communicator::world();
  const CheckpointState state = verify_checkpoint(line.checkpoint, world);
  together(world, [&] {
    if (world.rank() != 0) return;
    const Deck deck = parse_deck(state.deck, "deck of " + line.checkpoint, {}, "", {.model = true, .data = false, .weights = false});
    const ModelShape shape = model_shape(deck);
    const auto table = parameter_table(shape);
    MasterWeights weights(line.checkpoint, table);
    write_huggingface(line.folder, shape, table, line.dtype == "f32" ? "F32" : "BF16", kFileBytes,
                      [&](std::size_t p, std::int64_t begin, std::span<float> out) { weights.read(p, begin, out); });
    std::uintmax_t bytes = 0;
    std::int64_t files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(line.folder))
      if (entry.path().extension() == ".safetensors") ++files, bytes += entry.file_size();
    fmt::print(
        "{}: {} parameters after step {} as {} in {} file{}, {} bytes; a tokenizer is not part of a checkpoint: copy its files beside "
        "them\n",
        line.folder, shape.parameters(), state.step, line.dtype, files, files == 1 ? "" : "s", bytes);
    write_json(line.json, {{"checkpoint", line.checkpoint},
                           {"folder", line.folder},
                           {"step", state.step},
                           {"dtype", line.dtype},
                           {"parameters", shape.parameters()},
                           {"files", files},
                           {"bytes", bytes}});
  });
  return 0;
}

}  // namespace ballast
