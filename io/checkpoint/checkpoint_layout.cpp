#include "io/checkpoint/checkpoint_layout.hpp"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <numeric>
#include <sstream>

#include "parallel/comm/waits.hpp"

namespace ballast {

namespace {

std::int64_t product(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

/// Adds the boxes of flat elements [begin, end) of dimensions dim.. under the fixed leading indices
/// `prefix`.
void add_boxes(const Shape& shape, std::size_t dim, std::vector<std::uint64_t>& prefix,
               std::int64_t begin, std::int64_t end, std::vector<Hyperslab>& boxes) {
  if (begin == end) return;
  const std::int64_t row = std::accumulate(shape.begin() + static_cast<std::ptrdiff_t>(dim) + 1,
                                           shape.end(), std::int64_t{1}, std::multiplies<>());
  const auto inside = [&](std::int64_t index, std::int64_t b, std::int64_t e) {
    prefix.push_back(static_cast<std::uint64_t>(index));
    add_boxes(shape, dim + 1, prefix, b, e, boxes);
    prefix.pop_back();
  };
  std::int64_t first = begin / row;
  const std::int64_t last = end / row;
  if (begin % row != 0) {
    inside(first, begin % row, first == last ? end % row : row);
    if (first == last) return;
    ++first;
  }
  if (first < last) {
    Hyperslab box{prefix, std::vector<std::uint64_t>(prefix.size(), 1)};
    box.start.push_back(static_cast<std::uint64_t>(first));
    box.count.push_back(static_cast<std::uint64_t>(last - first));
    for (std::size_t d = dim + 1; d < shape.size(); ++d) {
      box.start.push_back(0);
      box.count.push_back(static_cast<std::uint64_t>(shape[d]));
    }
    boxes.push_back(std::move(box));
  }
  if (end % row != 0) inside(last, 0, end % row);
}

/// Names and shapes as text, a parameter a line; tied copies are left out, since the parameter
/// itself is in the file.
std::string table_text(const std::vector<Parameter>& table) {
  std::string text;
  for (const Parameter& p : table) {
    if (!p.tied_copy) text += fmt::format("{} {}\n", p.name, fmt::join(p.shape, " "));
  }
  return text;
}

std::string fields_text(const CheckpointShard& shard) {
  std::string text;
  for (const auto& [field, tensor] : shard.fields)
    text += fmt::format("{} {}\n", field, static_cast<int>(tensor.dtype()));
  return text;
}

/// What one rank says of its shard.
struct Offer {
  std::uint64_t table_hash = 0;
  std::int64_t begin = 0, end = 0, numel = 0;
  std::string fields;
};

Offer parse_offer(const std::string& text) {
  Offer offer;
  std::istringstream in(text);
  in >> offer.table_hash >> offer.begin >> offer.end >> offer.numel;
  in.get();
  offer.fields.assign(std::istreambuf_iterator<char>(in), {});
  return offer;
}

/// The shards of one table must cover it, each element once.
void check_cover(const std::vector<Offer>& offers, std::uint64_t table) {
  std::vector<std::size_t> ranks;
  for (std::size_t r = 0; r < offers.size(); ++r) {
    if (offers[r].table_hash == table && offers[r].begin < offers[r].end) ranks.push_back(r);
  }
  std::sort(ranks.begin(), ranks.end(),
            [&](std::size_t a, std::size_t b) { return offers[a].begin < offers[b].begin; });
  const auto holder = std::find_if(offers.begin(), offers.end(),
                                   [&](const Offer& o) { return o.table_hash == table; });
  std::int64_t covered = 0;
  for (std::size_t r : ranks) {
    require(offers[r].begin == covered,
            "checkpoint shards: elements [{}, {}) are offered by {}; rank {} offers [{}, {})",
            std::min(covered, offers[r].begin), std::max(covered, offers[r].begin),
            offers[r].begin > covered ? "no rank" : "two ranks", r, offers[r].begin, offers[r].end);
    covered = offers[r].end;
  }
  require(covered == holder->numel, "checkpoint shards: elements [{}, {}) are offered by no rank",
          covered, holder->numel);
}

}  // namespace

std::int64_t CheckpointDataset::numel() const { return product(shape); }

std::vector<ChecksumRange> checksum_ranges(const std::vector<CheckpointDataset>& datasets) {
  std::vector<ChecksumRange> ranges;
  for (std::size_t d = 0; d < datasets.size(); ++d) {
    const std::int64_t numel = datasets[d].numel();
    for (std::int64_t begin = 0; begin < numel; begin += kChecksumElements)
      ranges.push_back({d, begin, std::min(numel, begin + kChecksumElements)});
  }
  return ranges;
}

std::pair<std::size_t, std::size_t> ranges_of_rank(const std::vector<CheckpointDataset>& datasets,
                                                   const std::vector<ChecksumRange>& ranges,
                                                   int rank, int size) {
  const auto bytes = [&](const ChecksumRange& r) {
    return static_cast<double>(r.end - r.begin) *
           static_cast<double>(size_of(datasets[r.dataset].type));
  };
  const double total =
      std::accumulate(ranges.begin(), ranges.end(), 0.0,
                      [&](double sum, const ChecksumRange& r) { return sum + bytes(r); });
  // A range belongs to the rank in whose share of the bytes it begins.
  std::size_t first = ranges.size(), last = ranges.size();
  double before = 0;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const double owner = std::floor(before * size / total);
    if (first == ranges.size() && owner >= rank) first = i;
    if (owner > rank) {
      last = i;
      break;
    }
    before += bytes(ranges[i]);
  }
  return {std::min(first, last), last};
}

std::vector<Hyperslab> hyperslabs(const Shape& shape, std::int64_t begin, std::int64_t end) {
  require(0 <= begin && begin <= end && end <= product(shape),
          "elements [{}, {}) of an array of shape {}", begin, end, to_string(shape));
  std::vector<Hyperslab> boxes;
  std::vector<std::uint64_t> prefix;
  add_boxes(shape, 0, prefix, begin, end, boxes);
  return boxes;
}

void for_each_part(const CheckpointShard& shard,
                   const std::function<void(const Parameter&, std::int64_t first,
                                            std::int64_t count, std::int64_t at)>& visit) {
  std::int64_t offset = 0;
  for (const Parameter& parameter : *shard.table) {
    const std::int64_t from = std::max(shard.begin, offset),
                       to = std::min(shard.end, offset + parameter.numel());
    if (from < to) visit(parameter, from - offset, to - from, from - shard.begin);
    offset += parameter.numel();
  }
}

void check_shard(const CheckpointShard& shard) {
  require(shard.table != nullptr, "checkpoint shard: no parameter table");
  std::int64_t numel = 0;
  for (const Parameter& p : *shard.table) {
    require(!p.shape.empty() && p.numel() > 0 && p.name.find('/') == std::string::npos &&
                !p.name.empty() && p.name != ".",
            "checkpoint shard: parameter \"{}\" of shape {} cannot be stored", p.name,
            to_string(p.shape));
    numel += p.numel();
  }
  require(0 <= shard.begin && shard.begin <= shard.end && shard.end <= numel,
          "checkpoint shard: elements [{}, {}) of {}", shard.begin, shard.end, numel);
  if (shard.begin == shard.end) return;
  require(!shard.fields.empty(), "checkpoint shard: elements [{}, {}) without fields", shard.begin,
          shard.end);
  for (const auto& [field, tensor] : shard.fields) {
    require(tensor.defined() && tensor.numel() == shard.end - shard.begin && tensor.contiguous(),
            "checkpoint shard: field {} has shape {}, not {} elements in a row", field,
            to_string(tensor.shape()), shard.end - shard.begin);
    require(tensor.dtype() == DType::f32 || tensor.dtype() == DType::f64 ||
                tensor.dtype() == DType::bf16,
            "checkpoint shard: field {} of {}", field, name(tensor.dtype()));
  }
}

std::vector<CheckpointDataset> agree_layout(const Communicator& world,
                                            const CheckpointShard& shard) {
  on_all_ranks(world, [&] { check_shard(shard); });
  const std::string table = table_text(*shard.table);
  std::int64_t numel = 0;
  for (const Parameter& p : *shard.table) numel += p.numel();
  const std::uint64_t hash =
      XXH64(table.data(), table.size(), 0) ^ static_cast<std::uint64_t>(numel);
  std::vector<Offer> offers;
  const std::string fields = shard.begin < shard.end ? fields_text(shard) : "";
  for (const std::string& text : world.all_gather(
           fmt::format("{} {} {} {}\n{}", hash, shard.begin, shard.end, numel, fields))) {
    offers.push_back(parse_offer(text));
  }
  // Ranks with equal tables (all of them, or those of a pipeline stage) let the lowest one send it.
  const auto first_with = [&](std::uint64_t h) {
    return std::find_if(offers.begin(), offers.end(),
                        [&](const Offer& o) { return o.table_hash == h; }) -
           offers.begin();
  };
  const auto tables = world.all_gather(first_with(hash) == world.rank() ? table : std::string());

  std::vector<CheckpointDataset> datasets;
  on_all_ranks(world, [&] {
    const auto filled =
        std::find_if(offers.begin(), offers.end(), [](const Offer& o) { return o.begin < o.end; });
    require(filled != offers.end(), "checkpoint shards: every rank's shard is empty");
    std::map<std::string, Shape> shapes;
    for (std::size_t r = 0; r < offers.size(); ++r) {
      require(offers[r].begin == offers[r].end || offers[r].fields == filled->fields,
              "checkpoint shards: rank {} offers other fields than rank {}", r,
              filled - offers.begin());
      if (first_with(offers[r].table_hash) != static_cast<std::ptrdiff_t>(r)) continue;
      check_cover(offers, offers[r].table_hash);
      std::istringstream lines(tables[r]);
      for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        std::string name;
        words >> name;
        Shape shape(std::istream_iterator<std::int64_t>(words), {});
        require(shapes.emplace(name, shape).second,
                "checkpoint shards: parameter {} is in two tables", name);
      }
    }
    for (const auto& [name, shape] : shapes) {
      std::istringstream lines(filled->fields);
      std::string field;
      for (int type = 0; lines >> field >> type;)
        datasets.push_back({name, field, shape, static_cast<DType>(type)});
    }
  });
  return datasets;
}

void on_all_ranks(const Communicator& world, const std::function<void()>& work) {
  std::string problem;
  try {
    work();
  } catch (const std::exception& error) {
    problem = *error.what() ? error.what() : "unknown error";
  }
  check_all(world, problem.empty(), problem);
}

}  // namespace ballast
