// data.source = "lengths" and "distribution": lengths from a file or drawn from a table of bins,
// tokens made up.  For experiments on the system, where only lengths matter; every value comes from
// the counter-based generator, so it is the same on every mesh.
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "core/base/error.hpp"
#include "core/base/random.hpp"
#include "io/data/dataset_source.hpp"

namespace ballast {

namespace {

/// A length beyond this is a mistake in the file, and would overflow sums.
constexpr std::int64_t kLongest = std::int64_t{1} << 40;

class MadeUpSource final : public DocumentSource {
 public:
  MadeUpSource(std::string name, std::vector<std::int64_t> lengths, const DataOptions& options)
      : name_(std::move(name)),
        lengths_(std::move(lengths)),
        seed_(options.seed),
        vocabulary_(options.vocabulary) {
    require(vocabulary_ > 0 && vocabulary_ < (std::int64_t{1} << 31),
            "{}: tokens are made up in [0, model.vocabulary), which is {}", name_, vocabulary_);
  }
  std::int64_t documents() const override { return static_cast<std::int64_t>(lengths_.size()); }
  std::int64_t length(std::int64_t document) const override {
    return lengths_.at(static_cast<std::size_t>(document));
  }
  void tokens(std::int64_t document, std::int64_t begin, std::int64_t end,
              std::int32_t* out) const override {
    const std::uint64_t stream = stream_of("dataset.tokens") + static_cast<std::uint64_t>(document);
    for (std::int64_t i = begin; i < end;) {
      const auto words = philox(seed_, stream, static_cast<std::uint64_t>(i / 4));
      for (std::int64_t w = i % 4; w < 4 && i < end; ++w, ++i) {
        *out++ = static_cast<std::int32_t>((std::uint64_t{words[static_cast<std::size_t>(w)]} *
                                            static_cast<std::uint64_t>(vocabulary_)) >>
                                           32);
      }
    }
  }
  std::int64_t vocabulary() const override { return vocabulary_; }
  std::string place(std::int64_t document) const override {
    return fmt::format("{}, document {}", name_, document);
  }
  std::string description() const override {
    const std::int64_t longest =
        lengths_.empty() ? 0 : *std::max_element(lengths_.begin(), lengths_.end());
    return fmt::format("{}: {} documents, {} tokens (made up), longest {}", name_, documents(),
                       std::accumulate(lengths_.begin(), lengths_.end(), std::int64_t{0}), longest);
  }
  std::uint64_t fingerprint() const override {
    return Fingerprint()
        .add(lengths_.data(), lengths_.size() * sizeof(std::int64_t))
        .add(static_cast<std::int64_t>(seed_))
        .add(vocabulary_)
        .value();
  }

 private:
  std::string name_;
  std::vector<std::int64_t> lengths_;
  std::uint64_t seed_;
  std::int64_t vocabulary_;
};

}  // namespace

std::unique_ptr<DocumentSource> open_lengths(const DataOptions& options) {
  if (!options.lengths.empty())
    return std::make_unique<MadeUpSource>("lengths of the deck", options.lengths, options);
  require(!options.lengths_file.empty(),
          "data.source = \"lengths\" needs data.lengths_file: one length in tokens a line");
  const std::filesystem::file_status status = std::filesystem::status(options.lengths_file);
  require(!std::filesystem::exists(status) || std::filesystem::is_regular_file(status) ||
              std::filesystem::is_directory(status),
          "data.lengths_file: {} is a FIFO or a device; name a text file with one length a line",
          options.lengths_file);
  std::ifstream file(options.lengths_file);
  require(file.good(),
          "data.lengths_file: {} cannot be opened: {}; name a text file with one length a line",
          options.lengths_file, std::strerror(errno));
  require(!std::filesystem::is_directory(options.lengths_file),
          "data.lengths_file: {} is a folder; name a text file with one length a line",
          options.lengths_file);
  std::vector<std::int64_t> lengths;
  std::string line;
  for (std::int64_t number = 1; std::getline(file, line); ++number) {
    const auto is_space = [](char c) { return c == ' ' || c == '\t' || c == '\r'; };
    std::string_view text(line);
    text = text.substr(0, text.find('#'));
    while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
    while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
    if (text.empty()) continue;
    std::int64_t tokens = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), tokens);
    require(error == std::errc{} && end == text.data() + text.size() && tokens >= 0 &&
                tokens <= kLongest,
            "{}:{}: \"{}\" is no length: a line holds one whole number of tokens, 0 to 2^40",
            options.lengths_file, number, text.substr(0, 40));
    lengths.push_back(tokens);
  }
  require(file.eof(), "{}: reading stopped after {} lengths", options.lengths_file, lengths.size());
  require(!lengths.empty(), "data.lengths_file: {} holds no length", options.lengths_file);
  return std::make_unique<MadeUpSource>("lengths of " + options.lengths_file, std::move(lengths),
                                        options);
}

std::unique_ptr<DocumentSource> open_distribution(const DataOptions& options) {
  const auto& edges = options.bin_tokens;
  const auto& shares = options.bin_share;
  require(!edges.empty() && edges.size() == shares.size(),
          "data.source = \"distribution\" needs data.bin_tokens and data.bin_share of one size; "
          "they have {} and {} entries",
          edges.size(), shares.size());
  require(options.samples > 0, "data.source = \"distribution\" needs data.samples above 0");
  const std::int64_t shortest = std::max<std::int64_t>(1, options.min_tokens);
  require(
      edges.front() >= shortest,
      "data.bin_tokens begins with {}, below the shortest sample of {} tokens (data.min_tokens)",
      edges.front(), shortest);
  require(
      std::is_sorted(edges.begin(), edges.end(), std::less_equal<>()) && edges.back() <= kLongest,
      "data.bin_tokens must ascend strictly and stay within 2^40 tokens: it lists the upper edge "
      "of each bin");
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  require(std::all_of(shares.begin(), shares.end(), [](double s) { return s >= 0; }) && sum > 0 &&
              std::isfinite(sum),
          "data.bin_share: shares are not negative, and their sum is positive");

  std::vector<std::int64_t> lengths(static_cast<std::size_t>(options.samples));
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    double rest = random_uniform(options.seed, stream_of("dataset.bin"), i) * sum;
    std::size_t bin = 0;
    while (bin + 1 < shares.size() && rest >= shares[bin]) rest -= shares[bin++];
    while (shares[bin] == 0) --bin;  // rounding can run past the last bin that has a share
    // Log-uniform over the whole numbers [low, high].
    const std::int64_t low = bin == 0 ? shortest : edges[bin - 1] + 1, high = edges[bin];
    const double draw = random_uniform(options.seed, stream_of("dataset.length"), i);
    const double value =
        std::exp(std::log(static_cast<double>(low)) +
                 draw * std::log(static_cast<double>(high + 1) / static_cast<double>(low)));
    lengths[i] = std::clamp(static_cast<std::int64_t>(value), low, high);
  }
  return std::make_unique<MadeUpSource>(fmt::format("distribution of {} length bins", edges.size()),
                                        std::move(lengths), options);
}

}  // namespace ballast
