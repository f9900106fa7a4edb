// Block `data` of a deck as DataOptions.
#include "core/config/run_options.hpp"
#include "io/data/dataset.hpp"

namespace ballast {

DataOptions data_options(const Deck& deck) {
  DataOptions options;
  options.source = deck.text("data.source");
  options.paths = deck.get<std::vector<std::string>>("data.paths");
  options.extensions = deck.get<std::vector<std::string>>("data.extensions");
  options.path = deck.text("data.path");
  options.mask_path = deck.text("data.mask_path");
  options.lengths_file = deck.text("data.lengths_file");
  options.lengths = deck.get<std::vector<std::int64_t>>("data.lengths");
  options.bin_tokens = deck.get<std::vector<std::int64_t>>("data.bin_tokens");
  options.bin_share = deck.get<std::vector<double>>("data.bin_share");
  options.samples = deck.integer("data.samples");
  options.max_tokens = deck.integer("data.max_tokens");
  options.min_tokens = deck.integer("data.min_tokens");
  options.long_samples = deck.text("data.long");
  const auto& groups = deck.get<std::vector<std::int64_t>>("batching.groups");
  if (deck.text("batching.long") == "split" && !groups.empty() &&
      (options.max_tokens == 0 || options.max_tokens > groups.back())) {
    options.max_tokens = groups.back();
    options.long_samples = "split";
  }
  options.needle = needle_options(deck);
  options.needle_held_out = deck.integer("data.needle_held_out");
  options.seed = static_cast<std::uint64_t>(deck.integer("run.seed"));
  options.vocabulary = model_shape(deck).vocabulary;
  return options;
}

std::unique_ptr<Dataset> open_dataset(const Deck& deck) { return open_dataset(data_options(deck)); }

}  // namespace ballast
